"""LIBERO in worker processes: equal episodes whoever plays them, killed or stopped."""

import importlib.util
import os
import signal
import threading
import time

import pytest
import torch

from torchrl_vla.collectors import EpisodeRequest
from torchrl_vla.collectors.factory import make_pool
from torchrl_vla.config.schema import EnvConfig
from torchrl_vla.data.action_codec import UniformActionCodec
from torchrl_vla.data.random_streams import uniform

pytestmark = [
    pytest.mark.libero,
    pytest.mark.skipif(
        importlib.util.find_spec("libero") is None,
        reason="LIBERO is not installed: pip install 'torchrl-vla[libero]'",
    ),
]

REQUESTS = [
    EpisodeRequest(group * 2 + member, group, task, start, 1000 * group + 100 * member)
    for group, (task, start) in enumerate([(0, 3), (1, 1_000_004), (1, 3)])
    for member in range(2)
]
NUM_DECISIONS = 3


def make(num_workers, overlap=True, num_envs=2):
    cfg = EnvConfig(
        name="libero",
        task_suite="libero_object",
        chunk_size=4,
        max_episode_steps=4 * NUM_DECISIONS,
        image_size=64,
        num_workers=num_workers,
        num_envs=num_envs,
        overlap=overlap,
        min_timeout_s=5.0,
    )
    return make_pool(cfg, UniformActionCodec(9, low=-1.0, high=1.0))


def random_tokens(tensordict):
    """As a policy that samples: a function of the episode and the decision."""
    noise = uniform(tensordict["sampling_seed"].flatten(), 28)
    tensordict["vla_action", "tokens"] = (noise * 9).long().reshape(-1, 4, 7)
    return tensordict


def play(pool, policy=random_tokens):
    """Decisions of all episodes, in the order of the requests."""
    waiting = iter(REQUESTS)
    rows = torch.cat(list(pool.play(policy, lambda worker: next(waiting, None))))
    order = rows["episode_id"].flatten() * NUM_DECISIONS + rows["decision_id"].flatten()
    assert sorted(order.tolist()) == list(range(len(REQUESTS) * NUM_DECISIONS))
    return rows[order.argsort()]


def assert_same(left, right):
    for key in (
        "task_id",
        "init_state_id",
        ("observation", "image"),
        ("observation", "state"),
        ("next", "observation", "image"),
        ("next", "observation", "state"),
        ("next", "num_executed"),
        ("next", "done"),
    ):
        assert torch.equal(left[key], right[key]), key
    texts = [td.get("language_instruction").tolist() for td in (left, right)]
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def expected():
    pool = make(num_workers=1)
    try:
        return play(pool)
    finally:
        pool.close()


@pytest.fixture(scope="module")
def pool():
    pool = make(num_workers=2)
    yield pool
    pool.close()


def test_the_episodes_move(expected):
    """So that equality says something, also of members of a group."""
    first, second = expected[0], expected[NUM_DECISIONS]
    assert torch.equal(first["observation", "image"], second["observation", "image"])
    ends = [td["next", "observation", "state"] for td in (first, second)]
    assert not torch.equal(*ends)


def test_one_worker_and_two_give_the_same_episodes(expected, pool):
    assert_same(expected, play(pool))


def test_lockstep_gives_the_same_episodes(expected):
    lockstep = make(num_workers=2, overlap=False)
    try:
        assert_same(expected, play(lockstep))
    finally:
        lockstep.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_episodes_of_a_lost_worker_are_played_again(expected, pool, caplog, end):
    """It is ended in the middle of a chunk, from outside."""
    pool_restarts = pool.num_restarts
    lost = []

    def policy(tensordict):
        if not lost and (tensordict["decision_id"] == 1).any():
            worker = max(pool._workers, key=lambda worker: worker.asked_at_s)
            lost.append(worker.process.pid)
            threading.Timer(0.03, os.kill, (worker.process.pid, end)).start()
        return random_tokens(tensordict)

    begin_s = time.monotonic()
    assert_same(expected, play(pool, policy))
    assert time.monotonic() - begin_s < 120
    assert pool.num_restarts == pool_restarts + 1
    (record,) = caplog.records
    message = record.getMessage()
    assert f"(process {lost[0]})" in message
    assert "while it played task" in message
    why = {
        signal.SIGKILL: "ended with SIGKILL",
        signal.SIGSTOP: "has not answered for",
    }
    assert why[end] in message
    with pytest.raises(ProcessLookupError):
        os.kill(lost[0], 0)
