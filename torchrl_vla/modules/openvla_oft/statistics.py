"""Action and proprioception statistics of a checkpoint, and the codec they make."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_vla.data.action_codec import OpenVLAActionCodec
from torchrl_vla.data.dataset_statistics import check_statistics
from torchrl_vla.data.normalization import NormalizationStatistics
from torchrl_vla.modules.openvla_oft import folders
from torchrl_vla.modules.policy_file import ORIGIN

FILE = "dataset_statistics.json"
_SUFFIX = "_no_noops"


def load_statistics(
    folder_or_hub_id: str | Path,
    statistics_folder: str | Path | None = None,
    *,
    revision: str | None = None,
) -> dict[str, Any]:
    """All statistics there are for a checkpoint, by data set.

    ``norm_stats`` of ``config.json`` list the pre-training sets only, and fine-tuning
    writes ``dataset_statistics.json``. A checkpoint of reinforcement learning often has
    neither for its own suite: name the folder of another one then.

    Args:
        folder_or_hub_id: the checkpoint.
        statistics_folder: a folder (or repository) whose ``dataset_statistics.json`` is
            used in place of the checkpoint's.
        revision: of the repository.

    Raises:
        FileNotFoundError: when ``statistics_folder`` has no such file.
        ValueError: when the checkpoint was fine-tuned here with other statistics.
    """
    folder = folders.find_folder(folder_or_hub_id, revision)
    config = folder / "config.json"
    found = dict(folders.read_json(config).get("norm_stats") or {})
    beside = folder
    if statistics_folder is not None:
        beside = folders.find_folder(statistics_folder)
        found |= folders.read_json(beside / FILE)
    elif (folder / FILE).is_file():
        found |= folders.read_json(folder / FILE)
    if (folder / ORIGIN).is_file():  # written by supervised fine-tuning
        expected = folders.read_json(folder / ORIGIN)["statistics_id"]
        check_statistics(beside / FILE, expected, str(folder))
    return found


def select_statistics(statistics: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The entry of ``key``, or of ``key + "_no_noops"``.

    Raises:
        KeyError: with the keys there are.

    Example:
        >>> select_statistics({"libero_spatial_no_noops": {"action": 1}},
        ...                   "libero_spatial")
        {'action': 1}
    """
    for name in (key, key + _SUFFIX):
        if name in statistics:
            return statistics[name]
    raise KeyError(
        f"no action statistics for {key!r} (nor {key + _SUFFIX!r}); there are "
        f"{sorted(statistics)}. Without them every action is wrong in scale: choose "
        f"one of these keys, or name a folder whose {FILE} has the suite, such as that "
        "of the checkpoint before reinforcement learning"
    )


def load_action_codec(
    folder_or_hub_id: str | Path,
    key: str,
    *,
    statistics_folder: str | Path | None = None,
    normalization: str = "bounds_q99",
    binarize_gripper: bool = True,
    revision: str | None = None,
) -> OpenVLAActionCodec:
    """What the tokens of a checkpoint mean, without loading its weights.

    Args:
        folder_or_hub_id: the checkpoint.
        key: data set, or suite (``libero_spatial``).
        statistics_folder: see :func:`load_statistics`.
        normalization: ``bounds_q99`` (LIBERO) or ``bounds`` (ALOHA, RoboTwin).
        binarize_gripper: for LIBERO; off for ALOHA, whose grippers are normalised.
        revision: of the repository.

    Raises:
        FileNotFoundError, KeyError, ValueError: when statistics are missing, with what
            there is.
    """
    statistics = load_statistics(folder_or_hub_id, statistics_folder, revision=revision)
    entry = select_statistics(statistics, key)
    return OpenVLAActionCodec(
        NormalizationStatistics.from_dict(entry["action"], normalization),
        binarize_gripper=binarize_gripper,
    )
