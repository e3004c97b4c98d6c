"""OpenVLA-OFT as a policy over action tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_vla.data import keys
from torchrl_vla.data.normalization import NormalizationStatistics
from torchrl_vla.modules.openvla_oft import folders, statistics
from torchrl_vla.modules.openvla_oft.model import OpenVLAOFT
from torchrl_vla.modules.openvla_oft.prompt import PromptEncoder
from torchrl_vla.modules.token_policy import TokenPolicy


class OpenVLAOFTPolicy(TokenPolicy):
    """OpenVLA-OFT behind the interface that all token policies share.

    Source: SimpleVLA-RL at 7c51662d (``temperature`` 1.6, old log-probs in eval mode).
    TorchRL's ``VLAWrapperBase`` gives one summed log-prob per chunk.

    Args:
        model: the network.
        prompt_encoder: instructions to ids.
        image_keys: cameras in the order the network was trained with.
        proprio_key: the state it reads; ``None`` for a network without.
        proprio_statistics: normalise the state; ``None`` if it is normalised already.
        min_window_mass: the least probability the untempered head must put on the
            action window, among all ids, when the policy first acts; see
            :meth:`check_head`. 0 is off.
        temperature: divides the logits.
        top_k: see :class:`TokenPolicy`.
        micro_batch_size: rows per forward pass when acting.

    Keys read: ``image_keys`` uint8 ``[3, Y, X]`` of the network's size (see
    ``OpenVLAImageTransform``), ``"language_instruction"`` text, ``proprio_key`` float32
    ``[S]`` in env units. Keys written: see :class:`TokenPolicy`.

    Raises:
        ValueError: when the keys and the network's configuration do not fit, for images
            of another dtype or size, an empty instruction or an untrained head.
        TypeError: for an instruction that is not text.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_vla.modules.openvla_oft import tiny_config, tiny_tokenizer
        >>> policy = OpenVLAOFTPolicy(
        ...     OpenVLAOFT(tiny_config()),
        ...     PromptEncoder(tiny_tokenizer()),
        ...     min_window_mass=0.0,
        ... )
        >>> image = torch.zeros(2, 3, 224, 224, dtype=torch.uint8)
        >>> td = TensorDict({
        ...     ("observation", "image"): image,
        ...     "language_instruction": ["turn on the stove", "open the drawer"],
        ... }, batch_size=[2])
        >>> policy(td)["vla_action", "tokens"].shape
        torch.Size([2, 8, 7])
    """

    def __init__(
        self,
        model: OpenVLAOFT,
        prompt_encoder: PromptEncoder,
        *,
        image_keys: Sequence[NestedKey] = (keys.IMAGE,),
        proprio_key: NestedKey | None = None,
        proprio_statistics: NormalizationStatistics | None = None,
        min_window_mass: float = 0.5,
        temperature: float = 1.0,
        top_k: int = 0,
        micro_batch_size: int | None = None,
    ) -> None:
        config = model.config
        if len(image_keys) != config.num_images:
            raise ValueError(
                f"image_keys has {len(image_keys)} cameras and the network takes "
                f"{config.num_images}; set num_images where it is loaded"
            )
        if (proprio_key is None) != (config.proprio_dim is None):
            raise ValueError(
                f"proprio_key is {proprio_key} and the network's proprio_dim is "
                f"{config.proprio_dim}; give both or neither"
            )
        proprio_keys = [] if proprio_key is None else [proprio_key]
        super().__init__(
            in_keys=[*image_keys, *proprio_keys, keys.INSTRUCTION],
            chunk_size=config.chunk_size,
            action_dim=config.action_dim,
            num_bins=config.num_bins,
            temperature=temperature,
            top_k=top_k,
            micro_batch_size=micro_batch_size,
        )
        self.model = model
        self.prompt_encoder = prompt_encoder
        self.image_keys = list(image_keys)
        self.proprio_key = proprio_key
        self.proprio_statistics = proprio_statistics
        self.min_window_mass = min_window_mass
        self._head_is_checked = False

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_id: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        chunk_size: int = 8,
        action_dim: int = 7,
        proprio_dim: int | None = None,
        image_keys: Sequence[NestedKey] = (keys.IMAGE,),
        proprio_key: NestedKey | None = None,
        unnorm_key: str | None = None,
        statistics_folder: str | Path | None = None,
        normalization: str = "bounds_q99",
        **arguments: Any,
    ) -> "OpenVLAOFTPolicy":
        """Network, tokenizer and (with ``proprio_key``) statistics of one checkpoint.

        The actions' side of the statistics is a codec's: ``load_action_codec``.

        Args:
            folder_or_hub_id, dtype, device, revision: see
                :meth:`OpenVLAOFT.from_pretrained`.
            chunk_size, action_dim, proprio_dim: of the benchmark.
            image_keys, proprio_key: what the policy reads.
            unnorm_key, statistics_folder, normalization: of the proprioception.
            arguments: of the constructor.
        """
        folder = folders.find_folder(folder_or_hub_id, revision)
        model = OpenVLAOFT.from_pretrained(
            folder,
            dtype=dtype,
            device=device,
            num_images=len(image_keys),
            chunk_size=chunk_size,
            action_dim=action_dim,
            proprio_dim=proprio_dim,
        )
        if proprio_key is not None and unnorm_key is not None:
            found = statistics.load_statistics(folder, statistics_folder)
            entry = statistics.select_statistics(found, unnorm_key)
            arguments["proprio_statistics"] = NormalizationStatistics.from_dict(
                entry["proprio"], normalization
            )
        return cls(
            model,
            PromptEncoder.from_pretrained(folder),
            image_keys=image_keys,
            proprio_key=proprio_key,
            **arguments,
        )

    def action_logits(self, tensordict: TensorDictBase) -> Tensor:
        inputs = self.model_inputs(tensordict)
        if self.min_window_mass and not self._head_is_checked:
            self.check_head(inputs)
        return self.model(**inputs)

    def layers(self) -> list[nn.Module]:
        towers = self.model.vision_backbone.children()
        blocks = [layer for tower in towers for layer in tower.layers]
        return [*blocks, *self.model.language_model.model.layers]

    def model_inputs(self, tensordict: TensorDictBase) -> dict[str, Tensor | None]:
        """The network's arguments for a flat batch ``[B]``, on its device."""
        device = self.model.projector.fc1.weight.device
        images = torch.stack([tensordict.get(key) for key in self.image_keys], 1)
        input_ids, attention_mask = self.prompt_encoder(_instructions(tensordict))
        proprio = None
        if self.proprio_key is not None:
            proprio = tensordict.get(self.proprio_key)
            if self.proprio_statistics is not None:
                proprio = self.proprio_statistics.normalize(proprio)
            proprio = proprio.to(device, torch.float32)
        return {
            "pixel_values": self.model.normalize_images(images.to(device)),
            "input_ids": input_ids.to(device),
            "attention_mask": attention_mask.to(device),
            "proprio": proprio,
        }

    @torch.no_grad()
    def check_head(self, inputs: dict[str, Tensor | None]) -> float:
        """The probability of the action window among all ids, checked.

        A head that was trained to emit action tokens puts nearly all probability on the
        256 ids of the window; one that was not (a language model, a continuous-action
        checkpoint without its extra files) spreads it over 32,064. Such a policy would
        act, and never succeed.

        Args:
            inputs: of :meth:`model_inputs`.

        Returns:
            The mean probability over all action tokens.

        Raises:
            ValueError: when it is below ``min_window_mass``.
        """
        mass = float(self.model.window_mass(**inputs))
        if mass < self.min_window_mass:
            raise ValueError(
                f"the language head puts {mass:.3f} of its probability on the action "
                f"window, less than min_window_mass = {self.min_window_mass}: it was "
                "not trained to emit action tokens. Use a token-head checkpoint (as "
                "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1), fine-tune on "
                "demonstrations first, or set min_window_mass to 0"
            )
        self._head_is_checked = True
        return mass


def _instructions(tensordict: TensorDictBase) -> list[str]:
    value = tensordict.get(keys.INSTRUCTION, None)
    if value is None:
        raise KeyError(
            f"OpenVLA-OFT reads {keys.INSTRUCTION!r}; there are "
            f"{sorted(map(str, tensordict.keys(True, True)))}"
        )
    texts = value.tolist() if hasattr(value, "tolist") else value
    # One text may stand for the whole batch.
    return texts if isinstance(texts, list) else [texts] * len(tensordict)
