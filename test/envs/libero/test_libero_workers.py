"""Worker processes: how many are made, equal starts in all, and how they end."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv

from torchrl_vla.envs.libero import make_libero_envs
from torchrl_vla.envs.transforms import MultiAction

SHARED = {"task_suite": "libero_spatial", "camera_height": 64, "camera_width": 64}


def chunked(env: EnvBase, folder) -> EnvBase:
    """Append a chunk transform, and leave a note that an environment was made."""
    (folder / f"{os.getpid()}-{id(env)}").touch()
    return TransformedEnv(env, MultiAction(4))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module")
def workers(made):
    env = make_libero_envs(
        2,
        **SHARED,
        num_envs=2,
        wrap=partial(chunked, folder=made),
        worker_kwargs=[{"task_id": 0}, {"task_id": 1, "instruction": "do it"}],
    )
    yield env
    if not env.is_closed:
        env.close(raise_if_closed=False)


def chunks(seed):
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.uniform(-1, 1, (2, 2, 4, 7))).float()


def test_two_workers_make_two_environments(workers, made):
    assert isinstance(workers, ParallelEnv)
    assert len(list(made.iterdir())) == 2
    pids = {int(note.name.split("-")[0]) for note in made.iterdir()}
    assert pids == {process.pid for process in workers._workers}
    assert {process.pid for process in multiprocessing.active_children()} >= pids


def test_workers_have_their_own_arguments(workers):
    td = workers.reset()
    assert td["task_id"].squeeze(-1).tolist() == [[0, 0], [1, 1]]
    instructions = [td[worker]["language_instruction"] for worker in (0, 1)]
    assert "do it" not in str(instructions[0])
    assert "do it" in str(instructions[1])


def test_a_start_is_the_same_in_every_process(workers):
    """Whatever was played there before, and the episodes that follow too."""
    td = workers.reset()
    td["vla_action", "chunk"] = chunks(0)
    workers.step(td)
    td = workers.reset(list_of_kwargs=[{"task_id": 0, "init_state_id": 6}] * 2)
    same = chunks(1)[:1, :1].expand(2, 2, 4, 7).clone()
    after = workers.step(td.clone().set(("vla_action", "chunk"), same))["next"]
    for moment in (td, after):
        for key in ("image", "state"):
            values = moment["observation", key].flatten(0, 1)
            assert (values == values[0]).all()
    assert (after["num_executed"] == 4).all()


def test_single_members_are_stepped_and_reset(workers):
    td = workers.reset(list_of_kwargs=[{"init_state_id": 1}, {"init_state_id": 2}])
    td["vla_action", "chunk"] = chunks(2)
    td["_step"] = torch.tensor([[True, False], [False, False]])
    after = workers.step(td.clone())["next"]
    assert after["num_executed"].squeeze(-1).tolist() == [[4, 0], [0, 0]]
    image, before = after["observation", "image"], td["observation", "image"]
    moved = (image != before).flatten(2).any(-1)
    assert moved.tolist() == [[True, False], [False, False]]

    after["_reset"] = torch.tensor([[[False], [False]], [[False], [True]]])
    td = workers.reset(after, list_of_kwargs=[{"init_state_id": 8}] * 2)
    assert td["init_state_id"].squeeze(-1).tolist() == [[1, 1], [2, 8]]


def test_a_killed_worker_ends_the_next_step(workers):
    """Last with these workers: nothing is left of them."""
    td = workers.reset()
    td["vla_action", "chunk"] = chunks(0)
    processes = list(workers._workers)
    os.kill(processes[1].pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises((RuntimeError, OSError, EOFError)):
        workers.step(td)
    assert time.monotonic() - begin < 30
    workers.close(raise_if_closed=False)
    assert not any(process.is_alive() for process in processes)


ORPHANS = """
import sys
from torchrl_vla.envs.libero import make_libero_envs
if __name__ == "__main__":
    env = make_libero_envs(2, task_suite="libero_spatial", task_id=0)
    print(*(process.pid for process in env._workers), flush=True)
    if sys.stdin.readline():
        raise SystemExit("an error that nobody handles")
"""


@pytest.mark.parametrize("end", ["killed", "with an error"])
def test_the_end_of_the_main_process_leaves_no_orphan(tmp_path, end):
    script = tmp_path / "main.py"
    script.write_text(ORPHANS)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, script], **pipes) as main:
        try:
            pids = [int(pid) for pid in main.stdout.readline().split()]
            assert len(pids) == 2
            for pid in pids:  # Ctrl-C reaches all; workers leave it to the main process
                os.kill(pid, signal.SIGINT)
            time.sleep(0.5)
            assert all(is_running(pid) for pid in pids)
            if end == "killed":
                main.kill()
            else:
                main.communicate("go on\n", timeout=10)
        finally:
            main.kill()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_worker_needs_no_process(made):
    env = make_libero_envs(
        1, **SHARED, wrap=partial(chunked, folder=made), worker_kwargs=[{"task_id": 2}]
    )
    try:
        assert not isinstance(env, ParallelEnv)
        assert env.reset()["task_id"].item() == 2
    finally:
        env.close()


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_workers is 0"):
        make_libero_envs(0, **SHARED)
    with pytest.raises(ValueError, match="1 worker_kwargs for 2 workers"):
        make_libero_envs(2, **SHARED, worker_kwargs=[{}])
