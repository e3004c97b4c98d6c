"""The policy of a run and what belongs to it, from its section of the options."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import nn

from torchrl_vla.config.schema import PolicyConfig
from torchrl_vla.data.action_codec import (
    ActionCodec,
    OpenVLAActionCodec,
    UniformActionCodec,
)
from torchrl_vla.data.dataset_statistics import action_bounds
from torchrl_vla.data.normalization import NormalizationStatistics
from torchrl_vla.modules import lora, policy_file
from torchrl_vla.modules.compact_policy import CompactPolicy
from torchrl_vla.modules.token_policy import TokenPolicy

_SAFETENSORS = ".safetensors"


def make_codec(
    cfg: PolicyConfig,
    task_suite: str,
    statistics: Mapping[str, Any] | None = None,
) -> ActionCodec:
    """What the tokens of the policy mean in env units.

    A checkpoint decides: its tokens were trained with one meaning. Without one, or for
    a suite that it does not know, the statistics of demonstrations do.

    Args:
        cfg: the section ``policy`` of the options.
        task_suite: whose action statistics are taken, unless ``unnorm_key`` names some.
        statistics: of demonstrations, by suite; ``None`` for none.

    Raises:
        ValueError: when the checkpoint or its statistics are not there.
    """
    key = cfg.unnorm_key or task_suite
    entry = None if statistics is None else statistics[key]["action"]
    if cfg.name == "compact":
        low, high = _compact_bounds(cfg, entry)
        return UniformActionCodec(cfg.num_bins, low=low, high=high)
    from torchrl_vla.modules.openvla_oft import load_action_codec

    with _named_option("policy.checkpoint", cfg.checkpoint):
        if entry is not None and not _has_statistics(cfg, key):
            own = NormalizationStatistics.from_dict(entry)
            return OpenVLAActionCodec(own, binarize_gripper=True)
        return load_action_codec(
            cfg.checkpoint, key, statistics_folder=cfg.statistics_folder
        )


def codec_statistics(
    cfg: PolicyConfig, task_suite: str, statistics: Mapping[str, Any]
) -> dict[str, Any]:
    """The statistics that belong to the codec of :func:`make_codec`, to be saved.

    Args:
        cfg, task_suite: see :func:`make_codec`.
        statistics: of demonstrations, by suite.
    """
    key = cfg.unnorm_key or task_suite
    if cfg.name == "openvla_oft" and _has_statistics(cfg, key):
        from torchrl_vla.modules.openvla_oft import statistics as files

        found = files.load_statistics(cfg.checkpoint, cfg.statistics_folder)
        return {key: files.select_statistics(found, key)}
    return _exported(cfg).get("statistics", dict(statistics))


def _compact_bounds(cfg: PolicyConfig, entry: Mapping[str, Any] | None) -> tuple:
    metadata = _exported(cfg)
    if "action_low" in metadata:
        return metadata["action_low"], metadata["action_high"]
    return (-1.0, 1.0) if entry is None else action_bounds(entry)


def _exported(cfg: PolicyConfig) -> dict[str, Any]:
    """Metadata of an exported compact policy; empty where the checkpoint is none."""
    with _named_option("policy.checkpoint", cfg.checkpoint):
        path = policy_file.locate(cfg.checkpoint or "")
        return policy_file.read_metadata(path) if path.endswith(_SAFETENSORS) else {}


def _has_statistics(cfg: PolicyConfig, key: str) -> bool:
    from torchrl_vla.modules.openvla_oft import statistics

    found = statistics.load_statistics(cfg.checkpoint, cfg.statistics_folder)
    try:
        return bool(statistics.select_statistics(found, key))
    except KeyError:
        return False


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
        sizes: ``chunk_size``, ``action_dim``, ``state_dim`` and, for images,
            ``image_size`` (px) of the environment.
        seed: of new weights.
        device: where it lives.

    Raises:
        ValueError: when the checkpoint is not there, or of another shape; says which
            options to change.
    """
    cameras: list[NestedKey] = [("observation", camera) for camera in cfg.cameras]
    sampling = {
        "temperature": cfg.temperature,
        "top_k": cfg.top_k,
        "micro_batch_size": cfg.rollout_batch_size,
    }
    if cfg.name == "openvla_oft":
        return _make_openvla_oft(cfg, sizes, cameras, sampling, seed, device)
    network = {k: v for k, v in sizes.items() if k != "image_size"}
    weights = None
    if cfg.checkpoint is not None:
        with _named_option("policy.checkpoint", cfg.checkpoint):
            weights = load_weights(cfg.checkpoint, compact_shape(cfg, sizes))
    policy = CompactPolicy(
        **network,
        num_bins=cfg.num_bins,
        image_keys=cameras,
        hidden_dim=cfg.hidden_dim,
        seed=seed,
        **sampling,
    )
    if weights is not None:
        _load(policy, weights, cfg.checkpoint)
    return policy.to(device)


def standardize_state(
    policy: TokenPolicy, cfg: PolicyConfig, statistics: Mapping[str, Any]
) -> None:
    """Give a new compact policy the scale of its state; others have theirs.

    Args:
        policy: to change.
        cfg: the section ``policy`` of the options.
        statistics: of demonstrations, one data set.
    """
    if isinstance(policy, CompactPolicy) and cfg.checkpoint is None:
        (entry,) = statistics.values()
        policy.standardize_state(entry["proprio"]["mean"], entry["proprio"]["std"])


def compact_shape(cfg: PolicyConfig, sizes: dict[str, int]) -> dict[str, Any]:
    """Options and sizes that weights of a compact policy depend on, by name."""
    shape = {
        "policy.num_bins": cfg.num_bins,
        "policy.hidden_dim": cfg.hidden_dim,
        "policy.cameras": list(cfg.cameras),
        "env.chunk_size": sizes["chunk_size"],
        "action_dim": sizes["action_dim"],
        "state_dim": sizes["state_dim"],
    }
    if cfg.cameras and "image_size" in sizes:
        shape["env.image_size"] = sizes["image_size"]
    return shape


def _load(policy: nn.Module, weights: dict[str, torch.Tensor], path: str) -> None:
    """Load weights; what does not fit is an error of the option, not of torch."""
    own = policy.state_dict()
    given = {name: tuple(value.shape) for name, value in weights.items()}
    wrong = sorted(set(given.items()) ^ {(k, tuple(v.shape)) for k, v in own.items()})
    if wrong:
        raise ValueError(
            f"policy.checkpoint={path}: the weights are of another policy, for example "
            f"{wrong[:2]}; give the policy.* and env.* options it was trained with"
        )
    policy.load_state_dict(weights)


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


def load_weights(
    path: str, shape: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Weights of a compact policy: a safetensors file, or a checkpoint of a run.

    Args:
        path: of the file, or ``shipped:NAME``.
        shape: of :func:`compact_shape`, compared with what an exported policy was
            trained with.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for another shape.
    """
    path = policy_file.locate(path)
    if path.endswith(_SAFETENSORS):
        from safetensors.torch import load_file

        metadata = policy_file.read_metadata(path)
        policy_file.check_shape(path, metadata.get("shape", {}), shape or {})
        return load_file(path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is no file")
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
