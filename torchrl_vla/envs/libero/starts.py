"""Which start an episode has, and what makes it."""

import numpy as np

from torchrl_vla.data.group_schedule import FIRST_SAMPLED_INIT_STATE
from torchrl_vla.data.random_streams import derive_seed
from torchrl_vla.envs.libero.tasks import load_official_states

MODES = ("cycle", "fixed", "random")


class Starts:
    """The numbered starts of a suite's tasks, and which of them is next.

    A start is a pure function of ``(seed, task_id, number)``. Numbers below
    ``FIRST_SAMPLED_INIT_STATE`` are places in a list of simulator states; from there on
    they name seeded placements of all objects, of which there is no end.

    Args:
        task_suite: where official states come from.
        task_id: the task that an array of states belongs to.
        init_states: ``"official"``, ``"sampled"`` or float64 ``[N, 1 + nq + nv]``.
        mode: ``cycle``, ``fixed`` or ``random``.
        first_id: the number of ``fixed``, counted from the first sampled one for
            ``"sampled"``; where ``cycle`` begins.
        seed: names sampled placements.
        fixture_seed: places fixtures of listed states, which do not hold them.

    Raises:
        ValueError: for another mode, another kind of states, or a number out of range.

    Example:
        >>> states = np.zeros((3, 1))
        >>> starts = Starts("suite", 0, init_states=states, mode="cycle", first_id=2)
        >>> [starts.choose(0) for _ in range(4)]
        [2, 0, 1, 2]
    """

    def __init__(
        self,
        task_suite: str,
        task_id: int = 0,
        *,
        init_states: str | np.ndarray = "official",
        mode: str = "cycle",
        first_id: int = 0,
        seed: int = 0,
        fixture_seed: int = 0,
    ) -> None:
        if mode not in MODES:
            raise ValueError(
                f"init_state_mode is {mode!r}; allowed are {', '.join(MODES)}"
            )
        self.is_sampled = isinstance(init_states, str) and init_states == "sampled"
        self.is_official = isinstance(init_states, str) and init_states == "official"
        if isinstance(init_states, str) and not (self.is_sampled or self.is_official):
            raise ValueError(
                f"init_states is {init_states!r}; allowed are 'official', 'sampled' or "
                "an array"
            )
        self.task_suite = task_suite
        self.task_id = task_id
        self.init_states = init_states
        self.mode = mode
        self.next_id = first_id
        self.seed = seed
        self.fixture_seed = fixture_seed
        self.seed_choice(seed)
        if mode != "random":
            self.load(task_id, self._number(first_id))  # is it in range?

    def seed_choice(self, seed: int) -> None:
        """Seed what ``random`` draws; starts themselves stay where they are."""
        self._rng = np.random.default_rng(derive_seed(seed, "libero"))

    def choose(self, task_id: int) -> int:
        """The number of a task's next start."""
        num_states = 2**31 if self.is_sampled else len(self._listed(task_id))
        if self.mode == "random":
            return self._number(int(self._rng.integers(num_states)))
        place = self.next_id % num_states
        self.next_id += self.mode == "cycle"
        return self._number(place)

    def load(self, task_id: int, number: int) -> tuple[int, np.ndarray | None]:
        """The seed of a start's placement, and its state unless it is sampled.

        Raises:
            ValueError: when the task has no start with this number.
        """
        if number >= FIRST_SAMPLED_INIT_STATE:
            return derive_seed(self.seed, "libero", task_id, number) % 2**32, None
        states = self._listed(task_id)
        if not 0 <= number < len(states):
            raise ValueError(
                f"init_state_id is {number}; {self.task_suite} task {task_id} has 0 to "
                f"{len(states) - 1}, and sampled ones from {FIRST_SAMPLED_INIT_STATE} "
                "on"
            )
        return self.fixture_seed, states[number]

    def _number(self, place: int) -> int:
        return place + FIRST_SAMPLED_INIT_STATE * self.is_sampled

    def _listed(self, task_id: int) -> np.ndarray:
        if not isinstance(self.init_states, np.ndarray):
            return load_official_states(self.task_suite, task_id)
        if task_id != self.task_id:
            raise ValueError(
                f"init_states is an array of states of task {self.task_id} and the "
                f"task is {task_id}; use 'official' or 'sampled' to change tasks"
            )
        return self.init_states
