"""A trained policy as something another run starts from."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_vla.config.schema import PolicyConfig
from torchrl_vla.data.action_codec import ActionCodec, UniformActionCodec
from torchrl_vla.data.dataset_statistics import FILE as STATISTICS
from torchrl_vla.data.dataset_statistics import save_statistics, statistics_id
from torchrl_vla.modules import lora, policy_file
from torchrl_vla.modules.factory import compact_shape
from torchrl_vla.modules.token_policy import TokenPolicy
from torchrl_vla.training import report


def export_policy(
    folder: Path,
    policy: TokenPolicy,
    codec: ActionCodec,
    cfg: PolicyConfig,
    *,
    sizes: dict[str, int],
    statistics: Mapping[str, Any],
    origin: Mapping[str, Any],
) -> Path:
    """Write the policy for ``policy.checkpoint``.

    A compact policy is one file, ``policy.safetensors``. OpenVLA-OFT is a folder,
    ``policy/``, in the layout of the checkpoint it was loaded from; LoRA adapters are
    merged, which changes ``policy``. Either has ``dataset_statistics.json`` beside its
    weights, whose hash it holds.

    Args:
        folder: of the run.
        policy: to write.
        codec: what its tokens mean.
        cfg: the section ``policy`` of the options.
        sizes: of the environment, see :func:`make_policy`.
        statistics: of the actions, by suite.
        origin: JSON values that say where the policy is from.

    Returns:
        What to give as ``policy.checkpoint``.
    """
    origin = {"command": command_line(), "versions": report.versions(), **origin}
    if isinstance(codec, UniformActionCodec):
        path = folder / policy_file.NAME
        save_statistics(folder / STATISTICS, statistics)
        metadata = {
            **origin,
            "shape": compact_shape(cfg, sizes),
            "action_low": codec.low.tolist(),
            "action_high": codec.high.tolist(),
            "statistics": statistics,
        }
        policy_file.save_policy(path, policy.state_dict(), metadata)
        return path
    path = folder / "policy"
    if lora.has_lora(policy):
        lora.merge_lora(policy.model)
    policy.model.save_pretrained(path)
    save_statistics(path / STATISTICS, statistics)
    note = {**origin, "statistics_id": statistics_id(statistics)}
    report.save_json(path / policy_file.ORIGIN, note)
    return path


def command_line() -> str:
    """The command that started this process, as one would type it."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
