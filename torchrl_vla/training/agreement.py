"""Ranks that share a run must be about the same: found out before any work."""

import hashlib
import os
import platform
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchrl_vla
from torchrl_vla.collectors.ranks import Ranks
from torchrl_vla.training.report import versions

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_agreement(ranks: Ranks, facts: Mapping[str, Any]) -> None:
    """Refuse ranks that differ; every rank calls it and every rank raises.

    Args:
        ranks: of the run.
        facts: what must be equal, nested by name (plain values).

    Raises:
        ValueError: with every name that differs and its value on the ranks.
    """
    flat = [_flatten(each) for each in ranks.gather(dict(facts))]
    names = sorted(set().union(*flat))
    problems = []
    for name in names:
        of_value: dict[str, list[int]] = {}
        for rank, each in enumerate(flat):
            of_value.setdefault(str(each.get(name, "nothing")), []).append(rank)
        if len(of_value) > 1:
            said = [f"{v} on rank {_list(r)}" for v, r in of_value.items()]
            problems.append(f"{name}: {', '.join(said)}")
    if problems:
        raise ValueError(
            "the ranks differ in "
            + "; ".join(problems)
            + ". Start all of them with the same command, code and files"
        )


def code_version() -> dict[str, str]:
    """Versions of the packages, and a hash of this one's source files."""
    digest = hashlib.blake2b(digest_size=8)
    root = Path(torchrl_vla.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return {
        **versions(),
        "python": platform.python_version(),
        "source of torchrl_vla": digest.hexdigest(),
    }


@torch.no_grad()
def weights_digest(policy: nn.Module) -> str:
    """A short text that differs when weights do, and is the same on any device.

    Of each tensor it takes the sum of its bits, read as integers: a sum of floats would
    depend on the order in which a device adds.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, value in policy.state_dict().items():
        if isinstance(value, torch.Tensor):
            bits = value.contiguous().view(_INTEGERS[value.element_size()])
            digest.update(f"{name} {bits.sum(dtype=torch.int64).item()}".encode())
    return digest.hexdigest()


def check_shared_folder(ranks: Ranks, folder: Path) -> None:
    """Refuse a folder that is not the same one on every rank's host.

    Raises:
        ValueError: with the ranks that do not see what rank 0 writes.
    """
    if ranks.size == 1:
        return
    token = ranks.gather(uuid.uuid4().hex)[0]
    marker = folder / f".shared-{token}"
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    ranks.gather(None)
    # A network folder may show an old listing until it is opened again.
    seen = marker.exists() or (folder.is_dir() and marker.name in os.listdir(folder))
    everywhere = ranks.gather(seen)
    if ranks.rank == 0:
        marker.unlink()
    if blind := [rank for rank, sees in enumerate(everywhere) if not sees]:
        raise ValueError(
            f"run_dir={folder} is not one folder for all ranks: rank {_list(blind)} "
            "cannot see what rank 0 writes. Put it on a file system that all hosts "
            "share; checkpoints need it"
        )


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}." if name else prefix)
        else:
            flat[prefix + name] = value
    return flat


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
