"""OpenVLA-OFT with the token head, on current transformers.

Shape legend: ``B`` decisions, ``L`` prompt tokens, ``P`` visual (and proprioceptive)
tokens, ``N = H * A`` action tokens, ``S`` the whole sequence, ``D`` width, ``V`` bins.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from torchrl_vla.modules.openvla_oft import folders, head_check, weights
from torchrl_vla.modules.openvla_oft.config import OpenVLAOFTConfig
from torchrl_vla.modules.openvla_oft.language import (
    check_bidirectional,
    lay_out,
    make_llama_config,
)
from torchrl_vla.modules.openvla_oft.vision import (
    Projector,
    ProprioProjector,
    VisionBackbone,
)


class OpenVLAOFT(nn.Module):
    """Images and a prompt to the logits of a chunk of action tokens, in one pass.

    The sequence is ``BOS, patches, [proprio], prompt, H * A zero vectors, stop``. Every
    position attends to every other one (pads excepted), and the logits of an action
    token are read one position before it, over the 256 ids of the action window only.

    Source: openvla-oft (arXiv:2502.19645) as trained by SimpleVLA-RL at 7c51662d. It
    equals that program within rounding. Stock transformers would attend causally here,
    which costs half of the success rate; pytorch/rl's own copy of the reference does.

    Args:
        config: the architecture.

    Raises:
        RuntimeError: when the installed transformers cannot attend in both directions.

    Example:
        >>> from torchrl_vla.modules.openvla_oft import OpenVLAOFT, tiny_config
        >>> model = OpenVLAOFT(tiny_config())
        >>> images = torch.zeros(2, 1, 3, 224, 224, dtype=torch.uint8)
        >>> ids = torch.tensor([[1, 5, 29871], [0, 1, 29871]])
        >>> mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
        >>> logits = model(model.normalize_images(images), ids, mask)
        >>> tuple(logits.shape), logits.dtype
        ((2, 8, 7, 256), torch.float32)
    """

    def __init__(self, config: OpenVLAOFTConfig) -> None:
        super().__init__()
        check_bidirectional()
        self.config = config
        self.vision_backbone = VisionBackbone(config)
        self.projector = Projector(config)
        self.language_model = LlamaForCausalLM(make_llama_config(config.text))
        self.proprio_projector = None
        if config.proprio_dim is not None:
            self.proprio_projector = ProprioProjector(
                config.proprio_dim, config.text["hidden_size"]
            )
        self.gradient_checkpointing = False
        self.folder = folders.CheckpointFolder()

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_id: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        **options: Any,
    ) -> "OpenVLAOFT":
        """Load a public checkpoint as it is, shard by shard.

        No code of the folder is executed and nothing is unpickled without
        ``weights_only``. Host memory peaks at the model in ``dtype`` plus one shard.

        Args:
            folder_or_hub_id: a folder, or a Hugging Face repository.
            dtype: of the parameters; ``None`` is as stored.
            device: of the parameters.
            revision: of the repository.
            options: ``num_images``, ``chunk_size``, ``action_dim``, ``proprio_dim``.

        Raises:
            FileNotFoundError: for a missing folder, file or shard.
            ValueError: for a damaged shard, missing, unknown or misshapen tensors, a
                continuous-action checkpoint, or an untrained language head.
        """
        folder = folders.find_folder(folder_or_hub_id, revision)
        head_check.check_files(folder)
        raw = folders.read_json(folder / "config.json")
        config = OpenVLAOFTConfig.from_dict(
            raw, origin=str(folder / "config.json"), **options
        )
        with torch.device("meta"):
            model = cls(config)
        model.folder = weights.load(model, folder, dtype, torch.device(device))
        head_check.check_window_rows(model, folder)
        # Its frequencies are computed, not stored.
        rotary = LlamaRotaryEmbedding(model.language_model.config)
        model.language_model.model.rotary_emb = rotary.to(device)
        return model.eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the checkpoint in the layout it was loaded in: same files, same keys.

        A model that was not loaded is written in shards of at most 5 GB.

        Raises:
            ValueError: while LoRA adapters are attached; merge or save them first.
        """
        weights.save(self, Path(folder))

    def normalize_images(self, images: Tensor) -> Tensor:
        """``(image / 255 - mean) / std`` per tower, in float32, on the images' device.

        Args:
            images: uint8 ``[B, images, 3, Y, X]``, 0..255.

        Returns:
            float32 ``[B, 3 * towers * images, Y, X]``.

        Raises:
            ValueError: for another dtype, count or size.
        """
        size = self.config.image_size
        expected = (self.config.num_images, 3, size, size)
        if images.dtype != torch.uint8 or images.shape[1:] != expected:
            raise ValueError(
                f"images are {images.dtype} {tuple(images.shape)}; expected is uint8 "
                f"[B, images, 3, Y, X] = [B, {', '.join(map(str, expected))}] "
                "(OpenVLAImageTransform makes it)"
            )
        unit = images.float() / 255
        towers = []
        for tower in self.config.towers:
            mean = torch.tensor(tower.mean, device=images.device).view(3, 1, 1)
            std = torch.tensor(tower.std, device=images.device).view(3, 1, 1)
            towers.append((unit - mean) / std)
        return torch.cat(towers, 2).flatten(1, 2)

    def forward(
        self,
        pixel_values: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        proprio: Tensor | None = None,
    ) -> Tensor:
        """Logits of the action window, without temperature.

        Args:
            pixel_values: float ``[B, 3 * towers * images, Y, X]`` from
                :meth:`normalize_images`.
            input_ids: int64 ``[B, L]``, the prompt from BOS to 29871, padded on either
                side (or anywhere).
            attention_mask: int64 or bool ``[B, L]``, 0 where padded.
            proprio: float ``[B, S]``, normalised; with ``proprio_dim`` only.

        Returns:
            float32 ``[B, H, A, 256]``; index ``i`` is vocabulary id ``31744 + i``.

        Raises:
            ValueError: for shapes that do not fit the configuration.
        """
        hidden_BND = self._action_hidden(
            pixel_values, input_ids, attention_mask, proprio
        )
        first = self.config.window_start
        window_VD = self.language_model.lm_head.weight[
            first : first + self.config.num_bins
        ]
        logits_BNV = nn.functional.linear(hidden_BND, window_VD).float()
        return logits_BNV.unflatten(1, (self.config.chunk_size, self.config.action_dim))

    def window_mass(
        self,
        pixel_values: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        proprio: Tensor | None = None,
    ) -> Tensor:
        """Probability of the action window among all ids, averaged: float32 scalar.

        Takes what :meth:`forward` takes, and computes all 32,064 logits.
        """
        hidden_BND = self._action_hidden(
            pixel_values, input_ids, attention_mask, proprio
        )
        logits = self.language_model.lm_head(hidden_BND).float()
        first = self.config.window_start
        window = logits[..., first : first + self.config.num_bins]
        return (window.logsumexp(-1) - logits.logsumexp(-1)).exp().mean()

    def _action_hidden(
        self,
        pixel_values: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        proprio: Tensor | None,
    ) -> Tensor:
        """What the head reads for each action token: ``[B, H * A, D]``."""
        self._check_inputs(pixel_values, input_ids, attention_mask, proprio)
        embeds_BSD, mask_BS, position_BS = self.embed(
            pixel_values, input_ids, attention_mask.bool(), proprio
        )
        hidden_BSD = self.run_language_model(embeds_BSD, mask_BS, position_BS)
        # Logits are read one position early: the first at the last prompt token.
        num_actions = self.config.num_action_tokens
        start = hidden_BSD.shape[1] - num_actions - 1
        prompt_end_B = position_BS.masked_fill(~mask_BS, -1)[:, :start].argmax(1)
        rows_B = torch.arange(len(hidden_BSD), device=hidden_BSD.device)
        first_B1D = hidden_BSD[rows_B, prompt_end_B].unsqueeze(1)
        return torch.cat(
            [first_B1D, hidden_BSD[:, start : start + num_actions - 1]], dim=1
        )

    def embed(
        self,
        pixel_values: Tensor,
        input_ids: Tensor,
        prompt_mask_BL: Tensor,
        proprio: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sequence in memory order: visual tokens, prompt, actions, stop.

        What comes first for the model is said by the positions alone, since attention
        has no direction. So the visual tokens need not be spliced behind each BOS, and
        prompts of any padding need not be moved.

        Returns:
            embeddings ``[B, S, D]``, mask bool ``[B, S]``, positions int64 ``[B, S]``.
        """
        dtype = self.projector.fc1.weight.dtype
        table = self.language_model.model.embed_tokens
        features_BPD = self.vision_backbone(pixel_values.to(dtype), self._run)
        visual_BPD = self.projector(features_BPD)
        if self.proprio_projector is not None:
            token_B1D = self.proprio_projector(proprio.to(dtype))
            visual_BPD = torch.cat([visual_BPD, token_B1D], 1)
        batch, num_visual, width = visual_BPD.shape
        num_actions = self.config.num_action_tokens
        stop_B1 = input_ids.new_full((batch, 1), self.config.stop_id)
        embeds_BSD = torch.cat(
            [
                visual_BPD,
                table(input_ids),
                visual_BPD.new_zeros(batch, num_actions, width),
                table(stop_B1),
            ],
            dim=1,
        )
        mask_BS, position_BS = lay_out(prompt_mask_BL, num_visual, num_actions + 1)
        return embeds_BSD, mask_BS, position_BS

    def run_language_model(
        self, embeds_BSD: Tensor, mask_BS: Tensor, position_BS: Tensor
    ) -> Tensor:
        """LLaMA over the sequence in both directions; final norm included."""
        llama = self.language_model.model
        rotary = llama.rotary_emb(embeds_BSD, position_ids=position_BS)
        hidden_BSD = embeds_BSD
        for layer in llama.layers:
            hidden_BSD = self._run(
                layer,
                hidden_BSD,
                # Given a mask, SDPA is not causal, and the mask knows pads only.
                attention_mask=mask_BS[:, None, None, :],
                position_embeddings=rotary,
            )
        return llama.norm(hidden_BSD)

    def _run(self, layer: nn.Module, hidden: Tensor, **arguments: Any) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            call = partial(layer, **arguments)
            return checkpoint(call, hidden, use_reentrant=False)
        return layer(hidden, **arguments)

    def _check_inputs(
        self,
        pixel_values: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        proprio: Tensor | None,
    ) -> None:
        config = self.config
        batch = len(input_ids)
        channels = 3 * len(config.towers) * config.num_images
        shapes = {
            "pixel_values": (
                pixel_values,
                (batch, channels, config.image_size, config.image_size),
            ),
            "attention_mask": (attention_mask, tuple(input_ids.shape)),
        }
        if config.proprio_dim is not None:
            shapes["proprio"] = (proprio, (batch, config.proprio_dim))
        for name, (value, expected) in shapes.items():
            given = None if value is None else tuple(value.shape)
            if given != expected:
                raise ValueError(f"{name} has shape {given}; expected is {expected}")
        if input_ids.ndim != 2 or not attention_mask.any(1).all():
            raise ValueError(
                f"input_ids of shape {tuple(input_ids.shape)} must be [B, L] with at "
                "least BOS in every row of the attention_mask"
            )
