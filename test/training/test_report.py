"""What a run leaves: curves, videos, a summary, and the logger."""

import builtins
import json

import imageio.v2 as imageio
import numpy as np
import pytest

from torchrl_vla.training import report
from torchrl_vla.training.evaluator import EvaluationResult
from torchrl_vla.training.metrics import METRICS
from torchrl_vla.training.recorder import Recorder, make_logger
from torchrl_vla.training.run_folder import RunFolder

SUMMARY_KEYS = {
    "initial_success_rate",
    "final_success_rate",
    "num_eval_episodes",
    "num_iterations",
    "num_optimizer_steps",
    "num_episodes",
    "num_decisions",
    "num_env_steps",
    "seconds_total",
    "seconds_collect",
    "seconds_update",
    "seconds_eval",
}


def row(iteration, **metrics):
    counts = {
        "success_rate": 0.5,
        "groups_kept": 3,
        "groups_all_success": 1,
        "groups_all_failure": 2,
        "episodes_played": 24,
        "decisions_played": 100,
        "env_steps_played": 390,
        "optimizer_steps": 2,
        "clip_fraction": 0.1,
        "entropy": 2.0,
    }
    return {"iteration": iteration, **counts, **metrics}


def metrics_of(iteration, **metrics):
    values = row(iteration, **metrics)
    del values["iteration"]
    return values


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"iteration": 0, "eval_success_rate": 0.5}],
        [
            row(i, eval_success_rate=0.4, eval_success_low=0.3, eval_success_high=0.5)
            for i in range(9)
        ],
        [{"iteration": 0}, {k: v for k, v in row(1).items() if k != "entropy"}],
    ],
    ids=["none", "evaluation only", "full", "empty iterations"],
)
def test_curves_are_a_picture(tmp_path, rows):
    for values in rows:
        if "eval_success_rate" in values:
            values.setdefault("eval_success_low", 0.1)
            values.setdefault("eval_success_high", 0.9)
    report.save_curves(tmp_path / "curves.png", rows)
    picture = imageio.imread(tmp_path / "curves.png")
    assert picture.shape[:2] == (396, 1320)
    assert picture[..., :3].std() > 5, "something is drawn"
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_json_is_complete_or_not_there(tmp_path):
    path = tmp_path / "summary.json"
    report.save_json(path, {"a": 1})
    with pytest.raises(TypeError):
        report.save_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_versions_name_the_stack():
    versions = report.versions()
    assert versions.keys() >= {"torchrl-vla", "torch", "torchrl", "tensordict"}
    assert all(isinstance(version, str) for version in versions.values())


@pytest.fixture
def folder(tmp_path):
    return RunFolder(str(tmp_path / "run"), "name", "never", {"seed": 0})


def result(num_success, num=4):
    success = {(0, i): i < num_success for i in range(num)}
    video = {(0, 0): np.zeros((3, 32, 32, 3), np.uint8)}
    return EvaluationResult(success, dict.fromkeys(success, 8), video, {"env": "toy"})


def test_recorder_counts_and_sums_up(folder, capsys):
    with Recorder(folder, {}, num_iterations=2) as recorder:
        with recorder.time("eval"):
            metrics = recorder.evaluated(result(1))
        recorder.log(0, metrics)
        for iteration in (1, 2):
            with recorder.time("collect"):
                pass
            recorder.log(iteration, metrics_of(iteration))
        assert recorder.evaluated(result(3))["eval_success_rate"] == 0.75
        summary = recorder.finish()
    assert summary.keys() >= SUMMARY_KEYS
    assert json.loads((folder.path / "summary.json").read_text()).keys() == (
        summary.keys()
    )
    assert summary["initial_success_rate"] == 0.25
    assert summary["final_success_rate"] == 0.75
    assert summary["initial_evaluation"]["tasks"]["0"]["success_rate"] == 0.25
    assert summary["evaluation"]["tasks"]["0"]["success_rate"] == 0.75
    assert summary["num_eval_episodes"] == 4
    assert summary["num_iterations"] == 2
    assert summary["num_optimizer_steps"] == 4
    assert summary["num_episodes"] == 48
    assert summary["num_decisions"] == 200
    assert summary["num_env_steps"] == 780
    assert summary["seconds_total"] > 0
    assert summary["evaluation"]["protocol"] == {"env": "toy"}
    assert {path.name for path in (folder.path / "videos").iterdir()} == {
        "task0_start0_before_success.mp4",
        "task0_start0_after_success.mp4",
        "before_after.mp4",
    }
    assert (folder.path / "curves.png").exists()
    assert "greedy success rate 0.750" in capsys.readouterr().out


def test_recorder_goes_on_from_counters(folder):
    counters = {"num_episodes": 100, "initial_success_rate": 0.1, "num_iterations": 7}
    with Recorder(folder, counters, num_iterations=9) as recorder:
        recorder.evaluated(result(2))
        recorder.log(8, metrics_of(8))
        assert recorder.counters["num_episodes"] == 124
        assert recorder.counters["initial_success_rate"] == 0.1
        assert recorder.counters["final_success_rate"] == 0.5
        assert recorder.counters["num_iterations"] == 8


def test_empty_iterations_are_counted_in_a_row(folder):
    with Recorder(folder, {"empty_iterations": 1}, num_iterations=9) as recorder:
        flags = (True, False, True, True)
        assert [recorder.count_empty(flag) for flag in flags] == [2, 0, 1, 2]


def test_an_error_says_how_to_go_on_once_there_is_a_checkpoint(folder, capsys):
    def fail():
        with Recorder(folder, {}, num_iterations=9):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert "resume=auto" not in capsys.readouterr().out
    folder.save(1, {}, {}, keep=1)
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert f"resume=auto run_dir={folder.path}" in capsys.readouterr().out


def test_every_metric_reaches_the_logger(folder):
    class Logger:
        def __init__(self):
            self.logged = {}

        def log_scalar(self, name, value, step):
            self.logged[name] = (value, step)

    logger = Logger()
    with Recorder(folder, {}, num_iterations=2, logger=logger) as recorder:
        recorder.log(1, metrics_of(1))
    assert logger.logged["groups_kept"] == (3, 1)
    assert set(logger.logged) <= set(METRICS)
    assert set(logger.logged) > set(metrics_of(1))


def test_csv_needs_no_logger(tmp_path):
    assert make_logger("csv", project="p", mode="offline", path=tmp_path) is None


def test_wandb_offline_with_the_real_package(folder, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = make_logger("wandb", project="p", mode="offline", path=folder.path)
    with Recorder(folder, {}, num_iterations=1, logger=logger) as recorder:
        recorder.log(1, metrics_of(1))
    assert wandb.run is None, "the run is finished"
    wandb.teardown()
    (log,) = folder.path.glob("wandb/offline-run-*/*.wandb")
    content = log.read_bytes()
    assert b"groups_kept" in content
    assert b"success_rate" in content


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_wandb(name, *args, **kwargs):
        if name == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    with pytest.raises(
        ModuleNotFoundError, match=r"pip install 'torchrl-vla\[wandb\]'"
    ):
        make_logger("wandb", project="p", mode="offline", path=tmp_path / "new")
    assert not (tmp_path / "new").exists()
