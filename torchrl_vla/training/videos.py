"""Videos of episodes, and of the same starts before and after training."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

_GREEN, _RED, _GREY = (60, 160, 80), (200, 70, 60), (90, 90, 90)
_BORDER = 6
_HEADER = 24
_NAME = re.compile(r"task(\d+)_start(\d+)_(before|after)_(success|failure)\.mp4")


def save_video(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write uint8 frames ``[T, Y, X, 3]`` as H.264, enlarged to at least 256 px."""
    import imageio.v2 as imageio

    factor = max(1, -(-256 // min(frames.shape[1:3])))
    frames = frames.repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = (size - size % 2 for size in frames.shape[1:3])
    path.parent.mkdir(parents=True, exist_ok=True)
    with imageio.get_writer(
        path, fps=fps, macro_block_size=1, output_params=["-loglevel", "error"]
    ) as writer:
        for frame in frames[:, :height, :width]:
            writer.append_data(np.ascontiguousarray(frame))


def read_video(path: Path) -> np.ndarray:
    """All frames of a video, uint8 ``[T, Y, X, 3]``."""
    import imageio_ffmpeg

    # The readers of imageio leave their pipes open.
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path)]
    command += ["-f", "image2pipe", "-c:v", "ppm", "-"]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    kind, size, depth = output.split(b"\n", 3)[:3]
    width, height = map(int, size.split())
    header = len(kind + size + depth) + 3
    frames = np.frombuffer(output, np.uint8).reshape(-1, header + height * width * 3)
    return frames[:, header:].reshape(-1, height, width, 3)


def save_episodes(
    folder: Path,
    videos: Mapping[tuple[int, int], np.ndarray],
    success: Mapping[tuple[int, int], bool],
    fps: float,
    stage: str = "",
) -> None:
    """Write a video per (task, initial state), named with its outcome.

    Args:
        folder: ``task<task>_start<start>[_<stage>]_<outcome>.mp4`` go here.
        videos: frames uint8 ``[T, Y, X, 3]`` by pair.
        success: outcome by pair.
        fps: frames per second.
        stage: ``before`` or ``after`` training; empty where there is one stage only.
            Earlier videos of the stage are removed.
    """
    middle = f"_{stage}" if stage else ""
    for old in folder.glob(f"task*_start*{middle}_*.mp4"):
        old.unlink()
    for (task, start), frames in videos.items():
        outcome = "success" if success[task, start] else "failure"
        save_video(
            folder / f"task{task}_start{start}{middle}_{outcome}.mp4", frames, fps
        )


def save_before_after(folder: Path, fps: float) -> None:
    """Join the videos of :func:`save_episodes` into ``before_after.mp4``.

    A column per (task, initial state), before training above, after it below; a frame
    turns green or red when its episode has ended. Nothing is written unless some start
    has both.
    """
    rows: dict[str, dict[tuple[int, int], tuple[Path, bool]]] = {}
    for path in folder.glob("*.mp4"):
        if match := _NAME.fullmatch(path.name):
            task, start, stage, outcome = match.groups()
            pair = (int(task), int(start))
            rows.setdefault(stage, {})[pair] = (path, outcome == "success")
    pairs = sorted(rows.get("before", {}).keys() & rows.get("after", {}).keys())
    if pairs:
        panels = [
            [
                _panel(read_video(path), good, f"task {pair[0]}, {stage} training")
                for pair in pairs
                for path, good in [rows[stage][pair]]
            ]
            for stage in ("before", "after")
        ]
        save_video(folder / "before_after.mp4", _grid(panels), fps)


def _panel(frames: np.ndarray, success: bool, title: str) -> np.ndarray:
    """Frames with a title and a border that shows the outcome at the end."""
    from PIL import Image, ImageDraw, ImageFont

    num, height, width, _ = frames.shape
    header = Image.new("RGB", (width + 2 * _BORDER, _HEADER), "white")
    draw = ImageDraw.Draw(header)
    draw.text((_BORDER, 4), title, fill="black", font=ImageFont.load_default(14))
    framed = np.empty((num, height + 2 * _BORDER, width + 2 * _BORDER, 3), np.uint8)
    framed[:] = _GREY
    framed[-1] = _GREEN if success else _RED
    framed[:, _BORDER:-_BORDER, _BORDER:-_BORDER] = frames
    title_frames = np.broadcast_to(np.asarray(header), (num, *np.shape(header)))
    return np.concatenate([title_frames, framed], axis=1)


def _grid(panels: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Panels in rows and columns; those that end earlier keep their last frame."""
    num = max(len(panel) for row in panels for panel in row)
    held = np.minimum(np.arange(num + 4), num - 1)  # the end is seen for a while

    def fill(panel: np.ndarray) -> np.ndarray:
        return panel[np.minimum(held, len(panel) - 1)]

    rows = [np.concatenate([fill(p) for p in row], axis=2) for row in panels]
    return np.concatenate(rows, axis=1)
