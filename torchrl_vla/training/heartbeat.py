"""Every rank tells that it lives; who has ended is named by the others."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import torch.distributed as dist

_FAILED = "failed"
_GRACE_S = 2.0


class Peer(NamedTuple):
    """A rank as the others know it.

    ``machine`` tells apart what shares process ids: containers of one name do not.
    """

    rank: int
    host: str
    process: int
    machine: str

    @classmethod
    def of_this_process(cls, rank: int, host: str) -> "Peer":
        """This rank."""
        return cls(rank, host, os.getpid(), _machine())

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"

    def has_ended(self) -> bool:
        """Whether the process is gone, as far as that can be seen from here."""
        if not self.machine or self.machine != _machine():
            return False
        try:
            text = Path(f"/proc/{self.process}/stat").read_text()
        except OSError:
            return True
        # A zombie has ended and waits for its parent to notice.
        return text.rpartition(")")[2].split()[0] in "ZX"


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class Heartbeat:
    """A thread that counts in the store while this rank lives, and watches the others.

    A rank that hangs in a collective cannot notice by itself that its partner is gone:
    then this thread says so and ends the process. It beats whatever the main thread
    does, so a slow rank is not taken for a dead one.

    Args:
        store: a connection of its own, since a wait blocks a connection.
        peers: all ranks.
        rank: this one.
        timeout_s: silence after which a rank counts as lost; only for ranks elsewhere,
            the end of a process on this machine is seen at once.
        interval_s: between beats.
    """

    def __init__(
        self,
        store: dist.Store,
        peers: list[Peer],
        rank: int,
        timeout_s: float,
        interval_s: float = 0.5,
    ) -> None:
        self._store = dist.PrefixStore("heartbeat", store)
        self._peers = peers
        self._rank = rank
        self._timeout_s = timeout_s
        self._interval_s = min(interval_s, timeout_s / 4)
        self._stopped = Event()
        self._seen = {peer.rank: (b"", time.monotonic()) for peer in peers}
        self._thread = Thread(target=self._run, daemon=True, name="heartbeat")
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def stop_after(self, error: BaseException) -> str | None:
        """This rank ends with an error: whose fault it is, if another rank's.

        An error of this rank's own is told to the others.
        """
        self.stop()
        # Connections break before the end of the process that held them is seen.
        give_up_s = time.monotonic() + 2.0
        while isinstance(error, RuntimeError) and time.monotonic() < give_up_s:
            with suppress(Exception):
                if (problem := self._problem()) is not None:
                    return problem
            time.sleep(0.05)
        with suppress(Exception):
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._store.set(_FAILED, f"{self._peers[self._rank]} failed: {reason}")
        return None

    def _run(self) -> None:
        number = 0
        while not self._stopped.wait(self._interval_s):
            number += 1
            try:
                self._store.set(f"beat{self._rank}", str(number))
                problem = self._problem()
            except Exception as error:
                problem = (
                    f"the store of the run on {self._peers[0].host} is gone, and with "
                    f"it {self._peers[0]} or its torchrun ({error})"
                )
            # The main thread may be about to say the same, or what it is about.
            if problem is not None and not self._stopped.wait(_GRACE_S):
                text = f"error: {self._peers[self._rank]} ends: {problem}"
                print(text, file=sys.stderr, flush=True)
                os._exit(1)

    def _problem(self) -> str | None:
        """What is wrong with another rank."""
        others = [peer for peer in self._peers if peer.rank != self._rank]
        if self._store.check([_FAILED]):
            return self._store.get(_FAILED).decode()
        for peer in others:
            if peer.has_ended():
                return f"{peer} has ended; {_HOW_ON}"
        now_s = time.monotonic()
        for peer in others:
            name = f"beat{peer.rank}"
            beat = self._store.get(name) if self._store.check([name]) else b""
            last, at_s = self._seen[peer.rank]
            if beat != last:
                self._seen[peer.rank] = (beat, now_s)
            elif now_s - at_s > self._timeout_s:
                return f"{peer} has been silent for {now_s - at_s:.0f} s; {_HOW_ON}"
        return None


_HOW_ON = (
    "go on from the newest checkpoint with resume=auto (torchrun --max-restarts does "
    "so by itself)"
)
