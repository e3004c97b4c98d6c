"""What runs of one experiment and of its ablations showed: a table, JSON, a picture.

    python scripts/results.py libero_object_cpu=RUN,RUN,RUN one_change=RUN ...

Each argument is a name and its run folders, one per seed; the first is the experiment,
the others are compared with it. Written are ``docs/results.json`` (``summary.json`` of
each run, by name), ``docs/images/results.png`` and, from the end of the first run's
``videos/before_after.mp4``, ``docs/images/before_after.png``; the table is printed.
"""

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import imageio.v2 as imageio
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchrl_vla.training.metrics import wilson_interval
from torchrl_vla.training.videos import read_video

DOCS = Path(__file__).parent.parent / "docs"


def read_runs(arguments: Sequence[str]) -> dict[str, list[Path]]:
    """Run folders by name of the experiment.

    Raises:
        SystemExit: for an argument without folders, or a run that has not ended.
    """
    runs = {}
    for argument in arguments:
        name, _, folders = argument.partition("=")
        runs[name] = [Path(folder) for folder in folders.split(",") if folder]
        for folder in runs[name]:
            if not (folder / "summary.json").is_file():
                sys.exit(f"{folder} has no summary.json: the run has not ended")
    if not runs or not all(runs.values()):
        sys.exit(__doc__)
    return runs


def pooled(summaries: Sequence[Mapping], key: str) -> dict[str, tuple[int, int]]:
    """Successes and episodes per task and in ``all``, summed over seeds."""
    counts: dict[str, tuple[int, int]] = {}
    for summary in summaries:
        rows = {**summary[key]["tasks"], "all": summary[key]}
        for task, row in rows.items():
            good, num = counts.get(task, (0, 0))
            num_good = round(row["success_rate"] * row["num_episodes"])
            counts[task] = (good + num_good, num + row["num_episodes"])
    return counts


def before_and_after(summaries: Sequence[Mapping]) -> tuple[dict, dict]:
    """:func:`pooled` before training, which is the same in all seeds, and after."""
    once = pooled(summaries[:1], "initial_evaluation")
    if once != pooled(summaries[-1:], "initial_evaluation"):
        sys.exit("the seeds of an experiment start from different policies")
    return once, pooled(summaries, "evaluation")


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Rows of ``metrics.csv``; empty fields are left out."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: float(v) for k, v in row.items() if v} for row in rows]


def rate(good: int, num: int) -> str:
    """A success rate with its Wilson interval, in percent."""
    low, high = wilson_interval(good, num)
    return f"{good / num:.1%} [{low:.1%}, {high:.1%}]"


def table(summaries: Mapping[str, Sequence[Mapping]]) -> str:
    """A Markdown table: a row per run."""
    lines = [
        "| run | seed | before | after (Wilson 95 %) | iterations | episodes "
        "| collect, update, evaluate, all (s) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in summaries.items():
        for summary in runs:
            seconds = [summary[f"seconds_{p}"] for p in ("collect", "update", "eval")]
            seconds += [summary["seconds_total"]]
            before, after = summary["initial_evaluation"], summary["evaluation"]
            if before["protocol"] != after["protocol"]:
                sys.exit(f"{name}: the protocols before and after differ")
            lines.append(
                f"| {name} | {summary['seed']} | {before['success_rate']:.1%} "
                f"| {rate(*pooled([summary], 'evaluation')['all'])} "
                f"| {summary['num_iterations']} | {summary['num_episodes']} "
                f"| {', '.join(f'{s:.0f}' for s in seconds)} |"
            )
    return "\n".join(lines)


def plot_tasks(axes, summaries: Sequence[Mapping]) -> None:
    """Greedy success per task before and after, all seeds together."""
    looks = zip(("supervised start", "after GRPO"), ("0.6", "C0"), strict=True)
    both = before_and_after(summaries)
    for number, (counts, (label, color)) in enumerate(zip(both, looks, strict=True)):
        for place, (good, num) in enumerate(counts.values()):
            low, high = wilson_interval(good, num)
            x, y = place + 0.38 * number, good / num
            axes.bar(x, y, 0.36, color=color, label=label if place == 0 else None)
            axes.plot([x, x], [low, high], color="black", linewidth=1)
    names = [name if name == "all" else f"task {name}" for name in counts]
    axes.set_xticks([place + 0.19 for place in range(len(names))], names)
    axes.set_ylim(0, 1.2)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.set_title("greedy success, official starts, Wilson 95 %")
    axes.legend(frameon=False, loc="upper left", ncols=2)


def plot_curves(axes, runs: Mapping[str, Sequence[Path]], x: str, title: str) -> None:
    """Success while sampling, of each run."""
    for color, (name, folders) in enumerate(runs.items()):
        for number, folder in enumerate(folders):
            rows = read_metrics(folder)
            played = [row for row in rows if "success_rate" in row]
            axes.plot(
                [row[x] for row in played],
                [row["success_rate"] for row in played],
                color=f"C{color}",
                linewidth=1.2,
                alpha=1 - 0.25 * number,
                label=name if number == 0 else None,
            )
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(x)
    axes.set_title(title)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(0, 0.34), fontsize=8)


def main(arguments: Sequence[str]) -> None:
    """Read the runs, write JSON and picture, print the table."""
    runs = read_runs(arguments)
    summaries = {
        name: [json.loads((f / "summary.json").read_text()) for f in folders]
        for name, folders in runs.items()
    }
    (DOCS / "results.json").write_text(json.dumps(summaries, indent=1) + "\n")
    experiment, *others = runs
    figure = Figure(figsize=(14, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3 if others else 2)
    plot_tasks(panels[0], summaries[experiment])
    first = {experiment: runs[experiment]}
    plot_curves(panels[1], first, "iteration", "success while sampling, each seed")
    if others:
        plot_curves(panels[2], runs, "iteration", "the same with one thing changed")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "images" / "results.png", dpi=110)
    last = read_video(runs[experiment][0] / "videos" / "before_after.mp4")[-1]
    imageio.imwrite(DOCS / "images" / "before_after.png", last)
    print(table(summaries))
    both = before_and_after(summaries[experiment])
    for label, counts in zip(("before", "after"), both, strict=True):
        print(f"{label}: " + ", ".join(f"{k} {rate(*v)}" for k, v in counts.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
