"""Groups: which are kept, in which order, and where everything else is counted."""

import pytest
import torch
from countdown import CoinPolicy, RecordingPolicy, make_toy, make_workers

from torchrl_vla.collectors import EnvPool, GroupCollector
from torchrl_vla.collectors.group_wave import COUNTS
from torchrl_vla.data.group_schedule import GroupSchedule
from torchrl_vla.modules import CompactPolicy

TASKS = (0, 1, 2)
G = 4


def make_collector(kind="serial", num_workers=3, num_starts=8, **kwargs):
    pool = EnvPool(make_workers(kind, num_workers))
    schedule = GroupSchedule(TASKS, num_starts, seed=5)
    arguments = {"num_groups": 4, "group_size": G, "seed": 9, **kwargs}
    return GroupCollector(pool, schedule, **arguments)


@pytest.fixture(scope="module")
def every_group():
    """Returns of the first 24 groups, by group, played without the filter."""
    collector = make_collector(num_groups=24, dynamic_sampling=False)
    batch, _ = collector.collect(CoinPolicy())
    return returns_by_group(batch)


def returns_by_group(batch):
    done = batch["next", "done"].flatten()
    returns = {}
    for group, value in zip(
        batch["group_id"][done].flatten().tolist(),
        batch["episode_return"][done].flatten().tolist(),
        strict=True,
    ):
        returns.setdefault(group, []).append(value)
    return returns


def is_mixed(returns):
    return 0 < sum(returns) < len(returns)


def same(left, right):
    """Whether two batches are equal, bit for bit."""
    names = set(left.keys(True, True))
    return names == set(right.keys(True, True)) and all(
        torch.equal(left[key], right[key])
        for key in names
        if isinstance(left[key], torch.Tensor)
    )


def test_the_groups_of_the_tests_are_of_all_kinds(every_group):
    kinds = {(is_mixed(r), sum(r) > 0) for r in every_group.values()}
    assert kinds == {(True, True), (False, True), (False, False)}


@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_first_mixed_groups_of_the_schedule_are_kept(every_group, num_groups):
    collector = make_collector(num_groups=num_groups, max_sampling_factor=9)
    batch, counts = collector.collect(CoinPolicy())
    expected = [g for g, returns in every_group.items() if is_mixed(returns)]
    expected = expected[:num_groups]
    assert returns_by_group(batch) == {g: every_group[g] for g in expected}
    assert list(returns_by_group(batch)) == expected, "in the schedule's order"
    assert counts["groups_kept"] == num_groups
    assert collector.position == expected[-1] + 1
    before = range(expected[-1] + 1)
    solved = [g for g in before if sum(every_group[g]) == G]
    hopeless = [g for g in before if sum(every_group[g]) == 0]
    assert counts["groups_all_success"] == len(solved)
    assert counts["groups_all_failure"] == len(hopeless)
    rate = sum(sum(every_group[g]) for g in before) / (G * len(before))
    assert counts["success_rate"] == pytest.approx(rate)


def test_members_and_decisions_are_complete_and_in_order(every_group):
    batch, _ = make_collector().collect(CoinPolicy())
    order = list(
        zip(
            batch["group_id"].flatten().tolist(),
            batch["episode_id"].flatten().tolist(),
            batch["decision_id"].flatten().tolist(),
            strict=True,
        )
    )
    assert order == sorted(order)
    assert len(set(order)) == len(order)
    for group in batch["group_id"].unique().tolist():
        mine = batch[batch["group_id"].flatten() == group]
        assert len(mine["episode_id"].unique()) == G
        assert len(mine["init_state_id"].unique()) == 1
        assert len(mine["task_id"].unique()) == 1
        assert mine["next", "done"].sum() == G
        request = GroupSchedule(TASKS, 8, seed=5)[group]
        assert mine["task_id"][0].item() == request.task_id
        assert mine["init_state_id"][0].item() == request.init_state_id
        # All members of a group start alike, bit for bit.
        first = mine[mine["decision_id"].flatten() == 0]["observation", "state"]
        assert (first == first[0]).all()


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("single", 1), ("serial", 2), ("parallel", 2)]
)
def test_the_batch_does_not_depend_on_the_workers(kind, num_workers):
    one = make_collector("serial", 1)
    other = make_collector(kind, num_workers)
    try:
        for _ in range(3):
            batch, counts = one.collect(CoinPolicy())
            other_batch, other_counts = other.collect(CoinPolicy())
            assert same(batch, other_batch)
            assert one.state_dict() == other.state_dict()
            for name in ("groups_kept", "groups_all_failure", "success_rate"):
                assert counts[name] == other_counts[name]
    finally:
        other.pool.env.close()


