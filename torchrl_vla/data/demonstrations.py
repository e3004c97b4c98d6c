"""Demonstrations: what they are, what is wrong with them, on disk and back.

On disk they are a LeRobot data set of version 3.0, so that LeRobot's and TorchRL's
tools read them, and this module reads other people's. Three facts that LeRobot has no
field for (``task_id``, ``init_state_id``, ``success``) are columns of the table of
episodes.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_vla.data import lerobot, lerobot_episodes

ACTION_DIM = 7
"""Translation (3), rotation (3) and gripper (1) of LIBERO's arm."""


@dataclass
class Demonstration:
    """One episode of an expert, one entry per env step.

    Entry ``t`` of ``images`` and ``state`` is what was seen *before* ``action[t]``.

    Attributes:
        images: by camera (``"image"``, ``"wrist_image"``), uint8 ``[T, Y, X, 3]``,
            upright, all of one size.
        state: proprioception, float32 ``[T, S]``, in the environment's units.
        action: float32 ``[T, A]``, in the environment's units.
        instruction: the task in words.
        task_id: number of the task in its suite.
        init_state_id: number of the start.
        success: whether the episode ended in success.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray
    action: np.ndarray
    instruction: str
    task_id: int
    init_state_id: int
    success: bool

    def __len__(self) -> int:
        """``T``, env steps."""
        return len(self.action)


def check_demonstration(
    demonstration: Demonstration, name: str, action_dim: int | None = ACTION_DIM
) -> None:
    """Refuse what cannot be trained on.

    Args:
        demonstration: the episode.
        name: of the episode, for the error.
        action_dim: ``A``; ``None`` is any.

    Raises:
        ValueError: for the first thing that is wrong, with episode and field.
    """
    for field, problem in _problems(demonstration, action_dim):
        raise ValueError(f"{name}: {field} {problem}")


def _problems(demo: Demonstration, action_dim: int | None) -> Iterator[tuple[str, str]]:
    shape = np.shape(demo.action)
    if len(shape) != 2 or (action_dim is not None and shape[1] != action_dim):
        expected = "A" if action_dim is None else action_dim
        yield "action", f"has shape {shape}; expected is [T, {expected}]"
        return
    if shape[0] == 0:
        yield "action", "has no env step; leave the episode out"
        return
    if not isinstance(demo.instruction, str) or not demo.instruction.strip():
        yield "instruction", f"is {demo.instruction!r}; a text is needed"
    for field, values in (("action", demo.action), ("state", demo.state)):
        yield from _vector_problems(field, np.asarray(values), shape[0])
    sizes = set()
    for camera, frames in demo.images.items():
        yield from _image_problems(f"images[{camera!r}]", frames, shape[0])
        sizes.add(np.shape(frames)[1:])
    if len(sizes) > 1:
        yield "images", f"are of mixed sizes {sorted(sizes)}; render all in one size"


def _vector_problems(
    field: str, values: np.ndarray, length: int
) -> Iterator[tuple[str, str]]:
    if values.ndim != 2 or len(values) != length:
        yield field, f"has shape {values.shape}; {length} env steps need [{length}, S]"
    elif not np.isfinite(values).all():
        step = int(np.argwhere(~np.isfinite(values))[0, 0])
        yield field, f"holds NaN or infinity at env step {step}"


def _image_problems(
    field: str, frames: np.ndarray, length: int
) -> Iterator[tuple[str, str]]:
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8:
        yield field, "is no uint8 array; frames of one size, 0..255, are expected"
    elif frames.ndim != 4 or frames.shape[0] != length or frames.shape[3] != 3:
        yield field, f"has shape {frames.shape}; expected is [{length}, Y, X, 3]"


class DemonstrationWriter(AbstractContextManager["DemonstrationWriter"]):
    """Write demonstrations, one after the other, as a LeRobot v3.0 data set.

    Frames are PNG, without loss, in the parquet files of the other columns. Rows are
    written as they come; the files can be read after :meth:`close`.

    Args:
        folder: to write to; must be empty or not there.
        fps: env steps per second.
        robot_type: LeRobot's name of the robot.
        action_dim: ``A``, checked; ``None`` is any.

    Raises:
        ModuleNotFoundError: without the ``demos`` extra.
        ValueError: for a folder with something in it.

    Example:
        >>> import tempfile
        >>> frames = np.zeros((2, 8, 8, 3), np.uint8)
        >>> demo = Demonstration({"image": frames}, np.zeros((2, 9), np.float32),
        ...     np.zeros((2, 7), np.float32), "pick up the bowl", 0, 3, True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with DemonstrationWriter(Path(folder)) as writer:
        ...         writer.add(demo)
        ...     read_demonstrations(folder)[0].init_state_id
        3
    """

    def __init__(
        self,
        folder: Path,
        *,
        fps: int = 20,
        robot_type: str = "panda",
        action_dim: int | None = ACTION_DIM,
    ) -> None:
        lerobot.import_pyarrow()
        self.folder = Path(folder)
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(
                f"{self.folder} is not empty; demonstrations are not added to a data "
                "set, so give a new folder"
            )
        self.fps = fps
        self.robot_type = robot_type
        self.action_dim = action_dim
        self._tables = lerobot.DataFiles(self.folder)
        self._features: dict[str, Any] = {}
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._samples: dict[str, list[np.ndarray]] = {}
        self._num_frames = 0
        self._is_closed = False

    def add(self, demonstration: Demonstration) -> None:
        """Append an episode.

        Raises:
            ValueError: when something is wrong with it, or its cameras or sizes are
                not those of the first one; nothing is written then.
        """
        number = len(self._episodes)
        check_demonstration(demonstration, f"episode {number}", self.action_dim)
        columns = _columns(demonstration)
        features = lerobot.features({k: v.shape[1:] for k, v in columns.items()})
        self._features = self._features or features
        if features != self._features:
            raise ValueError(
                f"episode {number}: images or state have the shapes "
                f"{_shapes(features)}; those of the first episode are "
                f"{_shapes(self._features)}"
            )
        length = len(demonstration)
        task = self._tasks.setdefault(demonstration.instruction, len(self._tasks))
        is_last = np.arange(length) == length - 1
        place = self._tables.write(
            {
                **{k: _encoded(v) for k, v in columns.items()},
                "next.done": is_last,
                "next.success": is_last & demonstration.success,
                "timestamp": (np.arange(length) / self.fps).astype(np.float32),
                "frame_index": np.arange(length),
                "episode_index": np.full(length, number),
                "index": self._num_frames + np.arange(length),
                "task_index": np.full(length, task),
            },
            self._features,
        )
        samples = {k: lerobot.sample(v) for k, v in columns.items()}
        for name, values in samples.items():
            self._samples.setdefault(name, []).append(values)
        stats = {k: lerobot.statistics(v, length) for k, v in samples.items()}
        self._episodes.append(
            {
                "episode_index": number,
                "tasks": [demonstration.instruction],
                "length": length,
                "dataset_from_index": self._num_frames,
                "dataset_to_index": self._num_frames + length,
                **place,
                "task_id": int(demonstration.task_id),
                "init_state_id": int(demonstration.init_state_id),
                "success": bool(demonstration.success),
                **lerobot.flat_statistics(stats),
            }
        )
        self._num_frames += length

    def close(self) -> None:
        """Write the metadata; a second call does nothing.

        Raises:
            ValueError: when no episode was added.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._tables.close()
        if not self._episodes:
            raise ValueError(f"{self.folder}: no demonstration was added")
        lerobot.write_metadata(
            self.folder,
            info=lerobot.info(
                self._features,
                fps=self.fps,
                robot_type=self.robot_type,
                num_episodes=len(self._episodes),
                num_frames=self._num_frames,
                num_tasks=len(self._tasks),
            ),
            stats={
                name: lerobot.statistics(np.concatenate(parts), self._num_frames)
                for name, parts in self._samples.items()
            },
            tasks=list(self._tasks),
            episodes=self._episodes,
        )

    def __exit__(self, error_type: type | None, *error: object) -> None:
        # What was written before an error is complete, and worth keeping.
        if error_type is None or self._episodes:
            self.close()


def _columns(demonstration: Demonstration) -> dict[str, np.ndarray]:
    images = {
        lerobot.IMAGE_PREFIX + camera: frames
        for camera, frames in sorted(demonstration.images.items())
    }
    return {
        **images,
        lerobot.STATE: np.asarray(demonstration.state, np.float32),
        lerobot.ACTION: np.asarray(demonstration.action, np.float32),
    }


def _shapes(features: dict[str, Any]) -> dict[str, Any]:
    names = (lerobot.STATE, lerobot.ACTION)
    return {
        name: tuple(feature["shape"])
        for name, feature in features.items()
        if name in names or feature["dtype"] == "image"
    }


def _encoded(values: np.ndarray) -> Any:
    """PNG files of frames; anything else as it is."""
    if values.dtype != np.uint8:
        return values
    from PIL import Image

    files = []
    for frame in values:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, format="PNG", compress_level=3)
        files.append(buffer.getvalue())
    return files


