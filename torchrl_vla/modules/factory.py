"""The policy of a run and what belongs to it, from its section of the options."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import nn

from torchrl_vla.config.schema import PolicyConfig
from torchrl_vla.data.action_codec import ActionCodec, UniformActionCodec
from torchrl_vla.modules import lora
from torchrl_vla.modules.compact_policy import CompactPolicy
from torchrl_vla.modules.token_policy import TokenPolicy


def make_codec(cfg: PolicyConfig, task_suite: str) -> ActionCodec:
    """What the tokens of the policy mean in env units.

    Args:
        cfg: the section ``policy`` of the options.
        task_suite: whose action statistics are taken, unless ``unnorm_key`` names some.

    Raises:
        ValueError: when the checkpoint or its statistics are not there.
    """
    if cfg.name == "compact":
        return UniformActionCodec(cfg.num_bins, low=-1.0, high=1.0)
    from torchrl_vla.modules.openvla_oft import load_action_codec

    with _named_option("policy.checkpoint", cfg.checkpoint):
        return load_action_codec(
            cfg.checkpoint,
            cfg.unnorm_key or task_suite,
            statistics_folder=cfg.statistics_folder,
        )


@contextmanager
def _named_option(name: str, value: object) -> Iterator[None]:
    """Say which option led to files or entries that are missing."""
    try:
        yield
    except (KeyError, FileNotFoundError) as error:
        raise ValueError(f"{name}={value}: {error.args[0]}") from error


def make_policy(
    cfg: PolicyConfig, sizes: dict[str, int], *, seed: int, device: torch.device
) -> TokenPolicy:
    """The policy, with new or loaded weights.

    Args:
        cfg: the section ``policy`` of the options.
        sizes: ``chunk_size``, ``action_dim`` and ``state_dim`` of the environment.
        seed: of new weights.
        device: where it lives.
    """
    cameras: list[NestedKey] = [("observation", camera) for camera in cfg.cameras]
    sampling = {
        "temperature": cfg.temperature,
        "top_k": cfg.top_k,
        "micro_batch_size": cfg.rollout_batch_size,
    }
    if cfg.name == "openvla_oft":
        return _make_openvla_oft(cfg, sizes, cameras, sampling, seed, device)
    policy = CompactPolicy(
        **sizes,
        num_bins=cfg.num_bins,
        image_keys=cameras,
        hidden_dim=cfg.hidden_dim,
        seed=seed,
        **sampling,
    )
    if cfg.checkpoint is not None:
        policy.load_state_dict(load_weights(cfg.checkpoint))
    return policy.to(device)


def _make_openvla_oft(
    cfg: PolicyConfig,
    sizes: dict[str, int],
    cameras: list[NestedKey],
    sampling: dict[str, Any],
    seed: int,
    device: torch.device,
) -> TokenPolicy:
    from torchrl_vla.modules.openvla_oft import OpenVLAOFTPolicy

    with _named_option("policy.checkpoint", cfg.checkpoint):
        policy = OpenVLAOFTPolicy.from_pretrained(
            cfg.checkpoint,
            dtype=getattr(torch, cfg.dtype),
            device=device,
            chunk_size=sizes["chunk_size"],
            action_dim=sizes["action_dim"],
            image_keys=cameras,
            min_window_mass=cfg.min_window_mass,
            **sampling,
        )
    policy.model.gradient_checkpointing = cfg.gradient_checkpointing
    if cfg.lora_rank:
        lora.add_lora(policy.model, rank=cfg.lora_rank, seed=seed)
    return policy


def load_weights(path: str) -> dict[str, torch.Tensor]:
    """Weights of a compact policy: a safetensors file, or a checkpoint of a run."""
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)["policy"]


class TrainedWeights:
    """What a checkpoint holds of a policy: all weights, or with LoRA the adapters."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def state_dict(self) -> dict[str, torch.Tensor]:
        if lora.has_lora(self.policy):
            return lora.lora_state_dict(self.policy)
        return self.policy.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if lora.has_lora(self.policy):
            lora.load_lora_state_dict(self.policy, state)
        else:
            self.policy.load_state_dict(state)


class WithoutAdapters(nn.Module):
    """The policy with its LoRA adapters switched off, at no memory of its own."""

    def __init__(self, policy: TokenPolicy) -> None:
        super().__init__()
        self.policy = policy

    def get_dist(self, tensordict):
        with lora.lora_disabled(self.policy):
            return self.policy.get_dist(tensordict)


def make_reference(policy: TokenPolicy) -> nn.Module:
    """The policy as it is now, frozen: what a KL is measured against."""
    if lora.has_lora(policy):
        return WithoutAdapters(policy)
    return copy.deepcopy(policy).requires_grad_(False).eval()
