"""What a decision costs, from the shapes."""

from torchrl_vla.modules.openvla_oft.config import OpenVLAOFTConfig, TowerConfig


def flops_per_decision(
    config: OpenVLAOFTConfig, prompt_length: int = 35
) -> tuple[int, int]:
    """Floating point operations of a decision: forward, and forward plus backward.

    A multiplication and an addition are two operations. Counted are the matrix products
    (projections, attention scores and values, convolution, the 256 rows of the head);
    norms and activations are below one percent. The backward pass costs twice the
    forward pass. Gradient checkpointing adds one more forward pass.

    Args:
        config: the architecture.
        prompt_length: ``L``, tokens from BOS to 29871 (20 to 40 in LIBERO).

    Returns:
        ``(forward, forward_and_backward)``.

    Example:
        >>> from torchrl_vla.modules.openvla_oft import tiny_config
        >>> forward, total = flops_per_decision(tiny_config())
        >>> total == 3 * forward
        True
    """
    num_visual = config.num_images * config.num_patches
    forward = config.num_images * sum(
        _tower(tower, config.num_patches) for tower in config.towers
    )
    forward += num_visual * _projector(config)
    if config.proprio_dim is not None:
        width = config.text["hidden_size"]
        forward += 2 * width * (config.proprio_dim + width)
        num_visual += 1
    length = num_visual + prompt_length + config.num_action_tokens + 1
    forward += _llama(config, length)
    return forward, 3 * forward


def _layer(length: int, width: int, mlp: int, attention: int) -> int:
    """One transformer layer; ``mlp`` and ``attention`` are weights per token."""
    return 2 * length * (mlp + attention) + 4 * length * length * width


def _tower(tower: TowerConfig, num_patches: int) -> int:
    length = num_patches + (tower.num_registers and tower.num_registers + 1)
    patch = 2 * num_patches * 3 * tower.patch_size**2 * tower.width
    layer = _layer(
        length, tower.width, 2 * tower.width * tower.mlp_width, 4 * tower.width**2
    )
    return patch + (tower.depth - 1) * layer


def _projector(config: OpenVLAOFTConfig) -> int:
    vision, width = config.vision_width, config.text["hidden_size"]
    if len(config.towers) == 1:
        return 2 * (vision * width + width * width)
    return 2 * (4 * vision * vision + 4 * vision * width + width * width)


def _llama(config: OpenVLAOFTConfig, length: int) -> int:
    text = config.text
    width, heads = text["hidden_size"], text["num_attention_heads"]
    key_value = width * (text["num_key_value_heads"] or heads) // heads
    layer = _layer(
        length,
        width,
        3 * width * text["intermediate_size"],
        2 * width * width + 2 * width * key_value,
    )
    head = 2 * config.num_action_tokens * width * config.num_bins
    return text["num_hidden_layers"] * layer + head
