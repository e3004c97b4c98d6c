"""The pool of a run, from the section ``env`` of its options."""

from dataclasses import replace

from torchrl_vla.collectors.env_pool import EnvPool
from torchrl_vla.collectors.overlap_pool import OverlapPool
from torchrl_vla.collectors.slots import Pool
from torchrl_vla.config.schema import EnvConfig
from torchrl_vla.data.action_codec import ActionCodec
from torchrl_vla.envs.factory import make_env, make_libero_worker


def make_pool(
    cfg: EnvConfig,
    codec: ActionCodec,
    *,
    seed: int = 0,
    render_device: int | None = None,
) -> Pool:
    """Where a run plays its episodes.

    Args:
        cfg: the section ``env`` of the options.
        codec: what the policy's tokens mean.
        seed: names the initial states of the toy and the sampled ones of LIBERO.
        render_device: of this rank, unless the options name one.

    Raises:
        ModuleNotFoundError: when the simulator's extra is not installed.
    """
    if cfg.render_gpu_device_id is None:
        cfg = replace(cfg, render_gpu_device_id=render_device)
    if cfg.name == "toy" or not cfg.overlap:
        return EnvPool(make_env(cfg, codec, seed=seed))
    return OverlapPool(
        make_libero_worker(cfg, codec, seed=seed),
        cfg.num_workers,
        max_restarts=cfg.max_restarts,
        min_timeout_s=cfg.min_timeout_s,
    )
