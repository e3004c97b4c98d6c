"""Reading the rows of each episode of a LeRobot data set."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_vla.data import lerobot


def read_episodes(
    folder: Path, meta: lerobot.Metadata, wanted_cameras: Sequence[str]
) -> Iterator[tuple[dict[str, Any], dict[str, list[Any]]]]:
    """Each episode's row of metadata and its columns, in order.

    One row group at a time is in memory, so a large file is not.

    Raises:
        ValueError: when an episode has other rows than its metadata says.
    """
    parquet = lerobot.import_pyarrow().parquet
    columns = [lerobot.IMAGE_PREFIX + camera for camera in wanted_cameras]
    columns += [lerobot.STATE, lerobot.ACTION, "episode_index", "task_index"]
    waiting = list(meta.episodes)
    for path in sorted((folder / "data").glob("*/*.parquet")):
        file = parquet.ParquetFile(path)
        buffer: dict[str, list[Any]] = {name: [] for name in columns}
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=columns)
            for name in columns:
                buffer[name] += table[name].to_pylist()
            is_last = group == file.num_row_groups - 1
            while waiting and (length := _complete(buffer, waiting[0], is_last)):
                rows = {name: buffer[name][:length] for name in columns}
                buffer = {name: buffer[name][length:] for name in columns}
                yield waiting.pop(0), rows
    for episode in waiting:
        raise ValueError(
            f"{folder}, episode {episode['episode_index']}: length "
            f"{episode['length']}, but data/ has no such rows for it"
        )


def _complete(
    buffer: dict[str, list[Any]], episode: dict[str, Any], is_last: bool
) -> int:
    """Rows of the episode at the start of the buffer; 0 while some are missing."""
    numbers, length = buffer["episode_index"], int(episode["length"])
    if len(numbers) < length and not is_last:
        return 0
    mine = numbers[:length] == [episode["episode_index"]] * length
    return length if mine else 0


def matrix(rows: list[Any], name: str) -> np.ndarray:
    """Vectors of a column as float32 ``[T, S]``.

    Raises:
        ValueError: for missing values or vectors of mixed length.
    """
    try:
        return np.asarray(rows, np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} has missing values or mixed lengths") from error


def instruction(
    episode: dict[str, Any],
    rows: dict[str, list[Any]],
    tasks: dict[int, str],
    name: str,
) -> str:
    """The text of an episode.

    Raises:
        ValueError: when there is none, or more than one.
    """
    numbers = set(rows["task_index"])
    texts = {tasks.get(number) for number in numbers} or set(episode["tasks"])
    if len(texts) != 1 or None in texts:
        raise ValueError(
            f"{name}: instruction is not one text: task_index {sorted(numbers)} of "
            f"meta/tasks.parquet, which has {sorted(tasks)}"
        )
    return str(texts.pop())
