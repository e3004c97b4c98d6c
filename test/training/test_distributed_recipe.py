"""The recipe on several ranks: the same run, resumed on another number of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_processes import end, launch, on_ranks, start
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchrl_vla.training.checkpoint import load_checkpoint

SCRIPT = Path(__file__).parents[2] / "sota-implementations/vla_grpo/vla-grpo.py"
OPTIONS = {
    "seed": 3,
    "env.num_envs": 32,
    "env.success_tol": 0.5,
    "policy.hidden_dim": 32,
    "rollout.num_groups": 4,
    "rollout.group_size": 4,
    "objective.behavior_log_prob": "recompute",
    "update.episodes_per_step": 8,
    "update.micro_batch_size": 7,
    "train.num_iterations": 4,
    "train.device": "cpu",
    "eval.every": 2,
    "eval.num_init_states": 12,
    "eval.num_videos": 1,
    "checkpoint.every": 2,
    "checkpoint.keep": 9,
}


def command(folder, **changes):
    options = {**OPTIONS, "run_dir": folder}
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    return [sys.executable, str(SCRIPT), *(f"{k}={v}" for k, v in options.items())]


def run(size, folder, **changes):
    """A run on ``size`` ranks (1: as anybody starts it); its summary."""
    if size == 1:
        done = subprocess.run(
            command(folder, **changes), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    else:
        results = folder.with_name(f"{folder.name}-ranks")
        texts = on_ranks(launch, size, results, command(folder, **changes))
        assert "run folder" in texts[0]
        assert not [text for text in texts[1:] if text], "one rank speaks"
    return json.loads((folder / "summary.json").read_text())


def state_of(folder, iteration=4):
    """A checkpoint, with the shards of all ranks put together."""
    state = load_checkpoint(folder / "checkpoints" / f"iteration_{iteration:06d}.pt")
    if "shards" in state:
        whole = folder / "whole.pt"
        dcp_to_torch_save(state["shards"], whole)
        shards = torch.load(whole, weights_only=False)["policy"]
        state["policy"], state["optimizer"] = shards["policy"], shards["optimizer"]
    return state


def moved(left, right):
    """Largest difference of the weights of two checkpoints."""
    assert left["policy"].keys() == right["policy"].keys()
    return max(
        (value - right["policy"][name]).abs().max().item()
        for name, value in left["policy"].items()
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(1, folder)


@pytest.mark.parametrize(("size", "strategy"), [(2, "ddp"), (2, "fsdp"), (4, "ddp")])
def test_a_run_on_ranks_is_that_of_one_process(alone, tmp_path, size, strategy):
    folder, summary = alone
    shared = run(size, tmp_path, distributed__strategy=strategy)
    for name in ("final_success_rate", "num_optimizer_steps", "num_iterations"):
        assert shared[name] == summary[name], name
    assert shared["evaluation"]["tasks"] == summary["evaluation"]["tasks"]
    state, single = state_of(tmp_path), state_of(folder)
    assert state["collector"] == single["collector"], "the same groups"
    # Sums over micro-batches in another order, and AdamW's division by small numbers.
    assert moved(state, single) < 2e-4
    assert moved(state, state_of(folder, 2)) > 2e-3, "it was trained"
    names = {path.name.split("_")[-2] for path in (tmp_path / "videos").iterdir()}
    assert names == {"before", "after"}


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    """Two iterations on four ranks, saved in shards."""
    folder = tmp_path_factory.mktemp("four")
    run(4, folder, distributed__strategy="fsdp", train__num_iterations=2)
    return folder


@pytest.mark.parametrize("size", [2, 1])
def test_saved_on_four_ranks_resumes_on_fewer(alone, on_four, tmp_path, size):
    folder = tmp_path / "resumed"
    subprocess.run(["cp", "-r", on_four, folder], check=True)
    run(size, folder, distributed__strategy="fsdp", resume="auto")
    before, after = state_of(on_four, 2), state_of(folder, 4)
    single = state_of(alone[0])
    assert state_of(folder, 2)["options"] == before["options"]
    assert after["collector"] == single["collector"]
    assert after["updater"]["num_optimizer_steps"] == 8
    assert after["updater"]["scheduler"] == single["updater"]["scheduler"]
    assert moved(after, single) < 2e-4
    steps = {int(s["step"]) for s in after["optimizer"]["state"].values()}
    assert steps == {8}, "the optimizer went on from where it was"


def test_resume_with_another_strategy_is_refused(on_four, tmp_path):
    folder = tmp_path / "other"
    subprocess.run(["cp", "-r", on_four, folder], check=True)
    done = subprocess.run(
        command(folder, resume="auto"), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "saved with distributed.strategy=fsdp" in done.stderr


def test_a_killed_rank_is_named_and_the_run_goes_on(alone, tmp_path):
    """SIGKILL of rank 1 after a checkpoint; rank 0 ends with its name."""
    endless = command(
        tmp_path, train__num_iterations=100000, distributed__strategy="fsdp"
    )
    processes = start([endless] * 2)
    try:
        give_up = time.monotonic() + 200
        while not (tmp_path / "checkpoints" / "iteration_000002.pt").exists():
            assert [p.poll() for p in processes] == [None, None]
            assert time.monotonic() < give_up, "no checkpoint within a minute"
            time.sleep(0.01)
        processes[1].send_signal(signal.SIGKILL)
        text, _ = processes[0].communicate(timeout=30)
    finally:
        end(processes)
    assert processes[0].returncode == 1
    assert f"rank 1 (process {processes[1].pid} on " in text
    assert "has ended" in text
    assert "resume=auto" in text
    for path in (tmp_path / "checkpoints").glob("*.pt"):  # go on from iteration 2
        if path.name != "iteration_000002.pt":
            os.truncate(path, path.stat().st_size // 2)
    summary = run(2, tmp_path, resume="auto", distributed__strategy="fsdp")
    assert summary["final_success_rate"] == alone[1]["final_success_rate"]
    assert moved(state_of(tmp_path), state_of(alone[0])) < 2e-4


def test_ranks_with_other_options_are_refused(tmp_path):
    commands = [command(tmp_path), command(tmp_path, update__lr=0.5)]
    processes = start(commands)
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    for text in texts:
        assert "update.lr: 0.002 on rank 0, 0.5 on rank 1" in text
        assert "Traceback" not in text
    assert not tmp_path.joinpath("checkpoints").exists()
