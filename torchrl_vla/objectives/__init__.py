"""Losses, advantages and the mathematics behind them."""

from torchrl_vla.objectives import functional
from torchrl_vla.objectives.group_advantage import GroupAdvantage
from torchrl_vla.objectives.token_grpo import TokenGRPOLoss

__all__ = ["GroupAdvantage", "TokenGRPOLoss", "functional"]
