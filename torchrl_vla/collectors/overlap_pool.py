"""Play a stream of episodes on workers that do not wait for one another."""

import logging
import queue
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from tensordict import TensorDictBase

from torchrl_vla.collectors.slots import NextRequest, Policy, Slots, not_finite
from torchrl_vla.collectors.worker import (
    Answer,
    Failure,
    MakeEnv,
    Worker,
    WorkerTraceback,
    how_it_ended,
)
from torchrl_vla.data import keys

logger = logging.getLogger(__name__)

BAD_INPUT = (ValueError, TypeError, KeyError, ImportError)
"""Errors of a worker that another try would repeat."""


class TimeLimits:
    """How long an answer may take: some multiple of the slowest so far of its kind.

    Args:
        shortest_s: no limit is shorter.
        first_s: the limit while no answer of a kind was seen.
        factor: the multiple.

    Example:
        >>> limits = TimeLimits(shortest_s=60.0, first_s=600.0, factor=10.0)
        >>> limits.saw("step", 7.5)
        >>> limits["step"], limits["reset"]
        (75.0, 600.0)
    """

    def __init__(
        self, shortest_s: float, first_s: float = 600.0, factor: float = 10.0
    ) -> None:
        self.shortest_s = shortest_s
        self.first_s = first_s
        self.factor = factor
        self._slowest_s: dict[str, float] = {}

    def __getitem__(self, kind: str) -> float:
        if kind not in self._slowest_s:
            return max(self.shortest_s, self.first_s)
        return max(self.shortest_s, self.factor * self._slowest_s[kind])

    def saw(self, kind: str, seconds: float) -> None:
        """An answer took so long."""
        self._slowest_s[kind] = max(seconds, self._slowest_s.get(kind, 0.0))


class Silence(NamedTuple):
    """Stands for the answer of a worker that is overdue."""

    seconds: float


