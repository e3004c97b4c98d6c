"""What a run shows while it goes on, and what it leaves behind."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from torchrl_vla.training import report, videos
from torchrl_vla.training.evaluator import EvaluationResult
from torchrl_vla.training.metrics import METRICS, SUPERVISED_METRICS
from torchrl_vla.training.run_folder import RunFolder


@dataclass(frozen=True)
class Recording:
    """What a kind of run records.

    Attributes:
        metrics: columns of ``metrics.csv``.
        phases: what is timed.
        totals: totals of the summary, and the metric that each adds up.
        shown: labels on the progress bar, and the metric of each (text format).
        counters: further counters and their first value. ``initial_success_rate``:
            the first evaluation comes before training.
        save_curves: draws the rows of ``metrics.csv`` into a file.
    """

    metrics: tuple[str, ...]
    phases: tuple[str, ...]
    totals: Mapping[str, str]
    shown: Mapping[str, tuple[str, str]]
    counters: Mapping[str, Any]
    save_curves: Callable[[Path, list[dict[str, float]]], None]


GRPO = Recording(
    metrics=METRICS,
    phases=("collect", "update", "eval"),
    totals={
        "num_episodes": "episodes_played",
        "num_decisions": "decisions_played",
        "num_env_steps": "env_steps_played",
        "num_optimizer_steps": "optimizer_steps",
    },
    shown={"sampled": ("success_rate", ".3f"), "kept": ("groups_kept", ".0f")},
    counters={"initial_success_rate": None, "empty_iterations": 0},
    save_curves=report.save_curves,
)
SUPERVISED = Recording(
    metrics=SUPERVISED_METRICS,
    phases=("update", "validate", "eval"),
    totals={"num_optimizer_steps": "optimizer_steps"},
    shown={
        "loss": ("train_loss", ".3f"),
        "val_loss": ("val_loss", ".3f"),
        "val_accuracy": ("val_token_accuracy", ".3f"),
    },
    counters={},
    save_curves=report.save_supervised_curves,
)


class Recorder(AbstractContextManager):
    """Progress bar, ``metrics.csv``, curves, totals and summary of a run.

    Args:
        folder: of the run.
        counters: totals of the parts of the run before this one; empty for a new run.
        num_iterations: of the whole run.
        logger: a TorchRL logger that gets every metric too, or ``None``.
        fps: frames of a video per second.
        recording: what this kind of run records.

    Attributes:
        counters: totals of the whole run so far.
        result: the latest evaluation of this part of the run, if there was one.
    """

    def __init__(
        self,
        folder: RunFolder,
        counters: Mapping[str, Any],
        num_iterations: int,
        logger: Any = None,
        *,
        fps: float = 5.0,
        recording: Recording = GRPO,
    ) -> None:
        self.folder = folder
        self.fps = fps
        self.recording = recording
        self.metrics = folder.open_metrics(recording.metrics)
        self.logger = logger
        self.counters: dict[str, Any] = {
            **recording.counters,
            "final_success_rate": None,
            "num_iterations": 0,
            **dict.fromkeys(recording.totals, 0),
            "seconds_total": 0.0,
            **{f"seconds_{phase}": 0.0 for phase in recording.phases},
            **counters,
        }
        self.result: EvaluationResult | None = None
        self._seconds = dict.fromkeys(recording.phases, 0.0)
        self._last = time.perf_counter()
        self._bar = tqdm(
            total=num_iterations,
            initial=folder.iteration,
            unit="it",
            dynamic_ncols=True,
            disable=not folder.writes,
            # A log file gets a line now and then rather than one per iteration.
            mininterval=0.1 if sys.stderr.isatty() else 30,
        )
        self.say(f"run folder: {folder.path}")

    def __exit__(self, error_type: type | None, *error: object) -> None:
        if error_type is not None and self.folder.has_checkpoint:
            self.say(f"stopped; go on with resume=auto run_dir={self.folder.path}")
        self._bar.close()
        # W&B writes what it was given when its run is finished.
        if finish := getattr(getattr(self.logger, "experiment", None), "finish", None):
            finish()

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.folder.writes:
            self._bar.write(text)

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Count the seconds of a phase: ``update``, ``eval``, ..."""
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start

    def count_empty(self, is_empty: bool) -> int:
        """Number of iterations in a row, this one included, without a mixed group."""
        before = self.counters["empty_iterations"]
        self.counters["empty_iterations"] = before + 1 if is_empty else 0
        return self.counters["empty_iterations"]

    def say_idle(self, counts: Mapping[str, float]) -> None:
        """Say why there is nothing left to learn from."""
        self.say(
            f"no mixed group in {self.counters['empty_iterations']} iterations: of the "
            f"last one's groups {counts['groups_all_success']} were solved by all "
            f"members and {counts['groups_all_failure']} by none; the run ends here"
        )

    def evaluated(self, result: EvaluationResult) -> dict[str, float]:
        """Take note of an evaluation and save its videos; returns its metrics."""
        self.result = result
        stage = "after" if "initial_success_rate" in self.counters else ""
        if self.counters.get("initial_success_rate", 0) is None:
            self.counters["initial_success_rate"] = result.success_rate
            self.counters["initial_evaluation"] = result.summary()
            stage = "before"
        if result.videos and self.folder.writes:
            folder = self.folder.path / "videos"
            videos.save_episodes(folder, result.videos, result.success, self.fps, stage)
        self.counters["final_success_rate"] = result.success_rate
        low, high = result.interval
        return {
            "eval_success_rate": result.success_rate,
            "eval_success_low": low,
            "eval_success_high": high,
            "eval_num_episodes": len(result.success),
        }

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an iteration everywhere and move the bar."""
        row: dict[str, float] = {"iteration": iteration, **metrics}
        for phase in self.recording.phases:
            row[f"seconds_{phase}"] = round(self._seconds[phase], 4)
            self.counters[f"seconds_{phase}"] += self._seconds[phase]
            self._seconds[phase] = 0.0
        for total, name in self.recording.totals.items():
            self.counters[total] += int(metrics.get(name, 0))
        self._count_seconds()
        self.counters["num_iterations"] = iteration
        self.metrics.append(row)
        if self.logger is not None:
            for name, value in row.items():
                self.logger.log_scalar(name, value, step=iteration)
        self._show(iteration, metrics)

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        self.counters["seconds_total"] += now - self._last
        self._last = now

    def _show(self, iteration: int, metrics: Mapping[str, float]) -> None:
        greedy = self.counters["final_success_rate"]
        shown = {} if greedy is None else {"greedy": f"{greedy:.3f}"}
        for label, (name, form) in self.recording.shown.items():
            if name in metrics:
                shown[label] = f"{metrics[name]:{form}}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(iteration - self._bar.n)

    def finish(self, **further: Any) -> dict[str, Any]:
        """Draw the curves, write ``summary.json``; returns the summary.

        Args:
            further: entries of the summary.
        """
        assert self.result is not None, "finish comes after an evaluation"
        path, result = self.folder.path, self.result
        if self.folder.writes:
            self.recording.save_curves(path / "curves.png", self.metrics.rows)
            videos.save_before_after(path / "videos", self.fps)
        self._count_seconds()
        summary = {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in self.counters.items()
        }
        summary |= further
        summary["num_eval_episodes"] = len(result.success)
        summary["evaluation"] = result.summary()
        summary["versions"] = report.versions()
        if self.folder.writes:
            report.save_json(path / "summary.json", summary)
        low, high = result.interval
        before = summary.get("initial_success_rate")
        start = "" if before is None else f", from {before:.3f}"
        self.say(
            f"greedy success rate {result.success_rate:.3f} [{low:.3f}, {high:.3f}] "
            f"over {len(result.success)} episodes{start}; {summary['num_iterations']} "
            f"iterations in {summary['seconds_total']:.0f} s\n"
            f"{path}/summary.json, curves.png, metrics.csv, videos/"
        )
        return summary


def make_logger(
    name: str, *, project: str, mode: str, path: Path, writes: bool = True
) -> Any:
    """A TorchRL logger besides ``metrics.csv``: ``wandb``, or ``None`` for ``csv``.

    Only the rank that ``writes`` has one.

    Raises:
        ModuleNotFoundError: when the extra is not installed.
    """
    if name == "csv" or not writes:
        return None
    try:
        import wandb  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "logger=wandb needs the wandb extra: pip install 'torchrl-vla[wandb]'"
        ) from error
    from torchrl.record.loggers.wandb import WandbLogger

    path.mkdir(parents=True, exist_ok=True)
    return WandbLogger(
        exp_name=path.name,
        project=project,
        save_dir=str(path),
        offline=mode == "offline",
    )
