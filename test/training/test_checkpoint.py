"""Checkpoints: complete or not there, and a run folder that is never written over."""

import os
import random

import numpy as np
import pytest
import torch

from torchrl_vla.training import checkpoint
from torchrl_vla.training.checkpoint import (
    CheckpointError,
    check_same_options,
    list_checkpoints,
    load_checkpoint,
    load_newest_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
)
from torchrl_vla.training.run_folder import MAY_DIFFER, RunFolder


def save(folder, *iterations, keep=9):
    for iteration in iterations:
        state = {"weights": torch.full((100,), float(iteration))}
        save_checkpoint(folder, iteration, state, keep)


def iterations(folder):
    return [int(path.stem[-6:]) for path in list_checkpoints(folder)]


def truncate(path):
    os.truncate(path, path.stat().st_size - 100)


def test_roundtrip(tmp_path):
    state = {"a": torch.arange(3), "b": {"c": [1, 2.5, "x", None]}}
    path = save_checkpoint(tmp_path / "new" / "folder", 7, state, keep=1)
    loaded = load_checkpoint(path)
    assert torch.equal(loaded["a"], state["a"])
    assert loaded["b"] == state["b"]
    assert loaded["iteration"] == 7


def test_it_has_its_name_only_when_it_is_complete(tmp_path, monkeypatch):
    """Whatever happens while it is written, no file has the name of a checkpoint."""
    seen = []
    replace = os.replace

    def watch(source, target):
        assert not target.exists()
        seen.append(torch.load(source, weights_only=True)["iteration"])
        replace(source, target)

    monkeypatch.setattr(os, "replace", watch)
    save(tmp_path, 3)
    assert seen == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["iteration_000003.pt"]

    def fail(state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 4)
    assert iterations(tmp_path) == [3]
    assert load_newest_checkpoint(tmp_path)["iteration"] == 3


def test_the_newest_ones_are_kept_in_the_order_of_iterations(tmp_path):
    save(tmp_path, 8, 9, 10, 100, keep=3)
    assert iterations(tmp_path) == [9, 10, 100]
    save(tmp_path, 1_000_000, keep=2)
    assert iterations(tmp_path) == [100, 0] or list_checkpoints(tmp_path)[-1].name == (
        "iteration_1000000.pt"
    )


def test_the_newest_complete_one_is_loaded(tmp_path, capsys):
    save(tmp_path, 1, 2, 3)
    truncate(tmp_path / "iteration_000003.pt")
    (tmp_path / "iteration_000002.pt").write_bytes(b"")
    (tmp_path / "iteration_000009.pt.partial").write_bytes(b"half")
    (tmp_path / "iteration_9.pt").write_bytes(b"another name")
    assert load_newest_checkpoint(tmp_path)["iteration"] == 1
    out = capsys.readouterr().out
    assert "skipped" in out
    assert "iteration_000003.pt cannot be read" in out
    assert load_newest_checkpoint(tmp_path / "none") is None


def test_what_is_cut_off_is_refused_by_name(tmp_path):
    save(tmp_path, 1)
    path = tmp_path / "iteration_000001.pt"
    for size in (path.stat().st_size - 1, 300, 0):
        os.truncate(path, size)
        with pytest.raises(CheckpointError, match=r"iteration_000001\.pt cannot be"):
            load_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"none\.pt is not a checkpoint file"):
        load_checkpoint(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="is not a checkpoint file"):
        load_checkpoint(tmp_path)


def test_saving_never_removes_what_was_just_saved(tmp_path):
    """A cut off checkpoint of a later iteration must not count as a newer one."""
    save(tmp_path, 1, 2, 4)
    truncate(tmp_path / "iteration_000004.pt")
    save(tmp_path, 3, keep=1)
    assert iterations(tmp_path) == [3]
    assert load_newest_checkpoint(tmp_path)["iteration"] == 3


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save({"a": Evil()}, tmp_path / "iteration_000001.pt")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "iteration_000001.pt")
    assert not (tmp_path / "evil").exists()


SAVED = {"seed": 1, "update": {"lr": 0.1, "beta1": 0.9}, "train": {"device": "cpu"}}


def test_options_that_differ_are_all_named():
    now = {"seed": 2, "update": {"lr": 0.2, "beta1": 0.9}, "train": {"device": "cpu"}}
    with pytest.raises(CheckpointError) as error:
        check_same_options(SAVED, now, frozenset())
    text = str(error.value)
    assert "seed: 1 in the checkpoint, 2 now" in text
    assert "update.lr: 0.1 in the checkpoint, 0.2 now" in text
    assert "beta1" not in text
    assert "another run_dir" in text


