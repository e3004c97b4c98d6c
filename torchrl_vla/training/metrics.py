"""The metrics of a run: one table of names, one file of rows."""

import csv
import math
import os
from pathlib import Path

from torchrl_vla.collectors.group_wave import COUNTS

METRICS = (
    "iteration",
    # collection
    "success_rate",
    *COUNTS,
    # update
    "optimizer_steps",
    "learning_rate",
    "loss_objective",
    "loss_entropy",
    "loss_kl",
    "ratio_deviation",
    "ratio_mean",
    "ratio_max",
    "ratio_min",
    "clip_fraction",
    "clip_fraction_low",
    "clip_fraction_high",
    "kl_approx",
    "reference_kl",
    "kl_coef",
    "entropy",
    "effective_sample_size",
    "grad_norm",
    "masked_fraction",
    "advantage_mean",
    "advantage_std",
    # evaluation
    "eval_success_rate",
    "eval_success_low",
    "eval_success_high",
    "eval_num_episodes",
    # time
    "seconds_collect",
    "seconds_update",
    "seconds_eval",
)

SUPERVISED_METRICS = (
    "iteration",
    "train_loss",
    "train_token_accuracy",
    "val_loss",
    "val_token_accuracy",
    "optimizer_steps",
    "learning_rate",
    "grad_norm",
    "eval_success_rate",
    "eval_success_low",
    "eval_success_high",
    "eval_num_episodes",
    "seconds_update",
    "seconds_validate",
    "seconds_eval",
)


def wilson_interval(
    num_success: int, num_episodes: int, z: float = 1.959964
) -> tuple[float, float]:
    """Wilson score interval of a success rate, 95 % by default.

    Source: E. B. Wilson (1927), Journal of the American Statistical Association 22.

    Example:
        >>> low, high = wilson_interval(8, 10)
        >>> round(low, 4), round(high, 4)
        (0.4902, 0.9433)
    """
    if num_episodes == 0:
        return 0.0, 1.0
    rate = num_success / num_episodes
    scale = 1 + z**2 / num_episodes
    center = (rate + z**2 / (2 * num_episodes)) / scale
    spread = rate * (1 - rate) / num_episodes + z**2 / (4 * num_episodes**2)
    half_width = z * math.sqrt(spread) / scale
    return max(center - half_width, 0.0), min(center + half_width, 1.0)


def _number(text: str) -> float:
    # An integer stays one, so that a row that is read and written again is the same.
    return int(text) if text.lstrip("-").isdigit() else float(text)


class MetricsFile:
    """``metrics.csv``: a row per iteration, a column per metric.

    Args:
        path: of the file; ``None`` keeps the rows in memory. What is there already is
            kept up to ``last_iteration`` (the iteration of the checkpoint that a run
            resumes from), so a resumed run's file is the one of an uninterrupted run.
        last_iteration: rows beyond are dropped; ``-1`` drops all.
        names: of the columns.
    """

    def __init__(
        self,
        path: Path | None,
        last_iteration: int = -1,
        names: tuple[str, ...] = METRICS,
    ) -> None:
        self.path = path
        self.names = names
        self.rows: list[dict[str, float]] = []
        if path is not None and path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    if None in row.values():
                        continue  # the process was killed while it wrote this row
                    values = {k: _number(v) for k, v in row.items() if v != ""}
                    if values["iteration"] <= last_iteration:
                        self.rows.append(values)
        self._write()

    def append(self, row: dict[str, float]) -> None:
        """Add a row and write it out.

        Raises:
            KeyError: for a metric that is not in ``METRICS`` (and so not documented).
        """
        if unknown := set(row) - set(self.names):
            raise KeyError(f"metrics without a place in METRICS: {sorted(unknown)}")
        self.rows.append(row)
        if self.path is None:
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.names).writerow(row)

    def _write(self) -> None:
        if self.path is None:
            return
        partial = self.path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.names)
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(partial, self.path)
