"""The processes of a run that ``torchrun`` started: one group, one store."""

import os
import pickle
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from torchrl_vla.collectors.ranks import Alone, Board
from torchrl_vla.config.schema import DistributedConfig
from torchrl_vla.training.heartbeat import Heartbeat, Peer

_JOIN_TIMEOUT = timedelta(seconds=300)  # for all ranks to start Python
_LEAVE_TIMEOUT_S = 5.0


class StoreBoard:
    """A :class:`~torchrl_vla.collectors.ranks.Board` in the store of the run.

    Args:
        store: seen by all ranks, empty.
        timeout: for :meth:`wait`.
        is_first: of the ranks; it clears away what belongs to all.
    """

    def __init__(self, store: dist.Store, timeout: timedelta, is_first: bool) -> None:
        self._store = store
        self._timeout = timeout
        self._is_first = is_first
        self._num_read = 0
        self._own: list[str] = []

    def take(self) -> int:
        return self._store.add("taken", 1) - 1

    def num_taken(self) -> int:
        return self._store.add("taken", 0)

    def post(self, note: Any) -> None:
        name = f"note{self._store.add('posted', 1) - 1}"
        self._store.set(name, pickle.dumps(note))
        self._own.append(name)

    def read(self) -> list[Any]:
        end = self._store.add("posted", 0)
        # A note that is counted and not there yet is waited for: it is being written.
        names = [f"note{number}" for number in range(self._num_read, end)]
        self._num_read = end
        return [pickle.loads(self._store.get(name)) for name in names]

    def wait(self) -> None:
        self._store.wait([f"note{self._num_read}"], self._timeout)

    def close(self) -> None:
        for name in self._own + ["taken", "posted"] * self._is_first:
            self._store.delete_key(name)


class ProcessRanks:
    """One of several ranks, each a process with its own simulators and device.

    Tensors on the CPU go over gloo, those on a GPU over NCCL.

    Args:
        store: of the run.
        rank, size: number of this rank, of how many.
        local_rank, local_size: among the ranks of this host.
        timeout_s: longest wait for another rank in a collective.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        local_rank: int,
        local_size: int,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._num_boards = 0
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=self._timeout,
        )

    def board(self) -> Board:
        self._num_boards += 1
        store = dist.PrefixStore(f"board{self._num_boards}", self._store)
        return StoreBoard(store, self._timeout, self.rank == 0)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def exchange(self, parts: list[Tensor]) -> list[Tensor]:
        sizes = self.gather([len(part) for part in parts])
        received = [row[self.rank] for row in sizes]
        sent = torch.cat(parts).contiguous()
        # Bytes, since not every backend knows every dtype.
        flat = sent.reshape(len(sent), sent.shape[1:].numel()).view(torch.uint8)
        out = flat.new_empty(sum(received), flat.shape[1])
        dist.all_to_all_single(out, flat, received, sizes[self.rank])
        whole = out.view(sent.dtype).reshape(len(out), *sent.shape[1:])
        return list(whole.split(received))

    def add(self, tensors: list[Tensor]) -> None:
        # One message per dtype.
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            those = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in those])
            dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in those])
            for tensor, part in zip(those, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


@contextmanager
def join_ranks(cfg: DistributedConfig) -> Iterator[Alone | ProcessRanks]:
    """The ranks of the run, as ``torchrun`` says in the environment.

    Without ``WORLD_SIZE``, or with 1, nothing is started. Otherwise every rank watches
    the others: when one ends, fails or falls silent, the others end with its name.

    Args:
        cfg: the section ``distributed`` of the options.

    Raises:
        ValueError: for several ranks without a strategy, or incomplete variables.
        ChildProcessError: when another rank has ended; it names the rank.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield Alone()
        return
    local_rank, local_size = _check_environment(cfg, size)
    store, rank, _ = next(rendezvous("env://", timeout=_JOIN_TIMEOUT))
    _share_cores(local_rank, local_size)
    attempt, peers = _meet(store, rank, size)
    own = dist.PrefixStore(attempt, store.clone())  # a wait blocks a connection
    heartbeat = Heartbeat(own, peers, rank, cfg.heartbeat_timeout_s)
    try:
        ranks = ProcessRanks(
            dist.PrefixStore(attempt, store),
            rank,
            size,
            local_rank=local_rank,
            local_size=local_size,
            timeout_s=cfg.timeout_s,
        )
        yield ranks
    except BaseException as error:
        gone = heartbeat.stop_after(error)
        _leave_group()
        if gone is not None:
            raise ChildProcessError(gone) from error
        raise
    dist.barrier()
    heartbeat.stop()
    dist.barrier()  # the store is rank 0's: it stays until nobody asks it any more
    dist.destroy_process_group()


