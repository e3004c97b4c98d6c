"""What an OpenVLA-OFT checkpoint's ``config.json`` says, checked, and nothing more."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Size of one vision tower, and the normalisation of its pixels."""

    kind: str
    """``dinov2`` (registers, layer scale) or ``siglip``."""
    width: int
    depth: int
    """Blocks in the checkpoint; the last one is never run."""
    num_heads: int
    mlp_ratio: float
    num_registers: int
    """Register tokens; with any there is also a class token."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    patch_size: int = 14

    @property
    def mlp_width(self) -> int:
        return int(self.width * self.mlp_ratio)


TOWERS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": TowerConfig(
        kind="dinov2",
        width=1024,
        depth=24,
        num_heads=16,
        mlp_ratio=4,
        num_registers=4,
        mean=_IMAGENET[0],
        std=_IMAGENET[1],
    ),
    "vit_so400m_patch14_siglip_224": TowerConfig(
        kind="siglip",
        width=1152,
        depth=27,
        num_heads=16,
        mlp_ratio=3.7362,
        num_registers=0,
        mean=_HALF[0],
        std=_HALF[1],
    ),
}
"""Towers by the identifier that stands in ``timm_model_ids``."""

_SIZE_OVERRIDES = {
    "embed_dim": "width",
    "depth": "depth",
    "num_heads": "num_heads",
    "mlp_ratio": "mlp_ratio",
}


@dataclass(frozen=True, kw_only=True)
class OpenVLAOFTConfig:
    """Architecture of an OpenVLA-OFT policy with the token head.

    Build it with :meth:`from_dict`. The chunk, the action dimensions, the number of
    images and proprioception are no part of a checkpoint: the benchmark decides them.

    Example:
        >>> raw = {
        ...     "timm_model_ids": ["vit_so400m_patch14_siglip_224"],
        ...     "image_sizes": [224],
        ...     "text_config": {"vocab_size": 32064, "pad_token_id": 32000},
        ... }
        >>> config = OpenVLAOFTConfig.from_dict(raw)
        >>> config.window_start, config.num_patches, config.num_action_tokens
        (31744, 256, 56)
    """

    towers: tuple[TowerConfig, ...]
    text: dict[str, Any]
    """Arguments of the LLaMA configuration."""
    image_size: int = 224
    """Pixels per side."""
    num_images: int = 1
    """Cameras, 1 to 3."""
    chunk_size: int = 8
    """``H``, actions per decision."""
    action_dim: int = 7
    """``A``."""
    proprio_dim: int | None = None
    """Length of the proprioceptive state; ``None`` leaves it out."""
    num_bins: int = 256
    """``V``, ids of the action window."""
    pad_to_multiple_of: int = 64
    """Rows that were appended to the 32,000 of the vocabulary."""
    stop_id: int = 2
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The file as it was read; it is written back unchanged."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_images <= 3:
            raise ValueError(f"num_images is {self.num_images}; allowed are 1 to 3")
        if self.chunk_size < 1 or self.action_dim < 1:
            raise ValueError(
                f"chunk_size is {self.chunk_size} and action_dim {self.action_dim}; "
                "both must be >= 1"
            )

    @property
    def window_start(self) -> int:
        """First vocabulary id of the action window (31744)."""
        return self.text["vocab_size"] - self.pad_to_multiple_of - self.num_bins

    @property
    def num_patches(self) -> int:
        """Visual tokens per image."""
        return (self.image_size // self.towers[0].patch_size) ** 2

    @property
    def num_action_tokens(self) -> int:
        return self.chunk_size * self.action_dim

    @property
    def vision_width(self) -> int:
        """Features of a patch, all towers together."""
        return sum(tower.width for tower in self.towers)

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], *, origin: str = "config.json", **options: Any
    ) -> "OpenVLAOFTConfig":
        """From the content of a checkpoint's ``config.json``.

        Args:
            raw: the parsed file.
            origin: its name, for error messages.
            options: ``num_images``, ``chunk_size``, ``action_dim``, ``proprio_dim``.

        Raises:
            ValueError: when an entry is missing or unknown; it is named.
        """
        for name in ("timm_model_ids", "image_sizes", "text_config"):
            if not raw.get(name):
                raise ValueError(
                    f"{origin} has no {name!r}: expected is the configuration of an "
                    f"OpenVLA checkpoint; it has {sorted(raw)}"
                )
        if raw.get("model_type", "openvla") != "openvla":
            raise ValueError(
                f"{origin}: model_type is {raw['model_type']!r}; expected 'openvla'"
            )
        sizes = {_side(size) for size in raw["image_sizes"]}
        if len(sizes) > 1:
            raise ValueError(f"{origin}: image_sizes {sorted(sizes)} must be equal")
        return cls(
            towers=_towers(raw, origin),
            text=_text(raw, origin),
            image_size=sizes.pop(),
            num_bins=raw.get("n_action_bins", 256),
            pad_to_multiple_of=raw.get("pad_to_multiple_of", 64),
            raw=raw,
            **options,
        )


def _side(size: int | list[int]) -> int:
    return size if isinstance(size, int) else size[0]


def _towers(raw: Mapping[str, Any], origin: str) -> tuple[TowerConfig, ...]:
    names = raw["timm_model_ids"]
    unknown = [name for name in names if name not in TOWERS]
    if unknown:
        raise ValueError(
            f"{origin}: timm_model_ids has {unknown}; known towers: {sorted(TOWERS)}"
        )
    if raw.get("use_fused_vision_backbone", len(names) == 2) != (len(names) == 2):
        raise ValueError(
            f"{origin}: use_fused_vision_backbone is "
            f"{raw['use_fused_vision_backbone']} with {len(names)} timm_model_ids; "
            "fused means exactly two towers"
        )
    if any(raw.get("timm_override_act_layers") or ()):
        raise ValueError(
            f"{origin}: timm_override_act_layers is "
            f"{raw['timm_override_act_layers']}; only null entries are supported"
        )
    overrides = raw.get("timm_model_kwargs") or [{}] * len(names)
    allowed = sorted(_SIZE_OVERRIDES)
    if len(overrides) != len(names) or any(set(o) - set(allowed) for o in overrides):
        raise ValueError(
            f"{origin}: timm_model_kwargs is {overrides}; expected is one object per "
            f"tower with entries of {allowed}"
        )
    return tuple(
        replace(
            TOWERS[name],
            **{_SIZE_OVERRIDES[key]: value for key, value in override.items()},
        )
        for name, override in zip(names, overrides, strict=True)
    )


# All that changes what is computed, with the values of LLaMA-2 7B: files list only what
# differs from them. The epsilon is 1e-6, not the 1e-5 of Llama 2's own files.
_TEXT_DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "pad_token_id": 32000,
}


def _text(raw: Mapping[str, Any], origin: str) -> dict[str, Any]:
    text = raw["text_config"]
    if text.get("model_type", "llama") != "llama" or "vocab_size" not in text:
        raise ValueError(
            f"{origin}: text_config must be a 'llama' configuration with a "
            f"vocab_size; it is {dict(text)}"
        )
    if text.get("rope_scaling"):
        raise ValueError(f"{origin}: text_config.rope_scaling is not supported")
    return {key: text.get(key, value) for key, value in _TEXT_DEFAULTS.items()}
