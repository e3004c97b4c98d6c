"""Optimizer steps over whole episodes, in micro-batches of decisions."""

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchrl_vla.config.schema import UpdateConfig
from torchrl_vla.data import keys
from torchrl_vla.objectives.functional import executed_token_mask, normalize_weights
from torchrl_vla.objectives.token_grpo import TokenGRPOLoss

_EXTREMES = {"ratio_max": torch.maximum, "ratio_min": torch.minimum}


class Updater:
    """One pass over a batch: ``episodes_per_step`` episodes per optimizer step.

    The batch is cut at episodes, so that 512 episodes at 128 per step are 4 optimizer
    steps however many decisions they have; each step is accumulated over micro-batches
    of ``micro_batch_size`` decisions. Loss weights are normalised over the step, so
    loss and gradient do not depend on the micro-batch size.

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
        self.num_optimizer_steps = 0

    @torch.no_grad()
    def prepare(self, batch: TensorDictBase) -> dict[str, float]:
        """Write the log-probs that the update compares with, before the first step.

        Comes before the advantage, whose loss weights count the tokens that are played.

        Returns:
            ``ratio_deviation``: the largest ``|ratio - 1|`` of a played token before
            the first optimizer step (0 but for rounding, if sampling and update agree);
            ``reference_kl`` (with a reference policy): mean log-prob difference per
            played token.
        """
        if not self.mask_unexecuted:
            num_executed = batch[keys.NUM_EXECUTED]
            chunk_size = batch[keys.TOKENS].shape[-2]
            batch[keys.NUM_EXECUTED] = torch.full_like(num_executed, chunk_size)
        now_BHA = self._log_probs(self.policy, batch)
        mask_BHA = executed_token_mask(
            batch[keys.NUM_EXECUTED], *batch[keys.TOKENS].shape[-2:]
        )
        difference = (now_BHA - batch[keys.LOG_PROBS])[mask_BHA]
        deviation = torch.expm1(difference).abs().max() if mask_BHA.any() else 0.0
        metrics = {"ratio_deviation": float(deviation)}
        if self.behavior_log_prob == "recompute":
            batch[keys.LOG_PROBS] = now_BHA
        if self.reference_policy is not None:
            reference_BHA = self._log_probs(self.reference_policy, batch)
            batch[keys.REFERENCE_LOG_PROBS] = reference_BHA
            metrics["reference_kl"] = float((now_BHA - reference_BHA)[mask_BHA].mean())
        return metrics

    def _log_probs(self, policy: nn.Module, batch: TensorDictBase) -> torch.Tensor:
        policy.eval()
        device = _device_of(policy)
        parts = [
            policy.get_dist(part.to(device)).log_prob(part[keys.TOKENS].to(device))
            for part in batch.split(self.micro_batch_size)
        ]
        return torch.cat(parts).to(batch[keys.LOG_PROBS].device)

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Take the optimizer steps.

        Args:
            batch: whole episodes, with advantages and loss weights, ordered so that the
                decisions of an episode lie together.

        Returns:
            Metrics, averaged over the optimizer steps (extremes: over all), and
            ``optimizer_steps``.

        Raises:
            FloatingPointError: for a gradient that is not finite, before the step.
        """
        # Dropout off: a ratio between different dropout masks is noise.
        self.policy.eval()
        steps = [self._step(rows) for rows in self._cut(batch)]
        metrics = {
            name: sum(step[name] for step in steps) / len(steps) for name in steps[0]
        }
        metrics["ratio_max"] = max(step["ratio_max"] for step in steps)
        metrics["ratio_min"] = min(step["ratio_min"] for step in steps)
        advantage = batch[keys.ADVANTAGE]
        metrics["advantage_mean"] = float(advantage.mean())
        metrics["advantage_std"] = float(advantage.std(correction=0))
        metrics["optimizer_steps"] = len(steps)
        metrics["learning_rate"] = steps[-1]["learning_rate"]
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, schedule of the learning rate and number of steps taken."""
        scheduler = self.scheduler and self.scheduler.state_dict()
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": scheduler,
            "num_optimizer_steps": self.num_optimizer_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
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

    def _step(self, rows: TensorDictBase) -> dict[str, float]:
        self.optimizer.zero_grad(set_to_none=True)
        device = _device_of(self.policy)
        totals: dict[str, torch.Tensor] = {}
        for part in rows.split(self.micro_batch_size):
            losses = self.loss_module(part.to(device))
            names = [name for name in losses.keys() if name.startswith("loss_")]
            sum(losses[name] for name in names).backward()
            for name, value in losses.detach().items():
                combine = _EXTREMES.get(name, torch.add)
                totals[name] = combine(totals[name], value) if name in totals else value
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        grad_norm = nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
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
        metrics = {name: float(value) for name, value in totals.items()}
        metrics["grad_norm"] = float(grad_norm)
        metrics["learning_rate"] = learning_rate
        return _derive(metrics)


def _derive(metrics: dict[str, float]) -> dict[str, float]:
    """Replace sums by the quantities that are reported."""
    square = metrics.pop("ratio_square_mean")
    metrics["effective_sample_size"] = metrics["ratio_mean"] ** 2 / max(square, 1e-12)
    num_masked = metrics.pop("num_masked_tokens")
    num_tokens = metrics.pop("num_tokens") + num_masked
    metrics["masked_fraction"] = num_masked / max(num_tokens, 1)
    low, high = metrics["clip_fraction_low"], metrics["clip_fraction_high"]
    metrics["clip_fraction"] = low + high
    return metrics


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def make_updater(
    loss_module: TokenGRPOLoss,
    cfg: UpdateConfig,
    *,
    behavior_log_prob: str = "rollout",
    mask_unexecuted: bool = True,
    reference_policy: nn.Module | None = None,
) -> Updater:
    """An updater with AdamW: linear warm-up, then a constant rate.

    Args:
        loss_module: with the policy that is trained.
        cfg: the section ``update`` of the options.
        behavior_log_prob, mask_unexecuted, reference_policy: see :class:`Updater`.
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
    )


def choose_device(name: str) -> torch.device:
    """``auto`` is the first GPU, or the CPU where there is none.

    Raises:
        ValueError: for a device that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"train.device={name} is not available here "
            f"({str(error).splitlines()[0]}); use train.device=auto"
        ) from error
