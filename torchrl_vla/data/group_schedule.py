"""Which (task, initial state) the next group starts from, as a pure function."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torchrl_vla.data.random_streams import derive_seed

# Initial states below are a task's official ones; from here on they are sampled by the
# environment, without end. Training on the one and evaluating on the other is disjoint.
FIRST_SAMPLED_INIT_STATE = 1_000_000


@dataclass(frozen=True)
class GroupRequest:
    """A group to be played: all its episodes start from one initial state of a task."""

    group_id: int
    task_id: int
    init_state_id: int


@dataclass(frozen=True)
class GroupSchedule:
    """An endless list of groups; ``schedule[position]`` depends on its arguments only.

    Every run of ``len(task_ids)`` groups has each task once, in a shuffled order. The
    visits of a task walk through a shuffled list of its initial states, and a state
    comes back only after all others. The place in the list is one integer, so a run
    that resumes from it goes on exactly.

    Args:
        task_ids: numbers of the tasks in their suite.
        num_init_states: initial states per task (the official ones, numbers 0..), or
            ``None`` for sampled ones that never come back.
        seed: names the shuffles.

    Raises:
        ValueError: without tasks, with a task twice, or fewer than one initial state.

    Example:
        >>> schedule = GroupSchedule((3, 7), num_init_states=50, seed=0)
        >>> sorted(schedule[i].task_id for i in range(2))
        [3, 7]
        >>> schedule[10**6] == schedule[10**6]
        True
    """

    task_ids: Sequence[int]
    num_init_states: int | None
    seed: int

    def __post_init__(self) -> None:
        if not self.task_ids or len(set(self.task_ids)) != len(self.task_ids):
            raise ValueError(
                f"task_ids is {list(self.task_ids)}; give at least one, each once"
            )
        if self.num_init_states is not None and self.num_init_states < 1:
            raise ValueError(
                f"num_init_states is {self.num_init_states}; it must be >= 1 or None"
            )

    def __getitem__(self, position: int) -> GroupRequest:
        visit, place = divmod(position, len(self.task_ids))
        task_id = self._shuffled(self.task_ids, "tasks", visit)[place]
        return GroupRequest(position, task_id, self._init_state(task_id, visit))

    def _init_state(self, task_id: int, visit: int) -> int:
        if self.num_init_states is None:
            return FIRST_SAMPLED_INIT_STATE + visit
        turn, place = divmod(visit, self.num_init_states)
        states = range(self.num_init_states)
        return self._shuffled(states, "states", task_id, turn)[place]

    def _shuffled(self, items: Sequence[int], *stream: int | str) -> list[int]:
        shuffled = list(items)
        random.Random(derive_seed(self.seed, *stream)).shuffle(shuffled)
        return shuffled
