"""Checkpoints in shards: exported, written meanwhile, on a disk that is full."""

import resource
import subprocess
import sys

import pytest
import torch
from rank_processes import on_ranks
from rank_saves import load, save
from rank_updates import greedy, policy_of

from torchrl_vla.modules.openvla_oft.tiny import save_tiny_checkpoint
from torchrl_vla.training.checkpoint import (
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    load_newest_checkpoint,
    save_checkpoint,
)
from torchrl_vla.training.export_run import export_run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def on_four(tiny, tmp_path_factory):
    """A run folder that four ranks have saved to, and what they held."""
    folder = tmp_path_factory.mktemp("four")
    results = on_ranks(save, 4, folder, tiny, folder / "run", False)
    return folder / "run", results[0][0]


@pytest.mark.parametrize("size", [2, 1])
def test_fewer_ranks_load_what_four_have_saved_bit_for_bit(
    tiny, on_four, tmp_path, size
):
    run, saved = on_four
    results = (
        on_ranks(load, size, tmp_path, tiny, run) if size > 1 else [load(tiny, run)]
    )
    for loaded in results:
        for part in ("weights", "optimizer"):
            assert loaded[part].keys() == saved[part].keys()
            for name, value in saved[part].items():
                assert torch.equal(loaded[part][name], value), name
        assert loaded["updater"] == saved["updater"]
    assert saved["updater"]["num_optimizer_steps"] == 1
    moments = [v for k, v in saved["optimizer"].items() if k.endswith("exp_avg")]
    assert all(value.abs().min() > 0 for value in moments)


def test_exported_in_the_layout_it_was_loaded_from(tiny, on_four, tmp_path):
    check_export(tiny, *on_four, tmp_path / "exported")


def test_what_is_written_meanwhile_is_what_was_saved(tiny, tmp_path):
    results = on_ranks(save, 2, tmp_path, tiny, tmp_path / "run", True)
    check_export(tiny, tmp_path / "run", results[0][0], tmp_path / "exported")


def check_export(tiny, run, saved, folder):
    checkpoints = list_checkpoints(run / "checkpoints")
    assert [path.name for path in checkpoints] == ["iteration_000001.pt"]
    export_run(checkpoints[0], folder)
    # The same files, the shard of weights rewritten.
    names = sorted(path.name for path in tiny.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    exported, before = policy_of(folder), policy_of(tiny)
    for name, value in exported.named_parameters():
        assert torch.equal(value, saved["weights"][name]), name
    assert not torch.equal(
        exported.model.projector.fc1.weight, before.model.projector.fc1.weight
    )
    assert greedy(exported, folder).shape == greedy(before, tiny).shape


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_is_full_on_one_rank_leaves_the_old_checkpoint(
    tiny, tmp_path, asynchronous
):
    run = tmp_path / "run"
    results = on_ranks(save, 2, tmp_path, tiny, run, asynchronous, 100_000)
    for _, error in results:
        assert "iteration_000002.shards cannot be written" in error
        assert "rank 1" in error
        assert "resume=auto" in error
    state = load_newest_checkpoint(run / "checkpoints")
    assert state["iteration"] == 1
    weights = results[0][0]["weights"]
    exported = policy_of(
        export_run(list_checkpoints(run / "checkpoints")[0], tmp_path / "exported")
    )
    for name, value in exported.named_parameters():
        assert torch.equal(value, weights[name]), name


FULL = """
import resource, sys, torch
from pathlib import Path
from torchrl_vla.training.checkpoint import CheckpointError, save_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    save_checkpoint(Path(sys.argv[1]), 2, {"x": torch.zeros(100_000)}, keep=1)
except CheckpointError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    assert resource.RLIMIT_FSIZE is not None
    save_checkpoint(tmp_path, 1, {"x": torch.zeros(10)}, keep=1)
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True
    )
    assert "iteration_000002.pt cannot be written" in done.stdout, done.stderr
    assert "make room" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["iteration_000001.pt"]


def test_a_checkpoint_without_its_shards_is_not_the_newest(tmp_path, capsys):
    save_checkpoint(tmp_path, 1, {"x": 1}, keep=9)
    save_checkpoint(tmp_path, 2, {"shards": "iteration_000002.shards"}, keep=9)
    with pytest.raises(CheckpointError, match=r"needs .*iteration_000002\.shards"):
        load_checkpoint(tmp_path / "iteration_000002.pt")
    assert load_newest_checkpoint(tmp_path)["iteration"] == 1
    assert "skipped" in capsys.readouterr().out


def test_shards_go_with_their_checkpoint(tmp_path):
    for iteration in (1, 2):
        (tmp_path / f"iteration_{iteration:06d}.shards").mkdir()
        save_checkpoint(tmp_path, iteration, {}, keep=1)
    (tmp_path / "iteration_000007.shards").mkdir()  # cut off while it was written
    save_checkpoint(tmp_path, 3, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration_000003.pt"]
