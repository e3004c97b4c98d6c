"""Supervised fine-tuning of OpenVLA-OFT with the environment that it is for."""

import importlib.util

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from recipe_scripts import ROOT, load_script

from torchrl_vla.config import SFTConfig
from torchrl_vla.config.load import load_options
from torchrl_vla.data.demonstrations import Demonstration, DemonstrationWriter
from torchrl_vla.modules.factory import make_policy
from torchrl_vla.modules.openvla_oft.tiny import save_tiny_checkpoint

pytestmark = [
    pytest.mark.libero,
    pytest.mark.skipif(
        importlib.util.find_spec("libero") is None,
        reason="LIBERO is not installed: pip install 'torchrl-vla[libero]'",
    ),
]
SMALL = [
    "+experiment=sft_libero_spatial_openvla",
    "env.task_ids=[0]",
    "env.num_workers=1",
    "env.max_episode_steps=8",
    "policy.dtype=float32",
    "policy.lora_rank=2",
    "policy.min_window_mass=0",
    "demos.validation_fraction=0.5",
    "update.batch_size=4",
    "train.num_iterations=1",
    "train.steps_per_iteration=2",
    "train.device=cpu",
    "eval.num_init_states=1",
    "eval.num_videos=0",
]


def record(folder):
    """Two episodes of noise in the shapes of LIBERO."""
    draw = np.random.default_rng(0)
    with DemonstrationWriter(folder) as writer:
        for number in range(2):
            shape = (10, 256, 256, 3)
            writer.add(
                Demonstration(
                    images={"image": draw.integers(0, 256, shape, dtype=np.uint8)},
                    state=draw.normal(size=(10, 9)).astype(np.float32),
                    action=draw.uniform(-0.9, 0.9, (10, 7)).astype(np.float32),
                    instruction="pick up the bowl",
                    task_id=0,
                    init_state_id=number,
                    success=True,
                )
            )


def test_images_are_prepared_as_the_environment_does(tmp_path):
    """Demonstrations are in the simulator's size, 256 px; the policy sees 224."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("peft")
    weights = save_tiny_checkpoint(tmp_path / "weights")
    record(data := tmp_path / "demos")
    given = [f"policy.checkpoint={weights}", f"demos.path={data}"]
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        raw = compose("sft", [*SMALL, *given, f"run_dir={tmp_path / 'run'}"])
    cfg = load_options(raw, SFTConfig)
    summary = load_script("sft").run(cfg)
    assert summary["evaluation"]["num_episodes"] == 1
    cfg.policy.checkpoint, cfg.policy.lora_rank = str(tmp_path / "run/policy"), 0
    sizes = {"chunk_size": 8, "action_dim": 7, "state_dim": 9, "image_size": 224}
    make_policy(cfg.policy, sizes, seed=0, device=torch.device("cpu"))
