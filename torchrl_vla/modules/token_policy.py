"""What every policy over action tokens shares: sampling, greedy, log-probs, entropy."""

from abc import abstractmethod

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import nn
from torch.distributions import Categorical
from torchrl.envs.utils import ExplorationType, exploration_type

from torchrl_vla.data import keys
from torchrl_vla.data.random_streams import uniform


class TokenPolicy(TensorDictModuleBase):
    """A policy that emits a chunk of action tokens, ``H x A`` of them, ``V`` bins each.

    ``pi(token | observation) = softmax(action_logits / temperature)`` over the ``V``
    bins, in float32, for sampling, for the behaviour log-probs and in the update alike,
    so the importance ratio is 1 before the first optimizer step. A subclass gives
    :meth:`action_logits`; nothing else is needed.

    TorchRL's exploration context decides how tokens are read out:
    ``ExplorationType.RANDOM`` (its default) samples, ``DETERMINISTIC``, ``MODE`` and
    ``MEAN`` take the most likely bin.

    Source: SimpleVLA-RL (arXiv:2509.09674), section 3. TorchRL's ``VLAWrapperBase``
    returns one summed log-prob by default and knows no temperature; here log-probs are
    per token and the temperature is part of the distribution.

    Args:
        in_keys: what :meth:`action_logits` reads.
        chunk_size: ``H``, actions per chunk.
        action_dim: ``A``, dimensions of an action.
        num_bins: ``V``, bins per token.
        temperature: divides the logits, > 0.
        top_k: sample among the ``top_k`` most likely bins only; 0 is off. Log-probs
            stay those of the whole window.
        micro_batch_size: rows per forward pass when acting; ``None`` is all at once.

    Keys written by :meth:`forward`: ``("vla_action", "tokens")`` int64 ``[H, A]`` in
    ``[0, V)`` and ``("vla_action", "log_probs")`` float32 ``[H, A]``. An optional
    ``"sampling_seed"`` int64 ``[1]`` per row makes the sample a pure function of the
    row; without it torch's global generator is used.

    Raises:
        ValueError: for a temperature, ``top_k`` or ``micro_batch_size`` out of range.
        FloatingPointError: when acting on logits that are not finite.
    """

    def __init__(
        self,
        *,
        in_keys: list[NestedKey],
        chunk_size: int,
        action_dim: int,
        num_bins: int,
        temperature: float = 1.0,
        top_k: int = 0,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it must be > 0")
        if not 0 <= top_k <= num_bins:
            raise ValueError(
                f"top_k is {top_k}; allowed are 0 (off) to num_bins = {num_bins}"
            )
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(
                f"micro_batch_size is {micro_batch_size}; it must be >= 1 or None"
            )
        self.in_keys = list(in_keys)
        self.out_keys = [keys.TOKENS, keys.LOG_PROBS]
        self.chunk_size = chunk_size
        self.action_dim = action_dim
        self.num_bins = num_bins
        self.temperature = temperature
        self.top_k = top_k
        self.micro_batch_size = micro_batch_size

    @abstractmethod
    def action_logits(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Logits of the action window, before the temperature.

        Args:
            tensordict: a flat batch ``[B]`` with the policy's ``in_keys``.

        Returns:
            float32 ``[B, H, A, V]``.
        """

    def layers(self) -> list[nn.Module]:
        """Parts that are run one after another, for cutting a policy over ranks."""
        return []

    def get_dist(self, tensordict: TensorDictBase) -> Categorical:
        """The distribution of the tokens, batch shape ``[*B, H, A]``, float32."""
        flat = tensordict.reshape(-1)
        logits_BHAV = self.action_logits(flat).float() / self.temperature
        logits = logits_BHAV.reshape(*tensordict.shape, *logits_BHAV.shape[1:])
        return Categorical(logits=logits, validate_args=False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write tokens and their log-probs into ``tensordict`` and return it."""
        rows = tensordict.reshape(-1)
        size = self.micro_batch_size or max(len(rows), 1)
        parts = [self._act(part) for part in rows.split(size)]
        for key, values in zip(self.out_keys, zip(*parts, strict=True), strict=True):
            value = torch.cat(values)
            tensordict.set(key, value.reshape(*tensordict.shape, *value.shape[1:]))
        return tensordict

    def _act(self, rows: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
        dist = self.get_dist(rows)
        if exploration_type() in (ExplorationType.RANDOM, None):
            tokens_BHA = self._sample(dist.logits, rows.get(keys.SAMPLING_SEED, None))
        else:
            tokens_BHA = dist.logits.argmax(-1)
        log_prob_BHA = dist.log_prob(tokens_BHA)
        if not log_prob_BHA.isfinite().all():
            raise FloatingPointError(
                "the policy's logits are not finite; look at the last update's "
                "grad_norm and ratio_max, lower update.lr, and go on from a checkpoint"
            )
        return tokens_BHA, log_prob_BHA

    def _sample(
        self, logits_BHAV: torch.Tensor, seed_B1: torch.Tensor | None
    ) -> torch.Tensor:
        # Gumbel-max: argmax(logits + g), g = -log(-log(u)), samples the softmax.
        if seed_B1 is None:
            exponential = torch.empty_like(logits_BHAV).exponential_()
        else:
            seed_B = seed_B1.reshape(-1).to(logits_BHAV.device)
            u = uniform(seed_B, logits_BHAV[0].numel())
            exponential = -u.log().reshape(logits_BHAV.shape)
        if self.top_k:
            lowest = logits_BHAV.topk(self.top_k, dim=-1).values[..., -1:]
            logits_BHAV = logits_BHAV.masked_fill(logits_BHAV < lowest, -torch.inf)
        return (logits_BHAV - exponential.log()).argmax(-1)
