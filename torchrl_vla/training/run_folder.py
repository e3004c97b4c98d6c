"""A run's folder: where things go, and how a run finds its way back."""

import time
from pathlib import Path
from typing import Any

from torchrl_vla.config.load import save_config
from torchrl_vla.training import checkpoint, report
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
    ) -> None:
        runs = Path("runs") / name
        self.path = Path(run_dir) if run_dir else runs / time.strftime("%Y%m%d-%H%M%S")
        if run_dir is None and resume == "auto" and (newest := _newest_run(runs)):
            self.path = newest
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
        self.path.mkdir(parents=True, exist_ok=True)
        save_config(self.options, self.path / "config.yaml")
        last = -1 if self.state is None else self.iteration
        return MetricsFile(self.path / "metrics.csv", last, names)

    def restore(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Load the checkpoint into ``parts``; returns its counters."""
        if self.state is None:
            return {}
        for name, part in parts.items():
            part.load_state_dict(self.state[name])
        checkpoint.set_random_state(self.state["random_state"])
        return self.state["counters"]

    def save(
        self, iteration: int, parts: dict[str, Any], counters: dict[str, Any], keep: int
    ) -> None:
        """Write a checkpoint of ``parts`` and all that is needed to go on."""
        state = {name: part.state_dict() for name, part in parts.items()}
        state["counters"] = dict(counters)
        state["options"] = self.options
        state["versions"] = report.versions()
        state["random_state"] = checkpoint.random_state()
        checkpoint.save_checkpoint(self.checkpoints, iteration, state, keep)


def _newest_run(runs: Path) -> Path | None:
    found = [p.parent for p in runs.glob("*/checkpoints") if any(p.glob("*.pt"))]
    return max(found, default=None)
