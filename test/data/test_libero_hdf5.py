"""LIBERO's HDF5 files, written here in their layout."""

import json

import numpy as np
import pytest
import torch

from torchrl_vla.data.libero_hdf5 import axis_angle_to_quaternion, read_libero_hdf5
from torchrl_vla.data.normalization import quaternion_to_axis_angle

h5py = pytest.importorskip("h5py")
TEXT = "pick up the milk and place it in the basket"
LENGTH, SIZE = 6, 10


def contents(number):
    """What one demonstration holds, keys as in the file."""
    draw = np.random.default_rng(number)
    quaternion = draw.normal(size=(LENGTH, 4))
    quaternion /= np.linalg.norm(quaternion, axis=-1, keepdims=True)
    position, fingers = draw.normal(size=(LENGTH, 3)), draw.normal(size=(LENGTH, 2))
    frame = (LENGTH, SIZE, SIZE, 3)
    return {
        "actions": draw.uniform(-1, 1, (LENGTH, 7)),
        "states": draw.normal(size=(LENGTH, 50)),
        "robot_states": np.concatenate([fingers, position, quaternion], -1),
        "obs/agentview_rgb": draw.integers(0, 256, frame, dtype=np.uint8),
        "obs/eye_in_hand_rgb": draw.integers(0, 256, frame, dtype=np.uint8),
        "obs/ee_pos": position,
        "obs/ee_ori": quaternion_to_axis_angle(torch.from_numpy(quaternion)).numpy(),
        "obs/gripper_states": fingers,
        "obs/joint_states": draw.normal(size=(LENGTH, 7)),
    }


def write(path, demonstrations, text=TEXT):
    with h5py.File(path, "w") as file:
        group = file.create_group("data")
        info = {"problem_name": "libero_floor_manipulation"}
        if text is not None:
            info["language_instruction"] = text
        group.attrs["problem_info"] = json.dumps(info)
        group.attrs["bddl_file_name"] = f"bddl_files/{TEXT.replace(' ', '_')}.bddl"
        for number, content in enumerate(demonstrations):
            for key, values in content.items():
                group.create_dataset(f"demo_{number}/{key}", data=values)
    return path


def test_rows_are_what_was_seen_before_each_action(tmp_path):
    path = write(tmp_path / "milk_demo.hdf5", [contents(i) for i in range(12)])
    found = read_libero_hdf5(path, task_id=3)
    assert [d.init_state_id for d in found] == list(range(12)), "demo_10 after demo_9"
    for number, demonstration in enumerate(found):
        content = contents(number)
        assert len(demonstration) == LENGTH - 1
        np.testing.assert_allclose(demonstration.action, content["actions"][1:], 1e-6)
        seen = content["obs/agentview_rgb"][:-1, ::-1, ::-1]
        np.testing.assert_array_equal(demonstration.images["image"], seen)
        wrist = content["obs/eye_in_hand_rgb"][:-1, ::-1, ::-1]
        np.testing.assert_array_equal(demonstration.images["wrist_image"], wrist)
        fingers, pose = np.split(content["robot_states"][:-1], [2], axis=-1)
        expected = np.concatenate([pose, fingers], -1)
        np.testing.assert_allclose(demonstration.state, expected, 1e-6)
        assert demonstration.instruction == TEXT
        assert (demonstration.task_id, demonstration.success) == (3, True)


def test_files_that_were_recorded_again_are_not_shifted(tmp_path):
    path = write(tmp_path / "demo.hdf5", [contents(0)])
    (demonstration,) = read_libero_hdf5(path, observation_lag=0)
    np.testing.assert_allclose(demonstration.action, contents(0)["actions"], 1e-6)
    assert len(demonstration.images["image"]) == LENGTH


def test_without_robot_states_the_pose_is_put_together(tmp_path):
    content = contents(0)
    expected = content.pop("robot_states")
    path = write(tmp_path / "demo.hdf5", [content])
    (demonstration,) = read_libero_hdf5(path)
    np.testing.assert_allclose(demonstration.state[:, :7], expected[:-1, 2:], atol=1e-5)
    np.testing.assert_allclose(demonstration.state[:, 7:], expected[:-1, :2], atol=1e-6)


def test_quaternions_come_back_with_their_sign():
    draw = np.random.default_rng(0)
    quaternion = draw.normal(size=(50, 4))
    quaternion /= np.linalg.norm(quaternion, axis=-1, keepdims=True)
    assert (quaternion[:, 3] < 0).any()
    rotation = quaternion_to_axis_angle(torch.from_numpy(quaternion)).numpy()
    np.testing.assert_allclose(
        axis_angle_to_quaternion(rotation), quaternion, atol=1e-9
    )
    identity = axis_angle_to_quaternion(np.zeros((1, 3)))
    np.testing.assert_array_equal(identity, [[0, 0, 0, 1]])


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match="instruction is missing"):
        read_libero_hdf5(write(tmp_path / "a.hdf5", [contents(0)], text=None))
    for key in ("actions", "obs/agentview_rgb"):
        content = contents(1)
        del content[key]
        path = write(tmp_path / "b.hdf5", [contents(0), content])
        with pytest.raises(ValueError, match=f"demo_1: {key} is missing"):
            read_libero_hdf5(path)
    content = contents(0)
    content["actions"][3, 2] = np.nan
    with pytest.raises(ValueError, match="demo_0: action holds NaN"):
        read_libero_hdf5(write(tmp_path / "c.hdf5", [content]))
    with pytest.raises(ValueError, match=r"no demonstration data/demo_0"):
        read_libero_hdf5(write(tmp_path / "d.hdf5", []))
    with pytest.raises(ValueError, match=r"e\.hdf5 is no file"):
        read_libero_hdf5(tmp_path / "e.hdf5")
