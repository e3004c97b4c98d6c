"""Weights of a checkpoint: which tensor is which, streamed in, and out unchanged."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from torchrl_vla.modules.openvla_oft.folders import (
    INDEX,
    SINGLE,
    CheckpointFolder,
    find_weight_map,
    open_shard,
    read_companions,
)

_SHARD_BYTES = 5 * 10**9

# Names inside transformers' vision layers -> (name in the checkpoint, which third of
# the fused projection). DINOv2's attention has two sets of names: its releases differ.
_LAYER_NAMES = {
    "attention.q_proj": ("attn.qkv", 0),
    "attention.k_proj": ("attn.qkv", 1),
    "attention.v_proj": ("attn.qkv", 2),
    "attention.o_proj": ("attn.proj", 0),
    "attention.attention.query": ("attn.qkv", 0),
    "attention.attention.key": ("attn.qkv", 1),
    "attention.attention.value": ("attn.qkv", 2),
    "attention.output.dense": ("attn.proj", 0),
    "self_attn.q_proj": ("attn.qkv", 0),
    "self_attn.k_proj": ("attn.qkv", 1),
    "self_attn.v_proj": ("attn.qkv", 2),
    "self_attn.out_proj": ("attn.proj", 0),
    "layer_norm1": ("norm1", 0),
    "layer_norm2": ("norm2", 0),
    "layer_scale1": ("ls1", 0),
    "layer_scale2": ("ls2", 0),
}
_LAYER = re.compile(
    r"(vision_backbone\.\w+)\.layers\.(\d+)\.(.+)\.(weight|bias|lambda1)"
)
_PROPRIO = "proprio_projector."


def checkpoint_key(name: str) -> tuple[str, int]:
    """Checkpoint key of one of the model's tensors, and which part of it.

    Example:
        >>> checkpoint_key("vision_backbone.featurizer.layers.3.attention.k_proj.bias")
        ('vision_backbone.featurizer.blocks.3.attn.qkv.bias', 1)
    """
    match = _LAYER.fullmatch(name)
    if match:
        tower, index, inner, leaf = match.groups()
        inner, part = _LAYER_NAMES.get(inner, (inner, 0))
        leaf = "scale_factor" if leaf == "lambda1" else leaf
        return f"{tower}.blocks.{index}.{inner}.{leaf}", part
    return name.replace(".unused.", ".").replace("/", "."), 0


def key_map(model: nn.Module) -> dict[str, list[str]]:
    """For every checkpoint key the names of the model's tensors it is made of.

    A fused query-key-value projection is three of the model's tensors, concatenated
    along the first dimension; every other key is one. The proprioception projector is
    left out: it has a file of its own.
    """
    found: dict[str, dict[int, str]] = {}
    for name in model.state_dict():
        if not name.startswith(_PROPRIO):
            key, part = checkpoint_key(name)
            found.setdefault(key, {})[part] = name
    return {key: [parts[i] for i in sorted(parts)] for key, parts in found.items()}


def checkpoint_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every checkpoint key."""
    state = model.state_dict()
    return {
        key: (sum(state[n].shape[0] for n in names), *state[names[0]].shape[1:])
        for key, names in key_map(model).items()
    }


def _check_keys(expected: Mapping, weight_map: Mapping[str, str], folder: Path) -> None:
    missing = sorted(set(expected) - set(weight_map))
    unknown = sorted(set(weight_map) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(expected)} keys are missing "
            f"{missing[:5]}, {len(unknown)} are unknown {unknown[:5]} (at most 5 are "
            "shown); weights and config.json do not belong together"
        )


def load(
    model: nn.Module, folder: Path, dtype: torch.dtype | None, device: torch.device
) -> CheckpointFolder:
    """Fill a model on the meta device; one shard is open at a time."""
    names, shapes = key_map(model), checkpoint_shapes(model)
    weight_map = find_weight_map(folder)
    _check_keys(shapes, weight_map, folder)
    for shard in sorted(set(weight_map.values())):
        keys = [key for key, file in weight_map.items() if file == shard]
        with open_shard(folder / shard) as file:
            absent = sorted(set(keys) - set(file.keys()))
            if absent:
                raise ValueError(
                    f"{folder / shard} lacks {absent[:5]}, which {INDEX} places there"
                )
            for key in keys:
                tensor = file.get_tensor(key)
                if tuple(tensor.shape) != shapes[key]:
                    raise ValueError(
                        f"{folder / shard}: {key} has shape {tuple(tensor.shape)}; "
                        f"config.json makes it {shapes[key]}"
                    )
                parts = tensor.chunk(len(names[key]))
                for name, part in zip(names[key], parts, strict=True):
                    _assign(model, name, part, dtype, device)
    result = CheckpointFolder(weight_map, read_companions(folder))
    if model.proprio_projector is not None:
        _load_proprio(model, folder, result, dtype, device)
    return result


