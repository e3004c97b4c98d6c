"""Optimizer steps over whole episodes, in micro-batches of decisions."""

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchrl_vla.collectors.ranks import Alone, Ranks
from torchrl_vla.config.schema import UpdateConfig
from torchrl_vla.data import keys
from torchrl_vla.objectives.functional import executed_token_mask, normalize_weights
from torchrl_vla.objectives.token_grpo import TokenGRPOLoss
from torchrl_vla.training.global_batch import GlobalBatch
from torchrl_vla.training.gradients import clip_gradients, sum_gradients
from torchrl_vla.training.step_totals import combine, derive


class Updater:
    """One pass over a batch: ``episodes_per_step`` episodes per optimizer step.

    The batch is cut at episodes, so that 512 episodes at 128 per step are 4 optimizer
    steps however many decisions they have; each step is accumulated over micro-batches
    of ``micro_batch_size`` decisions. Loss weights are normalised over the step, so
    loss and gradient do not depend on the micro-batch size, or on the number of ranks.

    Source: SimpleVLA-RL (arXiv:2509.09674), appendix A. TorchRL's recipe counts
    decisions per optimizer step instead.

    Args:
        loss_module: gives ``loss_*`` entries that add up over micro-batches.
        optimizer: over the trained parameters of ``loss_module``.
        scheduler: stepped after every optimizer step.
        episodes_per_step: episodes per optimizer step.
        micro_batch_size: decisions per forward and backward pass.
        max_grad_norm: the gradient is scaled down to this norm.
        behavior_log_prob: ``rollout`` takes the log-probs as sampled, ``recompute``
            makes one forward pass before the update.
        mask_unexecuted: tokens that were sampled but not played, after a success within
            a chunk, do not count; false is for measuring what that does.
        reference_policy: frozen policy for the KL, or ``None``.
        ranks: that share each optimizer step.
        is_sharded: whether the policy is cut over the ranks.
        saves_optimizer: whether the optimizer is in :meth:`state_dict`, or saved with
            the shards of the policy.
        device: that computes; ``None`` is where the parameters are.

    Raises:
        ValueError: for sizes below 1 or an unknown ``behavior_log_prob``.
    """

    def __init__(
        self,
        loss_module: TokenGRPOLoss,
        optimizer: Optimizer,
        *,
        scheduler: LRScheduler | None = None,
        episodes_per_step: int = 128,
        micro_batch_size: int = 64,
        max_grad_norm: float = 1.0,
        behavior_log_prob: str = "rollout",
        mask_unexecuted: bool = True,
        reference_policy: nn.Module | None = None,
        ranks: Ranks | None = None,
        is_sharded: bool = False,
        saves_optimizer: bool = True,
        device: torch.device | None = None,
    ) -> None:
        if episodes_per_step < 1 or micro_batch_size < 1:
            raise ValueError(
                f"episodes_per_step is {episodes_per_step} and micro_batch_size "
                f"{micro_batch_size}; both must be >= 1"
            )
        if behavior_log_prob not in ("rollout", "recompute"):
            raise ValueError(
                f"behavior_log_prob is {behavior_log_prob!r}; allowed are 'rollout' "
                "and 'recompute'"
            )
        self.loss_module = loss_module
        self.policy = loss_module.actor_network
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.episodes_per_step = episodes_per_step
        self.micro_batch_size = micro_batch_size
        self.max_grad_norm = max_grad_norm
        self.behavior_log_prob = behavior_log_prob
        self.mask_unexecuted = mask_unexecuted
        self.reference_policy = reference_policy
        self.ranks = ranks or Alone()
        self.is_sharded = is_sharded
        self.saves_optimizer = saves_optimizer
        self.device = device or next(self.policy.parameters()).device
        self.num_optimizer_steps = 0

    @torch.no_grad()
    def prepare(self, batch: TensorDictBase | GlobalBatch) -> dict[str, float]:
        """Write the log-probs that the update compares with, before the first step.

        Comes before the advantage, whose loss weights count the tokens that are played.

        Args:
            batch: decisions, or with several ranks those of :func:`deal`.

        Returns:
            ``ratio_deviation``: the largest ``|ratio - 1|`` of a played token before
            the first optimizer step (0 but for rounding, if sampling and update agree);
            ``reference_kl`` (with a reference policy): mean log-prob difference per
            played token.
        """
        batch = _as_global(batch)
        rows = batch.rows
        if not self.mask_unexecuted:
            num_executed = rows[keys.NUM_EXECUTED]
            chunk_size = rows[keys.TOKENS].shape[-2]
            rows[keys.NUM_EXECUTED] = torch.full_like(num_executed, chunk_size)
        now_BHA = self._log_probs(self.policy, batch)
        mask_BHA = executed_token_mask(
            rows[keys.NUM_EXECUTED], *rows[keys.TOKENS].shape[-2:]
        )
        difference = (now_BHA - rows[keys.LOG_PROBS])[mask_BHA]
        deviation = torch.expm1(difference).abs().max() if mask_BHA.any() else 0.0
        metrics = {"ratio_deviation": float(deviation)}
        if self.behavior_log_prob == "recompute":
            rows[keys.LOG_PROBS] = now_BHA
        if self.reference_policy is not None:
            reference_BHA = self._log_probs(self.reference_policy, batch)
            rows[keys.REFERENCE_LOG_PROBS] = reference_BHA
            metrics["reference_kl"] = float((now_BHA - reference_BHA)[mask_BHA].mean())
        return metrics

    def _log_probs(self, policy: nn.Module, batch: GlobalBatch) -> torch.Tensor:
        policy.eval()
        own = batch.own()
        parts = []
        for part in own.split(self.micro_batch_size):
            if len(part):
                on_device = part.to(self.device)
                dist = policy.get_dist(on_device)
                parts.append(dist.log_prob(on_device[keys.TOKENS]))
        for spare in self._spares(batch, 0, len(batch.rows)):
            policy.get_dist(spare.to(self.device))
        like = own[keys.LOG_PROBS]
        joined = torch.cat(parts).to(like.device) if parts else like
        return batch.join(joined, self.ranks)

    def _spares(self, batch: GlobalBatch, start: int, end: int) -> list[TensorDictBase]:
        """Micro-batches that count nothing, one for each that another rank has more.

        The passes of ranks that share a cut policy must match.
        """
        if not self.is_sharded:
            return []
        size = self.micro_batch_size
        num_own = -(-len(batch.own(start, end)) // size)
        num_most = -(-batch.num_own_at_most(start, end) // size)
        return [_silent(batch.spare) for _ in range(num_most - num_own)]

    def update(self, batch: TensorDictBase | GlobalBatch) -> dict[str, float]:
        """Take the optimizer steps.

        Args:
            batch: whole episodes, with advantages and loss weights, ordered so that the
                decisions of an episode lie together; with several ranks those of
                :func:`deal`.

        Returns:
            Metrics, averaged over the optimizer steps (extremes: over all), and
            ``optimizer_steps``.

        Raises:
            FloatingPointError: for a gradient that is not finite, before the step.
        """
        # Dropout off: a ratio between different dropout masks is noise.
        self.policy.eval()
        batch = _as_global(batch)
        parts = self._cut(batch.rows)
        rows = batch.rows.clone(False)
        rows[keys.LOSS_WEIGHT] = torch.cat([part[keys.LOSS_WEIGHT] for part in parts])
        weighted = replace(batch, rows=rows)
        steps, start = [], 0
        for part in parts:
            steps.append(self._step(weighted, start, start + len(part)))
            start += len(part)
        metrics = {
            name: sum(step[name] for step in steps) / len(steps) for name in steps[0]
        }
        metrics["ratio_max"] = max(step["ratio_max"] for step in steps)
        metrics["ratio_min"] = min(step["ratio_min"] for step in steps)
        advantage = rows[keys.ADVANTAGE]
        metrics["advantage_mean"] = float(advantage.mean())
        metrics["advantage_std"] = float(advantage.std(correction=0))
        metrics["optimizer_steps"] = len(steps)
        metrics["learning_rate"] = steps[-1]["learning_rate"]
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, schedule of the learning rate and number of steps taken."""
        scheduler = self.scheduler and self.scheduler.state_dict()
        return {
            "optimizer": self.optimizer.state_dict() if self.saves_optimizer else None,
            "scheduler": scheduler,
            "num_optimizer_steps": self.num_optimizer_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.saves_optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.num_optimizer_steps = state["num_optimizer_steps"]

    def _cut(self, batch: TensorDictBase) -> list[TensorDictBase]:
        """The rows of each optimizer step, with weights normalised over them."""
        episode_B = batch[keys.EPISODE_ID].flatten()
        _, length_E = episode_B.unique_consecutive(return_counts=True)
        sizes = [int(part.sum()) for part in length_E.split(self.episodes_per_step)]
        steps = []
        for rows in batch.split(sizes):
            rows = rows.clone(False)
            num_tokens = rows[keys.NUM_EXECUTED] * rows[keys.TOKENS].shape[-1]
            weight = normalize_weights(rows[keys.LOSS_WEIGHT].double(), num_tokens)
            rows[keys.LOSS_WEIGHT] = weight.float()
            steps.append(rows)
        return steps

    def _step(self, batch: GlobalBatch, start: int, end: int) -> dict[str, float]:
        """An optimizer step on the rows from ``start`` to ``end``."""
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, float] = {}
        for part in batch.own(start, end).split(self.micro_batch_size):
            if len(part):
                losses = self._backward(part.to(self.device))
                combine(totals, {k: v.item() for k, v in losses.items()})
        for spare in self._spares(batch, start, end):
            self._backward(spare.to(self.device))
        everywhere = self.ranks.gather(totals)
        totals = {}
        for of_rank in everywhere:
            combine(totals, of_rank)
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        if self.ranks.size > 1 and not self.is_sharded:
            sum_gradients(parameters, self.ranks)
        grad_norm = clip_gradients(parameters, self.max_grad_norm)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        if not grad_norm.isfinite():
            raise FloatingPointError(
                f"the gradient of optimizer step {self.num_optimizer_steps + 1} is not "
                f"finite (ratios {float(totals['ratio_min']):.3g} to "
                f"{float(totals['ratio_max']):.3g}); the step was not taken. Lower "
                "update.lr or update.max_grad_norm and go on from the last checkpoint"
            )
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.num_optimizer_steps += 1
        totals["grad_norm"] = float(grad_norm)
        totals["learning_rate"] = learning_rate
        return derive(totals)

    def _backward(self, rows: TensorDictBase) -> TensorDictBase:
        losses = self.loss_module(rows)
        names = [name for name in losses.keys() if name.startswith("loss_")]
        sum(losses[name] for name in names).backward()
        return losses.detach()


def _as_global(batch: TensorDictBase | GlobalBatch) -> GlobalBatch:
    return batch if isinstance(batch, GlobalBatch) else GlobalBatch(batch)


def _silent(row: TensorDictBase) -> TensorDictBase:
    """A row that gives a loss of 0, with a graph through the whole policy."""
    silent = row.clone(False)
    silent[keys.NUM_EXECUTED] = torch.zeros_like(row[keys.NUM_EXECUTED])
    for name in (keys.LOSS_WEIGHT, keys.ADVANTAGE):
        silent[name] = torch.zeros(len(row), 1)
    if keys.REFERENCE_LOG_PROBS not in silent.keys(True):
        silent[keys.REFERENCE_LOG_PROBS] = row[keys.LOG_PROBS]
    return silent


def make_updater(
    loss_module: TokenGRPOLoss,
    cfg: UpdateConfig,
    *,
    behavior_log_prob: str = "rollout",
    mask_unexecuted: bool = True,
    reference_policy: nn.Module | None = None,
    **sharing: Any,
) -> Updater:
    """An updater with AdamW: linear warm-up, then a constant rate.

    Args:
        loss_module: with the policy that is trained.
        cfg: the section ``update`` of the options.
        behavior_log_prob, mask_unexecuted, reference_policy: see :class:`Updater`.
        sharing: ``ranks``, ``is_sharded``, ``saves_optimizer`` and ``device`` of
            :class:`Updater`.
    """
    policy = loss_module.actor_network
    optimizer = AdamW(
        [p for p in policy.parameters() if p.requires_grad],
        lr=cfg.lr,
        betas=(cfg.beta1, cfg.beta2),
        weight_decay=cfg.weight_decay,
    )

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / (cfg.warmup_steps + 1))

    return Updater(
        loss_module,
        optimizer,
        scheduler=LambdaLR(optimizer, factor),
        episodes_per_step=cfg.episodes_per_step,
        micro_batch_size=cfg.micro_batch_size,
        max_grad_norm=cfg.max_grad_norm,
        behavior_log_prob=behavior_log_prob,
        mask_unexecuted=mask_unexecuted,
        reference_policy=reference_policy,
        **sharing,
    )
