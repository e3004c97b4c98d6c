"""A controller for pick-and-place tasks that sees the simulator's state.

The phase is read off the state, not counted, so a disturbed or noisy episode goes on
from where it is, and an object that was dropped is picked up again.
"""

from typing import NamedTuple

import numpy as np

from torchrl_vla.envs.libero.goals import Goal
from torchrl_vla.envs.libero.grasps import GRASPS, Grasp, GraspPose

FULL_SPEED_AT_M = 0.05
"""Position error from which on the hand moves as fast as it can."""
FULL_SPEED_AT_RAD = 0.5
"""Yaw error from which on the hand turns as fast as it can."""
YAW_TOLERANCE_RAD = 0.1
"""Yaw errors below are left alone, so that rotations are zero where none is needed."""
YAW_LIMIT_RAD = 0.15
"""Yaw error above which the hand does not come down; above the tolerance, so that it
cannot come to rest between the two."""
HOVER_M = 0.10
"""Height above the grasp from which the hand comes down."""
FUNNEL = 4.0
"""Height that a hand is kept above its goal per distance beside it (m per m)."""
REACH_M = 0.012
"""Distance from the grasp at which the fingers begin to close."""
SLIP_M = 0.03
"""Distance from the grasp up to which closed fingers are taken to hold the object."""
STILL_M_S = 0.04
"""Speed of the fingers below which they have closed on something."""
LIFT_M = 0.02
"""Free height below the object from which on it moves sideways."""

PHASES = ("above", "down", "close", "lift", "carry", "lower", "open", "retreat")
CLOSED = PHASES[2:6]
"""Phases in which the gripper is told to close."""


class Placement(NamedTuple):
    """How an object is put to a target of a kind; heights are above the target.

    Attributes:
        carry_m: of the object's lowest point on its way, for what is to be cleared.
        release_m: of the object's origin where it is let go.
        tolerance_m: horizontal distance from the target that is near enough.
    """

    carry_m: float
    release_m: float
    tolerance_m: float


PLACEMENTS = {
    ("In", "basket"): Placement(carry_m=0.10, release_m=0.055, tolerance_m=0.04),
    ("On", "plate"): Placement(carry_m=0.04, release_m=-0.004, tolerance_m=0.02),
}
"""Goals that can be reached: predicate and kind of the target."""


def look_up(goal: Goal) -> tuple[Grasp, Placement]:
    """How the object of a goal is held and put down.

    Args:
        goal: of a task.

    Raises:
        ValueError: for an object or a target that is in no table.
    """
    place = (goal.predicate, goal.target_kind)
    if goal.object_kind not in GRASPS or place not in PLACEMENTS:
        raise ValueError(
            f"the goal is ({goal.predicate} {goal.object_name} {goal.target_name}); "
            f"the expert can hold {', '.join(GRASPS)}, and put them "
            f"{', '.join(f'{predicate} a {kind}' for predicate, kind in PLACEMENTS)}"
        )
    return GRASPS[goal.object_kind], PLACEMENTS[place]


class PickState(NamedTuple):
    """What the controller sees, in the world frame (m).

    Attributes:
        hand: point between the fingertips, ``[3]``.
        hand_angle_rad: of the line of the fingers in the horizontal plane.
        grip: how far the fingers are told to close, 0 (open) to 1.
        finger_speed_m_s: at which the fingers close or open.
        object_position: origin of its body, ``[3]``.
        object_bottom_m: height of its lowest point.
        clearance_m: from its lowest point down to what is below its middle.
        target: position of the target, ``[3]``.
    """

    hand: np.ndarray
    hand_angle_rad: float
    grip: float
    finger_speed_m_s: float
    object_position: np.ndarray
    object_bottom_m: float
    clearance_m: float
    target: np.ndarray


def yaw_error(state: PickState, pose: GraspPose) -> float:
    """Angle by which the hand has to turn about the vertical, rad in [-pi/2, pi/2).

    Args:
        state: what the controller sees.
        pose: where the object is to be held.
    """
    error = pose.angle_rad - state.hand_angle_rad
    return float((error + np.pi / 2) % np.pi - np.pi / 2)  # the fingers are alike


def is_turned(state: PickState, pose: GraspPose) -> bool:
    """Whether the hand's yaw is good enough to hold the object.

    Args:
        state: what the controller sees.
        pose: where the object is to be held.
    """
    return abs(yaw_error(state, pose)) < YAW_LIMIT_RAD


def choose_phase(state: PickState, pose: GraspPose, placement: Placement) -> str:
    """The phase that a state is in, one of ``PHASES``.

    Args:
        state: what the controller sees.
        pose: where the object is to be held.
        placement: how it is put down.
    """
    to_target = state.target - state.object_position
    is_near = np.linalg.norm(to_target[:2]) < placement.tolerance_m
    to_grasp = state.object_position + pose.offset - state.hand
    is_closing = state.grip > 0.1
    if is_near and -to_target[2] < placement.release_m + 0.005:
        return "open" if is_closing else "retreat"
    if is_closing and np.linalg.norm(to_grasp) < SLIP_M:
        if state.grip < 1.0 or state.finger_speed_m_s > STILL_M_S:
            return "close"
        if is_near:
            return "lower"
        return "lift" if state.clearance_m < LIFT_M else "carry"
    if np.linalg.norm(to_grasp) < REACH_M and is_turned(state, pose):
        return "close"
    return "above" if np.linalg.norm(to_grasp[:2]) > REACH_M else "down"


def choose_motion(
    state: PickState, phase: str, pose: GraspPose, placement: Placement
) -> np.ndarray:
    """Way that the hand has to go in a phase, m ``[3]``.

    Args:
        state: what the controller sees.
        phase: one of ``PHASES``.
        pose: where the object is to be held.
        placement: how it is put down.
    """
    to_grasp = state.object_position + pose.offset - state.hand
    to_target = state.target - state.object_position
    rise = state.target[2] + placement.carry_m - state.object_bottom_m
    if phase in ("above", "down"):
        beside = np.linalg.norm(to_grasp[:2])
        is_ready = is_turned(state, pose) and state.grip < 0.5
        height = FUNNEL * max(beside - REACH_M, 0.0) if is_ready else HOVER_M
        return to_grasp + [0.0, 0.0, min(height, HOVER_M)]
    return {
        "close": to_grasp,
        "lift": np.array([0.0, 0.0, max(rise, LIFT_M)]),
        "carry": np.array([to_target[0], to_target[1], rise]),
        "lower": to_target + [0.0, 0.0, placement.release_m],
        "open": np.zeros(3),
        "retreat": np.array([0.0, 0.0, HOVER_M]),
    }[phase]


def choose_action(
    state: PickState, pose: GraspPose, placement: Placement
) -> np.ndarray:
    """The action for a state, float64 ``[7]`` in [-1, 1].

    Args:
        state: what the controller sees.
        pose: where the object is to be held.
        placement: how it is put down.
    """
    phase = choose_phase(state, pose, placement)
    motion = choose_motion(state, phase, pose, placement)
    action = np.zeros(7)
    action[:3] = np.clip(motion / FULL_SPEED_AT_M, -1.0, 1.0)
    yaw = yaw_error(state, pose)
    if phase in ("above", "down") and abs(yaw) > YAW_TOLERANCE_RAD:
        action[5] = np.clip(yaw / FULL_SPEED_AT_RAD, -1.0, 1.0)
    action[6] = 1.0 if phase in CLOSED else -1.0
    return action
