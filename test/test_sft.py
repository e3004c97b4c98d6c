"""Supervised fine-tuning end to end, by its real ``run`` on the toy task."""

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from recipe_scripts import ROOT, load_script
from test_recipe import differences

from torchrl_vla.config import ConfigError, SFTConfig
from torchrl_vla.config.load import load_config, load_options
from torchrl_vla.modules import policy_file
from torchrl_vla.training.checkpoint import CheckpointError, load_checkpoint

pytest.importorskip("pyarrow")
from toy_demonstrations import SUCCESS_STEPS, SUCCESS_TOL, play, record

SCRIPT = ROOT / "sota-implementations" / "vla_grpo" / "sft.py"
ENV = {
    "name": "toy",
    "num_envs": 50,
    "success_tol": SUCCESS_TOL,
    "success_steps": SUCCESS_STEPS,
}
POLICY = {"num_bins": 33, "hidden_dim": 32}
SMALL = {
    "seed": 3,
    "env": ENV,
    "policy": POLICY,
    "demos": {"num_per_task": 20, "shift_px": 1},
    "update": {"warmup_steps": 5, "batch_size": 16, "micro_batch_size": 16},
    "train": {"num_iterations": 4, "steps_per_iteration": 5},
    "eval": {"every": 2, "num_init_states": 12, "num_videos": 1},
    "checkpoint": {"every": 2, "keep": 9},
}


@pytest.fixture(scope="session")
def sft():
    return load_script("sft")


@pytest.fixture(scope="session")
def demos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "demos"
    record(folder, 150, seed=3)
    return folder


def options(folder, data, **changes):
    """``SMALL`` with sections updated, on the demonstrations in ``data``."""
    merged = {**SMALL, "run_dir": str(folder)}
    changes["demos"] = {"path": str(data), **changes.get("demos", {})}
    for name, value in changes.items():
        merged[name] = (
            {**merged.get(name, {}), **value} if isinstance(value, dict) else value
        )
    return load_options(merged, SFTConfig)


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def newest(folder):
    return load_checkpoint(sorted((folder / "checkpoints").glob("*.pt"))[-1])


