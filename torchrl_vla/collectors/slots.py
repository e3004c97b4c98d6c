"""Which episode each slot plays: what the pools have in common."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite

from torchrl_vla.data import keys


class EpisodeRequest(NamedTuple):
    """An episode to be played."""

    episode_id: int
    group_id: int
    task_id: int
    init_state_id: int
    seed: int


Policy = Callable[[TensorDictBase], TensorDictBase]
NextRequest = Callable[[int], EpisodeRequest | None]


class Pool(Protocol):
    """Where episodes are played: :class:`EnvPool` or :class:`OverlapPool`."""

    specs: Composite
    num_restarts: int

    def play(
        self, policy: Policy, next_request: NextRequest
    ) -> Iterator[TensorDictBase]: ...

    def close(self) -> None: ...


class Slots:
    """``num_workers`` workers with ``num_members`` slots each.

    The slots of a worker play episodes of one task at a time: a request for another
    task waits until the others have finished.

    Attributes:
        ids: fields of the requests and ``"decision_id"``, int64 ``[S, 1]`` each.
        busy: whether a slot's episode is under way, bool ``[S]``.
    """

    def __init__(self, num_workers: int, num_members: int) -> None:
        self.num_members = num_members
        num_slots = num_workers * num_members
        names = EpisodeRequest._fields + (keys.DECISION_ID,)
        zeros = torch.zeros(num_slots, 1, dtype=torch.int64)
        self.ids = TensorDict({name: zeros.clone() for name in names}, [num_slots])
        self.busy = torch.zeros(num_slots, dtype=torch.bool)
        self._returns = torch.zeros(num_slots, 1)
        self._requests: list[EpisodeRequest | None] = [None] * num_slots
        self._waiting: list[deque[EpisodeRequest]] = [
            deque() for _ in range(num_workers)
        ]

    def of(self, worker: int) -> slice:
        """The slots of a worker."""
        return slice(worker * self.num_members, (worker + 1) * self.num_members)

    def rows(self, worker: int) -> Tensor:
        """Numbers of a worker's busy slots."""
        return self.busy[self.of(worker)].nonzero().flatten() + self.of(worker).start

    @property
    def has_work(self) -> bool:
        """Whether an episode is under way or waits."""
        return bool(self.busy.any()) or any(self._waiting)

    def requests(self, worker: int) -> list[EpisodeRequest]:
        """What a worker plays, and what waits for it."""
        playing = [self._requests[slot] for slot in self.rows(worker).tolist()]
        return [*playing, *self._waiting[worker]]

    def describe(self, worker: int) -> str:
        """What a worker plays, in words."""
        starts: dict[int, list[int]] = {}
        for request in self.requests(worker):
            states = starts.setdefault(request.task_id, [])
            if request.init_state_id not in states:
                states.append(request.init_state_id)
        return " and ".join(
            f"task {task} from initial state {', '.join(map(str, states))}"
            for task, states in starts.items()
        )

    def fill(self, worker: int, next_request: NextRequest) -> Tensor:
        """Give the free slots of a worker their next episodes.

        Returns:
            Which of them must be reset, bool ``[num_members]``: those that got an
            episode, and with a worker that was idle all, where the others share the
            start of the first (they cannot stay in another task).
        """
        slots = self.of(worker)
        was_idle = not self.busy[slots].any()
        filled: list[int] = []
        for slot in (~self.busy[slots]).nonzero().flatten().tolist():
            request = self._next(worker, next_request)
            if request is None:
                break
            playing = self.rows(worker)[:1].tolist()
            if playing and request.task_id != self._requests[playing[0]].task_id:
                self._waiting[worker].appendleft(request)
                break
            self._begin(slots.start + slot, request)
            filled.append(slot)
        reset = torch.zeros(self.num_members, dtype=torch.bool)
        if filled and was_idle:
            idle = (~self.busy[slots]).nonzero().flatten() + slots.start
            first = self.ids[slots.start + filled[0]].clone()
            self.ids[idle] = first.expand(len(idle))
            reset[:] = True
        reset[filled] = True
        return reset

    def _next(self, worker: int, next_request: NextRequest) -> EpisodeRequest | None:
        mine = self._waiting[worker]
        if not mine and (request := next_request(worker)) is not None:
            return request
        # Nothing of its own: then what another worker cannot play now.
        waiting = mine or max(self._waiting, key=len)
        return waiting.popleft() if waiting else None

    def _begin(self, slot: int, request: EpisodeRequest) -> None:
        for name, value in request._asdict().items():
            self.ids[name][slot] = value
        self.ids[keys.DECISION_ID][slot] = 0
        self._returns[slot] = 0
        self._requests[slot] = request
        self.busy[slot] = True

    def give_back(self, worker: int) -> None:
        """The episodes of a worker were lost; they wait to be played from the start."""
        self._waiting[worker] = deque(self.requests(worker))
        self.busy[self.of(worker)] = False

    def starts(self, slots: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Task and initial state of slots, int64 ``[S, 1]`` each."""
        ids = self.ids[slots]
        return ids[keys.TASK_ID], ids[keys.INIT_STATE_ID]

    def act(
        self, policy: Policy, observation: TensorDictBase, rows: Tensor
    ) -> TensorDictBase:
        """Decisions of the slots in ``rows`` on their observations, a flat batch."""
        acting = observation.clone(False)
        acting.update(self.ids[rows])
        acting[keys.SAMPLING_SEED] = acting.pop("seed") + acting[keys.DECISION_ID]
        return policy(acting).cpu()

    def record(
        self, acting: TensorDictBase, after: TensorDictBase, rows: Tensor
    ) -> TensorDictBase:
        """Complete decisions with what they led to; frees slots that are done."""
        acting["next"] = after
        self._returns[rows] += acting[keys.REWARD].to(self._returns)
        self.ids[keys.DECISION_ID][rows] += 1
        self.busy[rows] = ~acting[keys.DONE].flatten().to(self.busy.device)
        acting["episode_return"] = self._returns[rows]
        return acting


def not_finite(answer: TensorDictBase) -> list[str]:
    """Names of what a simulator returned that holds NaN or infinity."""
    return [
        str(key)
        for key, value in answer.items(True, True)
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and not value.isfinite().all()
    ]
