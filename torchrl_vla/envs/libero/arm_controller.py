"""The controller of one simulation state, set up from robosuite's own."""

from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np

from torchrl_vla.envs.libero.osc import (
    CONTROLLER,
    FINGER_SPEED,
    install,
    register,
    unregister,
)


def unsupported(robot: Any) -> str | None:
    """Why a robosuite robot needs robosuite's own control loop; ``None`` if not."""
    controller = robot.controller
    required = {
        "name": "OSC_POSE",
        "impedance_mode": "fixed",
        "use_delta": True,
        "uncoupling": True,
        "interpolator_pos": None,
        "interpolator_ori": None,
        "position_limits": None,
        "orientation_limits": None,
    }
    for setting, value in required.items():
        if (given := getattr(controller, setting, "missing")) != value:
            return f"the controller's {setting} is {given!r}, not {value!r}"
    if type(robot.gripper).__name__ != "PandaGripper":
        return f"the gripper is {type(robot.gripper).__name__}, not PandaGripper"
    if robot.gripper.speed != FINGER_SPEED:
        return f"the gripper's speed is {robot.gripper.speed}, not {FINGER_SPEED}"
    return None


class ArmController:
    """The controller of one simulation state.

    While it is open, every ``mj_step`` of ``data`` is controlled by it.

    Args:
        robot: robosuite's robot, for its settings.
        model: compiled scene.
        data: the state to control.

    Raises:
        RuntimeError: when ``MAX_CONTROLLERS`` are open in this process.
    """

    def __init__(self, robot: Any, model: mujoco.MjModel, data: mujoco.MjData) -> None:
        from robosuite.utils import transform_utils

        self._callback = install()
        self._helpers = transform_utils
        self._scale = robot.controller.scale_action
        self._data = data
        self._block = np.zeros(1, dtype=CONTROLLER)
        self._c = self._block.view(np.recarray)[0]
        self._write_settings(robot, model)
        self._write_addresses(robot, model, data)
        self._row = register(data._address, self._block.ctypes.data)

    def _write_settings(self, robot: Any, model: mujoco.MjModel) -> None:
        c, controller = self._c, robot.controller
        c.kp, c.kd = controller.kp, controller.kd
        c.torque_low, c.torque_high = robot.torque_limits
        fingers = robot._ref_joint_gripper_actuator_indexes
        low, high = model.actuator_ctrlrange[fingers].T
        c.finger_bias, c.finger_weight = 0.5 * (high + low), 0.5 * (high - low)
        c.finger_actuator = fingers
        c.actuator = robot._ref_joint_actuator_indexes
        c.qpos_index, c.qvel_index = controller.qpos_index, controller.qvel_index
        c.num_positions, c.num_velocities = model.nq, model.nv
        c.num_controls = model.nu

    def _write_addresses(
        self, robot: Any, model: mujoco.MjModel, data: mujoco.MjData
    ) -> None:
        c = self._c
        c.site = model.site(robot.controller.eef_name).id
        for name in ("qpos", "qvel", "ctrl", "qfrc_bias"):
            setattr(c, name, getattr(data, name).ctypes.data)
        c.site_xpos = data.site_xpos[c.site].ctypes.data
        c.site_xmat = data.site_xmat[c.site].ctypes.data

    def load(self, controller: Mapping[str, Any], finger_action: np.ndarray) -> None:
        """Go on from the state of robosuite's controller and gripper."""
        c = self._c
        c.goal_position = controller["goal_pos"]
        c.goal_rotation = controller["goal_ori"]
        c.initial_joint = controller["initial_joint"]
        c.finger_action = finger_action
        c.is_new_goal = 0

    def set_action(self, action: np.ndarray) -> None:
        """Give the action of the next control step, float64 ``[7]``."""
        c = self._c
        delta = self._scale(action[:6])
        c.delta_position = delta[:3]
        # A rotation of exactly zero keeps the goal that there was.
        c.rotates = bool(delta[3:].any())
        if c.rotates:
            # robosuite's own helpers, as they round to float32.
            quaternion = self._helpers.axisangle2quat(delta[3:])
            c.delta_rotation = self._helpers.quat2mat(quaternion)
        c.grip = np.sign(action[6])
        c.is_new_goal = 1

    def close(self) -> None:
        """Leave ``data`` uncontrolled."""
        unregister(self._row)
