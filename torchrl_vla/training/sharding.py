"""One policy on several ranks: a copy on each, or one cut into shards."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchrl_vla.collectors.ranks import Ranks
from torchrl_vla.config.schema import DistributedConfig
from torchrl_vla.modules.factory import TrainedWeights
from torchrl_vla.modules.token_policy import TokenPolicy
from torchrl_vla.training.shards import ShardedState


class TrainedPolicy:
    """A policy as it is trained, and as it acts: here one and the same module.

    Args:
        policy: whole on this rank.

    Attributes:
        policy: what is trained.
        is_sharded: whether it is cut over the ranks. Then all ranks must make the same
            number of forward and backward passes.
        saves_shards: whether checkpoints hold it in shards, readable by any number of
            ranks.
    """

    is_sharded = False

    def __init__(self, policy: TokenPolicy, saves_shards: bool = False) -> None:
        self.policy = policy
        self.saves_shards = saves_shards

    def state(self, optimizer: Optimizer) -> TrainedWeights | ShardedState:
        """What a checkpoint holds of it (in shards: of the optimizer too)."""
        if self.saves_shards:
            return ShardedState(self.policy, optimizer)
        return TrainedWeights(self.policy)

    @contextmanager
    def acting(self) -> Iterator[TokenPolicy]:
        """Inside, a policy that acts without the other ranks; its weights are fixed."""
        yield self.policy

    def share(self, other: nn.Module) -> nn.Module:
        """Lay out another module (a reference policy) as the policy is."""
        return other


class ShardedPolicy(TrainedPolicy):
    """A policy cut over the ranks with ``fully_shard``, layer by layer.

    Gradients of the ranks are summed, not averaged: loss weights are global.

    Args:
        policy: whole on every rank, with the same weights; it is cut up.
        mesh: of one dimension, or ``replicate`` x ``shard``.
        mixed_precision: compute in bfloat16 on weights that are float32.
        cpu_offload: keep the shards in host memory.

    Source: PyTorch's ``fully_shard``, one unit per transformer layer as in torchtitan.
    """

    is_sharded = True

    def __init__(
        self,
        policy: TokenPolicy,
        mesh: DeviceMesh,
        *,
        mixed_precision: bool = False,
        cpu_offload: bool = False,
    ) -> None:
        self._dtype = torch.bfloat16 if mixed_precision else None
        self._mesh = mesh
        self._device = next(policy.parameters()).device
        self._offload = OffloadPolicy()
        if cpu_offload:
            self._offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        self._empty = _without_weights(policy)
        super().__init__(self._cut(policy, master=mixed_precision), saves_shards=True)

    def share(self, other: nn.Module) -> nn.Module:
        return self._cut(other, master=False)

    def _cut(self, policy: nn.Module, master: bool) -> nn.Module:
        for layer in [*policy.layers(), policy]:
            if master:  # one layer at a time: the whole in float32 may not fit
                layer.float()
            precision = MixedPrecisionPolicy(
                param_dtype=self._dtype,
                reduce_dtype=torch.float32 if self._dtype else None,
                cast_forward_inputs=layer is not policy,
            )
            fully_shard(
                layer,
                mesh=self._mesh,
                mp_policy=precision,
                offload_policy=self._offload,
            )
            # Some backends can only sum; here nothing else is wanted.
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(policy, "action_logits")
        # Logits may be a view; what follows divides them by the temperature, out of
        # place, as the warning asks for.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        return policy

    @contextmanager
    def acting(self) -> Iterator[TokenPolicy]:
        """Inside, the whole policy in its acting dtype, gathered once and then freed.

        Every rank enters it at the same time.
        """
        empty = dict(self._empty.named_parameters())
        with torch.no_grad():
            for name, shard in self.policy.named_parameters():
                # Cast before it travels, on the device that computes.
                whole = shard.to(self._device, self._dtype or shard.dtype)
                if isinstance(whole, DTensor):
                    whole = whole.full_tensor()
                _set_parameter(self._empty, name, whole)
        try:
            yield self._empty
        finally:
            for name, value in empty.items():
                _set_parameter(self._empty, name, value)


def share_policy(
    policy: TokenPolicy,
    cfg: DistributedConfig,
    ranks: Ranks,
) -> TrainedPolicy:
    """The policy as the ranks train it.

    Args:
        policy: whole, with the same weights on every rank.
        cfg: the section ``distributed`` of the options.
        ranks: of the run. One rank has nothing to cut; with ``mixed_precision`` it then
            keeps and computes in float32, so that a checkpoint loses nothing.
    """
    if cfg.strategy != "fsdp" or ranks.size == 1:
        policy = policy.float() if cfg.mixed_precision else policy
        return TrainedPolicy(policy, saves_shards=cfg.strategy == "fsdp")
    device = next(policy.parameters()).device.type
    shape: tuple[int, ...] = (ranks.size,)
    names: tuple[str, ...] = ("shard",)
    if cfg.num_replicas > 1:
        shape = (cfg.num_replicas, ranks.size // cfg.num_replicas)
        names = ("replicate", "shard")
    return ShardedPolicy(
        policy,
        init_device_mesh(device, shape, mesh_dim_names=names),
        mixed_precision=cfg.mixed_precision,
        cpu_offload=cfg.cpu_offload,
    )


def num_units(policy: nn.Module) -> int:
    """Into how many parts ``policy`` is cut, each gathered at a time."""
    return sum(isinstance(module, FSDPModule) for module in policy.modules())


def _without_weights(policy: TokenPolicy) -> TokenPolicy:
    """The same policy on no memory: its parameters are of the meta device."""
    memo = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        for p in policy.parameters()
    }
    # Buffers are not cut, and are the same tensors in both.
    memo |= {id(buffer): buffer for buffer in policy.buffers()}
    return copy.deepcopy(policy, memo).eval()


def _set_parameter(module: nn.Module, name: str, value: torch.Tensor) -> None:
    *path, leaf = name.split(".")
    parent = module.get_submodule(".".join(path))
    parent._parameters[leaf] = nn.Parameter(value, requires_grad=False)
