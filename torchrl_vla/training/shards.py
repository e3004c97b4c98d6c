"""Weights and optimizer of a cut policy on disk: each rank writes what it has."""

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from torchrl_vla.collectors.ranks import Ranks
from torchrl_vla.modules.factory import TrainedWeights
from torchrl_vla.training.checkpoint import CheckpointError

KEY = "shards"
"""Entry of a checkpoint that names the folder of its shards."""
SUFFIX = ".shards"


class ShardedState:
    """The part of a checkpoint that is written in shards: weights and optimizer.

    Names are those of the whole policy, so any number of ranks can read what another
    number wrote.

    Args:
        policy: cut over the ranks, or whole.
        optimizer: over its parameters.
    """

    def __init__(self, policy: nn.Module, optimizer: Optimizer) -> None:
        self.policy = policy
        self.optimizer = optimizer

    def shards(self) -> dict[str, Any]:
        """What of it is on this rank."""
        weights, optimizer = get_state_dict(self.policy, self.optimizer)
        return {"policy": weights, "optimizer": optimizer}

    def load_shards(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`shards` gave."""
        set_state_dict(
            self.policy,
            self.optimizer,
            model_state_dict=state["policy"],
            optim_state_dict=state["optimizer"],
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing: it is in the shards."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: it is in the shards."""


def folder_of(checkpoints: Path, iteration: int) -> Path:
    """Where the shards of a checkpoint are, beside its file."""
    return checkpoints / f"iteration_{iteration:06d}{SUFFIX}"


def save(
    folder: Path,
    parts: Mapping[str, ShardedState],
    ranks: Ranks,
    asynchronous: bool = False,
) -> Callable[[], None]:
    """Write the shards; every rank calls it.

    Source: PyTorch's distributed checkpoint.

    Args:
        folder: written anew; it is complete when the file beside it is there.
        parts: by name.
        ranks: of the run.
        asynchronous: only copy now, and write while the run goes on.

    Returns:
        Waits until all is written. It raises :class:`CheckpointError` on every rank
        when a rank could not.
    """
    if ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off here
        folder.mkdir(parents=True)
    ranks.gather(None)
    state = {name: part.shards() for name, part in parts.items()}
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    if ranks.size == 1:
        future = None
        with _named(folder):
            dcp.save(state, storage_writer=writer, no_dist=True)
    elif asynchronous:
        # A group of its own: its messages must not mix with those of the run.
        group = dist.new_group(backend="gloo")
        future = dcp.async_save(state, storage_writer=writer, process_group=group)
    else:
        future = None
        with _named(folder):
            dcp.save(state, storage_writer=writer)

    def wait() -> None:
        if future is not None:
            with _named(folder):
                future.result()
            dist.destroy_process_group(group)

    return wait


def load(folder: Path, parts: Mapping[str, ShardedState]) -> None:
    """Read the shards that this rank needs into ``parts``; every rank calls it.

    Raises:
        CheckpointError: for shards that are missing or of another policy.
    """
    state = {name: part.shards() for name, part in parts.items()}
    with _named(folder, "read"):
        dcp.load(
            state,
            storage_reader=dcp.FileSystemReader(folder),
            no_dist=not dist.is_initialized(),
        )
    for name, part in parts.items():
        part.load_shards(state[name])


def load_weights(policy: nn.Module, state: Mapping[str, Any]) -> None:
    """Weights of a checkpoint, cut or not, into a whole policy of one process.

    Args:
        policy: of the options that the checkpoint holds.
        state: of :func:`~torchrl_vla.training.checkpoint.load_checkpoint`.

    Raises:
        CheckpointError: for shards that are missing or of another policy.
    """
    if KEY not in state:
        TrainedWeights(policy).load_state_dict(state["policy"])
        return
    # Read into tensors of its own dtype, and in place: the policy may be a large one.
    weights = get_model_state_dict(policy)
    folder = Path(state[KEY])
    with _named(folder, "read"):
        dcp.load(
            {"policy": {"policy": weights}},
            storage_reader=dcp.FileSystemReader(folder),
            no_dist=True,
        )
    policy.load_state_dict(weights)


class _named:
    """Turn what distributed checkpoints raise into one clear error."""

    def __init__(self, folder: Path, what: str = "written") -> None:
        self.folder, self.what = folder, what

    def __enter__(self) -> None:
        # One process is meant where it is one process.
        self.quiet = warnings.catch_warnings()
        self.quiet.__enter__()
        warnings.filterwarnings("ignore", "torch.distributed is disabled")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.quiet.__exit__(kind, error, trace)
        if isinstance(error, dcp.api.CheckpointException | OSError | RuntimeError):
            of_rank = getattr(error, "failures", {})
            reasons = [f"rank {r}: {wrapped[0]}" for r, wrapped in of_rank.items()]
            raise CheckpointError(
                f"{self.folder} cannot be {self.what} ("
                f"{'; '.join(reasons) or error}); checkpoints before it stay: go on "
                "with resume=auto"
            ) from error
