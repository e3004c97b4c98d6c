"""The script behind docs/results.md: counts are pooled, pictures are drawn."""

import importlib.util
import json
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest

from torchrl_vla.training import videos

SCRIPT = Path(__file__).parents[1] / "scripts" / "results.py"


@pytest.fixture
def results(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("results", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DOCS", tmp_path / "docs")
    (tmp_path / "docs" / "images").mkdir(parents=True)
    return module


def evaluation(good, num=50, limit=120):
    tasks = {
        str(task): {"success_rate": g / num, "num_episodes": num}
        for task, g in enumerate(good)
    }
    return {
        "success_rate": sum(good) / num / len(good),
        "num_episodes": num * len(good),
        "tasks": tasks,
        "protocol": {"max_episode_steps": limit},
    }


def run_folder(path, seed, before, after):
    path.mkdir()
    summary = {
        "seed": seed,
        "num_iterations": 2,
        "num_episodes": 160,
        "seconds_collect": 50.0,
        "seconds_update": 4.0,
        "seconds_eval": 90.0,
        "seconds_total": 150.0,
        "initial_evaluation": before,
        "evaluation": after,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    rows = ["iteration,success_rate,eval_success_rate", "0,,0.5", "1,0.5,", "2,0.8,0.9"]
    (path / "metrics.csv").write_text("\n".join(rows) + "\n")
    frames = {(0, 0): np.full((3, 64, 64, 3), 99, np.uint8)}
    for stage in ("before", "after"):
        videos.save_episodes(path / "videos", frames, {(0, 0): True}, 5, stage)
    videos.save_before_after(path / "videos", 5)
    return path


def test_a_table_json_and_pictures(results, tmp_path, capsys):
    first = run_folder(tmp_path / "a", 0, evaluation([20, 30]), evaluation([45, 50]))
    second = run_folder(tmp_path / "b", 1, evaluation([20, 30]), evaluation([47, 48]))
    other = run_folder(tmp_path / "c", 0, evaluation([20, 30]), evaluation([25, 25]))
    results.main([f"main={first},{second}", f"without={other}"])
    out = capsys.readouterr().out
    assert (
        "| main | 0 | 50.0% | 95.0% [88.8%, 97.8%] | 2 | 160 | 50, 4, 90, 150 |" in out
    )
    assert "| without | 0 | 50.0% | 50.0% [40.4%, 59.6%]" in out
    assert "after: 0 92.0% [85.0%, 95.9%], 1 98.0%" in out, "pooled over the seeds"
    saved = json.loads((tmp_path / "docs" / "results.json").read_text())
    assert [run["seed"] for run in saved["main"]] == [0, 1]
    for name in ("results", "before_after"):
        picture = imageio.imread(tmp_path / "docs" / "images" / f"{name}.png")
        assert picture[..., :3].std() > 5, "something is drawn"


def test_what_cannot_be_compared_is_refused(results, tmp_path):
    run = run_folder(tmp_path / "a", 0, evaluation([1]), evaluation([2], limit=280))
    with pytest.raises(SystemExit, match="protocols before and after differ"):
        results.main([f"main={run}"])
    with pytest.raises(SystemExit, match=r"has no summary\.json: .* not ended"):
        results.main([f"main={tmp_path}"])
