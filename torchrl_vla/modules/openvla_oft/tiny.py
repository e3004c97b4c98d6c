"""The real architecture in a size that a test or a laptop can run, random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, processors

from torchrl_vla.modules.openvla_oft.config import OpenVLAOFTConfig
from torchrl_vla.modules.openvla_oft.model import OpenVLAOFT
from torchrl_vla.modules.openvla_oft.prompt import BOS_ID, EMPTY_ID
from torchrl_vla.modules.openvla_oft.statistics import FILE

_RAW = {
    "model_type": "openvla",
    "timm_model_ids": [
        "vit_large_patch14_reg4_dinov2.lvd142m",
        "vit_so400m_patch14_siglip_224",
    ],
    "timm_model_kwargs": [
        {"embed_dim": 24, "depth": 3, "num_heads": 2},
        {"embed_dim": 40, "depth": 4, "num_heads": 2, "mlp_ratio": 2.2},
    ],
    "use_fused_vision_backbone": True,
    "image_sizes": [224, 224],
    "n_action_bins": 256,
    "pad_to_multiple_of": 64,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 32064,
        "pad_token_id": 32000,
    },
}
_SUITES = ("spatial", "object", "goal", "10", "90")


def tiny_config(**options: Any) -> OpenVLAOFTConfig:
    """Two towers of 2 and 3 running blocks and a LLaMA of 3 layers, width 32.

    Args:
        options: ``num_images``, ``chunk_size``, ``action_dim``, ``proprio_dim``.
    """
    return OpenVLAOFTConfig.from_dict(_RAW, origin="tiny_config()", **options)


def tiny_tokenizer() -> Tokenizer:
    """One token per byte, with LLaMA-2's ids for bytes, BOS, pad and the lone space."""
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    vocabulary = {"<unk>": 0, "<s>": BOS_ID, "</s>": 2, space: EMPTY_ID}
    vocabulary |= {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(space), normalizers.Replace(" ", space)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS_ID)]
    )
    return tokenizer


def save_tiny_checkpoint(folder: str | Path, *, seed: int = 0, **options: Any) -> Path:
    """A complete checkpoint folder with random weights, for tests and trial runs.

    Its statistics span -1..1 for the suites of LIBERO; the gripper is not masked in.

    Args:
        folder: where to; created.
        seed: of the weights.
        options: see :func:`tiny_config`.

    Returns:
        The folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     model = OpenVLAOFT.from_pretrained(save_tiny_checkpoint(name))
        >>> sum(p.numel() for p in model.parameters())
        2226280
    """
    folder = Path(folder)
    # torch.manual_seed would reseed every GPU as well, and fork_rng restores the CPU.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        OpenVLAOFT(tiny_config(**options)).save_pretrained(folder)
    action = {
        "q01": [-1.0] * 6 + [0.0],
        "q99": [1.0] * 7,
        "min": [-1.0] * 6 + [0.0],
        "max": [1.0] * 7,
        "mask": [True] * 6 + [False],
    }
    proprio = {"q01": [-1.0] * 8, "q99": [1.0] * 8, "min": [-1.0] * 8, "max": [1.0] * 8}
    statistics = {
        f"libero_{suite}_no_noops": {"action": action, "proprio": proprio}
        for suite in _SUITES
    }
    (folder / FILE).write_text(json.dumps(statistics, indent=2) + "\n")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
