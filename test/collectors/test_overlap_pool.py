"""Workers that go on by themselves: the same episodes, also of lost workers."""

import os
import re
import signal
import threading
import time
from functools import partial

import pytest
import torch
from countdown import (
    CoinPolicy,
    make_countdown,
    make_faulty,
    make_workers,
)

from torchrl_vla.collectors import EnvPool, EpisodeRequest, GroupCollector, OverlapPool
from torchrl_vla.collectors.overlap_pool import TimeLimits
from torchrl_vla.data.group_schedule import GroupSchedule

# Processes of these tests are forked: importing torch anew takes longer than the tests.
FORK = {"start_method": "fork"}


def requests_for(starts, num_tasks=2):
    return [
        EpisodeRequest(10 + i, 20 + i // 2, i // 3 % num_tasks, start, 100 * i)
        for i, start in enumerate(starts)
    ]


def play(pool, requests, policy=None):
    waiting = iter(requests)
    return list(pool.play(policy or CoinPolicy(), lambda worker: next(waiting, None)))


def by_episode(rows):
    """Decisions by episode, in order, without what depends on who played them."""
    rows = torch.cat(rows) if isinstance(rows, list) else rows
    rows = rows.exclude("language_instruction", ("next", "language_instruction"))
    return {
        episode: rows[rows["episode_id"].flatten() == episode]
        for episode in rows["episode_id"].unique().tolist()
    }


def assert_same(left, right):
    assert left.keys() == right.keys()
    for episode, expected in left.items():
        assert (expected == right[episode]).all(), episode


@pytest.fixture
def make_pool():
    pools = []

    def make(make_env=make_countdown, num_workers=2, **kwargs):
        pools.append(OverlapPool(make_env, num_workers, **FORK, **kwargs))
        return pools[-1]

    yield make
    for pool in pools:
        processes = [worker.process for worker in pool._workers]
        pool.close()
        assert not any(process.is_alive() for process in processes)


STARTS = [3, 0, 4, 1, 7, 2, 5, 9, 9, 4, 6]


@pytest.fixture(scope="module")
def lockstep():
    return by_episode(play(EnvPool(make_countdown()), requests_for(STARTS)))


@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_episodes_are_those_of_lockstep(make_pool, lockstep, num_workers, num_envs):
    pool = make_pool(partial(make_countdown, num_envs), num_workers)
    assert pool.num_slots == num_workers * (num_envs or 1)
    assert_same(lockstep, by_episode(play(pool, requests_for(STARTS))))


def test_lockstep_plays_one_task_at_a_time_in_vectorised_environments(lockstep):
    """CountdownEnv refuses members of two tasks."""
    pool = EnvPool(make_workers("members", 3))
    assert_same(lockstep, by_episode(play(pool, requests_for(STARTS))))


def test_decisions_of_an_episode_come_together_and_in_order(make_pool):
    for rows in play(make_pool(partial(make_countdown, 3)), requests_for(STARTS)):
        for episode, mine in by_episode(rows).items():
            length = 1 + mine["init_state_id"][0].item() % 5
            num_decisions = (length + 1) // 2
            assert mine["decision_id"].flatten().tolist() == [*range(num_decisions)]
            done = mine["next", "done"].flatten().tolist()
            assert done == [False] * (num_decisions - 1) + [True], episode


@pytest.mark.parametrize("num_envs", [None, 4])
def test_collected_batches_are_those_of_lockstep(make_pool, num_envs):
    def collector(pool):
        schedule = GroupSchedule((0, 1, 2), 8, seed=5)
        sizes = {"num_groups": 4, "group_size": 4, "max_sampling_factor": 9}
        return GroupCollector(pool, schedule, **sizes, seed=9)

    one = collector(EnvPool(make_countdown()))
    other = collector(make_pool(partial(make_countdown, num_envs), 2))
    for _ in range(3):
        batch, counts = one.collect(CoinPolicy())
        other_batch, other_counts = other.collect(CoinPolicy())
        assert_same(by_episode(batch), by_episode(other_batch))
        assert counts["groups_kept"] == other_counts["groups_kept"] == 4
        assert one.state_dict() == other.state_dict()


def test_nothing_to_play(make_pool):
    assert play(make_pool(), []) == []


def test_an_abandoned_call_leaves_no_trace(make_pool, lockstep):
    pool = make_pool(partial(make_countdown, 2))
    for num_events in (0, 1, 2):
        waiting = iter(requests_for([4, 4, 1, 4, 2, 0, 4]))
        rounds = pool.play(CoinPolicy(), lambda worker, w=waiting: next(w, None))
        for _ in range(num_events):
            next(rounds)
        rounds.close()
    assert_same(lockstep, by_episode(play(pool, requests_for(STARTS))))


def test_workers_do_not_wait_for_one_another(make_pool):
    """While the policy is at the decision of one worker, the other one simulates."""
    pool = make_pool(SlowStart)
    seen = []

    def policy(tensordict):
        seen.append(sorted(tensordict["init_state_id"].flatten().tolist()))
        return CoinPolicy()(tensordict)

    # The start 14 keeps one worker busy; the other goes on through its episodes.
    play(pool, requests_for([14, 3, 3, 3, 3], num_tasks=1), policy)
    assert [14] not in seen[:4]
    assert seen[:4] == [[3]] * 4


class SlowStart:
    """Makes a countdown environment in which the start 14 takes half a second."""

    def __new__(cls):
        env = make_countdown()
        inner = env.base_env
        inner = getattr(inner, "base_env", inner)
        reset = inner._reset

        def slow(tensordict=None, **kwargs):
            if int(kwargs.get("init_state_id", 0)) == 14:
                time.sleep(0.5)
            return reset(tensordict, **kwargs)

        inner._reset = slow
        return env


# -- lost workers --------------------------------------------------------------------


def set_faults(folder, kinds):
    for number, kind in enumerate(kinds):
        (folder / f"{number}.{kind}").touch()


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("kill", "ended with SIGKILL"),
        ("stop", r"has not answered for \d+ s \(to step"),
        ("nan", r"not finite at .*observation.*state"),
        ("raise", "failed: RuntimeError: the physics diverged"),
    ],
)
def test_lost_episodes_are_played_again(
    make_pool, lockstep, tmp_path, caplog, fault, reason, num_envs
):
    """In the middle of a chunk; all others go on."""
    set_faults(tmp_path, [fault] * 2)
    pool = make_pool(partial(make_faulty, tmp_path, num_envs), min_timeout_s=1.0)
    pool._limits.first_s = 1.0
    assert_same(lockstep, by_episode(play(pool, requests_for(STARTS))))
    assert pool.num_restarts == len(caplog.records) == 2
    for record in caplog.records:
        message = record.getMessage()
        assert record.levelname == "WARNING"
        assert re.search(reason, message), message
        named = re.search(
            r"worker [01] \(process (\d+)\) .* while it played task [01] from initial "
            r"state \d+.*started again",
            message,
        )
        assert named, message
        assert not is_running(int(named[1]))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_an_episode_that_is_always_lost_ends_the_run(make_pool, tmp_path, max_restarts):
    set_faults(tmp_path, ["kill"] * 20)
    pool = make_pool(partial(make_faulty, tmp_path), 1, max_restarts=max_restarts)
    with pytest.raises(
        ChildProcessError,
        match=r"worker 0 \(process \d+\) ended with SIGKILL.* task 0 from initial "
        rf"state 4\. .*{max_restarts + 1} times \(max_restarts={max_restarts}\)",
    ):
        play(pool, requests_for([4]))
    assert pool.num_restarts == max_restarts


