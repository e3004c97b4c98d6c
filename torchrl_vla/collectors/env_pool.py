"""Play a stream of episodes on a TorchRL environment, in lockstep."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_vla.collectors.flat_env import FlatEnv
from torchrl_vla.collectors.slots import NextRequest, Policy, Slots, not_finite
from torchrl_vla.collectors.worker import how_it_ended
from torchrl_vla.data import keys


class EnvPool:
    """Slots of one environment, each of which plays one episode after another.

    A *worker* is a process (or the one process of a vectorised environment) and has one
    or more slots; it is asked to keep the members of a group together, since the
    members share a task. In each round the policy sees all slots that wait for a
    decision as one batch, then all of them are stepped: the simple path, with any
    TorchRL environment. :class:`OverlapPool` lets each worker go on by itself, with
    the same episodes. Slots that have nothing to do are neither stepped nor rendered.

    Args:
        env: plays a chunk per step (:class:`MultiAction`) and takes ``task_id`` and
            ``init_state_id`` at ``reset``; see :class:`FlatEnv` for batch sizes.

    Attributes:
        specs: of the environment.
        num_workers: processes.
        num_restarts: of workers; none here, where a worker that ends, ends the run.

    Example:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_vla.collectors import EpisodeRequest
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

    num_restarts = 0

    def __init__(self, env: EnvBase) -> None:
        self.env = env
        self._flat = FlatEnv(env)
        self.specs = env.specs
        self.num_workers = self._flat.num_workers
        self.num_slots = self._flat.num_slots

    def close(self) -> None:
        """Close the environment."""
        num_threads = torch.get_num_threads()
        self.env.close(raise_if_closed=False)
        torch.set_num_threads(num_threads)  # ParallelEnv puts it up

    def play(
        self, policy: Policy, next_request: NextRequest
    ) -> Iterator[TensorDictBase]:
        """Play until no slot is busy and there is no further request.

        Args:
            policy: reads observations, writes ``("vla_action", "tokens")`` (and
                log-probs).
            next_request: called with the number of a worker that has a free slot;
                returns its next episode, or ``None`` for nothing at present (it is
                asked again after the next round).

        Yields:
            Decisions, a flat batch ``[B]``, those of an episode in order: what the
            policy read and wrote, everything under ``"next"``, the ids of the request,
            ``"decision_id"``, ``"sampling_seed"`` and ``"episode_return"`` float32
            ``[1]`` up to and including this decision. Closing the iterator abandons the
            episodes that are not done.

        Raises:
            ChildProcessError: when a worker process has ended; it names the worker.
            FloatingPointError: when an environment returns NaN; it names the worker.
        """
        slots = Slots(self.num_workers, self._flat.num_members)
        while True:
            reset = [slots.fill(w, next_request) for w in range(self.num_workers)]
            if (mask := torch.cat(reset)).any():
                with self._naming_ended_workers():
                    observation = self._flat.reset(mask, *slots.starts())
                self._check(observation, slots)
            if not slots.busy.any():
                return
            busy = slots.busy.clone()
            acting = slots.act(policy, self._flat.observation[busy], busy)
            with self._naming_ended_workers():
                after = self._flat.step(busy, acting[keys.TOKENS])
            self._check(after, slots)
            yield slots.record(acting, after[busy], busy)

    def _check(self, answer: TensorDictBase, slots: Slots) -> None:
        if not not_finite(answer):
            return
        for worker in range(self.num_workers):
            if names := not_finite(answer[slots.of(worker)]):
                raise FloatingPointError(
                    f"worker {worker} returned values that are not finite at "
                    f"{', '.join(names)} while it played {slots.describe(worker)}"
                )

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
        processes = getattr(self._flat.base, "_workers", [])
        # A pipe breaks, and a sentinel tells, a moment before the process can be asked
        # for its exit code.
        ending = connection.wait([p.sentinel for p in processes], timeout=5)
        for process in processes:
            process.join(timeout=5 if process.sentinel in ending else 0)
        return [
            f"worker {number} (process {process.pid}) {how_it_ended(process.exitcode)}"
            for number, process in enumerate(processes)
            if not process.is_alive()
        ]
