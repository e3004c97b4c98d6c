"""A trained compact policy in one file: weights, what its tokens mean, where from."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from torchrl_vla.data.dataset_statistics import FILE as STATISTICS
from torchrl_vla.data.dataset_statistics import check_statistics, statistics_id

FORMAT = "torchrl_vla.compact/1"
NAME = "policy.safetensors"
ORIGIN = "origin.json"
"""Beside the weights of an OpenVLA-OFT: where it is from, and its statistics' hash."""
SHIPPED = "shipped:"
"""Prefix of a file that comes with the package, by name."""
SHIPPED_FOLDER = Path(__file__).parent / "shipped"
MAX_BYTES = 10_000_000
"""Largest file: a compact policy fits into a repository."""


def locate(checkpoint: str) -> str:
    """The path of ``shipped:NAME``; any other name is a path already.

    Raises:
        FileNotFoundError: for a name that does not ship, with those that do.
    """
    if not checkpoint.startswith(SHIPPED):
        return checkpoint
    path = SHIPPED_FOLDER / f"{checkpoint.removeprefix(SHIPPED)}.safetensors"
    if not path.is_file():
        names = sorted(SHIPPED + p.stem for p in SHIPPED_FOLDER.glob("*.safetensors"))
        raise FileNotFoundError(f"what ships is {', '.join(names)}")
    return str(path)


def save_policy(
    path: Path, weights: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]
) -> None:
    """Write weights and metadata; the file is complete or not there.

    Args:
        path: of the file, ``*.safetensors``.
        weights: by name.
        metadata: JSON values by name. ``shape`` (options that decide the shapes of the
            weights, by dotted name), ``action_low`` and ``action_high`` (of the bins,
            ``[A]``) and ``statistics`` are read back; the rest says where the policy is
            from.

    Raises:
        ValueError: when the file would be larger than 10 MB.
    """
    size = sum(t.numel() * t.element_size() for t in weights.values())
    if size > MAX_BYTES:
        raise ValueError(
            f"the policy has {size / 1e6:.1f} MB of weights; at most "
            f"{MAX_BYTES / 1e6:.0f} MB are exported: lower policy.hidden_dim or "
            "policy.num_bins"
        )
    texts = {name: json.dumps(value) for name, value in metadata.items()}
    texts["format"] = FORMAT
    if "statistics" in metadata:
        texts["statistics_id"] = statistics_id(metadata["statistics"])
    partial = path.with_name(path.name + ".partial")
    save_file({k: v.cpu().contiguous() for k, v in weights.items()}, partial, texts)
    os.replace(partial, path)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata of :func:`save_policy`; empty for another safetensors file.

    A ``dataset_statistics.json`` beside the file must be the policy's own.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when the file is damaged, or the statistics are another policy's.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file")
    try:
        with safe_open(path, framework="pt") as file:
            texts = dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut off ({error})") from error
    if texts.pop("format", None) != FORMAT:
        return {}
    expected = texts.pop("statistics_id", None)
    metadata = {name: json.loads(text) for name, text in texts.items()}
    if expected is not None:
        if statistics_id(metadata["statistics"]) != expected:
            raise ValueError(f"{path}: its statistics were changed after it was saved")
        beside = path.parent / STATISTICS
        if beside.is_file():
            check_statistics(beside, expected, str(path))
    return metadata


def check_shape(
    path: str | Path, trained: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Refuse options that another policy was trained with.

    Args:
        path: of the file, for the error.
        trained: ``metadata["shape"]``.
        given: the options of this run by the same names.

    Raises:
        ValueError: with every option that differs and what to set.
    """
    wrong = {
        name: value
        for name, value in trained.items()
        if name in given and given[name] != value
    }
    if wrong:
        problems = "; ".join(
            f"{name}={_option(given[name])}, it was trained with {_option(value)}"
            for name, value in wrong.items()
        )
        change = " ".join(f"{name}={_option(value)}" for name, value in wrong.items())
        raise ValueError(f"policy.checkpoint={path}: {problems}. Set {change}")


def _option(value: Any) -> str:
    """As one writes it on a command line: ``[image,wrist_image]``."""
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return str(value)
