"""Where to hold an object with a hand that points down, and how not to hit others."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

HAND_HALF_LENGTH_M = 0.11
"""Half the palm, along the line of the fingers."""
HAND_HALF_WIDTH_M = 0.035
"""Half the palm, across the line of the fingers."""
FINGERS_HALF_LENGTH_M = 0.055
"""From the grasp to the outside of an open finger."""
FINGERS_HALF_WIDTH_M = 0.015
"""Half of a finger, across the line of the fingers."""
PALM_M = 0.03
"""Height of the palm above the point between the fingertips."""
FREE_M = 0.008
"""Distance to other things that is enough."""
UNTURNED_RAD = np.pi / 2
"""Line of the fingers at the start of an episode: along the world's y axis."""
TURNS_RAD = tuple(np.pi / 8 * n for n in (0, 1, -1, 2, -2, 3, -3, 4))
"""Turns of the hand from there that are tried around round objects."""


class Grasp(NamedTuple):
    """How an object of a kind is held.

    Attributes:
        height_m: of the fingertips above the origin of the object's body.
        rim_m: radius of a rim to hold; 0 holds the middle.
        across: axis of the object's body that the fingers straddle; ``None`` for round
            objects, around which the hand may turn.
        slide_m: how far from the middle a long object may be held.
    """

    height_m: float
    rim_m: float = 0.0
    across: tuple[float, float, float] | None = None
    slide_m: float = 0.0


GRASPS = {
    "akita_black_bowl": Grasp(0.030, rim_m=0.047),
    "alphabet_soup": Grasp(0.010),
    "bbq_sauce": Grasp(0.015),
    "butter": Grasp(0.005, across=(0.0, 1.0, 0.0), slide_m=0.02),
    "chocolate_pudding": Grasp(0.005, across=(0.0, 1.0, 0.0), slide_m=0.02),
    "cream_cheese": Grasp(0.005, across=(0.0, 1.0, 0.0), slide_m=0.02),
    "ketchup": Grasp(0.040),
    "milk": Grasp(0.035),
    "orange_juice": Grasp(0.035),
    "salad_dressing": Grasp(0.040),
    "tomato_sauce": Grasp(0.010),
}
"""Kinds of objects that can be held. Measured on the scenes of libero_object and
libero_spatial: boxes wider than the hand opens (0.08 m) across their narrow side."""


class GraspPose(NamedTuple):
    """A grasp of one object where it is now.

    Attributes:
        offset: of the fingertips from the origin of the object's body, m ``[3]``.
        angle_rad: of the line of the fingers in the horizontal plane; a half turn is
            the same.
    """

    offset: np.ndarray
    angle_rad: float


def grasp_poses(grasp: Grasp, rotation: np.ndarray, side: float) -> Iterator[GraspPose]:
    """Ways to hold an object, the ones that turn the hand least first.

    Args:
        grasp: how its kind is held.
        rotation: of its body, ``[3, 3]``.
        side: 1 or -1, the side of a rim that is tried first along the fingers' line.
    """
    up = np.array([0.0, 0.0, grasp.height_m])
    if grasp.across is not None:
        x, y, _ = rotation @ np.array(grasp.across)
        along = np.array([-y, x, 0.0])
        for slide_m in dict.fromkeys((0.0, grasp.slide_m, -grasp.slide_m)):
            yield GraspPose(up + slide_m * along, float(np.arctan2(y, x)))
        return
    for turn in TURNS_RAD:
        angle = UNTURNED_RAD + turn
        radial = np.array([np.cos(angle), np.sin(angle), 0.0])
        for sign in (side, -side) if grasp.rim_m else (side,):
            yield GraspPose(up + sign * grasp.rim_m * radial, angle)


def free_distance(point: np.ndarray, angle_rad: float, boxes: np.ndarray) -> float:
    """Horizontal distance from an open hand to what it would hit on its way down, m.

    The palm passes over what is lower than it, fingertips over what is lower than they.

    Args:
        point: between the fingertips at the grasp, ``[3]``.
        angle_rad: line of the fingers.
        boxes: lower and upper corners of other things, ``[K, 2, 3]``.

    Example:
        >>> box = np.array([[[0.2, -0.1, 0.0], [0.3, 0.1, 0.1]]])
        >>> round(free_distance(np.zeros(3), 0.0, box), 3)
        0.09
    """
    cos, sin = np.cos(angle_rad), np.sin(angle_rad)
    turn = np.array([[cos, sin], [-sin, cos]])
    distance = np.inf
    for half_length, half_width, bottom in (
        (HAND_HALF_LENGTH_M, HAND_HALF_WIDTH_M, point[2] + PALM_M),
        (FINGERS_HALF_LENGTH_M, FINGERS_HALF_WIDTH_M, point[2]),
    ):
        lengths, widths = np.linspace(-1, 1, 9), np.linspace(-1, 1, 5)
        grid = np.stack(np.meshgrid(lengths * half_length, widths * half_width), -1)
        samples_K2 = grid.reshape(-1, 1, 2) @ turn + point[:2]
        high = boxes[boxes[:, 1, 2] > bottom]
        outside = np.maximum(high[:, 0, :2] - samples_K2, samples_K2 - high[:, 1, :2])
        apart = np.linalg.norm(np.maximum(outside, 0.0), axis=-1)
        distance = min(distance, apart.min(initial=np.inf))
    return float(distance)


def choose_grasp(
    poses: Iterable[GraspPose], position: np.ndarray, boxes: np.ndarray
) -> GraspPose:
    """The first pose at which the hand is free of other things, or the freest one.

    Args:
        poses: in order of preference.
        position: of the object's body, m ``[3]``.
        boxes: lower and upper corners of other things, m ``[K, 2, 3]``.
    """
    near = np.abs(boxes[..., :2].mean(1) - position[:2]).max(-1) < 0.3
    best, best_m = None, -1.0
    for pose in poses:
        free_m = free_distance(position + pose.offset, pose.angle_rad, boxes[near])
        if free_m >= FREE_M:
            return pose
        if free_m > best_m:
            best, best_m = pose, free_m
    return best