def _leave_group() -> None:
    """End the group's threads after an error: alive at the exit, they abort it.

    A message to a rank that is gone may keep them; then they are left.
    """

    def leave() -> None:
        with suppress(Exception):
            dist.destroy_process_group()

    leaving = Thread(target=leave, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_TIMEOUT_S)


def require_one_rank(script: str) -> None:
    """Refuse several ranks, of which each would do all the work.

    Raises:
        ValueError: when torchrun has started more than one.
    """
    if (size := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        raise ValueError(
            f"{script} runs in one process, and there are {size} ranks (WORLD_SIZE): "
            f"start it with python instead of torchrun; vla-grpo.py runs on ranks"
        )


def _meet(store: dist.Store, rank: int, size: int) -> tuple[str, list[Peer]]:
    """What this start of the ranks is called in the store, and all ranks once here.

    torchrun's store survives a restart, with what ended ranks have left in it, and its
    hosts count their restarts each for itself. So rank 0 makes up a name and tells it
    to whoever asks; an answer to a rank that has ended does no harm.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"question{rank}", name)
        _wait_for({0: f"answer-{name}"}, store, size)
        name = store.get(f"answer-{name}").decode()
    here = dist.PrefixStore(name, store)
    me = Peer.of_this_process(rank, socket.gethostname())
    here.set(f"peer{rank}", pickle.dumps(me))
    peers = {number: f"peer{number}" for number in range(size)}

    def answer() -> None:
        for number in range(1, size):
            if store.check([question := f"question{number}"]):
                store.set(f"answer-{store.get(question).decode()}", name)

    _wait_for(peers, here, size, answer if rank == 0 else lambda: None)
    return name, [pickle.loads(here.get(peer)) for peer in peers.values()]


def _wait_for(
    names: dict[int, str],
    store: dist.Store,
    size: int,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Wait for what ranks write when they come; ``names`` is by rank."""
    give_up_s = time.monotonic() + _JOIN_TIMEOUT.total_seconds()
    while missing := [str(r) for r, name in names.items() if not store.check([name])]:
        if time.monotonic() > give_up_s:
            raise ChildProcessError(
                f"rank {', '.join(missing)} of {size} has not come within "
                f"{_JOIN_TIMEOUT.total_seconds():.0f} s; look at its output"
            )
        meanwhile()
        time.sleep(0.05)


def _check_environment(cfg: DistributedConfig, size: int) -> tuple[int, int]:
    """Number of this rank on its host, of how many there."""
    if cfg.strategy == "none":
        raise ValueError(
            f"distributed.strategy=none: there are {size} ranks (WORLD_SIZE), which "
            "would each train a policy of its own; use ddp or fsdp, or one process"
        )
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} not set; start with "
            "torchrun, which sets them all"
        )
    if size % cfg.num_replicas:
        raise ValueError(
            f"distributed.num_replicas={cfg.num_replicas}: does not divide {size} "
            "ranks; give the number of hosts, or 1"
        )
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def _share_cores(local_rank: int, local_size: int) -> None:
    """Keep this rank and its simulators to a block of the host's cores."""
    cores = sorted(os.sched_getaffinity(0))
    num = len(cores) // local_size
    if num:
        os.sched_setaffinity(0, cores[local_rank * num : (local_rank + 1) * num])
