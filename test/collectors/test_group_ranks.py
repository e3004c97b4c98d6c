"""Ranks that take groups from one schedule: the batch is that of one rank."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from countdown import CoinPolicy, make_workers
from test_group_collector import TASKS, G, returns_by_group, same

from torchrl_vla.collectors import EnvPool, GroupCollector
from torchrl_vla.collectors.group_wave import PLAYED, GroupWave
from torchrl_vla.data.group_schedule import GroupSchedule


class ThreadBoard:
    """A board of ranks that are threads."""

    def __init__(self, notes, taken, changed):
        self.notes, self.taken, self.changed = notes, taken, changed
        self.num_read = 0

    def take(self):
        with self.changed:
            self.taken.append(None)
            return len(self.taken) - 1

    def num_taken(self):
        return len(self.taken)

    def post(self, note):
        with self.changed:
            self.notes.append(note)
            self.changed.notify_all()

    def read(self):
        with self.changed:
            new, self.num_read = self.notes[self.num_read :], len(self.notes)
        return new

    def wait(self):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.notes) > self.num_read, 60)

    def close(self):
        pass


class ThreadRanks:
    """One of several ranks, each a thread of this process."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self.shared = rank, size, shared
        self.num_boards = self.num_gathered = 0

    def board(self):
        self.num_boards += 1
        with self.shared["lock"]:
            new = ([], [], threading.Condition())
            return ThreadBoard(*self.shared.setdefault(f"board{self.num_boards}", new))

    def gather(self, value):
        self.num_gathered += 1
        values = self.shared.setdefault(f"values{self.num_gathered}", {})
        values[self.rank] = value
        self.shared["barrier"].wait(60)
        return [values[rank] for rank in range(self.size)]


def play(size, policies, num_iterations=2, **options):
    """Batches and counts of each iteration, and the last place, by rank."""
    shared = {"lock": threading.Lock(), "barrier": threading.Barrier(size)}

    def rank_main(rank):
        arguments = {"num_groups": 4, "group_size": G, "seed": 9, **options}
        collector = GroupCollector(
            EnvPool(make_workers("serial", 2)),
            GroupSchedule(TASKS, 8, seed=5),
            ranks=ThreadRanks(rank, size, shared),
            **arguments,
        )
        try:
            found = [collector.collect(policies[rank]) for _ in range(num_iterations)]
        except BaseException:
            shared["barrier"].abort()  # or the others wait for this one
            raise
        return found, collector.state_dict()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank_main, range(size)))


def slow(seconds):
    policy = CoinPolicy()

    def acting(observation):
        time.sleep(seconds)
        return policy(observation)

    return acting


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"max_sampling_factor": 9},
        {"max_sampling_factor": 1},
        {"skip_solved": 1},
        {"dynamic_sampling": False},
    ],
    ids=str,
)
def test_the_batch_is_that_of_one_rank_however_slow_the_others_are(size, options):
    ((expected, place),) = play(1, [CoinPolicy()], **options)
    ranks = play(size, [slow(0.02 * rank) for rank in range(size)], **options)
    for number, (batch, counts) in enumerate(expected):
        parts = [found[number][0] for found, _ in ranks]
        together = torch.cat([part for part in parts if part is not None])
        order = together["episode_id"].flatten().argsort(stable=True)
        assert same(together[order], batch)
        groups = [set() if p is None else set(returns_by_group(p)) for p in parts]
        assert sum(map(len, groups)) == counts["groups_kept"], "each on one rank"
        for found, _ in ranks:
            mine = found[number][1]
            assert mine == ranks[0][0][number][1], "all know the same counts"
            for name in set(counts) - set(PLAYED):
                assert mine[name] == counts[name], name
    assert all(state == place for _, state in ranks)


def test_a_slow_rank_plays_fewer_groups():
    ranks = play(2, [CoinPolicy(), slow(0.5)], 1, num_groups=12, max_sampling_factor=9)
    num_fast, num_slow = (
        0 if batch is None else len(returns_by_group(batch))
        for ((batch, _),), _ in ranks
    )
    assert num_fast + num_slow == 12
    assert num_slow < num_fast / 2


def test_a_rank_that_holds_nothing_any_more_goes_on_forgetting():
    """Others decide on further groups while it plays its next one."""
    (((batch, _), *_), _) = play(1, [CoinPolicy()])[0]
    wave = object.__new__(GroupWave)
    wave.c, wave.kept, wave.rows = SimpleNamespace(num_groups=1), {}, [batch]
    wave.first = wave.num_forgotten = 0
    for wave.position in (1000, 2000):
        wave._forget_dropped()
        assert wave.rows == []
