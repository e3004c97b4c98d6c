"""Supervised fine-tuning of a token policy: optimizer steps and validation.

Shape legend: ``B`` rows of a batch, ``H`` chunk, ``A`` action dimensions, ``V`` bins.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchrl_vla.config.schema import SupervisedUpdateConfig
from torchrl_vla.data import keys
from torchrl_vla.data.action_chunks import TOKEN_MASK, ActionChunks, step_rows
from torchrl_vla.data.random_streams import derive_seed
from torchrl_vla.modules.token_policy import TokenPolicy

Prepare = Callable[[TensorDictBase], TensorDictBase]


def token_cross_entropy(
    logits_BHAV: Tensor, token_BHA: Tensor, mask_BH: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums over the tokens that count: cross-entropy, and how many were most likely.

    ``sum_{mask} -log softmax(logits)[token]``. The temperature of sampling has no part
    in it: the policy learns the data's distribution at temperature 1.

    Args:
        logits_BHAV: of the policy, before any temperature.
        token_BHA: int64, what the demonstration did.
        mask_BH: bool, which actions of the chunk were shown.

    Example:
        >>> logits = torch.tensor([[[[0.0, 0.0]], [[9.0, 0.0]]]])  # H = 2, A = 1, V = 2
        >>> tokens = torch.tensor([[[1], [1]]])
        >>> loss, correct = token_cross_entropy(logits, tokens,
        ...                                     torch.tensor([[True, False]]))
        >>> round(float(loss), 4), float(correct)  # log 2; the first of equal bins
        (0.6931, 0.0)
    """
    mask_BHA = mask_BH.unsqueeze(-1).expand_as(token_BHA)
    loss_BHA = nn.functional.cross_entropy(
        logits_BHAV.float().flatten(0, -2), token_BHA.flatten(), reduction="none"
    ).reshape(token_BHA.shape)
    correct_BHA = (logits_BHAV.argmax(-1) == token_BHA) & mask_BHA
    return loss_BHA.masked_fill(~mask_BHA, 0.0).sum(), correct_BHA.sum().float()


