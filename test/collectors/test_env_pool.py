"""Episodes on every kind of environment: who is stepped, who sees what."""

import math
import os
import signal
import time

import pytest
import torch
from countdown import RecordingPolicy, make_countdown, make_toy, make_workers
from torchrl.envs import ParallelEnv

from torchrl_vla.collectors import EnvPool, EpisodeRequest

KINDS = ["parallel", "serial", "single"]


def requests_for(starts, seed=100):
    """One episode per start; ids that cannot be taken for one another."""
    return [
        EpisodeRequest(10 + i, 20 + i // 2, i % 2, start, seed * i)
        for i, start in enumerate(starts)
    ]


def play(pool, requests, policy=None):
    """Decisions of all rounds, a list by round."""
    waiting = iter(requests)
    policy = policy or RecordingPolicy()
    return list(pool.play(policy, lambda worker: next(waiting, None)))


@pytest.fixture(params=KINDS)
def pool(request):
    pool = EnvPool(make_workers(request.param))
    yield pool
    pool.env.close(raise_if_closed=False)


@pytest.mark.parametrize("num_episodes", [1, 2, 7])
def test_every_episode_is_played_once_with_its_own_ids(pool, num_episodes):
    requests = requests_for([3, 0, 4, 1, 7, 2, 5][:num_episodes])
    rows = torch.cat(play(pool, requests))
    for request in requests:
        mine = rows[rows["episode_id"].flatten() == request.episode_id]
        length = 1 + request.init_state_id % 5
        num_decisions = math.ceil(length / 2)
        success = request.init_state_id % 2
        assert mine["decision_id"].flatten().tolist() == list(range(num_decisions))
        done = mine["next", "done"].flatten().tolist()
        assert done == [False] * (num_decisions - 1) + [True]
        assert mine["next", "num_executed"].sum() == length
        assert mine["next", "success"][-1].item() == bool(success)
        assert mine["episode_return"].flatten().tolist() == [0.0] * (
            num_decisions - 1
        ) + [float(success)]
        for name in ("group_id", "task_id", "init_state_id"):
            assert set(mine[name].flatten().tolist()) == {getattr(request, name)}
        # What was observed is of the start that was asked for.
        state = mine["observation", "state"]
        assert set(state[:, 0].tolist()) == {request.task_id}
        assert set(state[:, 1].tolist()) == {request.init_state_id}
        assert set(mine.get("language_instruction").tolist()) == {
            f"task {request.task_id}"
        }
        seeds = mine["sampling_seed"].flatten() - request.seed
        assert seeds.tolist() == list(range(num_decisions))
    assert rows["next", "done"].sum() == num_episodes


def test_finished_slots_are_not_stepped():
    pool = EnvPool(make_workers("serial"))
    requests = requests_for([0, 4, 1, 2, 3])  # 1, 5, 2, 3 and 4 env steps
    play(pool, requests)
    envs = [env.base_env for env in pool.env._envs]
    assert sum(env.num_steps for env in envs) == 1 + 5 + 2 + 3 + 4
    assert sum(env.num_resets for env in envs) == 5


def test_fewer_episodes_than_slots_step_no_idle_slot():
    pool = EnvPool(make_workers("serial"))
    play(pool, requests_for([4]))
    assert [env.base_env.num_steps for env in pool.env._envs] == [5, 0, 0]


def test_the_policy_sees_ready_slots_only(pool):
    policy = RecordingPolicy()
    play(pool, requests_for([0, 4, 1, 2, 3]), policy)
    sizes = [len(batch) for batch in policy.batches]
    assert max(sizes) == min(pool.num_slots, 5)
    assert sum(sizes) == 1 + 3 + 1 + 2 + 2, "one row per decision"


def test_no_requests_at_all(pool):
    assert play(pool, []) == []


def test_a_worker_without_work_is_asked_again_after_the_round():
    pool = EnvPool(make_workers("serial"))
    asked = []

    def next_request(worker):
        asked.append(worker)
        if worker == 0 and asked.count(0) in (1, 2):
            return EpisodeRequest(len(asked), 0, 0, 4, 0)
        if worker == 2 and asked.count(2) == 3:
            return EpisodeRequest(len(asked), 0, 0, 1, 0)
        return None

    rows = torch.cat(list(pool.play(RecordingPolicy(), next_request)))
    assert rows["next", "done"].sum() == 3
    assert set(asked) == {0, 1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_abandoned_episodes_leave_no_trace(kind):
    pool = EnvPool(make_workers(kind))
    try:
        waiting = iter(requests_for([4, 4, 4, 4]))
        rounds = pool.play(RecordingPolicy(), lambda worker: next(waiting, None))
        next(rounds)
        rounds.close()
        requests = requests_for([3, 1, 0], seed=7)
        rows = torch.cat(play(pool, requests))
        ids = rows["episode_id"][rows["next", "done"]].tolist()
        assert sorted(ids) == [r.episode_id for r in requests]
        first = rows["decision_id"].flatten() == 0
        assert first.sum() == 3
    finally:
        pool.env.close(raise_if_closed=False)


def test_an_episode_never_mixes_policy_versions(pool):
    """A new call begins all its episodes anew, under the policy it was given."""
    for version in (1, 2):
        waiting = iter(requests_for([4, 3, 4, 2]))
        rounds = pool.play(
            RecordingPolicy(version=version), lambda worker, w=waiting: next(w, None)
        )
        rows = [next(rounds), next(rounds)]
        rounds.close()
        for row in rows:
            assert (row["version"] == version).all()
        assert (rows[0]["decision_id"] == 0).all()
        assert (rows[0]["next", "num_executed"] == 2).all()


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_toy_outcome_does_not_depend_on_the_number_of_slots(num_envs):
    pool = EnvPool(make_toy(num_envs, max_episode_steps=8, success_tol=0.4))
    requests = [EpisodeRequest(i, i, 0, i, 0) for i in range(7)]
    policy = RecordingPolicy(chunk_size=4)  # stays at the centre
    rows = torch.cat(play(pool, requests, policy))
    done = rows["next", "done"].flatten()
    outcome = dict(
        zip(
            rows["episode_id"][done].flatten().tolist(),
            rows["episode_return"][done].flatten().tolist(),
            strict=True,
        )
    )
    # The centre is right where the target is within the tolerance in both dimensions.
    first = rows[rows["decision_id"].flatten() == 0]
    order = first["episode_id"].flatten().argsort()
    target = first["observation", "state"][order][:, 2:4]
    expected = (target.abs() <= 0.4).all(-1).float().tolist()
    assert [outcome[i] for i in range(7)] == expected
    assert 0 < sum(expected) < 7, "the test can fail"


def test_a_group_starts_bit_identically():
    pool = EnvPool(make_toy(4))
    requests = [EpisodeRequest(i, i // 4, 0, 5 + i // 4, i) for i in range(8)]
    rows = torch.cat(play(pool, requests, RecordingPolicy(chunk_size=4)))
    first = rows[rows["decision_id"].flatten() == 0]
    for group in (0, 1):
        members = first[first["group_id"].flatten() == group]
        assert len(members) == 4
        for key in [("observation", "image"), ("observation", "state")]:
            assert (members[key] == members[key][0]).all(), key


def test_a_dead_worker_is_noticed_and_named():
    env = ParallelEnv(2, make_countdown, mp_start_method="fork")  # in shared memory
    waiting = iter(requests_for([4] * 8))
    rounds = EnvPool(env).play(RecordingPolicy(), lambda worker: next(waiting, None))
    next(rounds)
    pids = [process.pid for process in env._workers]
    os.kill(pids[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="worker 1 dead"):
        list(rounds)
    assert time.monotonic() - start < 20
    with pytest.raises(RuntimeError, match="worker 1"):
        env.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):  # no process is left
            os.kill(pid, 0)


def test_two_batch_dimensions_are_refused():
    class Grid:
        batch_dims, batch_size = 2, torch.Size([2, 3])

    with pytest.raises(ValueError, match=r"batch size \(2, 3\)"):
        EnvPool(Grid())
