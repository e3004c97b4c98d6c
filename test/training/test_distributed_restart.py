"""Runs that are killed and go on: by torchrun itself, and at any moment."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_processes import end, start
from test_distributed_recipe import command, moved, run, state_of


def wait_for(path, process):
    give_up = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < give_up, f"no {path.name}"
        time.sleep(0.01)


def test_torchrun_restarts_a_killed_rank_and_the_run_resumes_by_itself(tmp_path):
    options = {"distributed__strategy": "fsdp", "checkpoint__every": 1}
    options |= {"train__num_iterations": 12, "eval__every": 0}
    whole = tmp_path / "whole"
    run(2, whole, **options)
    folder = tmp_path / "killed"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", "--max-restarts", "1"]
    launcher += command(folder, resume="auto", **options)[1:]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    with subprocess.Popen(
        launcher,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as torchrun:
        try:
            wait_for(folder / "checkpoints" / "iteration_000002.pt", torchrun)
            children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children")
            ranks = [
                int(child)
                for child in children.read_text().split()
                if "vla-grpo" in Path(f"/proc/{child}/cmdline").read_text()
            ]
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            text, _ = torchrun.communicate(timeout=300)
        finally:
            torchrun.terminate()
    assert torchrun.returncode == 0, text
    assert text.count(f"run folder: {folder}") == 2, "it was started twice"
    state, expected = state_of(folder, 12), state_of(whole, 12)
    assert state["collector"] == expected["collector"]
    assert moved(state, expected) < 2e-4


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_with_the_same_weights(tmp_path):
    options = {"train__num_iterations": 60, "checkpoint__every": 1}
    options |= {"checkpoint__keep": 2, "eval__every": 0}
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    run(2, whole, **options)
    moments = random.Random(0)
    for _ in range(10):
        processes = start([command(folder, resume="auto", **options)] * 2)
        try:
            time.sleep(moments.uniform(0.0, 9.0))
            alive = [process.poll() is None for process in processes]
            moments.choice(processes).send_signal(signal.SIGKILL)
            codes = [process.wait(timeout=100) for process in processes]
        finally:
            end(processes)
        # Once it is through, it starts, finds nothing to do and is killed all the same.
        assert not any(alive) or any(codes)
    run(2, folder, resume="auto", **options)
    state, expected = state_of(folder, 60), state_of(whole, 60)
    assert state["collector"] == expected["collector"]
    assert moved(state, expected) == 0.0
