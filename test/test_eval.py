"""The evaluation script, on checkpoints of a tiny run of the toy task."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
from recipe_scripts import ROOT, load_script

from torchrl_vla.config import ConfigError
from torchrl_vla.config.load import load_config
from torchrl_vla.training.checkpoint import CheckpointError

SCRIPT = ROOT / "sota-implementations" / "vla_grpo" / "eval.py"
NUM_STARTS = 40


@pytest.fixture(scope="module")
def script():
    return load_script("eval")


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """Folder and summary of a run of two iterations with options of its own."""
    folder = tmp_path_factory.mktemp("run")
    options = {
        "seed": 3,
        "run_dir": str(folder),
        "env": {"num_envs": 32, "success_tol": 0.5},
        "policy": {"hidden_dim": 32, "num_bins": 7},
        "rollout": {"num_groups": 4, "group_size": 4},
        "update": {"episodes_per_step": 8, "lr": 0.02},
        "train": {"num_iterations": 2},
        "eval": {"every": 1, "num_init_states": NUM_STARTS, "num_videos": 0},
        "checkpoint": {"every": 1},
    }
    return folder, recipe.run(load_config(options))


def evaluate(script, folder, **given):
    """As from a command line with ``given`` options, ``__`` for a dot."""
    options = asdict(load_config({}))
    options["run_dir"] = str(folder)
    names = ["run_dir"]
    for name, value in given.items():
        *sections, last = name.split("__")
        place = options
        for section in sections:
            place = place[section]
        place[last] = value
        names.append(name.replace("__", "."))
    return script.run(options, names)


def newest(folder):
    """Where the last evaluation of a run was written."""
    files = (folder / "evaluation").glob("*/evaluation.json")
    return max(files, key=lambda file: file.stat().st_mtime_ns).parent


def test_it_gives_the_success_rate_of_the_run(script, trained, capsys):
    folder, summary = trained
    found = evaluate(script, folder, eval__num_videos=2)
    expected = summary["evaluation"]
    for name in ("success_rate", "interval", "num_episodes", "tasks", "protocol"):
        assert found[name] == expected[name], name
    assert round(found["success_rate"], 4) == summary["final_success_rate"]
    assert found["iteration"] == 2
    place = newest(folder)
    written = json.loads((place / "evaluation.json").read_text())
    assert written == json.loads(json.dumps(found))
    assert len(list(place.glob("*.mp4"))) == 2
    low, high = found["interval"]
    table = capsys.readouterr().out
    assert f"[{low:.3f}, {high:.3f}]" in table
    assert f"{found['success_rate']:.3f}" in table


def test_the_number_of_members_does_not_matter(script, trained):
    folder, summary = trained
    found = evaluate(script, folder, env__num_envs=7)
    assert found["tasks"] == summary["evaluation"]["tasks"]


def test_a_named_checkpoint_of_another_moment(script, trained):
    folder, _ = trained
    first = folder / "checkpoints" / "iteration_000001.pt"
    found = script.run({"resume": str(first)}, ["resume"])
    assert found["iteration"] == 1
    metrics = (folder / "metrics.csv").read_text().splitlines()
    row = dict(zip(metrics[0].split(","), metrics[2].split(","), strict=True))
    assert found["success_rate"] == float(row["eval_success_rate"])


def test_what_is_played_can_change_but_not_the_run(script, trained):
    folder, _ = trained
    found = evaluate(script, folder, eval__num_init_states=5)
    assert found["protocol"]["pairs"] == {"0": "0-4"}
    before = sorted((folder / "evaluation").rglob("*"))
    for name, value in {"policy__num_bins": 7, "env__chunk_size": 2, "seed": 1}.items():
        with pytest.raises(ConfigError, match=r"fixed by the checkpoint.*eval"):
            evaluate(script, folder, **{name: value})
    assert sorted((folder / "evaluation").rglob("*")) == before


def test_an_evaluation_leaves_the_ones_before(script, trained):
    folder, _ = trained
    evaluate(script, folder, eval__num_init_states=4)
    first = newest(folder)
    before = (first / "evaluation.json").read_bytes()
    evaluate(script, folder, eval__num_init_states=3)
    assert newest(folder) != first
    assert newest(folder).name.startswith("toy_iteration_000002_")
    assert (first / "evaluation.json").read_bytes() == before


def test_without_a_checkpoint_the_policy_is_new(script, trained, tmp_path):
    _, summary = trained
    changes = {
        "seed": 3,
        "env__success_tol": 0.5,
        "policy__hidden_dim": 32,
        "policy__num_bins": 7,
        "eval__num_init_states": NUM_STARTS,
    }
    found = evaluate(script, tmp_path, **changes)
    assert found["iteration"] == 0
    assert round(found["success_rate"], 4) == summary["initial_success_rate"]


def test_a_missing_run_is_one_clear_error(tmp_path):
    command = [sys.executable, str(SCRIPT), f"run_dir={tmp_path}/none"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert "none has no complete checkpoint; give run_dir=" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_missing_file_and_no_run_at_all(script, tmp_path):
    with pytest.raises(CheckpointError, match=r"no\.pt is not a checkpoint file"):
        script.run({"resume": str(tmp_path / "no.pt")}, ["resume"])
    with pytest.raises(CheckpointError, match="no run is named"):
        script.run({}, [])


def test_the_command_line(trained, tmp_path):
    folder, _ = trained
    command = [sys.executable, str(SCRIPT), f"run_dir={folder}"]
    command += ["eval.num_init_states=3", "eval.num_videos=0"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "evaluation.json" in ended.stdout
    found = json.loads((newest(folder) / "evaluation.json").read_text())
    assert found["num_episodes"] == 3
    assert found["seed"] == 3
