"""A run's folder: where things go, and how a run finds its way back."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torchrl_vla.collectors.ranks import Alone, Ranks
from torchrl_vla.config.load import save_config
from torchrl_vla.config.schema import Config
from torchrl_vla.training import checkpoint, report, shards
from torchrl_vla.training.agreement import (
    check_agreement,
    check_shared_folder,
    code_version,
)
from torchrl_vla.training.metrics import METRICS, MetricsFile

# What may change between the parts of a run: none of it moves what is learned.
MAY_DIFFER = frozenset(
    {
        "run_dir",
        "resume",
        "name",
        "train.num_iterations",
        "train.device",
        "train.num_threads",
        "eval",
        "checkpoint",
        "logger",
        "distributed",
        "env.num_workers",
        "env.num_envs",
        "env.max_cached_tasks",
        "env.overlap",
        "env.max_restarts",
        "env.min_timeout_s",
        "env.render_gpu_device_id",
        "policy.rollout_batch_size",
    }
)

# The learning rate of supervised fine-tuning falls over all iterations, and what is
# best is decided by patience: both stay.
SUPERVISED_MAY_DIFFER = MAY_DIFFER - {"train.num_iterations"}


class RunFolder:
    """``config.yaml``, ``metrics.csv``, ``curves.png``, ``videos/``, ``checkpoints/``
    and ``summary.json`` of a run.

    Args:
        run_dir: the folder, or ``None`` for ``runs/<name>/<time>`` (with
            ``resume=auto``: the newest folder in ``runs/<name>`` with a checkpoint).
        name: of the set-up.
        resume: ``never``, ``auto`` or a checkpoint file.
        options: all options of this run, nested.
        may_differ: dotted names, or sections, that may change between the parts of a
            run.
        ranks: of the run. All read; the first one chooses the folder and writes.
        async_save: a cut policy is written until :meth:`finish_save`, while the run
            goes on.

    Attributes:
        writes: whether this rank does.

    Raises:
        CheckpointError: when another run would be written over, a named checkpoint is
            cut off, or its options are others.
    """

    def __init__(
        self,
        run_dir: str | None,
        name: str,
        resume: str,
        options: dict[str, Any],
        may_differ: frozenset[str] = MAY_DIFFER,
        ranks: Ranks | None = None,
        async_save: bool = False,
    ) -> None:
        self.ranks = ranks or Alone()
        self.writes = self.ranks.rank == 0
        self.async_save = async_save
        self._pending: Callable[[], None] | None = None
        runs = Path("runs") / name
        self.path = Path(run_dir) if run_dir else runs / time.strftime("%Y%m%d-%H%M%S")
        if run_dir is None and resume == "auto" and (newest := _newest_run(runs)):
            self.path = newest
        self.path = self.ranks.gather(self.path)[0]  # clocks differ
        self.checkpoints = self.path / "checkpoints"
        self.state = self._find_state(resume)
        if self.state is not None:
            checkpoint.check_same_options(self.state["options"], options, may_differ)
        self.options = options

    def _find_state(self, resume: str) -> dict[str, Any] | None:
        if resume == "auto":
            return checkpoint.load_newest_checkpoint(self.checkpoints)
        is_own = Path(resume).resolve().parent == self.checkpoints.resolve()
        if self.has_checkpoint and not is_own:
            raise checkpoint.CheckpointError(
                f"{self.path} holds a run already; go on with resume=auto, or choose "
                "another run_dir"
            )
        return None if resume == "never" else checkpoint.load_checkpoint(Path(resume))

    @property
    def iteration(self) -> int:
        """Iterations completed before this start."""
        return 0 if self.state is None else self.state["iteration"]

    @property
    def has_checkpoint(self) -> bool:
        """Whether a run can go on from here."""
        return bool(checkpoint.list_checkpoints(self.checkpoints))

    def open_metrics(self, names: tuple[str, ...] = METRICS) -> MetricsFile:
        """Create the folder, its ``config.yaml`` and its ``metrics.csv``."""
        if not self.writes:
            return MetricsFile(None, names=names)
        self.path.mkdir(parents=True, exist_ok=True)
        save_config(self.options, self.path / "config.yaml")
        last = -1 if self.state is None else self.iteration
        return MetricsFile(self.path / "metrics.csv", last, names)

    def restore(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Load the checkpoint into ``parts``; returns its counters.

        Raises:
            CheckpointError: for weights that were saved in another way.
        """
        if self.state is None:
            return {}
        cut = _cut_parts(parts)
        if bool(cut) != (shards.KEY in self.state):
            raise checkpoint.CheckpointError(
                f"the checkpoint was saved with{'out' * bool(cut)} "
                "distributed.strategy=fsdp; go on with the strategy it was saved with"
            )
        if cut:
            shards.load(Path(self.state[shards.KEY]), cut)
        for name, part in parts.items():
            part.load_state_dict(self.state[name])
        checkpoint.set_random_state(self.state["random_state"])
        return self.state["counters"]

    def save(
        self, iteration: int, parts: dict[str, Any], counters: dict[str, Any], keep: int
    ) -> None:
        """Write a checkpoint of ``parts`` and all that is needed to go on.

        Every rank calls it. A cut policy is written by all ranks, and the file that
        makes it a checkpoint afterwards.

        Raises:
            CheckpointError: when it cannot be written; the ones before stay.
        """
        self.finish_save()
        state = {name: part.state_dict() for name, part in parts.items()}
        state["counters"] = dict(counters)
        state["options"] = self.options
        state["versions"] = report.versions()
        state["random_state"] = checkpoint.random_state()
        cut = _cut_parts(parts)
        wait = None
        if cut:
            folder = shards.folder_of(self.checkpoints, iteration)
            state[shards.KEY] = folder.name
            wait = shards.save(folder, cut, self.ranks, self.async_save)

        def complete() -> None:
            if wait is not None:
                wait()
                self.ranks.gather(None)
            if self.writes:
                checkpoint.save_checkpoint(self.checkpoints, iteration, state, keep)

        self._pending = complete
        if not self.async_save:
            self.finish_save()

    def finish_save(self) -> None:
        """Wait until the last checkpoint is complete; every rank calls it.

        Raises:
            CheckpointError: when it cannot be written; the ones before stay.
        """
        complete, self._pending = self._pending, None
        if complete is not None:
            complete()


