"""The list of groups is a pure function that covers everything evenly."""

from collections import Counter

import pytest

from torchrl_vla.data.group_schedule import (
    FIRST_SAMPLED_INIT_STATE,
    GroupRequest,
    GroupSchedule,
)

TASKS = (3, 7, 1, 4, 9)


def take(schedule, num, first=0):
    return [schedule[i] for i in range(first, first + num)]


@pytest.mark.parametrize("num_init_states", [4, None])
def test_a_position_depends_on_the_arguments_only(num_init_states):
    one = GroupSchedule(TASKS, num_init_states, seed=2)
    other = GroupSchedule(list(TASKS), num_init_states, seed=2)
    forwards = take(one, 200)
    backwards = [other[i] for i in reversed(range(200))]
    assert forwards == backwards[::-1]
    assert one[10**9] == other[10**9], "without walking there"
    assert [request.group_id for request in forwards] == list(range(200))


def test_every_round_has_every_task_once_in_another_order():
    schedule = GroupSchedule(TASKS, 50, seed=0)
    rounds = [
        [request.task_id for request in take(schedule, 5, 5 * i)] for i in range(100)
    ]
    assert all(sorted(tasks) == sorted(TASKS) for tasks in rounds)
    assert len(set(map(tuple, rounds))) > 50, "of 120 orders"
    firsts = Counter(tasks[0] for tasks in rounds)
    assert set(firsts) == set(TASKS), "every task comes first now and then"
    assert max(firsts.values()) < 40


def test_every_state_comes_before_any_comes_again():
    schedule = GroupSchedule(TASKS, 6, seed=0)
    for turn in range(4):
        requests = take(schedule, 30, 30 * turn)
        starts = [(request.task_id, request.init_state_id) for request in requests]
        assert sorted(starts) == [(t, s) for t in sorted(TASKS) for s in range(6)]


def test_tasks_walk_through_their_states_in_orders_of_their_own():
    schedule = GroupSchedule(TASKS, 20, seed=0)
    orders = {task: [] for task in TASKS}
    for request in take(schedule, 200):
        orders[request.task_id].append(request.init_state_id)
    walks = {tuple(order[:20]) for order in orders.values()}
    walks |= {tuple(order[20:]) for order in orders.values()}
    assert len(walks) == 10, "nor does the second turn repeat the first"


def test_sampled_states_never_end_and_are_not_official_ones():
    schedule = GroupSchedule(TASKS, None, seed=0)
    requests = take(schedule, 1000)
    starts = {(request.task_id, request.init_state_id) for request in requests}
    assert len(starts) == 1000
    assert min(start for _, start in starts) == FIRST_SAMPLED_INIT_STATE
    official = {r.init_state_id for r in take(GroupSchedule(TASKS, 50, 0), 500)}
    assert not official & {start for _, start in starts}


def test_seeds_differ():
    orders = {tuple(take(GroupSchedule(TASKS, 6, seed=seed), 30)) for seed in range(20)}
    assert len(orders) == 20


def test_one_task_one_state():
    schedule = GroupSchedule((8,), 1, seed=0)
    assert take(schedule, 3) == [GroupRequest(i, 8, 0) for i in range(3)]


@pytest.mark.parametrize(
    ("tasks", "num_init_states", "message"),
    [
        ((), 5, r"task_ids is \[\]; give at least one"),
        ((1, 2, 1), 5, r"task_ids is \[1, 2, 1\]; .* each once"),
        ((1,), 0, "num_init_states is 0; it must be >= 1 or None"),
    ],
)
def test_bad_arguments(tasks, num_init_states, message):
    with pytest.raises(ValueError, match=message):
        GroupSchedule(tasks, num_init_states, seed=0)
