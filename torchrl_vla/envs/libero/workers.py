"""LIBERO environments side by side, each with its own arguments."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torchrl.envs import EnvBase, ParallelEnv

from torchrl_vla.envs.libero.env import LiberoEnv

_PR_SET_PDEATHSIG = 1


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
    ``num_workers`` builds a callable per worker, and its shared-memory mode keeps the
    main process busy while it waits.

    Args:
        num_workers: processes; 1 needs no subprocess.
        worker_kwargs: arguments of :class:`LiberoEnv` for each worker (task,
            instruction, initial state, seed, render device); they win over ``shared``.
        wrap: called in each worker on its environment, to append transforms.
        shared: arguments of :class:`LiberoEnv` that all workers have.

    Returns:
        A ``ParallelEnv`` with batch size ``[num_workers]``, or a single environment.

    Workers end with the main process, however it ends, and leave Ctrl-C to it.

    Raises:
        ValueError: for ``num_workers < 1`` or another number of ``worker_kwargs``.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}; it must be >= 1")
    each = [{}] * num_workers if worker_kwargs is None else list(worker_kwargs)
    if len(each) != num_workers:
        raise ValueError(
            f"there are {len(each)} worker_kwargs for {num_workers} workers; give one "
            "mapping per worker"
        )
    arguments = [{**shared, **own} for own in each]
    if num_workers == 1:
        return _make(wrap=wrap, **arguments[0])
    parent = os.getpid()
    return ParallelEnv(
        num_workers,
        _make_in_worker,
        create_env_kwargs=[{"parent": parent, "wrap": wrap, **a} for a in arguments],
        use_buffers=False,
        metadata_from_workers=True,
        num_sub_threads=1,
        mp_start_method="spawn",
    )


def _make(wrap: Callable[[EnvBase], EnvBase] | None, **arguments: Any) -> EnvBase:
    env = LiberoEnv(**arguments)
    return env if wrap is None else wrap(env)


def _make_in_worker(parent: int, **arguments: Any) -> EnvBase:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    return _make(**arguments)


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent does, even by SIGKILL."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)
