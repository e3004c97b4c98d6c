"""Checkpoint folders: which tensor is which, streaming in, and out again unchanged."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD_BYTES = 5 * 10**9
_COMPANION_BYTES = 32 * 2**20
_COMPANIONS = (".json", ".model", ".txt", ".md", ".py", ".jinja")

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


@dataclass
class CheckpointFolder:
    """What of a folder must survive until it is saved again."""

    weight_map: dict[str, str] = field(default_factory=dict)
    """File of every checkpoint key."""
    companions: dict[str, bytes] = field(default_factory=dict)
    """Configuration, statistics and tokenizer files, byte for byte."""
    proprio_file: str = "proprio_projector--latest_checkpoint.pt"
    proprio_prefix: str = ""
    """``module.`` where the file's keys carry it."""


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


def find_folder(folder_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """A local folder as it is; else the repository of that name, downloaded.

    Raises:
        FileNotFoundError: when it is neither.
    """
    folder = Path(folder_or_hub_id)
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder_or_hub_id)):
        raise FileNotFoundError(
            f"{folder} is no folder, and no repository id of the form 'owner/name'"
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "proprio_projector*", "action_head*"]
    patterns += [f"*{suffix}" for suffix in _COMPANIONS]
    name = str(folder_or_hub_id)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # connection, name and permission errors of many kinds
        raise FileNotFoundError(
            f"{name!r} is no folder here, and no repository that could be downloaded: "
            f"{error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an error that names the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected an object")
    return content


def find_weight_map(folder: Path) -> dict[str, str]:
    """File of every key, from the index or from the only file there is."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder / INDEX} has no 'weight_map'")
        outside = {f for f in weight_map.values() if Path(f).name != f}
        if outside:
            raise ValueError(
                f"{folder / INDEX} names {sorted(outside)}, not plain files"
            )
        missing = {f for f in weight_map.values() if not (folder / f).is_file()}
        if missing:
            raise FileNotFoundError(
                f"shards {sorted(missing)} of {folder / INDEX} are missing in {folder}"
            )
        return weight_map
    if (folder / SINGLE).is_file():
        with _open(folder / SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)
    raise FileNotFoundError(
        f"{folder} has neither {INDEX} nor {SINGLE}; there are "
        f"{sorted(p.name for p in folder.iterdir())}. Pickled weights (.bin) are not "
        "read: convert them to safetensors"
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged or cut off ({error}); download it again"
        ) from error


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
        with _open(folder / shard) as file:
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
    result = CheckpointFolder(weight_map, _read_companions(folder))
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


def _read_companions(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in _COMPANIONS
        and path.name != INDEX
        and path.stat().st_size <= _COMPANION_BYTES
    }


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
