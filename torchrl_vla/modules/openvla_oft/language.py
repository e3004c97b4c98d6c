"""LLaMA as OpenVLA-OFT uses it: attention in both directions, and a proof of that.

Shape legend: ``B`` decisions, ``L`` prompt tokens, ``P`` visual tokens, ``N`` tokens
behind the prompt, ``S`` the whole sequence.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers import __version__ as transformers_version
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
)


def make_llama_config(text: dict[str, Any]) -> LlamaConfig:
    arguments = dict(text)
    theta = arguments.pop("rope_theta", 10000.0)
    config = LlamaConfig(
        **arguments,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=False,
    )
    # Flash attention 2 and flex attention ignore a plain mask.
    config._attn_implementation = "sdpa"
    return config


def lay_out(
    prompt_mask_BL: Tensor, num_visual: int, num_behind: int
) -> tuple[Tensor, Tensor]:
    """Mask and positions of a sequence that lies in memory as visual, prompt, behind.

    Position 0 is the first valid prompt token (BOS), 1 to ``num_visual`` are the visual
    tokens, then come the other valid prompt tokens and what is behind them. Pads may
    lie anywhere in the prompt; their positions mean nothing.

    Args:
        prompt_mask_BL: bool ``[B, L]``, false where padded.
        num_visual: visual (and proprioceptive) tokens.
        num_behind: action placeholders and the stop token.

    Returns:
        bool and int64 ``[B, num_visual + L + num_behind]``.

    Example:
        >>> mask, position = lay_out(torch.tensor([[False, True, True]]), 2, 1)
        >>> position.tolist()
        [[1, 2, 0, 0, 3, 4]]
    """
    batch, device = len(prompt_mask_BL), prompt_mask_BL.device
    ones_BP = prompt_mask_BL.new_ones(batch, num_visual)
    ones_BN = prompt_mask_BL.new_ones(batch, num_behind)
    mask_BS = torch.cat([ones_BP, prompt_mask_BL, ones_BN], 1)
    rank_BL = (prompt_mask_BL.cumsum(1) - 1).clamp(min=0)
    prompt_BL = rank_BL + num_visual * (rank_BL > 0)
    visual_BP = torch.arange(1, num_visual + 1, device=device).expand(batch, -1)
    end_B1 = num_visual + prompt_mask_BL.sum(1, keepdim=True)
    behind_BN = end_B1 + torch.arange(num_behind, device=device)
    return mask_BS, torch.cat([visual_BP, prompt_BL, behind_BN], 1)


@cache
def check_bidirectional() -> None:
    """Ask a small layer whether the first position sees the last, and never a pad."""
    config = make_llama_config(
        {
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        }
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(0)
        layer = LlamaDecoderLayer(config, 0)
        rotary = LlamaRotaryEmbedding(config)
        hidden = torch.randn(1, 4, 8)
        mask = torch.tensor([True, True, False, True]).view(1, 1, 1, 4)
        embeddings = rotary(hidden, position_ids=torch.arange(4)[None])

        def first(position: int) -> Tensor:
            moved = hidden.clone()
            moved[:, position] += 1
            return layer(moved, attention_mask=mask, position_embeddings=embeddings)[
                0, 0
            ]

        last, pad = first(3), first(2)
        base = layer(hidden, attention_mask=mask, position_embeddings=embeddings)[0, 0]
    if torch.equal(last, base) or not torch.equal(pad, base):
        raise RuntimeError(
            f"transformers {transformers_version} does not attend in both directions "
            "under a padding mask; OpenVLA-OFT would lose about half of its success "
            "rate without an error. Install a release this project was tested with: "
            "pip install 'transformers>=5.2'"
        )
