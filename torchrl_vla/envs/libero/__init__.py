"""LIBERO: tasks, simulation, rendering, environment and its workers."""

from torchrl_vla.envs.libero.env import LiberoEnv
from torchrl_vla.envs.libero.workers import make_libero_envs

__all__ = ["LiberoEnv", "make_libero_envs"]
