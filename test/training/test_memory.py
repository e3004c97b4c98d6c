"""The memory table against what is held, and against numbers worked by hand."""

import json
from pathlib import Path

import pytest
import torch

from torchrl_vla.modules import lora
from torchrl_vla.modules.openvla_oft import OpenVLAOFT, OpenVLAOFTPolicy, tiny_config
from torchrl_vla.modules.openvla_oft.config import OpenVLAOFTConfig
from torchrl_vla.training.memory import PARTS, activation_bytes, memory_table

REAL = Path(__file__).parents[1] / "goldens/openvla_oft/real_7b_config.json"
SCALING = Path(__file__).parents[2] / "docs/scaling.md"


def on_meta(config, dtype=torch.float32):
    with torch.device("meta"):
        return OpenVLAOFT(config).to(dtype)


@pytest.fixture(scope="module")
def real():
    """The 7B architecture, on no memory."""
    config = OpenVLAOFTConfig.from_dict(json.loads(REAL.read_text()))
    return on_meta(config, torch.bfloat16)


def test_full_fine_tuning_of_the_7b_model_on_eight_gpus(real):
    table = memory_table(
        OpenVLAOFTPolicy(real, None), num_shards=8, mixed_precision=True
    )
    num = sum(p.numel() for p in real.parameters())
    assert num == pytest.approx(7.5e9, rel=0.01)
    for phase in ("rollout", "update"):
        assert table[phase]["weights"] == pytest.approx(4 * num / 8, rel=1e-3)
        assert table[phase]["optimizer"] == pytest.approx(8 * num / 8, rel=1e-3)
        assert table[phase]["total"] == sum(table[phase][part] for part in PARTS)
    assert table["update"]["gradients"] == table["update"]["weights"]
    assert table["rollout"]["gathered"] == 2 * num
    # Two layers of LLaMA, and what is no layer: embedding, head, projector, ...
    layer = sum(p.numel() for p in real.language_model.model.layers[0].parameters())
    assert 2 * 2 * layer < table["update"]["gathered"] < 2 * (2 * layer + 0.5e9)


def test_adapters_need_no_gradient_of_the_rest():
    model = OpenVLAOFT(tiny_config())
    lora.add_lora(model, rank=2)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num = sum(p.numel() for p in model.parameters())
    table = memory_table(OpenVLAOFTPolicy(model, None))["update"]
    assert table["weights"] == 4 * num
    assert table["gradients"] == 4 * adapters
    assert table["gathered"] == 0


def test_activations_are_those_that_autograd_saves():
    real_bytes = activation_bytes(OpenVLAOFT(tiny_config()), batch_size=2)
    meta = on_meta(tiny_config())
    meta_bytes = activation_bytes(meta, batch_size=2)
    # The meta device has no fused attention: the table is an upper bound.
    assert real_bytes <= meta_bytes < 3 * real_bytes
    assert activation_bytes(meta, batch_size=4) == pytest.approx(
        2 * meta_bytes, rel=0.01
    )
    meta.gradient_checkpointing = True
    assert activation_bytes(meta, batch_size=2) < meta_bytes / 2


def test_one_decision_of_the_7b_model_with_checkpointing(real):
    real.gradient_checkpointing = True
    try:
        num_bytes = activation_bytes(real)
    finally:
        real.gradient_checkpointing = False
    # 32 layers keep their input of 348 tokens x 4096 in bfloat16: 91 MB of it.
    assert 91e6 < num_bytes < 400e6


@pytest.mark.parametrize("rank", [0, 32], ids=["full", "lora"])
def test_the_table_of_the_documentation(rank):
    config = OpenVLAOFTConfig.from_dict(json.loads(REAL.read_text()))
    model = on_meta(config, torch.bfloat16)
    model.gradient_checkpointing = True
    cut = {"num_shards": 8, "mixed_precision": True, "micro_batch_size": 8}
    if rank:
        cut = {"micro_batch_size": 4}
        with torch.device("meta"):
            lora.add_lora(model, rank=rank)
    policy = OpenVLAOFTPolicy(model, None)
    table = memory_table(policy, activations=activation_bytes(model), **cut)
    text = SCALING.read_text()
    for name, phase in table.items():
        numbers = [f"{phase[part] / 1e9:.2f}" for part in [*PARTS[:-1], "total"]]
        assert f"| {name} | {' | '.join(numbers)} |" in text
