"""OpenVLA-OFT with the token head: model, checkpoints, prompts and policy."""

from torchrl_vla.modules.openvla_oft.config import OpenVLAOFTConfig
from torchrl_vla.modules.openvla_oft.model import OpenVLAOFT
from torchrl_vla.modules.openvla_oft.policy import OpenVLAOFTPolicy
from torchrl_vla.modules.openvla_oft.prompt import PromptEncoder
from torchrl_vla.modules.openvla_oft.statistics import (
    load_action_codec,
    load_statistics,
    select_statistics,
)
from torchrl_vla.modules.openvla_oft.tiny import (
    save_tiny_checkpoint,
    tiny_config,
    tiny_tokenizer,
)

__all__ = [
    "OpenVLAOFT",
    "OpenVLAOFTConfig",
    "OpenVLAOFTPolicy",
    "PromptEncoder",
    "load_action_codec",
    "load_statistics",
    "save_tiny_checkpoint",
    "select_statistics",
    "tiny_config",
    "tiny_tokenizer",
]