def _decoded(files: Sequence[dict[str, Any]]) -> np.ndarray | list[np.ndarray]:
    from PIL import Image

    frames = [
        np.asarray(Image.open(io.BytesIO(file["bytes"])).convert("RGB"))
        for file in files
    ]
    same = len({frame.shape for frame in frames}) == 1
    return np.stack(frames) if same else frames


def read_demonstrations(
    folder: str | Path,
    *,
    cameras: Sequence[str] | None = None,
    action_dim: int | None = ACTION_DIM,
) -> list[Demonstration]:
    """Read a LeRobot v3.0 data set with images in its parquet files.

    All frames are decoded into memory: 27 kB each at 96 px.

    Args:
        folder: of the data set.
        cameras: to read; ``None`` is all that there are. Names are LeRobot's without
            ``observation.images.``.
        action_dim: ``A``, checked; ``None`` is any.

    Returns:
        The episodes in order. Where a data set has no ``task_id``, ``init_state_id``
        and ``success`` they are LeRobot's ``task_index``, -1 and true.

    Raises:
        ModuleNotFoundError: without the ``demos`` extra.
        ValueError: when it is no such data set, or something is wrong with an episode;
            names episode and field.
    """
    lerobot.import_pyarrow()
    folder = Path(folder)
    meta = lerobot.read_metadata(folder)
    found = lerobot.cameras(meta.info)
    wanted = found if cameras is None else list(cameras)
    if missing := [camera for camera in wanted if camera not in found]:
        raise ValueError(f"{folder}: no images of {missing}; there are {found}")
    demonstrations = []
    for episode, rows in lerobot_episodes.read_episodes(folder, meta, wanted):
        name = f"{folder}, episode {episode['episode_index']}"
        demonstration = Demonstration(
            images={
                camera: _decoded(rows[lerobot.IMAGE_PREFIX + camera])  # type: ignore
                for camera in wanted
            },
            state=lerobot_episodes.matrix(rows[lerobot.STATE], f"{name}: state"),
            action=lerobot_episodes.matrix(rows[lerobot.ACTION], f"{name}: action"),
            instruction=lerobot_episodes.instruction(episode, rows, meta.tasks, name),
            task_id=int(episode.get("task_id", (rows["task_index"] or [-1])[0])),
            init_state_id=int(episode.get("init_state_id", -1)),
            success=bool(episode.get("success", True)),
        )
        check_demonstration(demonstration, name, action_dim)
        demonstrations.append(demonstration)
    return demonstrations
