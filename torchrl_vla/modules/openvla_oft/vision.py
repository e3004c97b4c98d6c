"""The vision towers, from transformers' layers, with the checkpoint's embeddings.

Shape legend: ``B`` decisions, ``P`` patches of an image, ``D`` width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersLayer,
)
from transformers.models.siglip.modeling_siglip import (
    SiglipEncoderLayer,
    SiglipVisionConfig,
)

from torchrl_vla.modules.openvla_oft.config import OpenVLAOFTConfig, TowerConfig

_EPS = 1e-6

RunLayer = Callable[..., Tensor]
"""``run(layer, hidden, **arguments)``: plain, or with gradient checkpointing."""


class VisionTower(nn.Module):
    """Patch features of the last block but one, before the final norm.

    Positions are added to the patches only; the class and register tokens come in
    front of them and are dropped at the end. The last block, the final norm and the
    attention pool are in every checkpoint but never run: they are kept as buffers in
    :attr:`unused`, so that they are saved, yet neither trained nor waited for by a
    data-parallel wrapper.

    Source: TRI-ML prismatic-vlms and openvla (``get_intermediate_layers`` of timm's
    vision transformer). transformers' ``Dinov2WithRegistersModel`` instead gives the
    class token a position and normalises the last block's output.

    Args:
        config: sizes.
        num_patches: ``P``.
    """

    def __init__(self, config: TowerConfig, num_patches: int) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv2d(3, width, config.patch_size, config.patch_size)}
        )
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, num_patches, width))
        if config.num_registers:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
            self.reg_token = nn.Parameter(torch.zeros(1, config.num_registers, width))
        make_layer = _make_dinov2_layer if config.kind == "dinov2" else _make_siglip
        self.layers = nn.ModuleList(make_layer(config) for _ in range(config.depth - 1))
        self.unused = nn.Module()
        for key, shape in unused_shapes(config).items():
            self.unused.register_buffer(key.replace(".", "/"), torch.zeros(shape))

    def forward(self, pixels_BCYX: Tensor, run: RunLayer) -> Tensor:
        """Normalised pixels ``[B, 3, Y, X]`` to features ``[B, P, D]``."""
        patches_BDyx = self.patch_embed["proj"](pixels_BCYX)
        hidden_BPD = patches_BDyx.flatten(2).transpose(1, 2) + self.pos_embed
        num_prefix = 0
        if self.config.num_registers:
            prefix_1PD = torch.cat([self.cls_token, self.reg_token], 1)
            num_prefix = prefix_1PD.shape[1]
            prefix_BPD = prefix_1PD.expand(len(hidden_BPD), -1, -1)
            hidden_BPD = torch.cat([prefix_BPD, hidden_BPD], 1)
        # SigLIP's layer insists on a mask; DINOv2's has none in some releases.
        mask = {"attention_mask": None} if self.config.kind == "siglip" else {}
        for layer in self.layers:
            hidden_BPD = run(layer, hidden_BPD, **mask)
        return hidden_BPD[:, num_prefix:]


class VisionBackbone(nn.Module):
    """One tower, or DINOv2 and SigLIP side by side, over one or several images."""

    def __init__(self, config: OpenVLAOFTConfig) -> None:
        super().__init__()
        names = ("featurizer", "fused_featurizer")
        for name, tower in zip(names, config.towers, strict=False):
            self.add_module(name, VisionTower(tower, config.num_patches))

    def forward(self, pixel_values: Tensor, run: RunLayer) -> Tensor:
        """Patch features of all images, one image after the other.

        Args:
            pixel_values: ``[B, 3 * towers * images, Y, X]``; the channels of an image
                are those of its towers in turn.
            run: how a layer is called.

        Returns:
            ``[B, images * P, D]``, ``D`` the widths of the towers together.
        """
        towers = list(self.children())
        images = pixel_values.split(3 * len(towers), dim=1)
        features = [
            torch.cat(
                [
                    tower(pixels_BCYX, run)
                    for tower, pixels_BCYX in zip(
                        towers, image.split(3, dim=1), strict=True
                    )
                ],
                dim=-1,
            )
            for image in images
        ]
        return torch.cat(features, dim=1)


class Projector(nn.Module):
    """From patch features to LLaMA's width: three linear layers if fused, else two."""

    def __init__(self, config: OpenVLAOFTConfig) -> None:
        super().__init__()
        vision, width = config.vision_width, config.text["hidden_size"]
        fused = len(config.towers) > 1
        hidden = 4 * vision if fused else width
        self.fc1 = nn.Linear(vision, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.fc3 = nn.Linear(width, width) if fused else None

    def forward(self, features_BPD: Tensor) -> Tensor:
        hidden_BPD = self.fc2(nn.functional.gelu(self.fc1(features_BPD)))
        if self.fc3 is None:
            return hidden_BPD
        return self.fc3(nn.functional.gelu(hidden_BPD))


class ProprioProjector(nn.Module):
    """One token from the normalised proprioceptive state ``[B, S]``: ``[B, 1, D]``."""

    def __init__(self, proprio_dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, proprio_BS: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(proprio_BS))).unsqueeze(1)


def _make_dinov2_layer(config: TowerConfig) -> nn.Module:
    layer_config = Dinov2WithRegistersConfig(
        hidden_size=config.width,
        num_attention_heads=config.num_heads,
        mlp_ratio=config.mlp_ratio,
        hidden_act="gelu",
        layer_norm_eps=_EPS,
    )
    layer_config._attn_implementation = "sdpa"
    return Dinov2WithRegistersLayer(layer_config)


def _make_siglip(config: TowerConfig) -> nn.Module:
    layer_config = SiglipVisionConfig(
        hidden_size=config.width,
        num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_width,
        # Not the tanh approximation of SigLIP's own code: OpenVLA was trained with
        # timm's model of that name, which has the exact function.
        hidden_act="gelu",
        layer_norm_eps=_EPS,
    )
    layer_config._attn_implementation = "sdpa"
    return SiglipEncoderLayer(layer_config)


def unused_shapes(config: TowerConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint keys of a tower that the forward pass never reads, with shapes."""
    shapes = _norm_shapes("norm", config.width)
    last = f"blocks.{config.depth - 1}."
    shapes |= _norm_shapes(last + "norm1", config.width)
    shapes |= _norm_shapes(last + "norm2", config.width)
    shapes |= _linear_shapes(last + "attn.qkv", config.width, 3 * config.width)
    shapes |= _linear_shapes(last + "attn.proj", config.width, config.width)
    shapes |= _mlp_shapes(last + "mlp", config)
    if config.kind == "dinov2":
        shapes[last + "ls1.scale_factor"] = (config.width,)
        shapes[last + "ls2.scale_factor"] = (config.width,)
        return shapes
    shapes["attn_pool.latent"] = (1, 1, config.width)
    shapes |= _linear_shapes("attn_pool.q", config.width, config.width)
    shapes |= _linear_shapes("attn_pool.kv", config.width, 2 * config.width)
    shapes |= _linear_shapes("attn_pool.proj", config.width, config.width)
    shapes |= _norm_shapes("attn_pool.norm", config.width)
    return shapes | _mlp_shapes("attn_pool.mlp", config)


def _norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear_shapes(name: str, width_in: int, width_out: int) -> dict:
    return {f"{name}.weight": (width_out, width_in), f"{name}.bias": (width_out,)}


def _mlp_shapes(name: str, config: TowerConfig) -> dict[str, tuple[int, ...]]:
    return _linear_shapes(
        f"{name}.fc1", config.width, config.mlp_width
    ) | _linear_shapes(f"{name}.fc2", config.mlp_width, config.width)