class OverlapPool:
    """Workers, each with some slots; while the policy acts for some, others simulate.

    When the policy is free it takes the workers that have waited longest, at most half
    of all, as one batch: the other half then simulates meanwhile, where all that are
    ready at once would soon go in step. A worker that has finished its episodes takes
    the next at once.

    Episodes are those of :class:`EnvPool`, one by one, as long as the policy's rows do
    not depend on each other (float rounding in a matrix product can depend on the size
    of a batch).

    A worker that ends, returns NaN, fails, or is silent for too long is named, ended
    and started again, and its episodes are played from their starts.

    ``torchrl.envs.AsyncEnvPool`` also lets workers go on by themselves. It takes no
    arguments for a reset, fails with environments that have a batch size, ends with
    the first worker that does, and starts processes by ``fork``. An answer of 1.5 MB
    takes 1 to 5 ms with it and 2 to 4 ms here (``benchmarks/overlap.py``).

    Args:
        make_env: makes the environment of a worker in its process; picklable. See
            :class:`EnvPool` for what it has to be like.
        num_workers: processes.
        max_restarts: how often an episode may be lost with its worker before the run
            ends.
        min_timeout_s: shortest silence that counts as hanging; ten times the slowest
            answer so far, where that is longer.
        start_method: of :mod:`multiprocessing`.

    Attributes:
        specs: of the environment of a worker.
        num_slots: of all workers.
        num_restarts: workers started again so far.

    Raises:
        ValueError: for ``num_workers < 1`` or ``max_restarts < 0``. Whatever
            ``make_env`` raises in the first worker.

    Example:
        >>> from torchrl_vla.envs import ToyTaskEnv
        >>> pool = OverlapPool(make_env, num_workers=2)  # doctest: +SKIP
        >>> rounds = pool.play(policy, next_request)  # doctest: +SKIP
        >>> episodes = torch.cat(list(rounds))  # doctest: +SKIP
        >>> pool.close()  # doctest: +SKIP
    """

    def __init__(
        self,
        make_env: MakeEnv,
        num_workers: int,
        *,
        max_restarts: int = 3,
        min_timeout_s: float = 60.0,
        start_method: str = "spawn",
    ) -> None:
        if num_workers < 1 or max_restarts < 0:
            raise ValueError(
                f"num_workers is {num_workers}, max_restarts {max_restarts}; needed "
                "are num_workers >= 1 and max_restarts >= 0"
            )
        self.num_workers = num_workers
        self.max_restarts = max_restarts
        self.num_restarts = 0
        self._limits = TimeLimits(min_timeout_s)
        self._failed_starts: Counter[int] = Counter()  # in a row, by worker
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._workers = [
            Worker(number, make_env, self._answers, start_method)
            for number in range(num_workers)
        ]
        self.specs = None
        try:
            nothing = _Played(Slots(num_workers, 0))
            while self.specs is None:  # the other workers go on starting
                self._take(self._next_answer(wait=True), nothing)
        except BaseException:
            self.close()
            raise
        self.num_slots = num_workers * self._num_members

    def close(self) -> None:
        """End the workers: those that answer within two seconds by themselves."""
        for worker in self._workers:
            worker.ask_to_end()
        give_up_s = time.monotonic() + 2
        for worker in self._workers:
            worker.process.join(max(0.0, give_up_s - time.monotonic()))
            worker.kill()

    def play(
        self, policy: Policy, next_request: NextRequest
    ) -> Iterator[TensorDictBase]:
        """Play until no slot is busy and there is no further request.

        Args and what is yielded are those of :meth:`EnvPool.play`, but the decisions of
        an episode come together when it is done, since it may be lost before.

        Raises:
            ChildProcessError: when an episode was lost with its worker more than
                ``max_restarts`` times; it names worker, task and initial state.
        """
        played = _Played(Slots(self.num_workers, self._num_members))
        slots = played.slots
        while True:
            # A worker may still be at what an abandoned call has asked of it.
            idle = [w for w in self._workers if w.asked is None]
            for worker in idle:
                reset = slots.fill(worker.number, next_request)
                if reset.any():
                    worker.ask("reset", reset, *slots.starts(slots.of(worker.number)))
            ready = [
                worker.number
                for worker in sorted(idle, key=lambda worker: worker.answered_at_s)
                if worker.asked is None and len(slots.rows(worker.number))
            ]
            answer = self._next_answer(wait=not ready and (slots.has_work or not idle))
            if answer is not None:
                if (episodes := self._take(answer, played)) is not None:
                    yield episodes
            elif ready:
                self._act(policy, ready[: (self.num_workers + 1) // 2], played)
            else:
                return

    def _act(self, policy: Policy, ready: list[int], played: "_Played") -> None:
        slots = played.slots
        busy = {n: slots.busy[slots.of(n)].clone() for n in ready}
        observation = torch.cat([played.observation[n][busy[n]] for n in ready])
        rows = torch.cat([slots.rows(n) for n in ready])
        acting = slots.act(policy, observation, rows)
        parts = acting.split([int(busy[n].sum()) for n in ready])
        for number, part in zip(ready, parts, strict=True):
            played.acting[number] = part
            self._workers[number].ask("step", busy[number], part[keys.TOKENS])

    # -- answers -------------------------------------------------------------------

    def _next_answer(self, wait: bool) -> Answer | None:
        """The next answer, or the silence of a worker that is overdue."""
        while True:
            asked = [worker for worker in self._workers if worker.asked]
            due_s = [w.asked_at_s + self._limits[w.asked] for w in asked]
            timeout_s = min(due_s, default=0.0) - time.monotonic() if wait else 0.0
            try:
                answer = self._answers.get(timeout=max(0.0, timeout_s))
            except queue.Empty:
                now_s = time.monotonic()
                for worker, at_s in zip(asked, due_s, strict=True):
                    if at_s <= now_s:
                        silence = Silence(now_s - worker.asked_at_s)
                        return Answer(worker.number, worker.incarnation, silence, now_s)
                if not (wait and asked):
                    return None
            else:
                if answer.incarnation == self._workers[answer.worker].incarnation:
                    return answer

    def _take(self, answer: Answer, played: "_Played") -> TensorDictBase | None:
        """Note what a worker answered; the decisions of episodes that are done."""
        worker, value = self._workers[answer.worker], answer.value
        if reason := self._why_lost(worker, value):
            self._restart(worker, reason, played)
            return None
        what, worker.asked, worker.answered_at_s = worker.asked, None, answer.at_s
        self._limits.saw(what, answer.at_s - worker.asked_at_s)
        if what == "start":
            self.specs, self._num_members = value
            self._failed_starts[worker.number] = 0
            return None
        return played.take(worker.number, value)

    def _why_lost(self, worker: Worker, value: object) -> str | None:
        if value is None:
            worker.process.join(5)  # its pipe closes a moment before it has ended
            return how_it_ended(worker.kill())
        if isinstance(value, Silence):
            return (
                f"has not answered for {value.seconds:.0f} s (to {worker.asked}; the "
                f"limit is {self._limits[worker.asked]:.0f} s)"
            )
        if isinstance(value, Failure):
            if _never_started(worker) or isinstance(value.error, BAD_INPUT):
                raise value.error from WorkerTraceback(value.trace)
            return f"failed: {type(value.error).__name__}: {value.error}"
        if worker.asked != "start" and (names := not_finite(value)):
            return f"returned values that are not finite at {', '.join(names)}"
        return None

    def _restart(self, worker: Worker, reason: str, played: "_Played") -> None:
        number, slots = worker.number, played.slots
        message = f"worker {number} (process {worker.process.pid}) {reason}"
        if worker.asked == "start":
            self._failed_starts[number] += 1
            message += ", while it started"
        if playing := slots.describe(number):
            message += f", while it played {playing}"
        worker.kill()
        num_losses = max(self._failed_starts[number], played.lose(number))
        if num_losses > self.max_restarts or _never_started(worker):
            raise ChildProcessError(
                f"{message}. It was tried {num_losses} times (max_restarts="
                f"{self.max_restarts})"
            )
        self.num_restarts += 1
        logger.warning(
            "%s. It is started again (restart %d), its episodes are played from "
            "their starts.",
            message,
            self.num_restarts,
        )
        worker.start()


class _Played:
    """What one call of :meth:`OverlapPool.play` keeps.

    Attributes:
        slots: which episode each slot plays.
        observation: last one of each worker's slots.
        acting: by worker, the decisions that it plays.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.observation: dict[int, TensorDictBase] = {}
        self.acting: dict[int, TensorDictBase] = {}
        self._decisions: dict[int, list[TensorDictBase]] = defaultdict(list)
        self._losses: Counter[int] = Counter()  # both by episode

    def take(self, worker: int, answer: TensorDictBase) -> TensorDictBase | None:
        """Note the answer to a reset or step; the episodes that are done with it."""
        slots = self.slots
        self.observation[worker] = answer.exclude("reward")
        acting = self.acting.pop(worker, None)
        if acting is None:  # the answer to a reset, or to an abandoned call
            return None
        rows = slots.rows(worker)
        decisions = slots.record(acting, answer[rows - slots.of(worker).start], rows)
        done = []
        for decision in decisions.split(1):
            episode = int(decision[keys.EPISODE_ID])
            self._decisions[episode].append(decision)
            if decision[keys.DONE].all():
                done += self._decisions.pop(episode)
        return torch.cat(done) if done else None

    def lose(self, worker: int) -> int:
        """The worker has ended; how often one of its episodes was lost."""
        episodes = [request.episode_id for request in self.slots.requests(worker)]
        self._losses.update(episodes)
        for episode in episodes:
            self._decisions.pop(episode, None)
        self.acting.pop(worker, None)
        self.slots.give_back(worker)
        return max((self._losses[episode] for episode in episodes), default=0)


def _never_started(worker: Worker) -> bool:
    """Whether it is the set-up that fails rather than a process."""
    return worker.incarnation == 1 and worker.asked == "start"
