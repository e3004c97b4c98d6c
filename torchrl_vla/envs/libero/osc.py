"""Operational-space control of robosuite 1.4, compiled as MuJoCo's control callback.

robosuite computes the torques of the arm in Python, before every physics substep, and
makes forward passes that serve nothing else. Here the same arithmetic runs inside
``mj_step`` itself, where MuJoCo asks for controls: positions, Jacobian, inertia and
bias forces of the substep are there then, one forward pass is enough, and a whole
control step is one call that does not hold Python's lock.

MuJoCo has one callback per process. It finds the controller of a simulation by the
address of its ``mjData`` and leaves any other simulation alone.

Source: robosuite 1.4.0, ``controllers/osc.py``, ``utils/control_utils.py``,
``robots/single_arm.py`` and ``models/grippers/panda_gripper.py``.
"""

import ctypes
import functools
import glob
import os
import threading
from typing import Any

import llvmlite.binding
import mujoco
import numpy as np
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Named symbols, unlike addresses, let numba keep what it compiled between processes.
_LIBRARY = ctypes.CDLL(
    glob.glob(os.path.join(os.path.dirname(mujoco.__file__), "libmujoco.so*"))[0]
)
for _name in ("mj_jacSite", "mj_mulM"):
    _address = ctypes.cast(getattr(_LIBRARY, _name), ctypes.c_void_p).value
    llvmlite.binding.add_symbol(_name, _address)

NUM_JOINTS = 7
MAX_CONTROLLERS = 256
"""Simulations of one process that can be controlled at once."""

CONTROLLER = np.dtype(
    [
        # Written before a control step.
        ("delta_position", "f8", 3),  # m, from the pose at the step's first substep
        ("delta_rotation", "f8", (3, 3)),
        ("grip", "f8"),  # sign of the gripper's action: -1 opens, 1 closes
        ("is_new_goal", "i8"),
        ("rotates", "i8"),
        # State that lasts from step to step.
        ("goal_position", "f8", 3),  # m, world frame
        ("goal_rotation", "f8", (3, 3)),
        ("finger_action", "f8", 2),  # in [-1, 1], moved by at most 0.01 per substep
        ("initial_joint", "f8", NUM_JOINTS),  # rad, where the null space is drawn to
        # Settings.
        ("kp", "f8", 6),
        ("kd", "f8", 6),
        ("torque_low", "f8", NUM_JOINTS),  # N m
        ("torque_high", "f8", NUM_JOINTS),
        ("finger_bias", "f8", 2),
        ("finger_weight", "f8", 2),
        # Where things are in the model and in mjData.
        ("site", "i8"),
        ("num_positions", "i8"),
        ("num_velocities", "i8"),
        ("num_controls", "i8"),
        ("qpos_index", "i8", NUM_JOINTS),
        ("qvel_index", "i8", NUM_JOINTS),
        ("actuator", "i8", NUM_JOINTS),
        ("finger_actuator", "i8", 2),
        ("qpos", "i8"),  # addresses from here on
        ("qvel", "i8"),
        ("ctrl", "i8"),
        ("qfrc_bias", "i8"),
        ("site_xpos", "i8"),  # of the hand's site alone
        ("site_xmat", "i8"),
    ],
    align=True,
)
"""A controller and everything it reads, in one block of memory."""

NULL_SPACE_KP = 10.0
FINGER_SPEED = 0.01

# Pairs (address of mjData, address of the controller). 0 ends the search, -1 is free.
_REGISTRY = np.zeros((MAX_CONTROLLERS + 1, 2), dtype=np.int64)
_LOCK = threading.Lock()


@njit(cache=True)
def _orientation_error(goal, current):
    """Half the sum of the cross products of the columns (small-angle axis-angle)."""
    error = np.zeros(3)
    for c in range(3):
        error[0] += current[1, c] * goal[2, c] - current[2, c] * goal[1, c]
        error[1] += current[2, c] * goal[0, c] - current[0, c] * goal[2, c]
        error[2] += current[0, c] * goal[1, c] - current[1, c] * goal[0, c]
    return 0.5 * error


