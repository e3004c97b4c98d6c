"""A process that holds one environment, and the handle by which it is supervised."""

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from torchrl.envs import EnvBase

from torchrl_vla.collectors.flat_env import FlatEnv
from torchrl_vla.envs.worker_process import enter_worker_process

MakeEnv = Callable[[], EnvBase]


class Failure(NamedTuple):
    """An error in a worker process, with the text of its traceback."""

    error: Exception
    trace: str


class Answer(NamedTuple):
    """What came from a worker, and when (monotonic clock).

    ``value`` is what was asked for, a :class:`Failure`, or ``None`` at the end of the
    process.
    """

    worker: int
    incarnation: int
    value: Any
    at_s: float


class WorkerTraceback(Exception):
    """The cause of an error that came from a worker process: where it was there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Worker:
    """One worker process after another, each with at most one question under way.

    The answers of all workers arrive in one queue. They are read by a thread per
    worker, so that a process that is stopped while it writes blocks nobody.

    Args:
        number: of the worker.
        make_env: makes its environment, in the process; picklable.
        answers: where every :class:`Answer` is put.
        start_method: of :mod:`multiprocessing`.

    Attributes:
        asked: what is unanswered, ``start``, ``reset`` or ``step``; otherwise ``None``.
        asked_at_s, answered_at_s: when last, on the monotonic clock.
        incarnation: how many processes there have been.
    """

    def __init__(
        self,
        number: int,
        make_env: MakeEnv,
        answers: "SimpleQueue[Answer]",
        start_method: str,
    ) -> None:
        self.number = number
        self.incarnation = 0
        self.answered_at_s = 0.0
        self._make_env = make_env
        self._answers = answers
        self._context: Any = multiprocessing.get_context(start_method)
        self.start()

    def start(self) -> None:
        """Start a process; it answers with specs and number of slots of its env."""
        self.incarnation += 1
        self.asked, self.asked_at_s = "start", time.monotonic()
        self._channel, theirs = self._context.Pipe()
        self.process = self._context.Process(
            target=_serve,
            args=(theirs, self._make_env, os.getpid()),
            daemon=True,  # or an error in the main process would wait for it for ever
        )
        self.process.start()
        theirs.close()
        reader = (self._channel, self.number, self.incarnation, self._answers)
        Thread(target=_forward, args=reader, daemon=True).start()

    def ask(self, what: str, *args: Any) -> None:
        """Call the method ``what`` of the worker's :class:`FlatEnv`."""
        self.asked, self.asked_at_s = what, time.monotonic()
        self._send((what, args))

    def kill(self) -> int:
        """End the process at once; returns its exit code."""
        self.process.kill()
        self.process.join()
        return self.process.exitcode

    def ask_to_end(self) -> None:
        """Have the process end when it has answered."""
        self._send(None)

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # it has ended, which its reader tells as well
            self._channel.send_bytes(pickle.dumps(message))


def _forward(
    channel: Connection, worker: int, incarnation: int, answers: "SimpleQueue[Answer]"
) -> None:
    """In a thread of the main process: hand on what a worker sends, until it ends."""
    value: Any = ...
    while value is not None:
        try:
            value = pickle.loads(channel.recv_bytes())
        except (EOFError, OSError):
            value = None
        answers.put(Answer(worker, incarnation, value, time.monotonic()))
    channel.close()


def _serve(channel: Connection, make_env: MakeEnv, parent: int) -> None:
    """In the worker process: answer until told to end, or until nobody listens."""
    enter_worker_process(parent)

    def answer(function: Callable[..., Any], *args: Any) -> Any:
        try:
            value = function(*args)
        except Exception as error:
            value = Failure(_picklable(error), traceback.format_exc())
        # With the plain pickler: torch's would send handles of shared memory, which
        # die with the process.
        channel.send_bytes(pickle.dumps(value))

    flat: FlatEnv

    def make() -> tuple:
        nonlocal flat
        flat = FlatEnv(make_env())
        return flat.env.specs, flat.num_slots

    with suppress(EOFError, OSError):
        answer(make)
        while (message := pickle.loads(channel.recv_bytes())) is not None:
            what, args = message
            answer(getattr(flat, what), *args)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def how_it_ended(exit_code: int) -> str:
    """The end of a process in words."""
    if exit_code == -signal.SIGKILL:
        return "ended with SIGKILL, as when memory runs out; fewer workers need less"
    if exit_code < 0:
        return f"ended with {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}; its own error is above"
