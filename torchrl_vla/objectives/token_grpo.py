"""The clip-higher policy loss over action tokens, as a TorchRL ``LossModule``."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import dispatch
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.objectives import LossModule

from torchrl_vla.data import keys
from torchrl_vla.objectives.functional import (
    KL_ESTIMATORS,
    clipped_policy_loss,
    executed_token_mask,
    kl_estimate,
)

RATIO_LEVELS = ("token", "decision")


class TokenGRPOLoss(LossModule):
    """Policy loss of group-relative policy optimisation with token-level ratios.

    ``loss = sum_b w_b sum_{h < executed_b, a} l(r_bha, A_b)`` with the clip-higher
    surrogate ``l`` of :func:`functional.clipped_policy_loss`. The weights ``w_b``
    (``"loss_weight"``) carry the aggregation: they sum to 1 over the tokens of an
    optimizer step, so losses, gradients and metrics of micro-batches **add up** to
    those of the step. Tokens of actions that were never played get no gradient.

    Source: SimpleVLA-RL (arXiv:2509.09674), equation 8. TorchRL's ``ClipPPOLoss`` uses
    one ratio per decision, a mean over the rows it is given, and has no mask.

    Args:
        actor_network: a module with ``get_dist(tensordict)`` that returns a
            distribution over tokens ``[*B, H, A]`` (a :class:`TokenPolicy`).
        clip_low: lower clip distance, in [0, 1).
        clip_high: upper clip distance, > 0.
        ratio_level: ``token``, or ``decision`` (one ratio per chunk, from the sum of
            its executed tokens' log-probs).
        entropy_coef: weight of the entropy bonus, 0 is off.
        kl_coef: weight of the KL to the reference policy as a loss term; 0 is off.
        kl_estimator: ``k1``, ``k2`` or ``k3``.

    Keys read (names can be changed with ``set_keys``): the actor's ``in_keys``,
    ``("vla_action", "tokens")`` int64 ``[H, A]``, ``("vla_action", "log_probs")``
    float32 ``[H, A]``, ``"advantage"`` ``[1]``, ``"loss_weight"`` ``[1]``,
    ``("next", "num_executed")`` int64 ``[1]``; with ``kl_coef > 0`` also
    ``("vla_action", "reference_log_probs")`` float32 ``[H, A]``.

    Keys written: ``loss_objective`` (and ``loss_entropy``, ``loss_kl`` when switched
    on): scalars to be added. Metrics, detached: ``entropy``, ``kl_approx``,
    ``clip_fraction_low``, ``clip_fraction_high``, ``ratio_mean``, ``ratio_square_mean``
    are weighted sums; ``ratio_max`` and ``ratio_min`` are extremes over played tokens;
    ``num_tokens`` and ``num_masked_tokens`` are counts.

    Raises:
        ValueError: for clip distances, a ratio level or an estimator out of range.
        KeyError: when a key is missing, with the keys there are.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_vla.modules import CompactPolicy
        >>> from torchrl_vla.objectives import GroupAdvantage, TokenGRPOLoss
        >>> policy = CompactPolicy(chunk_size=2, action_dim=3, num_bins=5, state_dim=4)
        >>> batch = policy(TensorDict({
        ...     ("observation", "state"): torch.randn(2, 4),
        ...     ("next", "reward"): torch.tensor([[1.0], [0.0]]),
        ...     ("next", "done"): torch.ones(2, 1, dtype=torch.bool),
        ...     ("next", "num_executed"): torch.tensor([[2], [1]]),
        ...     "group_id": torch.zeros(2, 1, dtype=torch.int64),
        ... }, batch_size=[2]))
        >>> losses = TokenGRPOLoss(policy)(GroupAdvantage()(batch))
        >>> losses["loss_objective"].backward()
    """

    @dataclass
    class _AcceptedKeys:
        tokens: NestedKey = keys.TOKENS
        behavior_log_probs: NestedKey = keys.LOG_PROBS
        reference_log_probs: NestedKey = keys.REFERENCE_LOG_PROBS
        advantage: NestedKey = keys.ADVANTAGE
        loss_weight: NestedKey = keys.LOSS_WEIGHT
        num_executed: NestedKey = keys.NUM_EXECUTED

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    actor_network: nn.Module

    def __init__(
        self,
        actor_network: nn.Module,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        ratio_level: str = "token",
        entropy_coef: float = 0.0,
        kl_coef: float = 0.0,
        kl_estimator: str = "k3",
    ) -> None:
        super().__init__()
        if not 0 <= clip_low < 1 or clip_high <= 0:
            raise ValueError(
                f"clip_low is {clip_low} and clip_high {clip_high}; allowed are "
                "0 <= clip_low < 1 and clip_high > 0"
            )
        if ratio_level not in RATIO_LEVELS:
            raise ValueError(f"ratio_level is {ratio_level!r}; allowed: {RATIO_LEVELS}")
        if kl_estimator not in KL_ESTIMATORS:
            raise ValueError(
                f"kl_estimator is {kl_estimator!r}; allowed: {KL_ESTIMATORS}"
            )
        self.actor_network = actor_network
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.ratio_level = ratio_level
        self.entropy_coef = entropy_coef
        self.kl_coef = kl_coef
        self.kl_estimator = kl_estimator

    @property
    def in_keys(self) -> list[NestedKey]:
        names = self.tensor_keys
        read = [
            *self.actor_network.in_keys,
            names.tokens,
            names.behavior_log_probs,
            names.advantage,
            names.loss_weight,
            names.num_executed,
        ]
        return read + [names.reference_log_probs] * bool(self.kl_coef)

    @property
    def out_keys(self) -> list[NestedKey]:
        losses = ["loss_objective"]
        losses += ["loss_entropy"] * bool(self.entropy_coef)
        losses += ["loss_kl"] * bool(self.kl_coef)
        return losses + [
            "entropy",
            "kl_approx",
            "clip_fraction_low",
            "clip_fraction_high",
            "ratio_mean",
            "ratio_square_mean",
            "ratio_max",
            "ratio_min",
            "num_tokens",
            "num_masked_tokens",
        ]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        names = self.tensor_keys
        tokens_BHA = self._read(tensordict, names.tokens)
        behavior_BHA = self._read(tensordict, names.behavior_log_probs)
        advantage_B11 = self._read(tensordict, names.advantage).unsqueeze(-1)
        weight_B11 = self._read(tensordict, names.loss_weight).unsqueeze(-1)
        mask_BHA = executed_token_mask(
            self._read(tensordict, names.num_executed), *tokens_BHA.shape[-2:]
        )
        dist = self.actor_network.get_dist(tensordict)
        log_prob_BHA = dist.log_prob(tokens_BHA)
        entropy_BHA = dist.entropy()
        # Zero first, multiply later: an infinite value under the mask must not become
        # NaN through a product with a zero weight.
        log_ratio_BHA = (log_prob_BHA - behavior_BHA).masked_fill(~mask_BHA, 0.0)
        if self.ratio_level == "decision":
            total_B11 = log_ratio_BHA.sum((-2, -1), keepdim=True)
            log_ratio_BHA = total_B11.expand_as(log_ratio_BHA)
        loss_BHA = clipped_policy_loss(
            log_ratio_BHA, advantage_B11, self.clip_low, self.clip_high
        )

        def weighted(values_BHA: Tensor) -> Tensor:
            return (values_BHA.masked_fill(~mask_BHA, 0.0) * weight_B11).sum()

        losses = {"loss_objective": weighted(loss_BHA)}
        if self.entropy_coef:
            losses["loss_entropy"] = -self.entropy_coef * weighted(entropy_BHA)
        if self.kl_coef:
            reference_BHA = self._read(tensordict, names.reference_log_probs)
            kl_BHA = kl_estimate(log_prob_BHA, reference_BHA, self.kl_estimator)
            losses["loss_kl"] = self.kl_coef * weighted(kl_BHA)
        with torch.no_grad():
            metrics = self._metrics(log_ratio_BHA, advantage_B11, mask_BHA, weighted)
            metrics["entropy"] = weighted(entropy_BHA)
        return TensorDict({**losses, **metrics}, batch_size=[])

    def _metrics(self, log_ratio_BHA, advantage_B11, mask_BHA, weighted):
        ratio_BHA = log_ratio_BHA.exp()
        # Clipping acts only where the advantage pushes the ratio further out.
        low_BHA = (ratio_BHA < 1 - self.clip_low) & (advantage_B11 < 0)
        high_BHA = (ratio_BHA > 1 + self.clip_high) & (advantage_B11 > 0)
        played = ratio_BHA[mask_BHA] if mask_BHA.any() else ratio_BHA.new_ones(1)
        return {
            "kl_approx": weighted(-log_ratio_BHA),
            "clip_fraction_low": weighted(low_BHA.float()),
            "clip_fraction_high": weighted(high_BHA.float()),
            "ratio_mean": weighted(ratio_BHA),
            "ratio_square_mean": weighted(ratio_BHA**2),
            "ratio_max": played.max(),
            "ratio_min": played.min(),
            "num_tokens": mask_BHA.sum(),
            "num_masked_tokens": (~mask_BHA).sum(),
        }

    @staticmethod
    def _read(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
        value = tensordict.get(key, None)
        if value is None:
            raise KeyError(
                f"TokenGRPOLoss needs {key!r}; the batch has "
                f"{sorted(map(str, tensordict.keys(True, True)))}. GroupAdvantage "
                "writes 'advantage' and 'loss_weight', MultiAction "
                "('next', 'num_executed'); set_keys changes the names."
            )
        return value
