"""The recipe end to end, by its real ``run`` on the toy task."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from torchrl_vla.config import ConfigError
from torchrl_vla.config.load import load_config
from torchrl_vla.training.checkpoint import CheckpointError, load_checkpoint

SCRIPT = Path(__file__).parents[1] / "sota-implementations/vla_grpo/vla-grpo.py"
SMALL = {
    "seed": 3,
    "env": {"num_envs": 32, "success_tol": 0.5},
    "policy": {"hidden_dim": 32},
    "rollout": {"num_groups": 4, "group_size": 4},
    "update": {"episodes_per_step": 8, "micro_batch_size": 32},
    "train": {"num_iterations": 4},
    "eval": {"every": 2, "num_init_states": 12, "num_videos": 1},
    "checkpoint": {"every": 2},
}
SUMMARY_KEYS = {
    "initial_success_rate",
    "final_success_rate",
    "num_eval_episodes",
    "num_iterations",
    "num_optimizer_steps",
    "num_episodes",
    "num_decisions",
    "num_env_steps",
    "seconds_total",
    "seconds_collect",
    "seconds_update",
    "seconds_eval",
}


def options(folder, **changes):
    """``SMALL`` with sections updated, e.g. ``rollout={"num_groups": 2}``."""
    merged = {**SMALL, "run_dir": str(folder)}
    for name, value in changes.items():
        merged[name] = (
            {**merged.get(name, {}), **value} if isinstance(value, dict) else value
        )
    return load_config(merged)


def newest(folder):
    return load_checkpoint(sorted((folder / "checkpoints").glob("*.pt"))[-1])


def rows(folder):
    """Rows of metrics.csv as text, without the columns of time."""
    with (folder / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    return [
        {k: v for k, v in row.items() if not k.startswith("seconds_")} for row in table
    ]


def differences(left, right, path="", ignore=()):
    """Paths at which two nested containers differ in any bit."""
    name = path.rsplit(".", 1)[-1]
    if name.startswith("seconds_") or path in ignore:
        return []
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [path]
        pairs = [(f"{path}.{key}", left[key], right[key]) for key in left]
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            return [path]
        pairs = [
            (f"{path}.{i}", *pair)
            for i, pair in enumerate(zip(left, right, strict=True))
        ]
    elif isinstance(left, torch.Tensor):
        return [] if torch.equal(left, right) else [path]
    else:
        return [] if left == right else [path]
    return [d for pair in pairs for d in differences(pair[1], pair[2], pair[0], ignore)]


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """An uninterrupted run of four iterations: its folder and summary."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, recipe.run(options(folder))


def assert_same_run(folder, whole_folder, ignore=()):
    state, whole_state = newest(folder), newest(whole_folder)
    assert state["iteration"] == whole_state["iteration"] == 4
    ignore = {".options.run_dir", ".options.resume", *ignore}
    assert differences(state, whole_state, ignore=ignore) == []
    assert rows(folder) == rows(whole_folder)


def test_a_run_writes_everything(whole):
    folder, summary = whole
    assert summary.keys() >= {*SUMMARY_KEYS, "seed", "initial_evaluation", "evaluation"}
    assert json.loads((folder / "summary.json").read_text()) == json.loads(
        json.dumps(summary)
    )
    for name in ("config.yaml", "metrics.csv", "curves.png"):
        assert (folder / name).stat().st_size > 0, name
    names = {path.name.split("_")[-2] for path in (folder / "videos").iterdir()}
    assert names == {"before", "after"}, "a start before, after, and before_after.mp4"
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "iteration_000002.pt",
        "iteration_000004.pt",
    ]
    assert not list(folder.rglob("*.partial*"))


def test_the_summary_adds_up(whole):
    folder, summary = whole
    table = rows(folder)
    assert [int(row["iteration"]) for row in table] == [0, 1, 2, 3, 4]
    for total, name in {
        "num_episodes": "episodes_played",
        "num_decisions": "decisions_played",
        "num_env_steps": "env_steps_played",
        "num_optimizer_steps": "optimizer_steps",
    }.items():
        assert summary[total] == sum(int(row[name]) for row in table[1:]), total
    assert summary["num_optimizer_steps"] == 4 * 2, "16 episodes, 8 per step"
    evaluated = [float(row["eval_success_rate"]) for row in table[::2]]
    assert summary["initial_success_rate"] == round(evaluated[0], 4)
    assert summary["final_success_rate"] == round(evaluated[-1], 4)
    assert summary["num_eval_episodes"] == 12
    assert summary["num_iterations"] == 4
    phases = sum(summary[f"seconds_{phase}"] for phase in ("collect", "update", "eval"))
    assert 0 < phases <= summary["seconds_total"]


def test_the_ratio_is_one_before_the_first_optimizer_step(whole):
    for row in rows(whole[0])[1:]:
        assert float(row["ratio_deviation"]) < 1e-5


