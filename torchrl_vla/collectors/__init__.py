"""Episodes played on workers, gathered into groups."""

from torchrl_vla.collectors.env_pool import EnvPool
from torchrl_vla.collectors.group_collector import GroupCollector
from torchrl_vla.collectors.overlap_pool import OverlapPool
from torchrl_vla.collectors.slots import EpisodeRequest

__all__ = ["EnvPool", "EpisodeRequest", "GroupCollector", "OverlapPool"]
