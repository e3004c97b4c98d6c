"""LIBERO environments side by side, each with its own arguments."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv
from torchrl.envs.transforms import Transform

from torchrl_vla.envs.libero.env import LiberoEnv
from torchrl_vla.envs.worker_process import enter_worker_process


class LiberoWorkers(ParallelEnv):
    """A ``ParallelEnv`` that steps single members of its workers.

    ``ParallelEnv`` takes a mask ``"_step"`` of whole workers only. With batch size
    ``[W, G]`` the mask of the members travels beside it. Workers end with the main
    process, and can be closed after one of them has died.
    """

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        members = tensordict.get("_step", None)
        if members is not None and self.batch_dims > 1:
            members = members.reshape(self.batch_size)
            tensordict = tensordict.exclude("_step").set("_members", members)
            workers = members.any(dim=-1, keepdim=True)
            tensordict["_step"] = workers.expand(self.batch_size)
        return super()._step(tensordict).exclude("_members")

    def _shutdown_workers(self) -> None:
        # ParallelEnv sends "close" through the pipe that broke, and may itself have
        # closed the objects of processes that it found dead.
        open_ones = [worker for worker in self._workers if not _is_closed(worker)]
        alive = [worker for worker in open_ones if worker.is_alive()]
        if len(alive) == len(self._workers):
            # One may be dying just now: its pipe is broken and it is not reaped yet.
            # ParallelEnv ends all processes on the way out of that error.
            with contextlib.suppress(OSError):
                super()._shutdown_workers()
            return
        self._terminate_and_join_workers(open_ones, timeout=2.0)
        for channel in self.parent_channels:
            channel.close()


def _is_closed(process: Any) -> bool:
    return getattr(process, "_closed", False)


class _MemberMaskTransform(Transform):
    """In a worker, the other end of :meth:`LiberoWorkers._step`."""

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        members = tensordict.pop("_members", None)
        return tensordict if members is None else tensordict.set("_step", members)


def make_libero_envs(
    num_workers: int,
    *,
    worker_kwargs: Sequence[Mapping[str, Any]] | None = None,
    wrap: Callable[[EnvBase], EnvBase] | None = None,
    **shared: Any,
) -> EnvBase:
    """``num_workers`` environments in processes of their own, or one in this process.

    One callable serves all workers and each reports its own specs, so ``W`` workers
    construct ``W`` environments and no further one. ``torchrl.envs.LiberoEnv`` with
    ``num_workers`` builds a callable per worker. Data goes through pipes: in
    shared-memory mode a ``ParallelEnv`` keeps a core busy while it waits.

    Args:
        num_workers: W, processes; 1 needs no subprocess.
        worker_kwargs: arguments of :class:`LiberoEnv` for each worker (task,
            instruction, initial state, seed, render device); they win over ``shared``.
        wrap: called in each worker on its environment, to append transforms.
        shared: arguments of :class:`LiberoEnv` that all workers have. ``num_threads``
            is the worker's share of the cores unless given.

    Returns:
        A ``ParallelEnv`` with batch size ``[W]`` (``[W, G]`` with ``num_envs=G``), or
        a single environment.

    Workers end with the main process, however it ends, and leave Ctrl-C to it. They end
    with the thread that started them too: start them from one that stays.

    Raises:
        ValueError: for ``num_workers < 1`` or another number of ``worker_kwargs``.

    Example:
        >>> env = make_libero_envs(
        ...     2,
        ...     task_suite="libero_spatial",
        ...     worker_kwargs=[{"task_id": 0}, {"task_id": 1}],
        ... )  # doctest: +SKIP
        >>> each = [{"init_state_id": 3}, {"init_state_id": 4}]  # doctest: +SKIP
        >>> env.reset(list_of_kwargs=each)["task_id"].tolist()  # doctest: +SKIP
        [[0], [1]]
    """
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}; it must be >= 1")
    each = [{}] * num_workers if worker_kwargs is None else list(worker_kwargs)
    if len(each) != num_workers:
        raise ValueError(
            f"there are {len(each)} worker_kwargs for {num_workers} workers; give one "
            "mapping per worker"
        )
    if num_workers == 1:
        return _make(wrap, **{**shared, **each[0]})
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
    arguments = [{"num_threads": num_threads, **shared, **own} for own in each]
    return LiberoWorkers(
        num_workers,
        partial(_make_in_worker, os.getpid(), wrap),
        create_env_kwargs=arguments,
        use_buffers=False,
        metadata_from_workers=True,
        num_sub_threads=1,
        mp_start_method="spawn",
        daemon=True,  # or an error in the main process would wait for them for ever
    )


def _make(wrap: Callable[[EnvBase], EnvBase] | None, **arguments: Any) -> EnvBase:
    env = LiberoEnv(**arguments)
    return env if wrap is None else wrap(env)


def make_worker_env(
    wrap: Callable[[EnvBase], EnvBase] | None, num_threads: int, **arguments: Any
) -> EnvBase:
    """An environment with ``num_threads`` threads for physics and rendering each.

    Args:
        wrap: called on it, to append transforms.
        num_threads: of the process that calls this.
        arguments: of :class:`LiberoEnv`.
    """
    # Mesa's rasteriser otherwise takes a thread per core in every worker.
    os.environ.setdefault("LP_NUM_THREADS", str(num_threads))
    return _make(wrap, num_threads=num_threads, **arguments)


def _make_in_worker(
    parent: int, wrap: Callable[[EnvBase], EnvBase] | None, **arguments: Any
) -> EnvBase:
    enter_worker_process(parent)
    env = make_worker_env(wrap, **arguments)
    if not env.batch_size:
        return env
    return TransformedEnv(env, _MemberMaskTransform())
