"""Transforms between a policy's chunk of tokens and an environment's steps."""

from torchrl_vla.envs.transforms.action_tokens import ActionTokensTransform
from torchrl_vla.envs.transforms.multi_action import MultiAction
from torchrl_vla.envs.transforms.openvla_image import OpenVLAImageTransform

__all__ = ["ActionTokensTransform", "MultiAction", "OpenVLAImageTransform"]
