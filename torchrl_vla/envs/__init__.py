"""Environments with TorchRL's vision-language-action schema, and their transforms."""

from torchrl_vla.envs.libero import LiberoEnv, make_libero_envs
from torchrl_vla.envs.toy import ToyTaskEnv
from torchrl_vla.envs.transforms import (
    ActionTokensTransform,
    MultiAction,
    OpenVLAImageTransform,
)

__all__ = [
    "ActionTokensTransform",
    "LiberoEnv",
    "MultiAction",
    "OpenVLAImageTransform",
    "ToyTaskEnv",
    "make_libero_envs",
]