@pytest.fixture(scope="module")
def whole(sft, demos, tmp_path_factory):
    """An uninterrupted run of four iterations: its folder and summary."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, sft.run(options(folder, demos))


@pytest.fixture(scope="module")
def with_images(sft, demos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    cfg = options(folder, demos, policy={"cameras": ["image"]})
    return folder, sft.run(cfg)


def test_it_solves_the_toy_from_demonstrations(sft, demos, tmp_path):
    summary = sft.run(
        options(
            tmp_path,
            demos,
            demos={"num_per_task": None},
            policy={"hidden_dim": 64},
            update={"warmup_steps": 20, "batch_size": 64, "micro_batch_size": 64},
            train={"num_iterations": 10, "steps_per_iteration": 50},
            eval={"every": 1, "num_init_states": 100, "num_videos": 0},
        )
    )
    table = rows(tmp_path)
    assert float(table[0]["eval_success_rate"]) < 0.3, "not solved by an untrained one"
    assert summary["final_success_rate"] > 0.8
    # The chunk reaches past what 33 bins resolve; chance is 3 %.
    assert float(table[-1]["val_token_accuracy"]) > 0.25
    assert summary["num_demonstrations"] == 150
    assert summary["num_validation_episodes"] == 15


def test_a_run_writes_everything(whole):
    folder, summary = whole
    assert json.loads((folder / "summary.json").read_text()) == json.loads(
        json.dumps(summary)
    )
    for name in ("config.yaml", "metrics.csv", "curves.png", "dataset_statistics.json"):
        assert (folder / name).stat().st_size > 0, name
    assert [p.suffix for p in (folder / "videos").iterdir()] == [".mp4"]
    assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == [
        "iteration_000002.pt",
        "iteration_000004.pt",
    ]
    assert not list(folder.rglob("*.partial*"))
    table = rows(folder)
    assert [int(row["iteration"]) for row in table] == [1, 2, 3, 4]
    assert summary["num_optimizer_steps"] == 20
    assert "initial_success_rate" not in summary, "nothing is evaluated before"
    assert summary["final_success_rate"] == float(
        f"{float(table[-1]['eval_success_rate']):.4f}"
    )
    assert table[0]["eval_success_rate"] == ""
    for row in table:
        assert float(row["train_loss"]) > 0
        assert 0 <= float(row["val_token_accuracy"]) <= 1


def test_the_policy_says_where_it_is_from(whole, demos):
    folder, summary = whole
    metadata = policy_file.read_metadata(folder / "policy.safetensors")
    assert metadata["seed"] == 3
    assert metadata["options"]["demos"]["path"] == str(demos)
    assert metadata["summary"]["final_success_rate"] == summary["final_success_rate"]
    assert metadata["statistics"] == json.loads(
        (folder / "dataset_statistics.json").read_text()
    )
    assert len(metadata["command"]) > 0


def test_resumed_equals_uninterrupted_bit_for_bit(sft, whole, demos, tmp_path):
    folder = tmp_path / "resumed"
    shutil.copytree(whole[0], folder)
    (folder / "checkpoints" / "iteration_000004.pt").unlink()
    (folder / "policy.safetensors").unlink()
    torch.manual_seed(12345)  # another process has drawn other numbers
    summary = sft.run(options(folder, demos, resume="auto"))
    ignore = {".options.run_dir", ".options.resume", ".random_state"}
    assert differences(newest(folder), newest(whole[0]), ignore=ignore) == []
    for name, value in whole[1].items():
        if not name.startswith("seconds_"):
            assert summary[name] == value, name
    ours, theirs = (
        [{k: v for k, v in row.items() if "seconds" not in k} for row in rows(path)]
        for path in (folder, whole[0])
    )
    assert ours == theirs


def test_resume_with_nothing_left_evaluates_and_exports_again(sft, whole, demos):
    folder, first = whole
    (folder / "policy.safetensors").unlink()
    again = sft.run(options(folder, demos, resume="auto"))
    assert again["final_success_rate"] == first["final_success_rate"]
    assert again["num_optimizer_steps"] == first["num_optimizer_steps"]
    assert (folder / "policy.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "holds a run already"),
        ({"resume": "auto", "update": {"lr": 0.5}}, "update.lr: 0.001 .* 0.5 now"),
        ({"resume": "auto", "train": {"num_iterations": 9}}, "num_iterations: 4 in"),
    ],
)
def test_another_run_is_not_written_over(sft, whole, demos, changes, message):
    with pytest.raises(CheckpointError, match=message):
        sft.run(options(whole[0], demos, **changes))


def test_it_ends_by_patience_with_the_best_weights(sft, demos, tmp_path):
    summary = sft.run(
        options(
            tmp_path,
            demos,
            # Loss on two held-out episodes grows soon when all else is memorised.
            demos={"num_per_task": 10, "validation_fraction": 0.2},
            update={"lr": 0.02},
            train={
                "num_iterations": 60,
                "steps_per_iteration": 10,
                "patience": 3,
                "stop_on": "val_loss",
            },
            eval={"every": 0},
        )
    )
    losses = [float(row["val_loss"]) for row in rows(tmp_path)]
    assert len(losses) == summary["num_iterations"] < 60
    best = summary["best_iteration"]
    assert losses[best - 1] == min(losses)
    assert len(losses) == best + 3
    state = newest(tmp_path)
    exported = policy_file.read_metadata(tmp_path / "policy.safetensors")
    assert exported["summary"]["best_iteration"] == best
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "policy.safetensors")
    best_weights = state["stopping"]["best"]
    assert differences(weights, best_weights) == []
    assert differences(weights, dict(state["policy"])) != [], "the last are others"


def grpo(folder, checkpoint, **changes):
    raw = {
        "seed": 3,
        "run_dir": str(folder),
        "env": ENV,
        "policy": {**POLICY, "checkpoint": str(checkpoint)},
        "rollout": {"num_groups": 2, "group_size": 2, "keep_low": 0.0},
        "update": {"episodes_per_step": 4},
        "train": {"num_iterations": 0},
        "eval": {"num_init_states": 12, "num_videos": 0},
    }
    for name, value in changes.items():
        raw[name] = {**raw[name], **value}
    return load_config(raw)


@pytest.mark.parametrize("cameras", [[], ["image"]])
def test_reinforcement_learning_starts_from_it(
    recipe, whole, with_images, tmp_path, cameras
):
    folder, summary = with_images if cameras else whole
    path = folder / "policy.safetensors"
    start = recipe.run(grpo(tmp_path, path, policy={"cameras": cameras}))
    assert start["evaluation"]["tasks"] == summary["evaluation"]["tasks"]
    more = grpo(
        tmp_path / "more",
        path,
        policy={"cameras": cameras},
        train={"num_iterations": 1},
    )
    assert recipe.run(more)["num_iterations"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": {"num_bins": 11}}, "policy.num_bins=11, .* Set policy.num_bins=33"),
        ({"policy": {"hidden_dim": 64}}, "Set policy.hidden_dim=32"),
        ({"policy": {"cameras": ["image"]}}, r"Set policy.cameras=\[\]"),
        ({"env": {"chunk_size": 2}}, "Set env.chunk_size=4"),
    ],
)
def test_options_of_another_policy_are_refused(
    recipe, whole, tmp_path, changes, message
):
    with pytest.raises(ValueError, match=message):
        recipe.run(grpo(tmp_path, whole[0] / "policy.safetensors", **changes))


def test_the_evaluation_script_plays_what_was_exported(whole, tmp_path):
    script = load_script("eval")
    folder, summary = whole
    cfg = grpo(tmp_path, folder / "policy.safetensors")
    found = script.run(asdict(cfg), ["policy.checkpoint"])
    assert found["tasks"] == summary["evaluation"]["tasks"]
    for raw in (
        {"run_dir": str(folder)},
        {"resume": str(folder / "checkpoints" / "iteration_000002.pt")},
    ):
        with pytest.raises(
            CheckpointError, match=r"is a run of sft\.py.*policy\.safet"
        ):
            script.run(raw, list(raw))


def test_it_goes_on_from_a_policy(sft, whole, demos, tmp_path):
    checkpoint = str(whole[0] / "policy.safetensors")
    sft.run(options(tmp_path, demos, policy={"checkpoint": checkpoint}))
    first, second = (float(rows(p)[0]["train_loss"]) for p in (whole[0], tmp_path))
    assert second < first - 0.1
    ours, theirs = (
        policy_file.read_metadata(p / "policy.safetensors")
        for p in (tmp_path, whole[0])
    )
    assert ours["action_high"] == theirs["action_high"]


def test_bad_data_is_one_clear_error(sft, demos, tmp_path):
    with pytest.raises(ValueError, match="there is no such file or folder"):
        sft.run(options(tmp_path, tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"151 .* per task are needed.*\{0: 150\}"):
        sft.run(options(tmp_path, demos, demos={"num_per_task": 151}))
    with pytest.raises(ValueError, match=r"no images of \['wrist_image'\]"):
        sft.run(
            options(
                tmp_path,
                demos,
                env={"cameras": ["image", "wrist_image"]},
                policy={"cameras": ["wrist_image"]},
            )
        )
    assert not list(tmp_path.iterdir())


def test_demonstrations_that_look_different_are_refused(sft, tmp_path):
    from torchrl_vla.data.demonstrations import DemonstrationWriter

    cases = {
        "image": r"'image' is 16 x 16 px, the environment draws 32; set env.image_size",
        "state": r"have \{'state_dim': 3\}, the environment has \{'state_dim': 4\}",
    }
    for name, message in cases.items():
        folder = tmp_path / name
        with DemonstrationWriter(folder, action_dim=None) as writer:
            for number in range(2):
                demonstration = play(number, seed=0)
                if name == "image":
                    frames = demonstration.images["image"][:, ::2, ::2]
                    demonstration.images["image"] = frames
                else:
                    demonstration.state = demonstration.state[:, :3]
                writer.add(demonstration)
        cfg = options(
            tmp_path / "run",
            folder,
            demos={"num_per_task": None},
            policy={"cameras": ["image"]},
        )
        with pytest.raises(ValueError, match=message):
            sft.run(cfg)


def test_openvla_is_trained_with_lora_and_written_as_a_checkpoint(tmp_path):
    """Its trainer's parts on a tiny OpenVLA-OFT: no simulator is needed for them."""
    openvla = pytest.importorskip("torchrl_vla.modules.openvla_oft")
    pytest.importorskip("peft")
    import numpy as np

    from torchrl_vla.config.schema import PolicyConfig, SupervisedUpdateConfig
    from torchrl_vla.data.action_chunks import ActionChunks
    from torchrl_vla.data.dataset_statistics import dataset_statistics
    from torchrl_vla.data.demonstrations import Demonstration
    from torchrl_vla.modules.factory import codec_statistics, make_codec, make_policy
    from torchrl_vla.training.policy_export import export_policy
    from torchrl_vla.training.supervised import make_trainer

    tiny = openvla.save_tiny_checkpoint(tmp_path / "tiny")
    draw = np.random.default_rng(0)
    action = draw.uniform(-0.5, 0.5, (6, 7)).astype(np.float32)
    action[:, 6] = np.where(np.arange(6) < 3, -1, 1)
    frames = draw.integers(0, 256, (6, 224, 224, 3), dtype=np.uint8)
    state = np.zeros((6, 9), np.float32)
    demo = Demonstration({"image": frames}, state, action, "go", 0, 0, True)
    cfg = PolicyConfig(
        name="openvla_oft",
        checkpoint=str(tiny),
        num_bins=256,
        cameras=["image"],
        min_window_mass=0.0,
        lora_rank=4,
        # A suite that the checkpoint does not know: the demonstrations' statistics.
        unnorm_key="mine",
    )
    statistics = dataset_statistics([demo], "mine")
    codec = make_codec(cfg, "libero_object", statistics)
    sizes = {"chunk_size": 8, "action_dim": 7, "state_dim": 9, "image_size": 224}
    policy = make_policy(cfg, sizes, seed=0, device=torch.device("cpu"))
    frozen = policy.model.projector.fc1.weight.clone()
    trainer = make_trainer(
        policy,
        SupervisedUpdateConfig(lr=0.02, warmup_steps=0, batch_size=6),
        ActionChunks([demo], codec, 8, ["image"]),
        None,
        num_steps=20,
        shift_px=0,
        prepare=torch.nn.Sequential(),
        seed=0,
    )
    first = trainer.train(1)["train_loss"]
    trainer.train(18)
    # Adapters alone can do little to a head of random weights.
    assert trainer.train(1)["train_loss"] < first - 0.1
    assert torch.equal(policy.model.projector.fc1.weight, frozen)
    batch = trainer.training.batch([0, 3])
    with torch.no_grad():
        expected = policy.action_logits(batch)
    path = export_policy(
        tmp_path,
        policy,
        codec,
        cfg,
        sizes=sizes,
        statistics=codec_statistics(cfg, "libero_object", statistics),
        origin={"seed": 0},
    )
    again_cfg = PolicyConfig(
        name="openvla_oft",
        checkpoint=str(path),
        num_bins=256,
        cameras=["image"],
        min_window_mass=0.0,
        unnorm_key="mine",
    )
    again = make_policy(again_cfg, sizes, seed=0, device=torch.device("cpu"))
    with torch.no_grad():
        found = again.action_logits(batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    token = batch["vla_action", "tokens"]
    again_codec = make_codec(again_cfg, "libero_object")
    assert torch.equal(again_codec.decode(token), codec.decode(token))
    shutil.copy(tiny / "dataset_statistics.json", path / "dataset_statistics.json")
    again_cfg.unnorm_key = "libero_object"
    with pytest.raises(ValueError, match=r"statistics\.json does not belong to"):
        make_codec(again_cfg, "libero_object")


def test_the_command_line(demos, tmp_path):
    command = [sys.executable, str(SCRIPT), f"demos.path={demos}", "env=toy"]
    command += [f"run_dir={tmp_path}/run", "env.num_envs=8", "policy.hidden_dim=16"]
    command += ["train.num_iterations=1", "train.steps_per_iteration=2"]
    command += ["eval.num_init_states=3", "eval.num_videos=0"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    metadata = policy_file.read_metadata(tmp_path / "run" / "policy.safetensors")
    assert metadata["command"].startswith(f"sft.py demos.path={demos} env=toy")
    command[2] = "demos.pth=x"
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 1
    assert "did you mean demos.path" in ended.stderr


def test_options_that_cannot_work():
    for raw, message in [
        ({}, "demos.path is not set"),
        ({"demos": {"format": "zarr"}}, "demos.format=zarr: allowed are lerobot"),
        ({"demos": {"validation_fraction": 1.0}}, "validation_fraction=1.0: must be"),
        ({"demos": {"num_per_task": 0}}, "demos.num_per_task=0: must be at least 1"),
        ({"train": {"stop_on": "loss"}}, "train.stop_on=loss: allowed are val_token"),
        ({"update": {"batch_size": 0}}, "update.batch_size=0: must be at least 1"),
        ({"update": {"beta2": 1.0}}, r"update.beta2=1.0: must be in \[0, 1\)"),
        ({"env": {"chunk_size": 5}, "demos": {"path": "x"}}, "a multiple of"),
        ({"rollout": {"group_size": 4}}, "rollout"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_options(raw, SFTConfig)
