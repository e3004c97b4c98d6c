"""Recognise a checkpoint whose language head cannot emit action tokens, and refuse it.

Three criteria, from cheap to dear: the files of a continuous head; rows that training
never leaves behind; and the probability that the head puts on the action window for the
first observation (``OpenVLAOFTPolicy.check_head``).
"""

from pathlib import Path

from torch import nn

_FOREIGN_FILES = {
    "action_head": "a continuous (L1 or diffusion) action head",
    "noisy_action_projector": "a diffusion action head",
    "vision_backbone--": "vision towers with FiLM, which this network does not have",
}


def check_files(folder: Path) -> None:
    """Refuse checkpoints of the continuous kind, by the files they come with.

    openvla-oft writes its L1 and diffusion heads to ``action_head--*`` (and
    ``noisy_action_projector--*``) beside the same ``model-*.safetensors``, whose
    language head then was never trained to emit actions: read as tokens it gives fluent
    nonsense and zero success.

    Raises:
        ValueError: with the files that were found and what they mean.
    """
    for path in sorted(folder.iterdir()):
        for prefix, meaning in _FOREIGN_FILES.items():
            if path.name.startswith(prefix):
                raise ValueError(
                    f"{path} belongs to {meaning}: the checkpoint's language head was "
                    "not trained to emit action tokens and would never succeed. Use a "
                    "token-head checkpoint, such as "
                    "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1"
                )


def check_window_rows(model: nn.Module, folder: Path) -> None:
    """Refuse a language head whose 256 action rows were never trained.

    Training moves every row that is ever a target or a competitor, so rows that are
    not finite, all zero, or equal to each other cannot come from it.
    """
    first, count = model.config.window_start, model.config.num_bins
    rows_VD = model.language_model.lm_head.weight[first : first + count].float()
    if not rows_VD.isfinite().all() or len(rows_VD.unique(dim=0)) < count // 2:
        raise ValueError(
            f"{folder}: rows {first}..{first + count - 1} of "
            "language_model.lm_head.weight (the action window) are not finite or equal "
            "to each other: this language head was never trained for actions. Use a "
            "token-head checkpoint, or fine-tune on demonstrations first"
        )
