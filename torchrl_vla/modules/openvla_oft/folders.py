"""What lies in a checkpoint folder, and where a checkpoint is found."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_COMPANION_BYTES = 32 * 2**20
_COMPANIONS = (".json", ".model", ".txt", ".md", ".py", ".jinja")


@dataclass
class CheckpointFolder:
    """What of a folder must survive until it is saved again."""

    weight_map: dict[str, str] = field(default_factory=dict)
    """File of every checkpoint key."""
    companions: dict[str, bytes] = field(default_factory=dict)
    """Configuration, statistics and tokenizer files, byte for byte."""
    proprio_file: str = "proprio_projector--latest_checkpoint.pt"
    proprio_prefix: str = ""
    """``module.`` where the file's keys carry it."""


def find_folder(folder_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """A local folder as it is; else the repository of that name, downloaded.

    Raises:
        FileNotFoundError: when it is neither.
    """
    folder = Path(folder_or_hub_id)
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder_or_hub_id)):
        raise FileNotFoundError(
            f"{folder} is no folder, and no repository id of the form 'owner/name'"
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "proprio_projector*", "action_head*"]
    patterns += [f"*{suffix}" for suffix in _COMPANIONS]
    name = str(folder_or_hub_id)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # connection, name and permission errors of many kinds
        raise FileNotFoundError(
            f"{name!r} is no folder here, and no repository that could be downloaded: "
            f"{error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an error that names the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected an object")
    return content


def find_weight_map(folder: Path) -> dict[str, str]:
    """File of every key, from the index or from the only file there is."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder / INDEX} has no 'weight_map'")
        outside = {f for f in weight_map.values() if Path(f).name != f}
        if outside:
            raise ValueError(
                f"{folder / INDEX} names {sorted(outside)}, not plain files"
            )
        missing = {f for f in weight_map.values() if not (folder / f).is_file()}
        if missing:
            raise FileNotFoundError(
                f"shards {sorted(missing)} of {folder / INDEX} are missing in {folder}"
            )
        return weight_map
    if (folder / SINGLE).is_file():
        with open_shard(folder / SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)
    raise FileNotFoundError(
        f"{folder} has neither {INDEX} nor {SINGLE}; there are "
        f"{sorted(p.name for p in folder.iterdir())}. Pickled weights (.bin) are not "
        "read: convert them to safetensors"
    )


def open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged or cut off ({error}); download it again"
        ) from error


def read_companions(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in _COMPANIONS
        and path.name != INDEX
        and path.stat().st_size <= _COMPANION_BYTES
    }
