"""Processes that share the work of a run, as the library sees them: alone, one."""

from collections import deque
from typing import Any, Protocol


class Board(Protocol):
    """Where ranks divide work and tell each other what came of it.

    No rank waits for another at a board, unless it says :meth:`wait`. Ranks make their
    boards in the same order.
    """

    def take(self) -> int:
        """The next of the numbers 0, 1, 2, ..., each of which one rank gets."""
        ...

    def num_taken(self) -> int:
        """How many numbers were taken so far, by all ranks."""
        ...

    def post(self, note: Any) -> None:
        """Tell all ranks, this one included."""
        ...

    def read(self) -> list[Any]:
        """Notes of all ranks that were not read here before, in one order for all."""
        ...

    def wait(self) -> None:
        """Return when there is a note to read."""
        ...

    def close(self) -> None:
        """Forget it, once no rank reads it any more."""
        ...


class Ranks(Protocol):
    """The ranks of a run; ``rank`` is the number of this one, of ``size``."""

    rank: int
    size: int

    def board(self) -> Board:
        """A new, empty board."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, by rank; every rank calls it."""
        ...

    def exchange(self, parts: list[Any]) -> list[Any]:
        """Send the tensor ``parts[r]`` to rank ``r``; returns what each rank sent.

        The parts are of one dtype and of one shape but for their first dimension.
        """
        ...

    def add(self, tensors: list[Any]) -> None:
        """Replace every tensor by its sum over the ranks; every rank calls it."""
        ...


class LocalBoard:
    """A :class:`Board` of one rank."""

    def __init__(self) -> None:
        self._num_taken = 0
        self._notes: deque[Any] = deque()

    def take(self) -> int:
        self._num_taken += 1
        return self._num_taken - 1

    def num_taken(self) -> int:
        return self._num_taken

    def post(self, note: Any) -> None:
        self._notes.append(note)

    def read(self) -> list[Any]:
        notes = list(self._notes)
        self._notes.clear()
        return notes

    def wait(self) -> None:
        if not self._notes:
            raise RuntimeError("there is nobody to wait for")

    def close(self) -> None:
        """Nothing is kept elsewhere."""


class Alone:
    """The only rank of a run: nothing is sent anywhere.

    Attributes:
        rank, size: 0 of 1.
        local_rank, local_size: among the ranks of this host, likewise.
    """

    rank = local_rank = 0
    size = local_size = 1

    def board(self) -> LocalBoard:
        return LocalBoard()

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def exchange(self, parts: list[Any]) -> list[Any]:
        return list(parts)

    def add(self, tensors: list[Any]) -> None:
        """Nothing: each is its own sum."""
