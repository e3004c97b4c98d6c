"""The layout of a LeRobot data set of version 3.0: tables and metadata, no meaning.

Many episodes share a parquet file; ``meta/episodes`` says which rows are whose::

    meta/info.json  meta/stats.json  meta/tasks.parquet
    meta/episodes/chunk-000/file-000.parquet     a row per episode
    data/chunk-000/file-000.parquet              a row per env step

Source: the format as documented and implemented by huggingface/lerobot 0.4.4.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VERSION = "v3.0"
ACTION, STATE = "action", "observation.state"
IMAGE_PREFIX = "observation.images."
FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
FILES_PER_CHUNK = 1000
FILE_MB = 100
"""A data file is closed when it has this size."""
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}

_SCALARS = {
    "next.done": "bool",
    "next.success": "bool",
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
_SAMPLED_FRAMES, _SAMPLED_STRIDE = 10, 8


class Metadata(NamedTuple):
    """``meta/`` of a data set."""

    info: dict[str, Any]
    stats: dict[str, Any]
    tasks: dict[int, str]
    episodes: list[dict[str, Any]]


def import_pyarrow() -> Any:
    """The package, or an error that names the extra.

    Raises:
        ModuleNotFoundError: when it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "LeRobot data sets need pyarrow: pip install 'torchrl-vla[demos]'"
        ) from error
    return pyarrow


# -- features ------------------------------------------------------------------------


