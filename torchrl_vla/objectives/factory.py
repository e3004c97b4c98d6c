"""Advantage and loss of a run, from their section of the options."""

from torch import nn

from torchrl_vla.config.schema import ObjectiveConfig
from torchrl_vla.objectives.group_advantage import GroupAdvantage
from torchrl_vla.objectives.token_grpo import TokenGRPOLoss


def make_advantage(cfg: ObjectiveConfig) -> GroupAdvantage:
    """The advantage, with the KL penalty on the reward if it is to be there."""
    return GroupAdvantage(
        aggregation=cfg.aggregation,
        normalize_std=cfg.normalize_std,
        kl_coef=cfg.kl_coef if cfg.kl_in == "reward" else 0.0,
        kl_estimator=cfg.kl_estimator,
        kl_target=cfg.kl_target,
    )


def make_loss(policy: nn.Module, cfg: ObjectiveConfig) -> TokenGRPOLoss:
    """The policy loss, with the KL term if it is to be there."""
    return TokenGRPOLoss(
        policy,
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        ratio_level=cfg.ratio_level,
        entropy_coef=cfg.entropy_coef,
        kl_coef=cfg.kl_coef if cfg.kl_in == "loss" else 0.0,
        kl_estimator=cfg.kl_estimator,
    )