@njit(cache=True, error_model="numpy")
def solve_spd(a, b):
    """``x`` of ``a x = b`` for a symmetric positive-definite ``a``, by Cholesky.

    LAPACK takes longer to call than to solve systems of this size, and numba's errors
    for a matrix that is singular or not finite would get lost in a callback; here the
    result is not finite then.
    """
    size, columns = b.shape
    lower = np.zeros((size, size))
    x = b.copy()
    for i in range(size):
        for k in range(i + 1):
            rest = a[i, k]
            for m in range(k):
                rest -= lower[i, m] * lower[k, m]
            lower[i, k] = np.sqrt(rest) if i == k else rest / lower[k, k]
    for column in range(columns):
        for i in range(size):
            for m in range(i):
                x[i, column] -= lower[i, m] * x[m, column]
            x[i, column] /= lower[i, i]
        for i in range(size - 1, -1, -1):
            for m in range(i + 1, size):
                x[i, column] -= lower[m, i] * x[m, column]
            x[i, column] /= lower[i, i]
    return x


@njit(cache=True)
def arm_torques(c, position, rotation, joint, joint_velocity, jacobian, mass, bias):
    """Torques that drive the hand to its goal, N m ``[7]``.

    ``J^T [L_p F; L_o T] + bias + N^T M (k_n (q_0 - q) - 2 sqrt(k_n) dq)`` with
    ``F = k_p e_p - k_d v`` and ``T`` likewise for rotation, ``L = (J M^-1 J^T)^-1`` of
    the rows for position, for rotation, or of all, and ``N = 1 - M^-1 J^T L J`` the
    null space of the hand's motion.

    Args:
        c: controller, a record of ``CONTROLLER``.
        position, rotation: of the hand, ``[3]`` and ``[3, 3]``, world frame.
        joint, joint_velocity: rad and rad/s, ``[7]``.
        jacobian: of the hand, ``[6, 7]``.
        mass: joint-space inertia, ``[7, 7]``.
        bias: Coriolis, centrifugal and gravitational torques, ``[7]``.
    """
    velocity = jacobian @ joint_velocity
    wrench = np.empty((6, 1))
    wrench[:3, 0] = c.goal_position - position
    wrench[3:, 0] = _orientation_error(c.goal_rotation, rotation)
    for i in range(6):
        wrench[i, 0] = wrench[i, 0] * c.kp[i] - velocity[i] * c.kd[i]

    mass_inv_jt = solve_spd(mass, jacobian.T.copy())
    inertia_inv = jacobian @ mass_inv_jt
    force = np.empty((6, 1))
    force[:3] = solve_spd(inertia_inv[:3, :3], wrench[:3])
    force[3:] = solve_spd(inertia_inv[3:, 3:], wrench[3:])

    pull = NULL_SPACE_KP * (c.initial_joint - joint)
    pull -= 2.0 * np.sqrt(NULL_SPACE_KP) * joint_velocity
    pull = mass @ pull
    # N^T applied to a vector: robosuite forms N, and inverts where this solves.
    force -= solve_spd(inertia_inv, (mass_inv_jt.T @ pull).reshape(6, 1))
    torques = jacobian.T @ force[:, 0].copy() + bias + pull
    for i in range(NUM_JOINTS):
        torques[i] = min(max(torques[i], c.torque_low[i]), c.torque_high[i])
    return torques


@njit(cache=True)
def set_goal(c, position, rotation):
    """Put the goal of a new action relative to where the hand is now."""
    for i in range(3):
        c.goal_position[i] = position[i] + c.delta_position[i]
    if c.rotates:
        c.goal_rotation[:] = c.delta_rotation @ rotation
    c.is_new_goal = 0


@njit(cache=True)
def finger_controls(c):
    """Move the fingers' command one substep on, and return it, ``[2]``."""
    controls = np.empty(2)
    for i in range(2):
        step = FINGER_SPEED * c.grip * (-1.0 if i == 0 else 1.0)
        c.finger_action[i] = min(max(c.finger_action[i] + step, -1.0), 1.0)
        controls[i] = c.finger_bias[i] + c.finger_weight[i] * c.finger_action[i]
    return controls