def test_the_batch_does_not_depend_on_the_number_of_members():
    def collect(num_envs):
        pool = EnvPool(make_toy(num_envs, success_tol=0.5))
        policy = CompactPolicy(chunk_size=4, action_dim=2, num_bins=11, state_dim=4)
        collector = GroupCollector(
            pool, GroupSchedule((0,), None, 0), num_groups=4, group_size=G
        )
        return [collector.collect(policy)[0] for _ in range(2)]

    for few, many in zip(collect(8), collect(64), strict=True):
        for key in ["group_id", "episode_id", ("vla_action", "tokens")]:
            assert torch.equal(few[key], many[key]), key
        assert torch.equal(few["observation", "image"], many["observation", "image"])
        key = ("vla_action", "log_probs")
        torch.testing.assert_close(few[key], many[key], rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_envs", [2, 7, 64])
def test_counts_add_up(num_envs):
    pool = EnvPool(make_toy(num_envs, success_tol=0.5))
    policy = CompactPolicy(chunk_size=4, action_dim=2, num_bins=11, state_dim=4)
    rows = []

    def play(*args):
        for decisions in EnvPool.play(pool, *args):
            rows.append(decisions.exclude("language_instruction"))
            yield decisions

    pool.play = play
    collector = GroupCollector(
        pool, GroupSchedule((0,), None, 0), num_groups=3, group_size=G
    )
    batch, counts = collector.collect(policy)
    assert counts.keys() == {*COUNTS, "success_rate"}
    decided = sum(
        counts[f"groups_{kind}"]
        for kind in ("kept", "all_success", "all_failure", "out_of_bounds")
    )
    assert decided == collector.position
    played = torch.cat(rows)
    assert counts["decisions_played"] == len(played)
    assert counts["env_steps_played"] == played["next", "num_executed"].sum()
    assert counts["episodes_played"] == played["next", "done"].sum()
    started = len(played["episode_id"].unique())
    assert counts["episodes_unfinished"] == started - counts["episodes_played"]
    finished = counts["groups_surplus"] + decided
    groups = len(played["group_id"].unique())
    assert counts["groups_unfinished"] == groups - finished
    assert counts["episodes_kept"] == G * counts["groups_kept"]
    assert batch["next", "done"].sum() == counts["episodes_kept"]
    # Whole groups decided, whole groups beyond, and finished members of others.
    done = played[played["next", "done"].flatten()]
    partly = [
        n for n in done["group_id"].unique(return_counts=True)[1].tolist() if n < G
    ]
    assert counts["episodes_played"] == G * finished + sum(partly)


def test_surplus_groups_come_again_as_new_samples():
    def collector():
        pool = EnvPool(make_toy(64, success_tol=0.5))
        schedule = GroupSchedule((0,), None, 0)
        return GroupCollector(pool, schedule, num_groups=4, group_size=G, seed=1)

    policy = CompactPolicy(chunk_size=4, action_dim=2, num_bins=11, state_dim=4)
    whole = collector()
    first, counts = whole.collect(policy)
    assert counts["groups_surplus"] + counts["groups_unfinished"] > 0
    assert whole.position == first["group_id"].max() + 1, "none of them is lost"
    second, _ = whole.collect(policy)
    assert second["group_id"].min() > first["group_id"].max()
    seeds = set(first["sampling_seed"].flatten().tolist())
    assert not seeds & set(second["sampling_seed"].flatten().tolist())
    # The same groups in another iteration draw other noise.
    again = collector()
    again.iteration = 1
    third, _ = again.collect(policy)
    assert not seeds & set(third["sampling_seed"].flatten().tolist())


@pytest.mark.parametrize(
    ("chance", "outcome"),
    [(0.0, "groups_all_failure"), (1.0, "groups_all_success")],
)
def test_the_budget_ends_a_hopeless_or_solved_iteration(chance, outcome):
    # Starts 1, 3, 5, 7 can succeed: with one start per task, number 0 is left out.
    collector = make_collector(max_sampling_factor=2)
    policy = CoinPolicy([chance] * 8)
    if chance:
        collector.schedule = OddStarts()
    batch, counts = collector.collect(policy)
    assert batch is None
    assert counts[outcome] == collector.position == 2 * 4
    assert counts["episodes_played"] == 2 * 4 * G, "not one episode more"
    assert counts["groups_kept"] == 0
    assert counts["success_rate"] == chance
    batch, counts = collector.collect(policy)
    assert batch is None
    assert collector.position == 4 * 4
    assert collector.iteration == 2


class OddStarts:
    """A schedule of starts that can succeed."""

    def __getitem__(self, position):
        request = GroupSchedule(TASKS, None, 0)[position]
        return type(request)(position, request.task_id, 2 * position + 1)


def test_a_spent_budget_returns_what_there_is(every_group):
    collector = make_collector(num_groups=6, max_sampling_factor=1)
    batch, counts = collector.collect(CoinPolicy())
    mixed = [g for g in range(6) if is_mixed(every_group[g])]
    assert 0 < len(mixed) < 6
    assert list(returns_by_group(batch)) == mixed
    assert counts["groups_kept"] == len(mixed)


def test_bounds_are_inclusive(every_group):
    means = {g: sum(r) / G for g, r in every_group.items()}
    exact = [g for g, mean in means.items() if mean == 0.25]
    assert exact
    collector = make_collector(
        num_groups=len(exact), keep_low=0.25, keep_high=0.25, max_sampling_factor=24
    )
    batch, counts = collector.collect(CoinPolicy())
    assert list(returns_by_group(batch)) == exact
    beside = [g for g, m in means.items() if m in (0.5, 0.75) and g < exact[-1]]
    assert counts["groups_out_of_bounds"] == len(beside)


def test_without_the_filter_everything_is_kept(every_group):
    collector = make_collector(num_groups=5, dynamic_sampling=False)
    batch, counts = collector.collect(CoinPolicy())
    assert returns_by_group(batch) == {g: every_group[g] for g in range(5)}
    assert counts["groups_kept"] == 5
    assert counts["episodes_played"] == 5 * G


@pytest.mark.parametrize("selection", ["first", "uniform", "balanced"])
def test_candidates(selection):
    collector = make_collector(
        num_groups=3,
        group_size=2,
        num_candidates=8,
        selection=selection,
        max_sampling_factor=30,
    )
    batch, counts = collector.collect(CoinPolicy())
    returns = returns_by_group(batch)
    assert len(returns) == 3
    assert all(sum(r) == 1 and len(r) == 2 for r in returns.values())
    assert counts["episodes_kept"] == 3 * 2
    decided = 8 * collector.position
    assert decided <= counts["episodes_played"]
    members = batch["episode_id"].flatten() % 8
    if selection == "first":
        assert set(members.tolist()) == {0, 1}
    else:
        assert set(members.tolist()) - {0, 1}


def test_balanced_finds_contrast_where_the_first_members_have_none():
    kept = {}
    for selection in ("first", "balanced"):
        collector = make_collector(
            num_groups=24,
            group_size=2,
            num_candidates=8,
            selection=selection,
            max_sampling_factor=1,
        )
        kept[selection] = collector.collect(CoinPolicy())[1]["groups_kept"]
    assert kept["balanced"] > kept["first"]


def test_skip_solved_passes_over_what_is_solved():
    # Two starts per task; number 1 is solved by everyone, number 0 is mixed at best.
    collector = make_collector(num_starts=2, skip_solved=1, num_groups=6)
    policy = CoinPolicy([0.0, 1.0])
    _, counts = collector.collect(policy)
    assert counts["groups_skipped_solved"] == 0
    assert set(collector.solved_visits) == {(task, 1) for task in TASKS}
    _, counts = collector.collect(policy)
    assert counts["groups_skipped_solved"] >= 3
    assert counts["groups_all_failure"] > counts["groups_all_success"]


def test_skip_solved_goes_on_when_all_it_sees_is_solved():
    """A start that is passed over must not count as one that is being played."""
    collector = make_collector(num_groups=1, skip_solved=1, max_sampling_factor=2)
    collector.schedule = FirstSolved()
    collector.solved_visits[0, 0] = 1
    batch, counts = collector.collect(CoinPolicy([0.5]))
    assert counts["groups_skipped_solved"] == 1
    assert counts["episodes_played"] >= G
    assert batch is not None


def test_what_is_passed_over_costs_no_budget():
    collector = make_collector(num_groups=2, skip_solved=1, max_sampling_factor=1)
    collector.schedule = FirstSolved()
    collector.solved_visits[0, 0] = 1
    _, counts = collector.collect(CoinPolicy([0.0]))
    assert counts["groups_skipped_solved"] == 1
    assert counts["groups_all_failure"] == 2
    assert collector.position == 3


class FirstSolved:
    """Start 0 first, then starts that are mixed."""

    def __getitem__(self, position):
        request = GroupSchedule((0,), None, 0)[position]
        start = 0 if position == 0 else 2 * position + 1
        return type(request)(position, 0, start)


def test_skip_solved_does_not_depend_on_the_workers():
    states = []
    for num_workers in (1, 2, 5):
        collector = make_collector("serial", num_workers, 4, skip_solved=1)
        policy = CoinPolicy([0.0, 1.0, 0.0, 0.5])
        batches = [collector.collect(policy)[0] for _ in range(4)]
        ids = [b["episode_id"].flatten().tolist() for b in batches]
        states.append((collector.state_dict(), ids))
    assert states[0] == states[1] == states[2]
    assert states[0][0]["solved_visits"], "something was solved"


def test_the_record_of_solved_starts_does_not_grow_without_need():
    collector = make_collector()
    for _ in range(3):
        collector.collect(CoinPolicy())
    assert not collector.solved_visits


def test_state_dict_goes_on_exactly():
    whole = make_collector(num_starts=4, skip_solved=1)
    policy = CoinPolicy([0.0, 1.0, 0.0, 0.5])
    for _ in range(2):
        whole.collect(policy)
    state = whole.state_dict()
    expected, expected_counts = whole.collect(policy)
    resumed = make_collector(num_starts=4, skip_solved=1)
    resumed.load_state_dict(state)
    batch, counts = resumed.collect(policy)
    assert same(batch, expected)
    assert counts == expected_counts
    assert resumed.state_dict() == whole.state_dict()


def test_one_policy_version_in_a_batch():
    """Nothing that an earlier policy played reaches a later batch."""
    collector = make_collector(num_groups=2, dynamic_sampling=False)
    for version in (1, 2, 3):
        batch, _ = collector.collect(RecordingPolicy(version=version))
        assert batch["version"].unique().tolist() == [version]


def test_rows_of_dropped_groups_are_freed(monkeypatch):
    from torchrl_vla.collectors import group_collector

    most = 0

    class Watched(group_collector.GroupWave):
        def add(self, decisions):
            nonlocal most
            super().add(decisions)
            most = max(most, sum(len(rows) for rows in self.rows))

    monkeypatch.setattr(group_collector, "GroupWave", Watched)
    collector = make_collector(num_groups=2, max_sampling_factor=20)
    batch, counts = collector.collect(CoinPolicy([0.0]))
    assert batch is None
    assert counts["groups_all_failure"] == 40
    # Dropped ones up to the number wanted, and what came since: not all 40.
    assert most < counts["decisions_played"] / 4
    # What is kept survives: the same batch as without anything to forget.
    collector = make_collector(num_groups=4, max_sampling_factor=9)
    kept, _ = collector.collect(CoinPolicy())
    monkeypatch.setattr(Watched, "_forget_dropped", lambda self: None)
    collector = make_collector(num_groups=4, max_sampling_factor=9)
    assert same(kept, collector.collect(CoinPolicy())[0])


def test_only_what_training_reads_is_stored():
    collector = make_collector()
    batch, _ = collector.collect(CoinPolicy())
    assert "done" not in batch.keys()
    assert ("next", "observation") not in batch.keys(True)
    toy = GroupCollector(
        EnvPool(make_toy(4)),
        GroupSchedule((0,), None, 0),
        num_groups=1,
        group_size=2,
        dynamic_sampling=False,
    )
    batch, _ = toy.collect(RecordingPolicy(chunk_size=4))
    assert batch["observation", "image"].dtype == torch.uint8


@pytest.mark.parametrize(
    "sizes",
    [
        {"group_size": 1},
        {"group_size": 4, "num_candidates": 3},
        {"num_groups": 0},
    ],
)
def test_bad_sizes(sizes):
    with pytest.raises(ValueError, match="needed are 2 <= group_size"):
        make_collector(**sizes)