def open_run_folder(cfg: Config, ranks: Ranks, data: Mapping[str, Any]) -> RunFolder:
    """The folder of a run, once all ranks are found to be about the same run.

    Args:
        cfg: all options.
        ranks: of the run.
        data: what the ranks found on their hosts, by name; compared by its text.

    Raises:
        ValueError: when ranks differ, or the folder is not one for all of them.
    """
    options = asdict(cfg)
    compared = {**options, "train": {**options["train"], "device": "each rank's own"}}
    facts = {name: _text(value) for name, value in data.items()}
    check_agreement(ranks, {"": compared, "code": code_version(), "data": facts})
    folder = RunFolder(
        cfg.run_dir,
        cfg.name,
        cfg.resume,
        options,
        ranks=ranks,
        async_save=cfg.distributed.async_save,
    )
    check_shared_folder(ranks, folder.path)
    check_agreement(ranks, {"iteration of the newest checkpoint": folder.iteration})
    return folder


def _text(value: Any) -> str:
    """A short text, the same for the same content."""
    return hashlib.blake2b(repr(_plain(value)).encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "__dict__"):
        return {name: _plain(each) for name, each in vars(value).items()}
    return value


def _cut_parts(parts: dict[str, Any]) -> dict[str, shards.ShardedState]:
    return {k: v for k, v in parts.items() if isinstance(v, shards.ShardedState)}


def _newest_run(runs: Path) -> Path | None:
    found = [p.parent for p in runs.glob("*/checkpoints") if any(p.glob("*.pt"))]
    return max(found, default=None)