@intrinsic
def _pointer(typing_context, address):
    """An integer as a pointer."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


_mj_jac_site = types.ExternalFunction(
    "mj_jacSite", types.void(*[types.voidptr] * 4, types.int32)
)
# mj_fullM's arguments differ between versions of MuJoCo; these do not.
_mj_mul_m = types.ExternalFunction("mj_mulM", types.void(*[types.voidptr] * 4))


@njit(cache=True)
def _jacobian(model, data, c):
    columns = np.empty((6, c.num_velocities))
    position, rotation = columns[:3], columns[3:]
    _mj_jac_site(model, data, position.ctypes, rotation.ctypes, np.int32(c.site))
    jacobian = np.empty((6, NUM_JOINTS))
    for i in range(NUM_JOINTS):
        jacobian[:, i] = columns[:, c.qvel_index[i]]
    return jacobian


@njit(cache=True)
def _inertia(model, data, c):
    unit, column = np.zeros(c.num_velocities), np.empty(c.num_velocities)
    mass = np.empty((NUM_JOINTS, NUM_JOINTS))
    for i in range(NUM_JOINTS):
        unit[c.qvel_index[i]] = 1.0
        _mj_mul_m(model, data, column.ctypes, unit.ctypes)
        unit[c.qvel_index[i]] = 0.0
        for k in range(NUM_JOINTS):
            mass[k, i] = column[c.qvel_index[k]]
    return mass


@njit("void(intp, intp, intp)", cache=True)
def _control(registry, model, data):
    """Write the controls of the substep under way, if ``data`` has a controller."""
    table = carray(_pointer(registry), (MAX_CONTROLLERS + 1, 2), np.int64)
    row = 0
    while table[row, 0] != 0 and table[row, 0] != data:
        row += 1
    if table[row, 0] == 0:
        return
    c = carray(_pointer(table[row, 1]), (1,), CONTROLLER)[0]
    position = carray(_pointer(c.site_xpos), (3,), np.float64)
    rotation = carray(_pointer(c.site_xmat), (3, 3), np.float64)
    qpos = carray(_pointer(c.qpos), (c.num_positions,), np.float64)
    qvel = carray(_pointer(c.qvel), (c.num_velocities,), np.float64)
    bias = carray(_pointer(c.qfrc_bias), (c.num_velocities,), np.float64)
    ctrl = carray(_pointer(c.ctrl), (c.num_controls,), np.float64)
    if c.is_new_goal:
        set_goal(c, position, rotation)
    torques = arm_torques(
        c,
        position,
        rotation,
        qpos[c.qpos_index],
        qvel[c.qvel_index],
        _jacobian(_pointer(model), _pointer(data), c),
        _inertia(_pointer(model), _pointer(data), c),
        bias[c.qvel_index],
    )
    fingers = finger_controls(c)
    for i in range(NUM_JOINTS):
        ctrl[c.actuator[i]] = torques[i]
    for i in range(2):
        ctrl[c.finger_actuator[i]] = fingers[i]


@functools.cache
def install() -> Any:
    """Compile the callback and give it to MuJoCo, once per process."""
    registry = _REGISTRY.ctypes.data

    @cfunc("void(intp, intp)")
    def callback(model, data):
        _control(registry, model, data)

    mujoco.set_mjcb_control(callback.ctypes)
    return callback


def register(data: int, controller: int) -> int:
    """Have a controller act on a state, both by address; returns the row to free."""
    with _LOCK:
        free = np.flatnonzero(_REGISTRY[:MAX_CONTROLLERS, 0] <= 0)
        if not len(free):
            raise RuntimeError(
                f"{MAX_CONTROLLERS} controllers are open in this process; close some "
                "environments"
            )
        row = int(free[0])
        _REGISTRY[row, 1] = controller
        _REGISTRY[row, 0] = data
        return row


def unregister(row: int) -> None:
    """Undo :func:`register`."""
    with _LOCK:
        _REGISTRY[row, 0] = -1  # a zero would hide the rows behind it
