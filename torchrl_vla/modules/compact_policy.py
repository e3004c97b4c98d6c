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
_TEXT_DIM = 32
_CHANNELS = 48
# Standard deviations of the state below this are noise, not motion (m, or quaternion).
_LEAST_STATE_STD = 0.01


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


class ImageEncoder(nn.Module):
    """A picture, looked at with an instruction in mind: ``[B, 3, Y, X]`` -> features.

    Four convolutions at a quarter of the resolution. After each, the instruction scales
    and shifts the channels, so that the same weights look for the object that is named.
    What is returned is where each of ``num_keypoints`` maps is high (spatial softmax)
    and what there is in the picture (the mean of the features).

    Source: FiLM, Perez et al., arXiv:1709.07871; as in RT-1 (arXiv:2212.06817) on a
    language-conditioned policy, there with EfficientNet.

    Args:
        text_dim: of the instruction's embedding.
        channels: of the feature maps.
        num_keypoints: channels of the spatial softmax.
    """

    def __init__(self, text_dim: int, channels: int, num_keypoints: int) -> None:
        super().__init__()
        self.channels = channels
        self.num_features = 2 * num_keypoints + channels
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(3, channels, 8, stride=4, padding=2),
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.Conv2d(channels, channels, 3, padding=1),
            ]
        )
        # FiLM takes the place of the affine part of the normalisation.
        self.norms = nn.ModuleList(
            nn.GroupNorm(8, channels, affine=False) for _ in self.convs
        )
        self.film = nn.Linear(text_dim, 2 * channels * len(self.convs))
        self.keypoints = nn.Conv2d(channels, num_keypoints, 1)
        self.softmax = SpatialSoftmax()

    def forward(self, image_BCYX: Tensor, text_BD: Tensor) -> Tensor:
        film = self.film(text_BD)[..., None, None].chunk(2 * len(self.convs), dim=1)
        maps = image_BCYX
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            scale, shift = film[2 * i], film[2 * i + 1]
            new = nn.functional.silu(norm(conv(maps)) * (1 + scale) + shift)
            maps = new if i == 0 else maps + new
        where = self.softmax(self.keypoints(maps))
        return torch.cat([where, maps.mean((-2, -1))], dim=-1)


class CompactPolicy(TokenPolicy):
    """Images, proprioception, instruction to ``H x A x V`` logits, 2 M weights.

    One small convolutional encoder per camera (:class:`ImageEncoder`), hashed words for
    the instruction, two residual layers, one linear head. All tokens of a chunk are
    independent given the observation, as in OpenVLA-OFT's parallel decoding.

    With the default sizes, two cameras and ``V = 65`` there are 1.7 M weights; a
    forward and backward pass of 64 rows of 96 px takes 0.12 s per camera on one core.
    The order of the words is not seen.

    Args:
        chunk_size, action_dim, num_bins, temperature, top_k, micro_batch_size: see
            :class:`TokenPolicy`.
        state_dim: size of the proprioceptive state.
        image_keys: cameras to look at; none for a policy that sees the state only.
        hidden_dim: width of the trunk.
        num_keypoints: channels of each spatial softmax.
        seed: of the initial weights.

    Attributes:
        state_mean, state_std: float32 ``[state_dim]``, buffers; the state is
            standardised with them and clipped to 5 deviations. 0 and 1 until
            :meth:`standardize_state`.

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
        self.register_buffer("state_mean", torch.zeros(state_dim))
        self.register_buffer("state_std", torch.ones(state_dim))
        # torch.manual_seed would reseed every GPU as well.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.encoders = nn.ModuleList(
                ImageEncoder(_TEXT_DIM, _CHANNELS, num_keypoints)
                for _ in self.image_keys
            )
            self.words = nn.EmbeddingBag(
                _NUM_WORDS, _TEXT_DIM, mode="sum", padding_idx=0
            )
            num_features = sum(encoder.num_features for encoder in self.encoders)
            self.stem = nn.Linear(num_features + state_dim + _TEXT_DIM, hidden_dim)
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
        text_BD = self._instruction(tensordict)
        # Of one length, however many words there are.
        film_BD = nn.functional.layer_norm(text_BD, (_TEXT_DIM,))
        features = [
            encoder(self._image(tensordict, key), film_BD)
            for key, encoder in zip(self.image_keys, self.encoders, strict=True)
        ]
        features += [self._state(tensordict), text_BD]
        hidden_BD = self.stem(torch.cat(features, dim=-1))
        for block in self.blocks:
            hidden_BD = hidden_BD + block(hidden_BD)
        logits = self.head(self.norm(hidden_BD))
        shape = (self.chunk_size, self.action_dim, self.num_bins)
        return logits.unflatten(-1, shape).float()

    def layers(self) -> list[nn.Module]:
        return [*self.encoders, *self.blocks]

    def standardize_state(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Take mean and standard deviation of the state from data.

        A deviation below 0.01 counts as 0.01, so that noise in what does not move is
        not blown up.

        Args:
            mean: ``[state_dim]``, in the environment's units.
            std: likewise.
        """
        self.state_mean.copy_(torch.as_tensor(mean))
        self.state_std.copy_(torch.as_tensor(std).clamp(min=_LEAST_STATE_STD))

    def _state(self, tensordict: TensorDictBase) -> Tensor:
        state_BS = tensordict.get(keys.STATE).to(self.stem.weight.device)
        return ((state_BS - self.state_mean) / self.state_std).clamp(-5, 5)

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
