"""LIBERO's own demonstrations: HDF5 files, one task each."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_vla.data.demonstrations import Demonstration, check_demonstration

CAMERAS = {"image": "agentview_rgb", "wrist_image": "eye_in_hand_rgb"}
"""LIBERO's name of each camera."""


def read_libero_hdf5(
    path: str | Path, *, task_id: int = 0, observation_lag: int = 1
) -> list[Demonstration]:
    """Read ``data/demo_*`` of a file of LIBERO.

    Images are turned by 180 degrees: the files hold them as OpenGL draws them, upside
    down. The state is what ``LiberoEnv`` gives: position of the hand (m), its
    quaternion (xyzw), the two fingers (m).

    **Rows are shifted.** LIBERO's ``create_dataset.py`` steps with ``actions[j]`` and
    then records ``obs[j]``, so what was seen before ``actions[j]`` is ``obs[j - 1]``.
    With ``observation_lag=1`` the first action and the last observation are dropped.
    Files that were recorded again with observations first (OpenVLA's
    ``regenerate_libero_dataset.py``) need 0.

    Source: LIBERO at 19520007 (``scripts/create_dataset.py``), by which the official
    files were made.

    Args:
        path: of the file.
        task_id: number of the task in its suite; the file does not say.
        observation_lag: env steps by which observations come after the action of their
            row.

    Returns:
        The demonstrations in the order of their numbers, all of them successful;
        ``init_state_id`` is that number.

    Raises:
        ModuleNotFoundError: without the ``demos`` extra.
        ValueError: when the file is not laid out like this or something is wrong with
            an episode; names episode and field.
    """
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "LIBERO's HDF5 files need h5py: pip install 'torchrl-vla[demos]'"
        ) from error
    if not Path(path).is_file():
        raise ValueError(f"{path} is no file")
    with h5py.File(path, "r") as file:
        if "data" not in file:
            raise ValueError(
                f"{path}: there is no group 'data', as LIBERO's files have"
            )
        group = file["data"]
        text = _instruction(group, str(path))
        numbers = sorted(int(n.split("_")[1]) for n in group if n.startswith("demo_"))
        demonstrations = []
        for number in numbers:
            name = f"{path}, demo_{number}"
            demonstration = _demonstration(
                group[f"demo_{number}"], name, text, observation_lag
            )
            demonstration.task_id = task_id
            demonstration.init_state_id = number
            check_demonstration(demonstration, name)
            demonstrations.append(demonstration)
    if not demonstrations:
        raise ValueError(f"{path}: there is no demonstration data/demo_0")
    return demonstrations


def _instruction(group: Any, name: str) -> str:
    info = json.loads(group.attrs.get("problem_info", "{}"))
    text = info.get("language_instruction", "")
    # Some files hold the words of the text as a list.
    text = " ".join(text) if isinstance(text, list) else text
    if not text.strip('" '):
        raise ValueError(
            f"{name}: instruction is missing; the attribute problem_info of data has "
            f"{sorted(info)}"
        )
    return str(text).strip('" ')


def _demonstration(demo: Any, name: str, text: str, lag: int) -> Demonstration:
    action = _read(demo, "actions", name).astype(np.float32)
    images = {
        camera: np.ascontiguousarray(_read(demo, f"obs/{stored}", name)[:, ::-1, ::-1])
        for camera, stored in CAMERAS.items()
    }
    state = _state(demo, name).astype(np.float32)
    if lag:
        action, state = action[lag:], state[:-lag]
        images = {camera: frames[:-lag] for camera, frames in images.items()}
    return Demonstration(images, state, action, text, 0, 0, success=True)


def _read(demo: Any, key: str, name: str) -> np.ndarray:
    if key not in demo:
        raise ValueError(f"{name}: {key} is missing")
    return np.asarray(demo[key])


def _state(demo: Any, name: str) -> np.ndarray:
    """``[T, 9]``: position, quaternion, fingers."""
    if "robot_states" in demo:  # fingers, position, quaternion
        fingers, pose = np.split(_read(demo, "robot_states", name), [2], axis=-1)
        return np.concatenate([pose, fingers], -1)
    position = _read(demo, "obs/ee_pos", name)
    quaternion = axis_angle_to_quaternion(_read(demo, "obs/ee_ori", name))
    fingers = _read(demo, "obs/gripper_states", name)
    return np.concatenate([position, quaternion, fingers], -1)


def axis_angle_to_quaternion(rotation: np.ndarray) -> np.ndarray:
    """The inverse of :func:`normalization.quaternion_to_axis_angle`, sign included.

    Args:
        rotation: ``[*, 3]``, radians; angles reach 2 pi.

    Returns:
        ``[*, 4]``, unit length, order x, y, z, w.

    Example:
        >>> axis_angle_to_quaternion(np.array([0.0, 0.0, np.pi])).round(6).tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    angle = np.linalg.norm(rotation, axis=-1, keepdims=True)
    axis = rotation / np.where(angle == 0, 1.0, angle)
    return np.concatenate([axis * np.sin(angle / 2), np.cos(angle / 2)], -1)
