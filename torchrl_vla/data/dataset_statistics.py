"""Statistics of a set of demonstrations, and the name by which they are recognised."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_vla.data.demonstrations import Demonstration

FILE = "dataset_statistics.json"
"""OpenVLA's name of the file, and its layout: by data set, then action and proprio."""


def dataset_statistics(
    demonstrations: Sequence[Demonstration], key: str
) -> dict[str, Any]:
    """What ``dataset_statistics.json`` holds, from data.

    ``q01`` and ``q99`` are quantiles over all env steps. The gripper (last action
    dimension) is outside the mask, as in OpenVLA's files: it is binary and not scaled.

    Args:
        demonstrations: at least one.
        key: name of the data set, or suite.

    Returns:
        ``{key: {"action": {...}, "proprio": {...}, "num_transitions": int,
        "num_trajectories": int}}``.

    Raises:
        ValueError: without demonstrations.
    """
    if not demonstrations:
        raise ValueError("there is no demonstration to take statistics of")
    action = _moments(np.concatenate([d.action for d in demonstrations]))
    action["mask"] = [True] * (len(action["mean"]) - 1) + [False]
    proprio = _moments(np.concatenate([d.state for d in demonstrations]))
    return {
        key: {
            "action": action,
            "proprio": proprio,
            "num_transitions": sum(map(len, demonstrations)),
            "num_trajectories": len(demonstrations),
        }
    }


def _moments(values: np.ndarray) -> dict[str, Any]:
    values = values.astype(np.float64)
    found = {
        "mean": values.mean(0),
        "std": values.std(0),
        "min": values.min(0),
        "max": values.max(0),
        "q01": np.quantile(values, 0.01, axis=0),
        "q99": np.quantile(values, 0.99, axis=0),
    }
    return {name: value.tolist() for name, value in found.items()}


def statistics_id(statistics: Mapping[str, Any]) -> str:
    """Hash of the content, whatever the order and spacing of its text.

    Example:
        >>> statistics_id({"a": 1, "b": 2}) == statistics_id({"b": 2, "a": 1})
        True
    """
    text = json.dumps(statistics, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def save_statistics(path: Path, statistics: Mapping[str, Any]) -> None:
    """Write ``dataset_statistics.json``."""
    path.write_text(json.dumps(statistics, indent=2, sort_keys=True) + "\n")


def check_statistics(path: Path, expected_id: str, owner: str) -> None:
    """Refuse a file of statistics that belongs to another checkpoint.

    Args:
        path: of ``dataset_statistics.json``.
        expected_id: what the checkpoint was saved with.
        owner: the checkpoint, for the error.

    Raises:
        ValueError: when it is missing, no JSON or its content is other.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: the statistics of {owner}")
    try:
        found = statistics_id(json.loads(path.read_text()))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if found != expected_id:
        raise ValueError(
            f"{path} does not belong to {owner}: its statistics are {found[:12]}..., "
            f"the checkpoint was trained with {expected_id[:12]}.... With them every "
            "action would be wrong in scale; put the file beside it that was saved "
            "with it, or remove this one"
        )


def action_bounds(
    statistics: Mapping[str, Any], *, least: float = 0.05
) -> tuple[list[float], list[float]]:
    """Symmetric bounds of each action dimension, for uniform bins.

    ``high = max(|q01|, |q99|, least)`` and ``low = -high``, at most 1, and 1 for the
    gripper (outside the mask). Symmetric, so that the middle of an odd number of bins
    is zero exactly; ``least`` keeps a bin in a dimension that never moves.

    Args:
        statistics: the ``"action"`` entry of a data set.
        least: smallest bound.

    Returns:
        ``low`` and ``high``, ``[A]``.

    Example:
        >>> action_bounds({"q01": [-0.5, -1.0], "q99": [0.25, 1.0],
        ...                "mask": [True, False]})
        ([-0.5, -1.0], [0.5, 1.0])
    """
    ends = np.maximum(np.abs(statistics["q01"]), np.abs(statistics["q99"]))
    high = np.where(statistics["mask"], np.clip(ends, least, 1.0), 1.0)
    return (-high).tolist(), high.tolist()
