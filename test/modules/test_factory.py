"""Policies from options: compact, OpenVLA-OFT, with LoRA, and their references."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_vla.config.schema import PolicyConfig
from torchrl_vla.modules import CompactPolicy
from torchrl_vla.modules.factory import (
    TrainedWeights,
    make_codec,
    make_policy,
    make_reference,
)

CPU = torch.device("cpu")
SIZES = {"chunk_size": 8, "action_dim": 7, "state_dim": 9}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    openvla_oft = pytest.importorskip("torchrl_vla.modules.openvla_oft")
    return str(openvla_oft.save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def openvla(tiny, **options):
    return PolicyConfig(
        name="openvla_oft",
        checkpoint=tiny,
        num_bins=256,
        cameras=["image"],
        min_window_mass=0.0,
        **options,
    )


def observation(num=2):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num, 3, 224, 224), generator=generator)
    return TensorDict(
        {
            ("observation", "image"): images.to(torch.uint8),
            "language_instruction": ["turn on the stove"] * num,
        },
        [num],
    )


def test_compact_policy_from_options():
    cfg = PolicyConfig(num_bins=5, hidden_dim=16, temperature=1.5, top_k=3)
    policy = make_policy(cfg, SIZES, seed=3, device=CPU)
    assert isinstance(policy, CompactPolicy)
    assert (policy.chunk_size, policy.action_dim, policy.num_bins) == (8, 7, 5)
    assert (policy.temperature, policy.top_k) == (1.5, 3)
    codec = make_codec(cfg, "libero_spatial")
    assert codec.decode(torch.tensor([[0, 2, 4, 2, 2, 2, 2]]))[0, 1].item() == 0


def test_compact_policy_starts_from_saved_weights(tmp_path):
    cfg = PolicyConfig(hidden_dim=16)
    first = make_policy(cfg, SIZES, seed=1, device=CPU)
    path = tmp_path / "iteration_000001.pt"
    torch.save({"policy": first.state_dict()}, path)
    cfg = PolicyConfig(hidden_dim=16, checkpoint=str(path))
    second = make_policy(cfg, SIZES, seed=2, device=CPU)
    for ours, theirs in zip(second.parameters(), first.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_openvla_from_options(tiny):
    policy = make_policy(openvla(tiny, temperature=1.6), SIZES, seed=0, device=CPU)
    td = policy(observation())
    assert td["vla_action", "tokens"].shape == (2, 8, 7)
    assert policy.temperature == 1.6
    assert all(p.requires_grad for p in policy.parameters()), "towers are trained too"


def test_gradient_checkpointing_is_passed_on(tiny):
    cfg = openvla(tiny, gradient_checkpointing=True)
    assert make_policy(cfg, SIZES, seed=0, device=CPU).model.gradient_checkpointing


def test_openvla_codec_takes_the_statistics_of_the_suite(tiny):
    codec = make_codec(openvla(tiny), "libero_spatial")
    assert codec.num_bins == 256
    with pytest.raises(ValueError, match=r"policy.checkpoint.*libero_spatial_no_noops"):
        make_codec(openvla(tiny, unnorm_key="bridge"), "libero_spatial")


def test_a_checkpoint_that_is_not_there(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"policy\.checkpoint="):
        make_codec(openvla(str(tmp_path / "nowhere")), "libero_spatial")
    with pytest.raises(ValueError, match=r"policy\.checkpoint="):
        make_policy(openvla(str(tmp_path)), SIZES, seed=0, device=CPU)


class TestLoRA:
    @pytest.fixture
    def policy(self, tiny):
        pytest.importorskip("peft")
        policy = make_policy(openvla(tiny, lora_rank=4), SIZES, seed=0, device=CPU)
        with torch.no_grad():  # as if it had been trained
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        return policy

    def test_only_adapters_are_trained_and_saved(self, policy):
        trained = [n for n, p in policy.named_parameters() if p.requires_grad]
        state = TrainedWeights(policy).state_dict()
        assert sorted(state) == sorted(trained)
        assert all("lora_" in name for name in state)

    def test_adapters_go_back_into_a_new_policy(self, policy, tiny):
        other = make_policy(openvla(tiny, lora_rank=4), SIZES, seed=1, device=CPU)
        TrainedWeights(other).load_state_dict(TrainedWeights(policy).state_dict())
        td = observation()
        assert torch.equal(policy.get_dist(td).logits, other.get_dist(td).logits)

    def test_reference_is_the_model_without_adapters(self, policy, tiny):
        td = observation()
        plain = make_policy(openvla(tiny), SIZES, seed=0, device=CPU)
        reference = make_reference(policy).get_dist(td).logits
        assert torch.equal(reference, plain.get_dist(td).logits)
        assert not torch.equal(reference, policy.get_dist(td).logits)
        trained = [n for n, p in policy.named_parameters() if p.requires_grad]
        assert trained, "the adapters are trained again afterwards"


def test_full_checkpoint_holds_everything():
    policy = make_policy(PolicyConfig(hidden_dim=16), SIZES, seed=0, device=CPU)
    assert TrainedWeights(policy).state_dict().keys() == policy.state_dict().keys()
