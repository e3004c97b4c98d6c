"""What a GPU holds in each phase of an iteration, in bytes, from the shapes alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_vla.modules.openvla_oft.model import OpenVLAOFT
from torchrl_vla.modules.token_policy import TokenPolicy

PARTS = ("weights", "gathered", "gradients", "optimizer", "activations", "images")


def memory_table(
    policy: TokenPolicy,
    *,
    num_shards: int = 1,
    mixed_precision: bool = False,
    cpu_offload: bool = False,
    activations: int = 0,
    micro_batch_size: int = 0,
    rollout_batch_size: int = 0,
    image_bytes: int = 0,
) -> dict[str, dict[str, int]]:
    """Bytes per GPU by phase and part; rank 0's, which has most of a cut policy.

    ``rollout``: with shards the whole policy is gathered in its acting dtype beside
    them. ``update``: the outer unit and two layers are gathered at a time (the one that
    computes and the next). Optimizer states stay in both. Not counted: the CUDA
    context (about 0.5 GB), buffers of NCCL, the allocator's fragments.

    Args:
        policy: of the shapes; weights on the meta device are enough.
        num_shards: ranks that one policy is cut over; 1 is a whole one on each.
        mixed_precision: float32 shards that are gathered in bfloat16.
        cpu_offload: shards, their gradients and the optimizer are in host memory.
        activations: bytes that the backward pass of a decision needs, see
            :func:`activation_bytes`.
        micro_batch_size: decisions per forward and backward pass.
        rollout_batch_size: decisions per forward pass when acting.
        image_bytes: images of a decision (on the GPU: of the batch that is computed).

    Returns:
        ``{"rollout": ..., "update": ...}``, each with :data:`PARTS` and ``total``.

    Example:
        >>> from torchrl_vla.modules import CompactPolicy
        >>> policy = CompactPolicy(chunk_size=1, action_dim=1, num_bins=3, state_dim=2)
        >>> table = memory_table(policy, num_shards=2)
        >>> table["update"]["optimizer"] > 2 * table["update"]["gradients"]
        True
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    master = torch.float32 if mixed_precision else None
    compute = torch.bfloat16 if mixed_precision else None
    weights = _local(policy.parameters(), num_shards, master)
    gradients = _local(trained, num_shards, master)
    # Two moments of each weight, and a float32 count of steps of each parameter.
    optimizer = 2 * gradients + 4 * len(trained)
    if cpu_offload:
        weights = gradients = optimizer = 0
    is_cut = num_shards > 1
    shared = {"weights": weights, "optimizer": optimizer}
    rollout = {
        **shared,
        "gathered": _bytes(policy.parameters(), compute) if is_cut else 0,
        "gradients": 0,
        "activations": 0,
        "images": rollout_batch_size * image_bytes,
    }
    update = {
        **shared,
        "gathered": _gathered(policy, compute) if is_cut else 0,
        "gradients": gradients,
        "activations": micro_batch_size * activations,
        "images": micro_batch_size * image_bytes,
    }
    return {
        name: {part: phase[part] for part in PARTS} | {"total": sum(phase.values())}
        for name, phase in (("rollout", rollout), ("update", update))
    }


def _bytes(parameters: Any, dtype: torch.dtype | None = None) -> int:
    return sum(p.numel() * (dtype or p.dtype).itemsize for p in parameters)


def _local(parameters: Any, num_shards: int, dtype: torch.dtype | None) -> int:
    """Rows of each parameter are dealt out; rank 0 gets the rounded-up part."""
    total = 0
    for p in parameters:
        num_rows = -(-p.shape[0] // num_shards) if p.dim() else 1
        itemsize = (dtype or p.dtype).itemsize
        total += num_rows * p.shape[1:].numel() * itemsize if p.numel() else 0
    return total


def _gathered(policy: TokenPolicy, dtype: torch.dtype | None) -> int:
    layers = [_bytes(layer.parameters(), dtype) for layer in policy.layers()]
    outer = _bytes(policy.parameters(), dtype) - sum(layers)
    return outer + sum(sorted(layers)[-2:])


def activation_bytes(
    model: OpenVLAOFT, prompt_length: int = 35, *, batch_size: int = 1
) -> int:
    """Bytes that the backward pass of OpenVLA-OFT needs, by a pass on the meta device.

    With gradient checkpointing these are the inputs of all layers and what one layer
    saves while it is computed again.

    Args:
        model: on any device; on the meta device nothing is allocated.
        prompt_length: tokens from BOS to 29871.
        batch_size: decisions.
    """
    config = model.config
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    inputs: list[int] = []
    inner: list[int] = []
    device = model.projector.fc1.weight.device
    channels = 3 * len(config.towers) * config.num_images

    def run(layer: nn.Module, hidden: Tensor, **arguments: Any) -> Tensor:
        inputs.append(hidden.numel() * hidden.element_size())
        with _counting(own) as layer_bytes:
            out = layer(hidden, **arguments)
        inner.append(layer_bytes())
        return out

    model._run = run  # type: ignore[method-assign]
    try:
        with _counting(own) as outer:
            embeds, mask, position = model.embed(
                torch.empty(
                    batch_size,
                    channels,
                    config.image_size,
                    config.image_size,
                    device=device,
                ),
                torch.zeros(
                    batch_size, prompt_length, dtype=torch.int64, device=device
                ),
                torch.ones(batch_size, prompt_length, dtype=torch.bool, device=device),
                None,
            )
            model.run_language_model(embeds, mask, position)
    finally:
        del model._run
    if model.gradient_checkpointing:
        return outer() + sum(inputs) + max(inner)
    return outer() + sum(inner)


@contextmanager
def _counting(own: set[int]) -> Iterator[Callable[[], int]]:
    """Count what autograd saves inside, each storage once, the weights not."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(sizes.values())