def test_options_that_may_differ():
    now = {"seed": 1, "update": {"lr": 0.2, "beta1": 0}, "train": {"device": "cuda"}}
    check_same_options(SAVED, now, frozenset({"update", "train.device"}))
    with pytest.raises(CheckpointError, match=r"train\.device"):
        check_same_options(SAVED, now, frozenset({"update"}))
    with pytest.raises(CheckpointError, match="new: None in the checkpoint, 3 now"):
        check_same_options(SAVED, {**SAVED, "new": 3}, frozenset())


def test_may_differ_names_options_that_exist():
    from torchrl_vla.config.load import option_names

    names = option_names()
    for name in MAY_DIFFER:
        assert name in names or any(n.startswith(f"{name}.") for n in names), name
    for name in ("seed", "update.lr", "rollout.num_groups", "policy.temperature"):
        assert name not in MAY_DIFFER
        assert name.split(".")[0] not in MAY_DIFFER


def test_random_state_roundtrip(tmp_path):
    random.gauss(0, 1)  # leaves a second value behind
    np.random.normal()
    path = save_checkpoint(tmp_path, 1, {"random": random_state()}, keep=1)

    def draw():
        return (
            random.random(),
            random.gauss(0, 1),
            np.random.normal(),
            np.random.randint(1 << 30),
            torch.rand(3).tolist(),
        )

    expected = draw()
    assert draw() != expected
    set_random_state(load_checkpoint(path)["random"])
    assert draw() == expected


OPTIONS = {"seed": 1, "eval": {"every": 1}}


class Part:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def folder(path, resume="never", options=OPTIONS):
    return RunFolder(str(path), "name", resume, options)


def run_to(path, iteration, value=0):
    run = folder(path)
    run.open_metrics().append({"iteration": iteration})
    run.save(iteration, {"part": Part(value)}, {"num_episodes": 5}, keep=2)


def test_run_folder_restores_parts_and_counters(tmp_path):
    run_to(tmp_path, 3, value=42)
    run = folder(tmp_path, "auto")
    part = Part(0)
    assert run.restore({"part": part}) == {"num_episodes": 5}
    assert part.value == 42
    assert run.iteration == 3
    assert [row["iteration"] for row in run.open_metrics().rows] == [3]
    fresh = folder(tmp_path / "fresh")
    assert fresh.iteration == 0
    assert fresh.restore({"part": part}) == {}
    assert not (tmp_path / "fresh").exists(), "nothing is made before it is needed"


def test_a_run_is_not_written_over(tmp_path):
    run_to(tmp_path, 3)
    with pytest.raises(CheckpointError, match="resume=auto, or choose another run_dir"):
        folder(tmp_path)


def test_a_checkpoint_of_another_run_does_not_go_into_this_folder(tmp_path):
    run_to(tmp_path / "this", 3)
    run_to(tmp_path / "other", 1)
    other = tmp_path / "other" / "checkpoints" / "iteration_000001.pt"
    with pytest.raises(CheckpointError, match="this holds a run already"):
        folder(tmp_path / "this", str(other))
    assert folder(tmp_path / "third", str(other)).iteration == 1


def test_other_options_are_refused(tmp_path):
    run_to(tmp_path, 3)
    with pytest.raises(CheckpointError, match="seed: 1 in the checkpoint, 2 now"):
        folder(tmp_path, "auto", {**OPTIONS, "seed": 2})
    assert folder(tmp_path, "auto", {**OPTIONS, "eval": {"every": 9}}).iteration == 3


def test_auto_finds_the_newest_run_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("20250101-000000", "20250301-000000", "20250201-000000"):
        run_to(tmp_path / "runs" / "toy" / name, 2)
    (tmp_path / "runs" / "toy" / "20250401-000000" / "checkpoints").mkdir(parents=True)
    run_to(tmp_path / "runs" / "other" / "20250501-000000", 2)
    run = RunFolder(None, "toy", "auto", OPTIONS)
    assert run.path.name == "20250301-000000"
    assert run.iteration == 2
    new = RunFolder(None, "toy", "never", OPTIONS)
    assert new.path.parent.name == "toy"
    assert new.state is None
    assert RunFolder(None, "nothing", "auto", OPTIONS).iteration == 0


def test_versions_are_in_the_checkpoint(tmp_path):
    run_to(tmp_path, 1)
    state = checkpoint.load_newest_checkpoint(tmp_path / "checkpoints")
    assert state["versions"]["torch"] == torch.__version__
    assert state["options"] == OPTIONS
    assert state.keys() >= {"random_state", "counters", "iteration", "part"}
