"""Videos: every frame, upright, in colour; the same starts before and after."""

import imageio_ffmpeg
import numpy as np
import pytest

from torchrl_vla.training import videos


@pytest.mark.parametrize(("size", "expected"), [(32, 256), (100, 300), (257, 256)])
def test_videos_have_every_frame_at_a_size_that_can_be_watched(
    tmp_path, size, expected
):
    frames = np.zeros((5, size, size, 3), np.uint8)
    for number, frame in enumerate(frames):
        frame[: size // 2] = 50 * number  # upper half brighter and brighter
        frame[:, : size // 2, 2] = 255  # left half blue
    videos.save_video(tmp_path / "videos" / "one.mp4", frames, fps=5)
    path = tmp_path / "videos" / "one.mp4"
    num_frames, seconds = imageio_ffmpeg.count_frames_and_secs(path)
    assert (num_frames, seconds) == (5, pytest.approx(1.0, abs=0.01))
    decoded = videos.read_video(path)
    assert decoded.shape == (5, expected, expected, 3)
    quarter = expected // 4
    upper = decoded[:, quarter, -quarter].astype(float).mean(-1)
    np.testing.assert_allclose(upper, [0, 50, 100, 150, 200], atol=6)
    assert decoded[:, -quarter, -quarter].max() < 10, "the picture is upright"
    assert decoded[:, quarter, quarter, 2].min() > 230, "colours are where they were"


def plain(level, num_frames, size=64):
    return np.full((num_frames, size, size, 3), level, np.uint8)


def test_episodes_are_named_with_their_outcome_and_replace_earlier_ones(tmp_path):
    pairs = {(0, 3): plain(9, 2), (7, 0): plain(9, 2)}
    for outcome in (False, True):
        success = dict.fromkeys(pairs, outcome)
        videos.save_episodes(tmp_path, pairs, success, fps=5, stage="before")
    videos.save_episodes(tmp_path, pairs, success, fps=5, stage="after")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"task{task}_start{start}_{stage}_success.mp4"
        for task, start in pairs
        for stage in ("after", "before")
    ]


def test_before_is_above_after_and_the_border_tells_the_outcome(tmp_path):
    before = {(0, 0): plain(50, 6), (2, 1): plain(100, 3), (5, 5): plain(0, 3)}
    after = {(0, 0): plain(150, 4), (2, 1): plain(200, 2)}
    failure = dict.fromkeys(before, False)
    success = {(0, 0): True, (2, 1): False}
    videos.save_episodes(tmp_path, before, failure, fps=5, stage="before")
    videos.save_episodes(tmp_path, after, success, fps=5, stage="after")
    videos.save_before_after(tmp_path, fps=5)
    frames = videos.read_video(tmp_path / "before_after.mp4").astype(int)
    assert len(frames) == 6 + 4, "as long as the longest, and its end is held"
    # Two columns: the start that was not played afterwards is left out.
    height, width = (size // 2 for size in frames.shape[1:3])
    for row, levels in enumerate([(50, 100), (150, 200)]):
        for column, level in enumerate(levels):
            y, x = int((row + 0.5) * height), int((column + 0.5) * width)
            assert abs(frames[:, y, x] - level).max() < 8, (row, column)

    def border(number, row, column):
        return frames[number, int((row + 0.5) * height), column * width + 3]

    red, green, _ = border(-1, 0, 0)
    assert red > green + 60, "a failure ends red"
    red, green, _ = border(-1, 1, 0)
    assert green > red + 60, "a success ends green"
    assert np.ptp(border(0, 1, 0)) < 30, "grey while it goes on"
    assert np.ptp(border(2, 1, 0)) < 30
    assert np.ptp(border(3, 1, 0)) > 60, "its last frame, while others go on"


def test_without_both_stages_there_is_no_video(tmp_path):
    videos.save_episodes(tmp_path, {(0, 0): plain(9, 2)}, {(0, 0): True}, fps=5)
    videos.save_before_after(tmp_path, fps=5)
    assert [path.name for path in tmp_path.iterdir()] == ["task0_start0_success.mp4"]
