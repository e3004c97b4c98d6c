"""Episodes played on workers, gathered into groups."""

from torchrl_vla.collectors.env_pool import EnvPool, EpisodeRequest
from torchrl_vla.collectors.group_collector import GroupCollector

__all__ = ["EnvPool", "EpisodeRequest", "GroupCollector"]
