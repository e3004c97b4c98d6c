"""Demonstrations: round trips, what other readers see, and what is refused."""

import json

import numpy as np
import pytest

from torchrl_vla.data import lerobot
from torchrl_vla.data.demonstrations import (
    Demonstration,
    DemonstrationWriter,
    check_demonstration,
    read_demonstrations,
)

pytest.importorskip("pyarrow")


def make(number=0, length=5, *, size=12, cameras=("image", "wrist_image"), **changes):
    draw = np.random.default_rng(number)
    frame = (length, size, size, 3)
    fields = {
        "images": {c: draw.integers(0, 256, frame, dtype=np.uint8) for c in cameras},
        "state": draw.normal(size=(length, 9)).astype(np.float32),
        "action": draw.uniform(-1, 1, (length, 7)).astype(np.float32),
        "instruction": f"pick up object {number % 2}",
        "task_id": number % 2,
        "init_state_id": 1_000_000 + number,
        "success": number != 1,
    }
    return Demonstration(**{**fields, **changes})


def write(folder, demonstrations, **options):
    with DemonstrationWriter(folder, **options) as writer:
        for demonstration in demonstrations:
            writer.add(demonstration)
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "demos", [make(i, length=3 + i) for i in range(4)])


def assert_equal(ours, theirs):
    assert ours.images.keys() == theirs.images.keys()
    for camera, frames in ours.images.items():
        np.testing.assert_array_equal(frames, theirs.images[camera])
    np.testing.assert_array_equal(ours.state, theirs.state)
    np.testing.assert_array_equal(ours.action, theirs.action)
    for name in ("instruction", "task_id", "init_state_id", "success"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_what_is_written_is_read(folder):
    found = read_demonstrations(folder)
    assert len(found) == 4
    for number, demonstration in enumerate(found):
        assert_equal(demonstration, make(number, length=3 + number))
        assert demonstration.action.dtype == demonstration.state.dtype == np.float32


def test_only_the_cameras_that_are_asked_for(folder):
    assert list(read_demonstrations(folder, cameras=["image"])[0].images) == ["image"]
    assert read_demonstrations(folder, cameras=[])[0].images == {}
    with pytest.raises(ValueError, match=r"no images of \['top'\]; there are \['image"):
        read_demonstrations(folder, cameras=["top"])


def test_many_files_and_episodes_in_each(tmp_path, monkeypatch):
    """A file is closed at its size; the next episode goes into the next one."""
    monkeypatch.setattr(lerobot, "FILE_MB", 0.02)
    monkeypatch.setattr(lerobot, "FILES_PER_CHUNK", 2)
    demonstrations = [make(i) for i in range(12)]
    write(tmp_path / "demos", demonstrations)
    files = sorted((tmp_path / "demos" / "data").rglob("*.parquet"))
    names = [str(f.relative_to(tmp_path / "demos" / "data")) for f in files]
    assert names[:3] == [
        "chunk-000/file-000.parquet",
        "chunk-000/file-001.parquet",
        "chunk-001/file-000.parquet",
    ]
    assert len(files) < 12, "more than one episode in a file"
    for ours, theirs in zip(
        read_demonstrations(tmp_path / "demos"), demonstrations, strict=True
    ):
        assert_equal(ours, theirs)


def test_the_metadata_of_lerobot(folder):
    info = json.loads((folder / "meta" / "info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["fps"], info["robot_type"]) == (20, "panda")
    assert (info["total_episodes"], info["total_frames"]) == (4, 3 + 4 + 5 + 6)
    assert info["total_tasks"] == 2
    image = info["features"]["observation.images.wrist_image"]
    assert (image["dtype"], image["shape"]) == ("image", [12, 12, 3])
    assert info["features"]["action"]["shape"] == [7]
    demonstrations = [make(i, length=3 + i) for i in range(4)]
    actions = np.concatenate([d.action for d in demonstrations])
    stats = json.loads((folder / "meta" / "stats.json").read_text())
    np.testing.assert_allclose(stats["action"]["mean"], actions.mean(0), atol=1e-6)
    np.testing.assert_allclose(stats["action"]["std"], actions.std(0), atol=1e-6)
    np.testing.assert_allclose(
        stats["action"]["q99"], np.quantile(actions.astype(float), 0.99, axis=0)
    )
    assert stats["action"]["count"] == [18]
    assert np.shape(stats["observation.images.image"]["mean"]) == (3, 1, 1)
    assert 0.4 < stats["observation.images.image"]["mean"][0][0][0] < 0.6


def test_pandas_finds_tasks_and_episodes_as_lerobot_looks_them_up(folder):
    pandas = pytest.importorskip("pandas")
    tasks = pandas.read_parquet(folder / "meta" / "tasks.parquet")
    assert tasks.loc["pick up object 1"].task_index == 1
    assert tasks.iloc[0].name == "pick up object 0"
    path = folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    row = pandas.read_parquet(path).iloc[2]
    assert (row["dataset_from_index"], row["dataset_to_index"]) == (7, 12)
    assert (row["data/chunk_index"], row["data/file_index"]) == (0, 0)
    assert list(row["tasks"]) == ["pick up object 0"]
    np.testing.assert_allclose(
        row["stats/action/min"], make(2, length=5).action.min(0), atol=1e-6
    )


# TorchRL warns of its own classes when its data sets are first imported.
@pytest.mark.filterwarnings("ignore:Creating .*WeightUpdater:DeprecationWarning")
def test_torchrl_reads_it(tmp_path, monkeypatch):
    """TorchRL's reader of the hub, given the data set as a download in its cache."""
    datasets = pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub")
    from torchrl.data.datasets import LeRobotExperienceReplay

    commit = "0" * 40
    place = tmp_path / "hub" / "datasets--local--demos"
    demonstrations = [make(i) for i in range(3)]
    write(place / "snapshots" / commit, demonstrations)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    replay = LeRobotExperienceReplay("local/demos", root=tmp_path, batch_size=4)
    rows = replay[:]
    for name in ("action", "state"):
        key = name if name == "action" else ("observation", name)
        expected = np.concatenate([getattr(d, name) for d in demonstrations])
        np.testing.assert_array_equal(rows[key].numpy(), expected)
    for camera in ("image", "wrist_image"):
        frames = rows["observation", "image", camera].permute(0, 2, 3, 1).numpy()
        expected = np.concatenate([d.images[camera] for d in demonstrations])
        np.testing.assert_array_equal(frames, expected)
    assert rows["episode"].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert rows.get("language_instruction")[5:6].tolist() == ["pick up object 1"]
    assert rows["next", "done"].flatten().nonzero().flatten().tolist() == [4, 9, 14]
    assert rows["next", "success"].flatten().nonzero().flatten().tolist() == [4, 14]
    assert replay.sample().shape == (4,)


def with_nan(field):
    demonstration = make(0)
    getattr(demonstration, field)[2, 1] = np.nan
    return demonstration


def with_images(**images):
    return make(0, images={**make(0).images, **images})


BAD = {
    "nan action": (lambda: with_nan("action"), "action holds NaN.*env step 2"),
    "nan state": (lambda: with_nan("state"), "state holds NaN.*env step 2"),
    "action size": (
        lambda: make(0, action=np.zeros((5, 6), np.float32)),
        r"action has shape \(5, 6\); expected is \[T, 7\]",
    ),
    "no instruction": (lambda: make(0, instruction=" "), "instruction is ' '"),
    "no step": (lambda: make(0, length=0), "action has no env step"),
    "mixed sizes": (
        lambda: with_images(wrist_image=make(0, size=8).images["image"]),
        r"images are of mixed sizes \[\(8, 8, 3\), \(12, 12, 3\)\]",
    ),
    "one frame too few": (
        lambda: with_images(image=make(0, length=4).images["image"]),
        r"images\['image'\] has shape \(4, 12, 12, 3\); expected is \[5, Y, X, 3\]",
    ),
    "ragged frames": (
        lambda: with_images(image=[np.zeros((8, 8, 3)), np.zeros((9, 9, 3))]),
        r"images\['image'\] is no uint8 array; frames of one size",
    ),
    "short state": (
        lambda: make(0, state=np.zeros((4, 9), np.float32)),
        r"state has shape \(4, 9\); 5 env steps",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_episodes_are_refused_by_episode_and_field(tmp_path, name):
    bad, message = BAD[name]
    with pytest.raises(ValueError, match=f"mine: {message}"):
        check_demonstration(bad(), "mine")
    with DemonstrationWriter(tmp_path / "demos") as writer:
        writer.add(make(0))
        with pytest.raises(ValueError, match=f"episode 1: {message}"):
            writer.add(bad())
    assert len(read_demonstrations(tmp_path / "demos")) == 1, "the good one is kept"


def test_another_size_or_camera_than_the_first_episode(tmp_path):
    with DemonstrationWriter(tmp_path / "demos") as writer:
        writer.add(make(0))
        for other in (make(1, size=8), make(1, cameras=("image",))):
            with pytest.raises(ValueError, match=r"episode 1: .* have the shapes"):
                writer.add(other)


def test_a_folder_with_something_in_it_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"is not empty; .* give a new folder"):
        DemonstrationWriter(folder)
    with (
        pytest.raises(ValueError, match="no demonstration was added"),
        DemonstrationWriter(tmp_path / "none"),
    ):
        pass


def test_missing_metadata_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"info\.json is missing: .* no complete"):
        read_demonstrations(tmp_path / "nowhere")
    stats = folder / "meta" / "stats.json"
    content = json.loads(stats.read_text())
    del content["action"]
    stats.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="action has no statistics"):
        read_demonstrations(folder)
    stats.unlink()
    with pytest.raises(ValueError, match=r"stats\.json is missing"):
        read_demonstrations(folder)


def test_another_version_and_videos_are_refused(folder):
    path = folder / "meta" / "info.json"
    info = json.loads(path.read_text())
    info["features"]["observation.images.image"]["dtype"] = "video"
    path.write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"\['image'\] are MP4 videos"):
        read_demonstrations(folder)
    path.write_text(json.dumps({**info, "codebase_version": "v2.1"}))
    with pytest.raises(ValueError, match=r"v2\.1; only v3\.0 is read"):
        read_demonstrations(folder)


def test_what_is_wrong_in_a_file_is_named(folder):
    """An instruction that is not in the table of tasks, and rows that are missing."""
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder / "meta" / "tasks.parquet"
    tasks = parquet.read_table(path)
    parquet.write_table(tasks.slice(0, 1), path)
    with pytest.raises(ValueError, match="episode 1: instruction is not one text"):
        read_demonstrations(folder)
    parquet.write_table(tasks, path)
    path = folder / "data" / "chunk-000" / "file-000.parquet"
    rows = parquet.read_table(path)
    parquet.write_table(rows.slice(0, 16), path)
    with pytest.raises(ValueError, match="episode 3: length 6, but data/ has no such"):
        read_demonstrations(folder)


def test_large_row_groups_hold_many_episodes(folder):
    """As other writers make them."""
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder / "data" / "chunk-000" / "file-000.parquet"
    rows = parquet.read_table(path)
    parquet.write_table(rows, path, row_group_size=7)
    for number, demonstration in enumerate(read_demonstrations(folder)):
        assert_equal(demonstration, make(number, length=3 + number))