class SupervisedTrainer:
    """AdamW on the cross-entropy of demonstrated tokens.

    The loss of an optimizer step is the mean over its shown tokens, accumulated over
    micro-batches, so it does not depend on ``micro_batch_size``. Rows and augmentation
    of a step are functions of ``(seed, step)``: a run that resumes goes on exactly.

    Args:
        policy: gives ``action_logits``.
        optimizer: over its trained parameters.
        training: rows to train on.
        validation: rows held out, or ``None``.
        scheduler: stepped after every optimizer step.
        batch_size: rows per optimizer step.
        micro_batch_size: rows per forward and backward pass.
        max_grad_norm: the gradient is scaled down to this norm.
        shift_px: augmentation of the images in training; 0 is off.
        prepare: what the environment does to observations before the policy sees them.
        seed: names the order of rows and the augmentation.

    Raises:
        ValueError: for sizes below 1.
    """

    def __init__(
        self,
        policy: TokenPolicy,
        optimizer: Optimizer,
        training: ActionChunks,
        validation: ActionChunks | None = None,
        *,
        scheduler: LRScheduler | None = None,
        batch_size: int = 64,
        micro_batch_size: int = 64,
        max_grad_norm: float = 1.0,
        shift_px: int = 0,
        prepare: Prepare = lambda batch: batch,
        seed: int = 0,
    ) -> None:
        if batch_size < 1 or micro_batch_size < 1:
            raise ValueError(
                f"batch_size is {batch_size} and micro_batch_size {micro_batch_size}; "
                "both must be >= 1"
            )
        self.policy = policy
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.training = training
        self.validation = validation
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.max_grad_norm = max_grad_norm
        self.shift_px = shift_px
        self.prepare = prepare
        self.seed = seed
        self.num_optimizer_steps = 0

    def train(self, num_steps: int) -> dict[str, float]:
        """Take optimizer steps.

        Returns:
            Means over the steps of ``train_loss`` (nat per token),
            ``train_token_accuracy`` (on augmented images) and ``grad_norm``, and
            ``optimizer_steps``, ``learning_rate``.

        Raises:
            FloatingPointError: for a gradient that is not finite, before the step.
        """
        self.policy.train()
        steps = [self._step() for _ in range(num_steps)]
        metrics = {
            name: sum(step[name] for step in steps) / num_steps for name in steps[0]
        }
        metrics["learning_rate"] = steps[-1]["learning_rate"]
        metrics["optimizer_steps"] = num_steps
        return metrics

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """``val_loss`` and ``val_token_accuracy``; empty without held-out rows."""
        if self.validation is None:
            return {}
        self.policy.eval()
        totals = torch.zeros(3, dtype=torch.float64)
        for rows in torch.arange(len(self.validation)).split(self.micro_batch_size):
            loss, correct, num = self._losses(self.validation.batch(rows))
            totals += torch.stack([loss, correct, num]).double().cpu()
        loss, accuracy = (totals[:2] / totals[2]).tolist()
        return {"val_loss": loss, "val_token_accuracy": accuracy}

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, schedule of the learning rate and number of steps taken."""
        scheduler = self.scheduler and self.scheduler.state_dict()
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": scheduler,
            "num_optimizer_steps": self.num_optimizer_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.num_optimizer_steps = state["num_optimizer_steps"]

    def _losses(self, batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of loss and hits over a batch, and the number of tokens."""
        device = next(self.policy.parameters()).device
        batch = self.prepare(batch).to(device)
        tokens, mask = batch[keys.TOKENS], batch[TOKEN_MASK]
        logits = self.policy.action_logits(batch)
        loss, correct = token_cross_entropy(logits, tokens, mask)
        return loss, correct, mask.sum() * tokens.shape[-1]

    def _step(self) -> dict[str, float]:
        step = self.num_optimizer_steps
        rows = step_rows(len(self.training), self.batch_size, step, self.seed)
        seed = derive_seed(self.seed, "augmentation", step)
        batch = self.training.batch(rows, seed=seed, shift_px=self.shift_px)
        num_tokens = batch[TOKEN_MASK].sum() * batch[keys.TOKENS].shape[-1]
        self.optimizer.zero_grad(set_to_none=True)
        total_loss = total_correct = 0.0
        for part in batch.split(self.micro_batch_size):
            loss, correct, _ = self._losses(part)
            (loss / num_tokens).backward()
            total_loss += float(loss.detach())
            total_correct += float(correct)
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        grad_norm = nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        if not grad_norm.isfinite():
            raise FloatingPointError(
                f"the gradient of optimizer step {step + 1} is not finite; the step "
                "was not taken. Lower update.lr and go on from the last checkpoint"
            )
        learning_rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.num_optimizer_steps += 1
        return {
            "train_loss": total_loss / int(num_tokens),
            "train_token_accuracy": total_correct / int(num_tokens),
            "grad_norm": float(grad_norm),
            "learning_rate": learning_rate,
        }


def cosine_factor(step: int, num_steps: int, warmup_steps: int) -> float:
    """Factor of the learning rate: linear up, then half a cosine down to 0.

    Source: Loshchilov and Hutter, arXiv:1608.03983, without restarts.

    Example:
        >>> [round(cosine_factor(step, 5, 1), 3) for step in range(6)]
        [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def make_trainer(
    policy: TokenPolicy,
    cfg: SupervisedUpdateConfig,
    training: ActionChunks,
    validation: ActionChunks | None,
    *,
    num_steps: int,
    shift_px: int,
    prepare: Prepare,
    seed: int,
) -> SupervisedTrainer:
    """A trainer with AdamW, linear warm-up and a cosine.

    Args:
        policy: to train.
        cfg: the section ``update`` of the options.
        training, validation: rows.
        num_steps: optimizer steps of the whole run.
        shift_px, prepare, seed: see :class:`SupervisedTrainer`.
    """
    optimizer = AdamW(
        [p for p in policy.parameters() if p.requires_grad],
        lr=cfg.lr,
        betas=(cfg.beta1, cfg.beta2),
        weight_decay=cfg.weight_decay,
    )

    def factor(step: int) -> float:
        return cosine_factor(step, num_steps, cfg.warmup_steps)

    return SupervisedTrainer(
        policy,
        optimizer,
        training,
        validation,
        scheduler=LambdaLR(optimizer, factor),
        batch_size=cfg.batch_size,
        micro_batch_size=cfg.micro_batch_size,
        max_grad_norm=cfg.max_grad_norm,
        shift_px=shift_px,
        prepare=prepare,
        seed=seed,
    )