def _assign(
    model: nn.Module,
    name: str,
    value: Tensor,
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    # A copy, so that no parameter keeps a mapped shard or a fused tensor alive.
    value = value.to(device, dtype or value.dtype, copy=True)
    if leaf in module._parameters:
        setattr(module, leaf, nn.Parameter(value))
    else:
        setattr(module, leaf, value)


def _load_proprio(
    model: nn.Module,
    folder: Path,
    result: CheckpointFolder,
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    files = sorted(folder.glob("proprio_projector*.pt"))
    if len(files) != 1:
        raise FileNotFoundError(
            f"proprio_dim is {model.config.proprio_dim}, so {folder} must have one "
            f"proprio_projector*.pt; there are {[f.name for f in files]}. Set "
            "proprio_dim to None for a policy without proprioception"
        )
    try:
        state = torch.load(files[0], map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a bad file
        raise ValueError(
            f"{files[0]} is not a plain file of tensors (weights_only): {error}"
        ) from error
    result.proprio_file = files[0].name
    result.proprio_prefix = (
        "module." if all(key.startswith("module.") for key in state) else ""
    )
    state = {key.removeprefix("module."): value for key, value in state.items()}
    expected = model.proprio_projector.state_dict()
    given = {key: tuple(value.shape) for key, value in state.items()}
    wanted = {key: tuple(value.shape) for key, value in expected.items()}
    if given != wanted:
        raise ValueError(f"{files[0]} has {given}; proprio_dim makes it {wanted}")
    for name, value in state.items():
        _assign(model, _PROPRIO + name, value, dtype, device)


def save(model: nn.Module, folder: Path) -> None:
    """Write a model as the checkpoint it was loaded from, or in shards of 5 GB."""
    state = model.state_dict()
    if any("lora_" in name for name in state):
        raise ValueError(
            "the model carries LoRA adapters; call merge_lora(model) to export it, or "
            "save_lora(model, folder) to save the adapters alone"
        )
    folder.mkdir(parents=True, exist_ok=True)
    names = key_map(model)
    weight_map = model.folder.weight_map or _split(names, state)
    total = 0
    for shard in sorted(set(weight_map.values())):
        tensors = {
            key: torch.cat([state[name].cpu() for name in names[key]]).contiguous()
            for key, file in weight_map.items()
            if file == shard
        }
        total += sum(t.numel() * t.element_size() for t in tensors.values())
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    if set(weight_map.values()) != {SINGLE}:
        index = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    companions = dict(model.folder.companions)
    config = json.dumps(dict(model.config.raw), indent=2, sort_keys=True) + "\n"
    companions.setdefault("config.json", config.encode())
    for name, content in companions.items():
        (folder / name).write_bytes(content)
    if model.proprio_projector is not None:
        prefix = model.folder.proprio_prefix
        proprio = model.proprio_projector.state_dict()
        torch.save(
            {prefix + key: value.cpu() for key, value in proprio.items()},
            folder / model.folder.proprio_file,
        )


def _split(names: Mapping[str, list[str]], state: Mapping[str, Tensor]) -> dict:
    """Assign keys to shards in order, each of at most 5 GB."""
    shard, filled, shard_of = 0, 0, {}
    for key, parts in names.items():
        size = sum(state[n].numel() * state[n].element_size() for n in parts)
        if filled and filled + size > _SHARD_BYTES:
            shard, filled = shard + 1, 0
        shard_of[key], filled = shard, filled + size
    if shard == 0:
        return dict.fromkeys(names, SINGLE)
    return {
        key: f"model-{i + 1:05d}-of-{shard + 1:05d}.safetensors"
        for key, i in shard_of.items()
    }