def test_config_yaml_gives_the_same_options(whole):
    from omegaconf import OmegaConf

    again = load_config(OmegaConf.load(whole[0] / "config.yaml"))
    assert again == options(whole[0])


def test_resumed_equals_uninterrupted_bit_for_bit(recipe, whole, tmp_path):
    recipe.run(options(tmp_path, train={"num_iterations": 2}))
    assert newest(tmp_path)["iteration"] == 2
    torch.manual_seed(12345)  # another process has drawn other numbers
    summary = recipe.run(options(tmp_path, resume="auto"))
    assert_same_run(tmp_path, whole[0])
    for name in SUMMARY_KEYS:
        if not name.startswith("seconds_"):
            assert summary[name] == whole[1][name], name


def test_resumes_from_a_named_checkpoint_and_replaces_what_followed(
    recipe, whole, tmp_path
):
    recipe.run(options(tmp_path, checkpoint={"every": 1, "keep": 9}))
    checkpoint = tmp_path / "checkpoints" / "iteration_000001.pt"
    recipe.run(options(tmp_path, resume=str(checkpoint), checkpoint={"every": 9}))
    assert [int(row["iteration"]) for row in rows(tmp_path)] == [0, 1, 2, 3, 4]
    ignore = {".options.run_dir", ".options.resume", ".options.checkpoint.every"}
    assert differences(newest(tmp_path), newest(whole[0]), ignore=ignore) == []


def test_resume_with_nothing_left_evaluates_and_sums_up(recipe, tmp_path):
    first = recipe.run(options(tmp_path, train={"num_iterations": 2}))
    again = recipe.run(options(tmp_path, resume="auto", train={"num_iterations": 2}))
    for name in ("final_success_rate", "num_iterations", "num_optimizer_steps"):
        assert again[name] == first[name]
    assert again["seconds_eval"] > first["seconds_eval"]
    *_, before, last = rows(tmp_path)
    assert last["iteration"] == before["iteration"] == "2"
    assert last["eval_success_rate"] == before["eval_success_rate"]
    assert last["success_rate"] == "", "nothing was collected"


def test_resume_auto_of_nothing_starts_afresh(recipe, whole, tmp_path):
    recipe.run(options(tmp_path, resume="auto"))
    assert_same_run(tmp_path, whole[0])


def test_killed_run_goes_on_to_the_same_end(recipe, whole, tmp_path):
    """SIGKILL at whatever moment follows the third checkpoint."""
    command = [
        sys.executable,
        str(SCRIPT),
        f"run_dir={tmp_path}",
        "seed=3",
        "train.num_iterations=100000",
    ]
    for section in ("env", "policy", "rollout", "update", "eval"):
        command += [f"{section}.{k}={v}" for k, v in SMALL[section].items()]
    command += ["checkpoint.every=2", "checkpoint.keep=100000"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path
    ) as process:
        try:
            give_up = time.monotonic() + 60
            while not list(tmp_path.glob("checkpoints/iteration_000006.pt")):
                assert process.poll() is None, "the run ended by itself"
                assert time.monotonic() < give_up, "no checkpoint within a minute"
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
    for path in tmp_path.glob("checkpoints/*.pt"):  # go on from iteration 2
        if path.name != "iteration_000002.pt":
            os.truncate(path, path.stat().st_size // 2)
    recipe.run(options(tmp_path, resume="auto"))
    # Another process had another state of Python's generator; nothing draws from it.
    assert_same_run(tmp_path, whole[0], ignore={".random_state"})


def test_hopeless_run_ends_by_patience(recipe, tmp_path, capsys):
    # Every start is out of reach: one env step cannot make a streak of two.
    summary = recipe.run(
        options(
            tmp_path,
            env={"chunk_size": 1, "max_episode_steps": 1},
            train={"num_iterations": 50, "patience": 2},
        )
    )
    assert summary["num_iterations"] == 2
    assert summary["num_optimizer_steps"] == 0
    assert summary["final_success_rate"] == 0.0
    assert summary["num_eval_episodes"] == 12
    assert newest(tmp_path)["iteration"] == 2
    last = rows(tmp_path)[-1]
    assert int(last["groups_all_failure"]) == 16, "the whole budget: 4 x num_groups"
    assert last["loss_objective"] == "", "no update was made"
    assert "no mixed group in 2 iterations" in capsys.readouterr().out


def test_solved_run_ends_by_patience(recipe, tmp_path, monkeypatch):
    # A policy that reads the target off the state and never fails.
    def oracle(cfg, sizes, *, seed, device):
        policy = make_policy(cfg, sizes, seed=seed, device=device)
        bins = torch.linspace(-1, 1, cfg.num_bins)

        def action_logits(td):
            target_BA = td["observation", "state"][:, 2:4]
            distance = (bins - target_BA.unsqueeze(-1)).abs()
            shape = (-1, sizes["chunk_size"], -1, -1)
            return -1e4 * distance.unsqueeze(1).expand(shape)

        policy.action_logits = action_logits
        return policy

    make_policy = recipe.make_policy
    monkeypatch.setattr(recipe, "make_policy", oracle)
    summary = recipe.run(options(tmp_path, train={"num_iterations": 50, "patience": 3}))
    assert summary["num_iterations"] == 3
    assert summary["final_success_rate"] == 1.0
    assert newest(tmp_path)["iteration"] == 3
    assert int(rows(tmp_path)[-1]["groups_all_success"]) == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": {"entropy_coef": 0.01, "ratio_level": "decision"}},
        {"objective": {"kl_coef": 0.1, "kl_in": "loss", "aggregation": "token"}},
        {
            "objective": {
                "kl_coef": 0.1,
                "kl_in": "reward",
                "kl_target": 0.01,
                "kl_estimator": "k1",
            }
        },
        {
            "objective": {
                "behavior_log_prob": "recompute",
                "aggregation": "decision",
                "normalize_std": False,
            }
        },
        {"rollout": {"num_candidates": 8, "selection": "balanced"}},
        {"rollout": {"skip_solved": 1}, "env": {"init_states": "official"}},
        {"rollout": {"dynamic_sampling": False}},
        {"policy": {"top_k": 5, "temperature": 1.6, "rollout_batch_size": 7}},
        {"policy": {"cameras": ["image"]}},
        {"update": {"warmup_steps": 3, "micro_batch_size": 5}},
    ],
    ids=lambda changes: "-".join(f"{v}" for s in changes.values() for v in s.values()),
)
def test_options_run(recipe, tmp_path, changes):
    summary = recipe.run(options(tmp_path, train={"num_iterations": 2}, **changes))
    assert summary["num_iterations"] == 2
    assert summary["num_optimizer_steps"] == 4
    for row in rows(tmp_path)[1:]:
        assert all(abs(float(v)) < float("inf") for v in row.values() if v)