def test_faults_of_different_episodes_do_not_add_up(make_pool, lockstep, tmp_path):
    set_faults(tmp_path, ["raise"] * 4)
    pool = make_pool(partial(make_faulty, tmp_path), 1, max_restarts=4)
    assert_same(lockstep, by_episode(play(pool, requests_for(STARTS))))
    again = by_episode(play(pool, requests_for(STARTS)))
    assert_same(lockstep, again)
    assert pool.num_restarts == 4


def test_bad_input_is_not_tried_again(make_pool, tmp_path):
    set_faults(tmp_path, ["refuse"])
    pool = make_pool(partial(make_faulty, tmp_path))
    with pytest.raises(ValueError, match="no such action") as caught:
        play(pool, requests_for([4, 4]))
    assert "countdown.py" in str(caught.value.__cause__), "where it was"
    assert pool.num_restarts == 0


def test_workers_killed_between_two_calls_are_replaced(make_pool, lockstep):
    pool = make_pool(partial(make_countdown, 2))
    assert_same(lockstep, by_episode(play(pool, requests_for(STARTS))))
    for worker in pool._workers:
        os.kill(worker.process.pid, signal.SIGKILL)
    assert_same(lockstep, by_episode(play(pool, requests_for(STARTS))))
    assert 1 <= pool.num_restarts <= 2  # one may have been lost, and all played by one


def test_workers_killed_at_any_moment(make_pool, lockstep):
    """From outside, at moments that differ from run to run."""
    pool = make_pool(partial(make_countdown, 2), max_restarts=100)
    stop = threading.Event()

    def kill():
        for victim in (0, 1, 0, 1, 0):
            if stop.wait(0.15):
                return
            os.kill(pool._workers[victim].process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        while killer.is_alive():
            assert_same(lockstep, by_episode(play(pool, requests_for(STARTS))))
    finally:
        stop.set()
        killer.join()
    assert pool.num_restarts >= 3


def unmakeable(error):
    raise error


@pytest.mark.parametrize("error", [RuntimeError("no OpenGL"), ValueError("no suite")])
def test_an_environment_that_cannot_be_made_is_an_error_at_once(error):
    with pytest.raises(type(error), match=str(error)) as caught:
        OverlapPool(partial(unmakeable, error), 2, **FORK)
    assert "unmakeable" in str(caught.value.__cause__)


def test_a_worker_that_dies_while_it_starts_is_an_error_at_once():
    with pytest.raises(ChildProcessError, match=r"SIGKILL.* while it started"):
        OverlapPool(die, 1, **FORK)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_workers is 0"):
        OverlapPool(make_countdown, 0)
    with pytest.raises(ValueError, match="max_restarts -1"):
        OverlapPool(make_countdown, 1, max_restarts=-1)


def test_limits_follow_the_slowest_answer():
    limits = TimeLimits(shortest_s=2.0, first_s=100.0, factor=10.0)
    assert limits["step"] == 100.0, "nothing is known of it"
    limits.saw("step", 0.1)
    assert limits["step"] == 2.0
    for seconds in (3.0, 0.5):
        limits.saw("step", seconds)
        assert limits["step"] == 30.0
    assert limits["reset"] == 100.0
