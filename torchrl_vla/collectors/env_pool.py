"""Play a stream of episodes on whatever environments there are, in lockstep."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_vla.data import keys


class EpisodeRequest(NamedTuple):
    """An episode to be played."""

    episode_id: int
    group_id: int
    task_id: int
    init_state_id: int
    seed: int


Policy = Callable[[TensorDictBase], TensorDictBase]


class EnvPool:
    """Slots, each of which plays one episode after another.

    A *worker* is a process (or the one process of a vectorised environment) and has one
    or more slots; it is asked to keep the members of a group together, since the
    members share a task. In each round the policy sees all slots that wait for a
    decision as one batch. Slots that have nothing to do are neither stepped nor
    rendered.

    Args:
        env: a TorchRL environment that plays a chunk per step (:class:`MultiAction`),
            and takes ``task_id`` and ``init_state_id`` at ``reset``: a ``ParallelEnv``
            or ``SerialEnv`` of single environments, a vectorised environment with batch
            size ``[N]``, or one single environment.

    Example:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_vla.data.action_codec import UniformActionCodec
        >>> from torchrl_vla.envs import ActionTokensTransform, MultiAction, ToyTaskEnv
        >>> from torchrl_vla.modules import CompactPolicy
        >>> env = TransformedEnv(ToyTaskEnv(num_envs=4), MultiAction(num_actions=4))
        >>> env = env.append_transform(ActionTokensTransform(UniformActionCodec(33)))
        >>> policy = CompactPolicy(chunk_size=4, action_dim=2, num_bins=33, state_dim=4)
        >>> episodes = [EpisodeRequest(i, i, 0, i, seed=i) for i in range(6)]
        >>> pool = EnvPool(env)
        >>> waiting = iter(episodes)
        >>> rounds = pool.play(policy, lambda worker: next(waiting, None))
        >>> sum(int(decisions["next", "done"].sum()) for decisions in rounds)
        6
    """

    def __init__(self, env: EnvBase) -> None:
        if env.batch_dims > 1:
            raise ValueError(
                f"the environment has batch size {tuple(env.batch_size)}; at most one "
                "batch dimension is supported"
            )
        self.env = env
        self.num_slots = max(env.numel(), 1)
        base = env
        while isinstance(base, TransformedEnv):
            base = base.base_env
        self._base = base
        self._has_workers = isinstance(base, BatchedEnvBase)
        self.num_workers = self.num_slots if self._has_workers else 1

    def play(
        self, policy: Policy, next_request: Callable[[int], EpisodeRequest | None]
    ) -> Iterator[TensorDictBase]:
        """Play until no slot is busy and there is no further request.

        Args:
            policy: reads observations, writes ``("vla_action", "tokens")`` (and
                log-probs).
            next_request: called with the number of a worker that has a free slot;
                returns its next episode, or ``None`` for nothing at present (it is
                asked again after the next round).

        Yields:
            The decisions of each round, a flat batch ``[B]``: what the policy read and
            wrote, everything under ``"next"``, the ids of the request,
            ``"decision_id"``, ``"sampling_seed"`` and ``"episode_return"`` float32
            ``[1]`` up to and including this decision. Closing the iterator abandons the
            episodes that are not done.

        Raises:
            ChildProcessError: when a worker process has ended; it names the worker.
        """
        slots = _Slots(self.num_slots)
        observation = None
        while True:
            free = slots.fill(next_request, self._worker_of)
            if free:
                observation = self._start(slots, free, observation)
            busy = slots.busy
            if not busy.any():
                return
            decisions, observation = self._round(policy, slots, observation)
            yield decisions

    def _worker_of(self, slot: int) -> int:
        return slot if self._has_workers else 0

    def _start(self, slots, free: list[int], observation):
        """Reset the slots in ``free`` to the starts that were requested for them."""
        if observation is None:
            # TorchRL needs a complete first reset, so idle slots share a start.
            idle = ~slots.busy
            slots.ids[idle] = slots.ids[free[0]].expand(int(idle.sum()))
            free = list(range(self.num_slots))
        task, state = slots.ids[keys.TASK_ID], slots.ids[keys.INIT_STATE_ID]
        if self._has_workers:
            starts = zip(task.flatten().tolist(), state.flatten().tolist(), strict=True)
            each = [{keys.TASK_ID: t, keys.INIT_STATE_ID: s} for t, s in starts]
            kwargs = {"list_of_kwargs": each}
        else:
            kwargs = {keys.TASK_ID: task, keys.INIT_STATE_ID: state}
        mask = torch.zeros(self.num_slots, dtype=torch.bool)
        mask[free] = True
        request = TensorDict({}) if observation is None else observation.clone(False)
        request.batch_size = torch.Size([self.num_slots])
        if not mask.all():
            request["_reset"] = mask.unsqueeze(-1)
        if not self.env.batch_dims:
            request = request.squeeze(0)
        with self._naming_ended_workers():
            return self.env.reset(request, **kwargs).reshape(self.num_slots)

    def _round(self, policy, slots, observation):
        busy = slots.busy
        rows = busy.nonzero().flatten()
        acting = observation[rows]
        acting.update(slots.ids[rows])
        acting[keys.SAMPLING_SEED] = acting.pop("seed") + acting[keys.DECISION_ID]
        acting = policy(acting).cpu()

        step = observation.clone(False)
        tokens = acting[keys.TOKENS]
        all_tokens = tokens.new_zeros(self.num_slots, *tokens.shape[1:])
        step[keys.TOKENS] = all_tokens.index_copy(0, rows, tokens).to(self.env.device)
        if not busy.all():
            step["_step"] = busy
        if not self.env.batch_dims:
            step = step.squeeze(0)
        with self._naming_ended_workers():
            after = self.env.step(step)["next"].reshape(self.num_slots)

        acting["next"] = after[rows]
        slots.advance(rows, acting[keys.REWARD], acting[keys.DONE])
        acting["episode_return"] = slots.returns[rows]
        return acting, after.exclude("reward")

    @contextmanager
    def _naming_ended_workers(self) -> Iterator[None]:
        """Say which worker broke the pipe that an error is about, and how it ended."""
        try:
            yield
        except (EOFError, OSError) as error:
            if not (ended := self._ended_workers()):
                raise
            raise ChildProcessError("; ".join(ended)) from error

    def _ended_workers(self) -> list[str]:
        processes = getattr(self._base, "_workers", [])
        # A pipe breaks, and a sentinel tells, a moment before the process can be asked
        # for its exit code.
        ending = connection.wait([p.sentinel for p in processes], timeout=5)
        for process in processes:
            process.join(timeout=5 if process.sentinel in ending else 0)
        return [
            f"worker {number} (process {process.pid}) ended {_how(process.exitcode)}"
            for number, process in enumerate(processes)
            if not process.is_alive()
        ]


def _how(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "with SIGKILL, as when memory runs out; fewer workers need less"
    if exit_code < 0:
        return f"with {signal.Signals(-exit_code).name}"
    return f"with exit code {exit_code}; its own error is above"


class _Slots:
    """Which episode each slot plays."""

    def __init__(self, num_slots: int) -> None:
        names = EpisodeRequest._fields + (keys.DECISION_ID,)
        zeros = torch.zeros(num_slots, 1, dtype=torch.int64)
        self.ids = TensorDict({name: zeros.clone() for name in names}, [num_slots])
        self.busy = torch.zeros(num_slots, dtype=torch.bool)
        self.returns = torch.zeros(num_slots, 1)

    def fill(self, next_request, worker_of) -> list[int]:
        """Give free slots their next episodes; returns the slots that got one."""
        filled: list[int] = []
        out_of_work = set()
        for slot in (~self.busy).nonzero().flatten().tolist():
            worker = worker_of(slot)
            request = None if worker in out_of_work else next_request(worker)
            if request is None:
                out_of_work.add(worker)
                continue
            for name, value in request._asdict().items():
                self.ids[name][slot] = value
            self.ids[keys.DECISION_ID][slot] = 0
            self.returns[slot] = 0
            self.busy[slot] = True
            filled.append(slot)
        return filled

    def advance(self, rows, reward, done) -> None:
        self.returns[rows] += reward.to(self.returns)
        self.ids[keys.DECISION_ID][rows] += 1
        self.busy[rows] = ~done.flatten().to(self.busy.device)