def test_kl_coef_steered_in_the_reward_is_resumed(recipe, tmp_path):
    kl = {"kl_coef": 0.1, "kl_in": "reward", "kl_target": 0.01, "kl_estimator": "k1"}
    parts = {"objective": kl, "checkpoint": {"every": 1, "keep": 9}}
    recipe.run(options(tmp_path / "whole", train={"num_iterations": 4}, **parts))
    recipe.run(options(tmp_path / "parts", train={"num_iterations": 2}, **parts))
    recipe.run(
        options(tmp_path / "parts", train={"num_iterations": 4}, resume="auto", **parts)
    )
    whole_state, state = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert state["advantage"] == whole_state["advantage"]
    assert state["advantage"]["_extra_state"]["kl_coef"] != 0.1
    assert differences(state["policy"], whole_state["policy"]) == []


def test_learns(recipe, tmp_path):
    """Success while sampling rises clearly within a few seconds, on a fixed seed."""
    recipe.run(
        options(
            tmp_path,
            env={"num_envs": 128},
            policy={"hidden_dim": 64},
            rollout={"num_groups": 16, "group_size": 8},
            update={"episodes_per_step": 32, "lr": 3e-3, "micro_batch_size": 512},
            train={"num_iterations": 25},
            eval={"every": 0, "num_init_states": 100, "num_videos": 0},
        )
    )
    sampled = [float(row["success_rate"]) for row in rows(tmp_path)[1:]]
    start, end = sum(sampled[:3]) / 3, sum(sampled[-3:]) / 3
    assert end > start + 0.2, sampled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"group_size": 3}}, "rollout.group_size=3"),
        ({"rollout": {"num_grups": 3}}, "num_grups"),
        ({"policy": {"name": "openvla_oft"}}, "policy.checkpoint"),
    ],
)
def test_bad_options_end_before_any_work(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        options(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume": "never"}, "holds a run already.*resume=auto"),
        ({"resume": "auto", "update": {"lr": 0.5}}, "update.lr: 0.002 .* 0.5 now"),
        ({"resume": "auto", "seed": 4}, "seed: 3 in the checkpoint, 4 now"),
        ({"resume": "no_such.pt"}, "holds a run already"),
        (
            {"resume": "auto", "train": {"device": "cuda:99"}},
            "cuda:99 is not available",
        ),
    ],
)
def test_bad_resume_leaves_the_run_as_it_is(recipe, whole, changes, message):
    folder, _ = whole
    before = contents(folder)
    with pytest.raises(ValueError, match=message):
        recipe.run(options(folder, **changes))
    assert contents(folder) == before


def test_a_named_checkpoint_that_is_missing_or_cut_off(recipe, whole, tmp_path):
    with pytest.raises(CheckpointError, match=r"no_such\.pt is not a checkpoint file"):
        recipe.run(options(tmp_path / "new", resume="no_such.pt"))
    whole_file = whole[0] / "checkpoints" / "iteration_000004.pt"
    cut = tmp_path / "cut.pt"
    cut.write_bytes(whole_file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"cut\.pt cannot be read.*resume=auto"):
        recipe.run(options(tmp_path / "new", resume=str(cut)))
    assert not (tmp_path / "new").exists()
