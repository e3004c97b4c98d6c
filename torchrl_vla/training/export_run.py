"""``python -m torchrl_vla.training.export_run CHECKPOINT FOLDER``: for others to use.

Writes the OpenVLA-OFT of a run's checkpoint, however many ranks have saved it, in the
layout of the checkpoint that the run began with. LoRA adapters are merged.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from torchrl_vla.config.schema import PolicyConfig
from torchrl_vla.modules import lora
from torchrl_vla.modules.factory import make_policy
from torchrl_vla.training.checkpoint import CheckpointError, load_checkpoint
from torchrl_vla.training.shards import load_weights


def export_run(checkpoint: Path, folder: Path) -> Path:
    """Write the policy of a run's checkpoint in OpenVLA's layout.

    Args:
        checkpoint: ``iteration_*.pt`` of a run.
        folder: written; it is what ``policy.checkpoint`` takes.

    Raises:
        CheckpointError: when it cannot be read, or is of another kind of policy.
    """
    state = load_checkpoint(checkpoint)
    options: dict[str, Any] = state["options"]
    cfg = PolicyConfig(**options["policy"])
    if cfg.name != "openvla_oft":
        raise CheckpointError(
            f"{checkpoint} is of a {cfg.name} policy, which policy.checkpoint takes as "
            "it is; exported are those of openvla_oft"
        )
    sizes = {"chunk_size": options["env"]["chunk_size"], "action_dim": 7}
    policy: Any = make_policy(cfg, sizes, seed=0, device=torch.device("cpu"))
    load_weights(policy, state)
    if lora.has_lora(policy):
        lora.merge_lora(policy.model)
    policy.model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    print(export_run(given.checkpoint, given.folder))
