"""A token policy of a few million parameters, for a CPU."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_vla.data import keys
from torchrl_vla.modules.token_policy import TokenPolicy

_NUM_WORDS = 1024


@lru_cache(maxsize=4096)
def word_ids(instruction: str) -> tuple[int, ...]:
    """Hash buckets of the words of an instruction, each in ``[1, 1024)``."""
    words = instruction.lower().split()
    digests = (hashlib.blake2b(w.encode(), digest_size=4).digest() for w in words)
    return tuple(1 + int.from_bytes(d, "big") % (_NUM_WORDS - 1) for d in digests)


class SpatialSoftmax(nn.Module):
    """Expected image coordinates of every channel: ``[B, C, Y, X]`` -> ``[B, 2 C]``.

    Source: Levine et al., "End-to-end training of deep visuomotor policies",
    arXiv:1504.00702. Coordinates are in [-1, 1].
    """

    def forward(self, features_BCYX: Tensor) -> Tensor:
        height, width = features_BCYX.shape[-2:]
        weights = features_BCYX.flatten(2).softmax(-1).unflatten(-1, (height, width))
        y = torch.linspace(-1, 1, height, device=weights.device)
        x = torch.linspace(-1, 1, width, device=weights.device)
        y_BC = (weights.sum(-1) * y).sum(-1)
        x_BC = (weights.sum(-2) * x).sum(-1)
        return torch.cat([y_BC, x_BC], dim=-1)


def _image_encoder(num_keypoints: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for out_channels in (32, 64, 64):
        layers += [
            nn.Conv2d(channels, out_channels, 3, stride=2, padding=1),
            nn.GroupNorm(8, out_channels),
            nn.SiLU(),
        ]
        channels = out_channels
    layers += [nn.Conv2d(channels, num_keypoints, 3, padding=1), SpatialSoftmax()]
    return nn.Sequential(*layers)


class CompactPolicy(TokenPolicy):
    """Images, proprioception, instruction to ``H x A x V`` logits, under 5 M weights.

    One small convolutional encoder with spatial softmax per camera, hashed words for
    the instruction, two residual layers, one linear head. All tokens of a chunk are
    independent given the observation, as in OpenVLA-OFT's parallel decoding.

    Args:
        chunk_size, action_dim, num_bins, temperature, top_k, micro_batch_size: see
            :class:`TokenPolicy`.
        state_dim: size of the proprioceptive state.
        image_keys: cameras to look at; none for a policy that sees the state only.
        hidden_dim: width of the trunk.
        num_keypoints: channels of each spatial softmax.
        seed: of the initial weights.

    Keys read: ``image_keys`` uint8 ``[3, Y, X]``, at least 8 px each way;
    ``("observation", "state")`` float32 ``[state_dim]``; ``"language_instruction"`` if
    there is one. Keys written: see :class:`TokenPolicy`.

    Raises:
        TypeError: for an image that is not uint8.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> policy = CompactPolicy(chunk_size=8, action_dim=7, num_bins=65, state_dim=9)
        >>> td = TensorDict({("observation", "state"): torch.zeros(2, 9)}, [2])
        >>> policy(td)["vla_action", "tokens"].shape
        torch.Size([2, 8, 7])
    """

    def __init__(
        self,
        *,
        chunk_size: int,
        action_dim: int,
        num_bins: int,
        state_dim: int,
        image_keys: Sequence[NestedKey] = (),
        hidden_dim: int = 256,
        num_keypoints: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        micro_batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            in_keys=[*image_keys, keys.STATE],
            chunk_size=chunk_size,
            action_dim=action_dim,
            num_bins=num_bins,
            temperature=temperature,
            top_k=top_k,
            micro_batch_size=micro_batch_size,
        )
        self.image_keys = list(image_keys)
        # torch.manual_seed would reseed every GPU as well.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.encoders = nn.ModuleList(
                _image_encoder(num_keypoints) for _ in self.image_keys
            )
            self.words = nn.EmbeddingBag(_NUM_WORDS, 32, mode="sum", padding_idx=0)
            num_features = 2 * num_keypoints * len(self.image_keys) + state_dim + 32
            self.stem = nn.Linear(num_features, hidden_dim)
            self.blocks = nn.ModuleList(
                nn.Sequential(
                    nn.LayerNorm(hidden_dim),
                    nn.Linear(hidden_dim, 2 * hidden_dim),
                    nn.SiLU(),
                    nn.Linear(2 * hidden_dim, hidden_dim),
                )
                for _ in range(2)
            )
            self.norm = nn.LayerNorm(hidden_dim)
            self.head = nn.Linear(hidden_dim, chunk_size * action_dim * num_bins)
        # Start close to the uniform distribution, so that exploration is wide.
        nn.init.zeros_(self.head.bias)
        self.head.weight.data.mul_(0.1)

    def action_logits(self, tensordict: TensorDictBase) -> Tensor:
        features = [
            encoder(self._image(tensordict, key))
            for key, encoder in zip(self.image_keys, self.encoders, strict=True)
        ]
        features.append(tensordict.get(keys.STATE).to(self.stem.weight.device))
        features.append(self._instruction(tensordict))
        hidden_BD = self.stem(torch.cat(features, dim=-1))
        for block in self.blocks:
            hidden_BD = hidden_BD + block(hidden_BD)
        logits = self.head(self.norm(hidden_BD))
        shape = (self.chunk_size, self.action_dim, self.num_bins)
        return logits.unflatten(-1, shape).float()

    def _image(self, tensordict: TensorDictBase, key: NestedKey) -> Tensor:
        image = tensordict.get(key)
        if image.dtype != torch.uint8:
            raise TypeError(f"the image at {key!r} is {image.dtype}; expected uint8")
        weight = self.stem.weight
        return image.to(weight.device).to(weight.dtype) / 127.5 - 1

    def _instruction(self, tensordict: TensorDictBase) -> Tensor:
        texts = instructions(tensordict)
        ids = [word_ids(text) for text in texts]
        width = max([len(i) for i in ids] + [1])
        padded = [[*i, *(0,) * (width - len(i))] for i in ids]
        ids_BL = torch.tensor(padded, device=self.stem.weight.device)
        return self.words(ids_BL).expand(len(tensordict), -1)


def instructions(tensordict: TensorDictBase) -> list[str]:
    """Instruction of each row of a flat batch, or one empty text if there is none."""
    value = tensordict.get(keys.INSTRUCTION, None)
    return [""] if value is None else value.tolist()
