"""Environments with TorchRL's vision-language-action schema, and their transforms."""

from torchrl_vla.envs.transforms import MultiAction

__all__ = ["MultiAction"]