def features(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """``features`` of ``info.json`` for columns with these shapes of a row.

    Args:
        shapes: three dimensions are an image ``(Y, X, 3)``, one is a vector.
    """
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        is_image = len(shape) == 3
        found[name] = {
            "dtype": "image" if is_image else "float32",
            "shape": list(shape),
            "names": ["height", "width", "channels"] if is_image else None,
        }
    for name, dtype in _SCALARS.items():
        found[name] = {"dtype": dtype, "shape": [1], "names": None}
    return found


def cameras(info: dict[str, Any]) -> list[str]:
    """Cameras with images in the tables.

    Raises:
        ValueError: for cameras that are videos.
    """
    kinds = {
        name.removeprefix(IMAGE_PREFIX): feature["dtype"]
        for name, feature in info["features"].items()
        if name.startswith(IMAGE_PREFIX)
    }
    if videos := [camera for camera, kind in kinds.items() if kind == "video"]:
        raise ValueError(
            f"{videos} are MP4 videos; only images in parquet files are read. Convert "
            "the data set, or record it with DemonstrationWriter"
        )
    return list(kinds)


def _schema(all_features: dict[str, Any]) -> Any:
    """Arrow's schema, with the note by which ``datasets`` decodes images."""
    pa = import_pyarrow()
    fields, notes = [], {}
    for name, feature in all_features.items():
        dtype, (size, *_) = feature["dtype"], feature["shape"]
        if dtype == "image":
            kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
            note: dict[str, Any] = {"_type": "Image"}
        else:
            kind = pa.bool_() if dtype == "bool" else getattr(pa, dtype)()
            note = {"dtype": dtype, "_type": "Value"}
        if name in (STATE, ACTION):
            kind = pa.list_(kind, size)
            note = {"feature": note, "length": size, "_type": "Sequence"}
        fields.append((name, kind))
        notes[name] = note
    text = json.dumps({"info": {"features": notes}})
    return pa.schema(fields).with_metadata({"huggingface": text})


class DataFiles:
    """``data/``: tables of env steps, an episode in one of them, files of 100 MB.

    Args:
        folder: of the data set.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = -1
        self._writer: Any = None
        self._path = folder

    def write(
        self, columns: dict[str, Any], all_features: dict[str, Any]
    ) -> dict[str, int]:
        """Append an episode; returns where it is, as columns of ``meta/episodes``."""
        pa = import_pyarrow()
        if self._writer is None or self._path.stat().st_size >= FILE_MB * 2**20:
            self._open_next(all_features)
        schema = _schema(all_features)
        arrays = [_array(columns[field.name], field.type) for field in schema]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        chunk, file = divmod(self._number, FILES_PER_CHUNK)
        return {"data/chunk_index": chunk, "data/file_index": file}

    def _open_next(self, all_features: dict[str, Any]) -> None:
        self.close()
        self._number += 1
        chunk, file = divmod(self._number, FILES_PER_CHUNK)
        path = self.folder / "data" / FILE.format(chunk_index=chunk, file_index=file)
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet = import_pyarrow().parquet
        self._path = path
        self._writer = parquet.ParquetWriter(path, _schema(all_features))

    def close(self) -> None:
        """Complete the file that is being written."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _array(values: Any, kind: Any) -> Any:
    pa = import_pyarrow()
    if isinstance(values, list):  # encoded images
        values = [{"bytes": value, "path": None} for value in values]
        return pa.array(values, kind)
    if values.ndim == 2:
        flat = pa.array(values.reshape(-1), kind.value_type)
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return pa.array(values, kind)


# -- statistics ----------------------------------------------------------------------


def sample(values: np.ndarray) -> np.ndarray:
    """What statistics of a column are taken from: vectors, or some pixels in 0..1."""
    if values.dtype != np.uint8:
        return values
    stride = max(1, len(values) // _SAMPLED_FRAMES)
    pixels = values[::stride, ::_SAMPLED_STRIDE, ::_SAMPLED_STRIDE]
    return (pixels.reshape(-1, 1, 1, 3) / 255).transpose(0, 3, 1, 2)


def statistics(values: np.ndarray, count: int) -> dict[str, Any]:
    """Extremes, moments and quantiles over the first axis, as lists.

    Args:
        values: of :func:`sample`: ``[N, S]``, or pixels ``[N, 3, 1, 1]``.
        count: env steps they stand for.
    """
    values = values.astype(np.float64)
    found = {
        "min": values.min(0),
        "max": values.max(0),
        "mean": values.mean(0),
        "std": values.std(0),
    }
    found |= {name: np.quantile(values, q, axis=0) for name, q in QUANTILES.items()}
    return {**{name: value.tolist() for name, value in found.items()}, "count": [count]}


def flat_statistics(stats: dict[str, Any]) -> dict[str, Any]:
    """Columns of ``meta/episodes``: ``stats/action/min`` and so on."""
    return {
        f"stats/{name}/{statistic}": value
        for name, entry in stats.items()
        for statistic, value in entry.items()
    }


# -- metadata ------------------------------------------------------------------------


def info(
    all_features: dict[str, Any],
    *,
    fps: int,
    robot_type: str,
    num_episodes: int,
    num_frames: int,
    num_tasks: int,
) -> dict[str, Any]:
    """Content of ``info.json``."""
    return {
        "codebase_version": VERSION,
        "robot_type": robot_type,
        "total_episodes": num_episodes,
        "total_frames": num_frames,
        "total_tasks": num_tasks,
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": FILE_MB,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": {"train": f"0:{num_episodes}"},
        "data_path": f"data/{FILE}",
        "video_path": None,
        "features": all_features,
    }


def write_metadata(
    folder: Path,
    *,
    info: dict[str, Any],
    stats: dict[str, Any],
    tasks: Sequence[str],
    episodes: Sequence[dict[str, Any]],
) -> None:
    """Write ``meta/``; ``info.json`` last, so a data set that has it is complete."""
    pa = import_pyarrow()
    meta = folder / "meta"
    place = FILE.format(chunk_index=0, file_index=0)
    (meta / "episodes" / place).parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {**row, "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        for row in episodes
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows), meta / "episodes" / place)
    pa.parquet.write_table(_task_table(tasks), meta / "tasks.parquet")
    (meta / "stats.json").write_text(json.dumps(stats, indent=2) + "\n")
    (meta / "info.json").write_text(json.dumps(info, indent=2) + "\n")


def _task_table(tasks: Sequence[str]) -> Any:
    """LeRobot looks tasks up in a pandas index; this is how pandas notes one."""
    pa = import_pyarrow()
    index = "__index_level_0__"
    columns: list[dict[str, Any]] = [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64"},
        {"name": None, "field_name": index, "pandas_type": "unicode"},
    ]
    dtypes = ("int64", "object")
    columns = [
        {**column, "numpy_type": dtype, "metadata": None}
        for column, dtype in zip(columns, dtypes, strict=True)
    ]
    note = {"index_columns": [index], "column_indexes": [], "columns": columns}
    table = pa.table({"task_index": list(range(len(tasks))), index: list(tasks)})
    return table.replace_schema_metadata({"pandas": json.dumps(note)})


def read_metadata(folder: Path) -> Metadata:
    """Read ``meta/``.

    Raises:
        ValueError: when a part is missing or of another version; names it.
    """
    import_pyarrow()
    info = _read_json(folder, "info.json")
    version = str(info.get("codebase_version"))
    if version != VERSION:
        raise ValueError(
            f"{folder}: codebase_version is {version}; only {VERSION} is read (LeRobot "
            "has a script that converts older ones)"
        )
    stats = _read_json(folder, "stats.json")
    for name in (ACTION, STATE):
        if name not in stats or name not in info.get("features", {}):
            raise ValueError(f"{folder}: {name} has no statistics or is no feature")
    tasks = {
        int(row["task_index"]): str(row.get("task", row.get("__index_level_0__", "")))
        for row in _read_tables(folder, "meta/tasks.parquet")
    }
    episodes = _read_tables(folder, "meta/episodes/*/*.parquet")
    episodes.sort(key=lambda row: row["episode_index"])
    return Metadata(info, stats, tasks, episodes)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / "meta" / name
    if not path.is_file():
        raise ValueError(f"{path} is missing: {folder} is no complete LeRobot data set")
    return json.loads(path.read_text())


def _read_tables(folder: Path, pattern: str) -> list[dict[str, Any]]:
    parquet = import_pyarrow().parquet
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise ValueError(f"{folder / pattern} is missing")
    return [row for path in paths for row in parquet.read_table(path).to_pylist()]
