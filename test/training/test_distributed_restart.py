"""Runs that are killed and go on: by torchrun itself, and at any moment."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from rank_processes import free_port
from test_distributed_recipe import command, moved, run, state_of


def wait_for(path, process):
    give_up = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < give_up, f"no {path.name}"
        time.sleep(0.01)


TWO_RANKS = ("--standalone", "--nproc-per-node=2")


@contextmanager
def torchrun(max_restarts, rank_command, ranks=TWO_RANKS):
    """torchrun of one host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *ranks]
    launcher += [f"--max-restarts={max_restarts}"]
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        launcher + rank_command[1:],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def ranks_of(process):
    """Process ids of the ranks that torchrun has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    found = []
    for child in children.split():
        with suppress(OSError):
            if "vla-grpo" in Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
    return found


def test_torchrun_restarts_a_killed_rank_and_the_run_resumes_by_itself(tmp_path):
    options = {"distributed__strategy": "fsdp", "distributed__async_save": True}
    options |= {"train__num_iterations": 12, "checkpoint__every": 3, "eval__every": 0}
    whole = tmp_path / "whole"
    run(2, whole, **options)
    folder = tmp_path / "killed"
    with torchrun(1, command(folder, resume="auto", **options)) as process:
        wait_for(folder / "checkpoints" / "iteration_000003.pt", process)
        last = (folder / "metrics.csv").read_text().splitlines()[-1]
        assert int(last.split(",")[0]) in (4, 5), "complete an iteration later"
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    assert text.count(f"run folder: {folder}") == 2, "it was started twice"
    state, expected = state_of(folder, 12), state_of(whole, 12)
    assert state["collector"] == expected["collector"]
    assert moved(state, expected) < 2e-4


def test_a_rank_that_is_killed_on_another_host_costs_one_restart(tmp_path):
    """Two torchruns: the second one counts its restart, the first one does not."""
    options = {"checkpoint__every": 1, "train__num_iterations": 6, "eval__every": 0}
    line = command(tmp_path / "run", resume="auto", **options)
    host = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=run")
    host += (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1")
    with torchrun(1, line, host) as first, torchrun(1, line, host) as second:
        wait_for(tmp_path / "run/checkpoints/iteration_000002.pt", first)
        os.kill(ranks_of(second)[0], signal.SIGKILL)
        texts = [each.communicate(timeout=300)[0] for each in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], texts
    assert sum(text.count("run folder: ") for text in texts) == 2, texts
    assert (tmp_path / "run/summary.json").exists()


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_with_the_same_weights(tmp_path):
    options = {"train__num_iterations": 400, "checkpoint__every": 1}
    options |= {"checkpoint__keep": 2, "eval__every": 0}
    # Learns slowly, so that it is not through with the task before it is killed.
    options |= {"update__lr": 2e-4, "train__patience": 100}
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    run(2, whole, **options)
    moments = random.Random(0)
    with torchrun(10, command(folder, resume="auto", **options)) as process:
        for _ in range(10):
            time.sleep(moments.uniform(0.0, 8.0))
            while not (ranks := ranks_of(process)):
                assert process.poll() is None, "it ended before it was killed enough"
                time.sleep(0.05)
            os.kill(moments.choice(ranks), signal.SIGKILL)
        text, _ = process.communicate(timeout=500)
    assert process.returncode == 0, text
    state, expected = state_of(folder, 400), state_of(whole, 400)
    assert state["collector"] == expected["collector"]
    assert moved(state, expected) == 0.0
