"""Checkpoints that are complete or not there, and hold all that a run needs."""

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

_NAME = "iteration_{:06d}.pt"
_SHARDS = ".shards"
_PATTERN = re.compile(r"iteration_(\d{6,})\.pt")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the text names it and says what to do."""


def save_checkpoint(
    folder: Path, iteration: int, state: dict[str, Any], keep: int
) -> Path:
    """Write a checkpoint, then remove those beyond ``keep``.

    It is written under a temporary name, flushed to disk and renamed, so a file with a
    checkpoint's name is complete whenever the process or the machine stops.

    Checkpoints of later iterations go too: either they are cut off, or the run went on
    from an earlier one and replaces them.

    Args:
        folder: of the checkpoints.
        iteration: iterations completed.
        state: tensors, numbers, strings and containers of them.
        keep: newest checkpoints that stay.

    Raises:
        CheckpointError: when it cannot be written; those before stay as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _NAME.format(iteration)
    partial = folder / (path.name + ".partial")
    try:
        with partial.open("wb") as file:
            torch.save({**state, "iteration": iteration}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch.save has its own for a full disk
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} cannot be written ({str(error).splitlines()[0]}); checkpoints "
            "before it stay: make room and go on with resume=auto"
        ) from error
    found = list_checkpoints(folder)
    newest = found.index(path) + 1
    for other in found[: max(newest - keep, 0)] + found[newest:]:
        other.unlink()
    for shards in folder.glob("*" + _SHARDS):  # of those, or of one that was cut off
        if not shards.with_suffix(".pt").exists():
            shutil.rmtree(shards)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("*.pt") if _PATTERN.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem.split("_")[1]))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Raises:
        CheckpointError: when the file is missing or cut off.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a checkpoint file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: it is cut off or not a "
            "checkpoint); use resume=auto to take the newest complete one"
        ) from error
    if "shards" in state:
        folder = path.parent / state["shards"]
        if not (folder / ".metadata").is_file():
            raise CheckpointError(f"{path} needs {folder}, which is not there")
        state["shards"] = str(folder)
    return state


def load_newest_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that is complete, or ``None`` where there is none."""
    for path in reversed(list_checkpoints(folder)):
        try:
            return load_checkpoint(path)
        except CheckpointError as error:
            print(f"skipped: {error}")
    return None


def check_same_options(
    saved: dict[str, Any], now: dict[str, Any], may_differ: frozenset[str]
) -> None:
    """Refuse to resume with options that would make another run of it.

    Args:
        saved: options in the checkpoint, nested.
        now: options of this run, nested.
        may_differ: dotted names, or sections, that do not change what is learned.

    Raises:
        CheckpointError: with every option that differs.
    """
    before, after = _flatten(saved), _flatten(now)
    differing = [
        f"{name}: {before.get(name)} in the checkpoint, {after.get(name)} now"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
        and name not in may_differ
        and name.split(".")[0] not in may_differ
    ]
    if differing:
        raise CheckpointError(
            "the checkpoint is from a run with other options: "
            + "; ".join(differing)
            + ". Give it the same options, or start afresh with another run_dir"
        )


def _flatten(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in options.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def random_state() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's global generators."""
    version, internal, gauss = random.getstate()
    name, numbers, *rest = np.random.get_state()
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(numbers.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()  # of the device in use
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Undo what has been drawn since :func:`random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, numbers, *rest = state["numpy"]
    np.random.set_state((name, numbers.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
