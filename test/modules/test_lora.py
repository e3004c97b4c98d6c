import pytest
import torch
from torch import nn

from torchrl_vla.modules.lora import (
    add_lora,
    has_lora,
    load_lora,
    lora_disabled,
    lora_state_dict,
    merge_lora,
    save_lora,
)
from torchrl_vla.modules.openvla_oft import OpenVLAOFT, tiny_config

IDS = torch.tensor([[1, 40, 50, 29871]])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return OpenVLAOFT(tiny_config()).eval()


def logits(model):
    images = torch.arange(3 * 224 * 224).reshape(1, 1, 3, 224, 224) % 251
    pixels = model.normalize_images(images.to(torch.uint8))
    return model(pixels, IDS, torch.ones_like(IDS))


def train_a_little(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        logits(model).logsumexp(-1).sum().backward()
        optimizer.step()


def test_fresh_adapters_change_nothing_and_are_all_that_is_trained(model):
    before = logits(model)
    add_lora(model, rank=4)
    assert torch.equal(logits(model), before)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    # A and B of 4 projections in 3 layers.
    assert len(trained) == 2 * 4 * 3
    assert all("self_attn" in n and "language_model" in n for n in trained)


def test_adapters_of_a_bfloat16_model_take_small_steps(model):
    add_lora(model.bfloat16(), rank=4)
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in adapters} == {torch.float32}
    before = [p.detach().clone() for p in adapters]
    optimizer = torch.optim.AdamW(adapters, lr=1e-5, weight_decay=0.0)
    for _ in range(3):  # B is 0 at first, and A then without a gradient
        optimizer.zero_grad()
        logits(model).float().logsumexp(-1).sum().backward()
        optimizer.step()
    for parameter, old in zip(adapters, before, strict=True):
        assert 1e-6 < (parameter - old).abs().max() < 1e-4
    merged = merge_lora(model)
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}


def test_adapters_off_is_the_model_before(model):
    before = logits(model).detach()
    add_lora(model, rank=4)
    train_a_little(model)
    after = logits(model)
    assert (after - before).abs().max() > 1e-3
    with lora_disabled(model), torch.no_grad():
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), after)
    assert any(p.requires_grad for p in model.parameters())


def test_adapters_come_back_after_an_error(model):
    add_lora(model, rank=4)
    train_a_little(model)
    after = logits(model)
    with pytest.raises(RuntimeError, match="inside"), lora_disabled(model):
        raise RuntimeError("inside")
    assert torch.equal(logits(model), after)
    assert any(p.requires_grad for p in model.parameters())


def test_merged_model_equals_the_adapted_one_and_can_be_exported(model, tmp_path):
    names = list(model.state_dict())
    add_lora(model, rank=4)
    train_a_little(model)
    adapted = logits(model)
    with pytest.raises(ValueError, match="merge_lora"):
        model.save_pretrained(tmp_path)
    merge_lora(model)
    assert not has_lora(model)
    assert list(model.state_dict()) == names
    assert all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(logits(model), adapted, rtol=0, atol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = OpenVLAOFT.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model))


def test_only_adapters_are_saved_and_they_come_back(model, tmp_path):
    base = {k: v.clone() for k, v in model.state_dict().items()}
    add_lora(model, rank=4)
    train_a_little(model)
    save_lora(model, tmp_path)
    assert sum(v.numel() for v in lora_state_dict(model).values()) == 3072
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 20_000
    other = OpenVLAOFT(tiny_config()).eval()
    other.load_state_dict(base)
    load_lora(add_lora(other, rank=4, seed=1), tmp_path)
    assert torch.equal(logits(other), logits(model))


def test_bad_input(model, tmp_path):
    with pytest.raises(ValueError, match="rank is 0"):
        add_lora(model, rank=0)
    with pytest.raises(ValueError, match="no LoRA adapters"):
        merge_lora(model)
    with pytest.raises(FileNotFoundError, match="adapter_model"):
        load_lora(model, tmp_path)
    with pytest.raises(ValueError, match="nothing_like_this"):
        add_lora(model, target="nothing_like_this")
    add_lora(model, rank=2)
    with pytest.raises(ValueError, match="already"):
        add_lora(model)
    save_lora(model, tmp_path)
    other = add_lora(nn.Sequential(nn.Linear(2, 2)), rank=1, target="0")
    with pytest.raises(ValueError, match="do not fit"):
        load_lora(other, tmp_path)
