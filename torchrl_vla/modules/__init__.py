"""Policies over action tokens."""

from torchrl_vla.modules.compact_policy import CompactPolicy
from torchrl_vla.modules.token_policy import TokenPolicy

__all__ = ["CompactPolicy", "TokenPolicy"]
