"""Options: their schema, the rules between them, and how they are loaded."""

from torchrl_vla.config.rules import ConfigError
from torchrl_vla.config.schema import Config, SFTConfig

__all__ = ["Config", "ConfigError", "SFTConfig"]
