"""The policy of a run and the meaning of its tokens, from their section of options."""

from tensordict.utils import NestedKey

from torchrl_vla.config.schema import PolicyConfig
from torchrl_vla.data.action_codec import ActionCodec, UniformActionCodec
from torchrl_vla.modules.compact_policy import CompactPolicy
from torchrl_vla.modules.token_policy import TokenPolicy


def make_codec(cfg: PolicyConfig) -> ActionCodec:
    """What the tokens of the policy mean in env units, here -1..1 per dimension."""
    return UniformActionCodec(cfg.num_bins, low=-1.0, high=1.0)


def make_policy(
    cfg: PolicyConfig, sizes: dict[str, int], *, seed: int
) -> TokenPolicy:
    """The policy, with new or loaded weights.

    Args:
        cfg: the section ``policy`` of the options.
        sizes: ``chunk_size``, ``action_dim`` and ``state_dim`` of the environment.
        seed: of new weights.
    """
    cameras: list[NestedKey] = [("observation", camera) for camera in cfg.cameras]
    return CompactPolicy(
        **sizes,
        num_bins=cfg.num_bins,
        image_keys=cameras,
        hidden_dim=cfg.hidden_dim,
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        micro_batch_size=cfg.rollout_batch_size,
        seed=seed,
    )
