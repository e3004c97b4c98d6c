"""The scripted expert's pure parts, against numbers worked by hand."""

import numpy as np
import pytest

from torchrl_vla.envs.libero.goals import (
    Goal,
    parse_conditions,
    parse_goal,
    parse_kinds,
)
from torchrl_vla.envs.libero.grasps import (
    Grasp,
    GraspPose,
    choose_grasp,
    free_distance,
    grasp_poses,
)
from torchrl_vla.envs.libero.pick_and_place import (
    PickState,
    Placement,
    choose_action,
    choose_motion,
    choose_phase,
    yaw_error,
)

SCENE = """(define (problem Tabletop)
  (:fixtures
    main_table - table
    cabinet_1 - cabinet
  )
  (:objects
    bowl_1 bowl_2 - bowl
    basket_1 - basket
    plate_1 - plate
  )
  (:init (On bowl_1 main_table_region))
  (:goal
    (And %s)
  )
)"""


def test_kinds_of_objects_and_fixtures():
    assert parse_kinds(SCENE) == {
        "main_table": "table",
        "cabinet_1": "cabinet",
        "bowl_1": "bowl",
        "bowl_2": "bowl",
        "basket_1": "basket",
        "plate_1": "plate",
    }


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("(On bowl_1 plate_1)", Goal("On", "bowl_1", "bowl", "plate_1", "plate")),
        (
            "(In bowl_2 basket_1_contain_region)",
            Goal("In", "bowl_2", "bowl", "basket_1_contain_region", "basket"),
        ),
    ],
)
def test_goals(text, goal):
    assert parse_goal(SCENE % text) == goal


def test_conditions_of_the_goal_only():
    text = SCENE % "(Open cabinet_1) (On bowl_1 plate_1)"
    assert parse_conditions(text) == [
        ("Open", "cabinet_1"),
        ("On", "bowl_1", "plate_1"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(Open cabinet_1)", r"the goal is \(Open cabinet_1\); known are"),
        ("(On bowl_1 plate_1) (On bowl_2 plate_1)", "goals of one condition"),
        ("(On cup_1 plate_1)", "names cup_1 and plate_1; the scene has main_table"),
        ("(On bowl_1 plate_2)", "names bowl_1 and plate_2"),
        ("", r"has no \(:goal"),
    ],
)
def test_other_goals_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_goal(SCENE % text)


# -- grasps ------------------------------------------------------------------------

TURNED = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
"""A quarter turn about the vertical."""


def test_a_box_is_held_across_its_narrow_side():
    grasp = Grasp(0.005, across=(0.0, 1.0, 0.0), slide_m=0.02)
    middle, *slid = grasp_poses(grasp, np.eye(3), side=1.0)
    assert middle.angle_rad == pytest.approx(np.pi / 2)
    np.testing.assert_allclose(middle.offset, [0, 0, 0.005])
    np.testing.assert_allclose(slid[0].offset, [-0.02, 0, 0.005], atol=1e-12)
    np.testing.assert_allclose(slid[1].offset, [0.02, 0, 0.005], atol=1e-12)
    turned = next(grasp_poses(grasp, TURNED, side=1.0))
    assert abs(turned.angle_rad) == pytest.approx(np.pi)  # along x, either way round


def test_a_rim_is_held_on_the_line_of_the_fingers():
    first, second, *_ = grasp_poses(Grasp(0.03, rim_m=0.05), np.eye(3), side=-1.0)
    np.testing.assert_allclose(first.offset, [0, -0.05, 0.03], atol=1e-12)
    np.testing.assert_allclose(second.offset, [0, 0.05, 0.03], atol=1e-12)


def test_the_palm_passes_over_what_is_low_and_not_over_what_is_high():
    # 0.15 m beside the grasp along the fingers; the palm ends at 0.11 m.
    low, high = [-0.1, 0.15, 0.0], [0.1, 0.2, 0.05]
    box = np.array([[low, high]])
    point = np.array([0.0, 0.0, 0.01])
    assert free_distance(point, np.pi / 2, box) == pytest.approx(0.04)
    assert free_distance(point, 0.0, box) == pytest.approx(0.15 - 0.035)
    assert free_distance(point + [0, 0, 0.03], np.pi / 2, box) == pytest.approx(0.095)
    assert free_distance(point + [0, 0, 0.05], np.pi / 2, box) == np.inf


def test_the_first_free_grasp_is_chosen_or_the_freest():
    poses = [GraspPose(np.zeros(3), np.pi / 2), GraspPose(np.zeros(3), 0.0)]
    beside = np.array([[[-0.02, 0.08, 0.0], [0.02, 0.2, 0.2]]])
    nothing = np.empty((0, 2, 3))
    assert choose_grasp(poses, np.zeros(3), nothing) is poses[0]
    assert choose_grasp(poses, np.zeros(3), beside) is poses[1]
    around = np.array([[[-0.2, -0.2, 0.0], [0.2, 0.2, 0.2]]])
    assert choose_grasp(poses, np.zeros(3), around) is poses[0]


# -- phases ------------------------------------------------------------------------

PLACEMENT = Placement(carry_m=0.10, release_m=0.055, tolerance_m=0.04)
POSE = GraspPose(np.array([0.0, 0.0, 0.01]), np.pi / 2)


def seen(hand, thing, **changes):
    """A state with an object of 0.04 m from origin to bottom, target 0.5 m away."""
    state = PickState(
        hand=np.array(hand, float),
        hand_angle_rad=np.pi / 2,
        grip=0.0,
        finger_speed_m_s=0.0,
        object_position=np.array(thing, float),
        object_bottom_m=thing[2] - 0.04,
        clearance_m=thing[2] - 0.04,
        target=np.array([0.0, 0.5, 0.07]),
    )
    return state._replace(**changes)


ON_FLOOR = [0.0, 0.0, 0.04]
IN_BASKET = [0.0, 0.49, 0.12]
CLOSED = {"grip": 1.0}

EPISODE = [
    ("above", seen([0.2, 0.1, 0.25], ON_FLOOR)),
    ("down", seen([0.005, 0.0, 0.10], ON_FLOOR)),
    ("close", seen([0.0, 0.0, 0.055], ON_FLOOR)),
    ("close", seen([0.0, 0.0, 0.05], ON_FLOOR, grip=0.5)),
    ("close", seen([0.0, 0.0, 0.05], ON_FLOOR, grip=1.0, finger_speed_m_s=0.09)),
    ("lift", seen([0.0, 0.0, 0.05], ON_FLOOR, **CLOSED)),
    ("carry", seen([0.0, 0.0, 0.08], [0.0, 0.0, 0.07], **CLOSED)),
    ("lower", seen([0.0, 0.49, 0.22], [0.0, 0.49, 0.21], **CLOSED)),
    ("open", seen([0.0, 0.49, 0.13], IN_BASKET, **CLOSED)),
    ("retreat", seen([0.0, 0.49, 0.13], IN_BASKET)),
]


@pytest.mark.parametrize(("phase", "state"), EPISODE)
def test_the_phase_is_read_off_the_state(phase, state):
    assert choose_phase(state, POSE, PLACEMENT) == phase
    action = choose_action(state, POSE, PLACEMENT)
    closes = phase in ("close", "lift", "carry", "lower")
    assert action[6] == (1.0 if closes else -1.0)
    assert (action[3:6] == 0).all()  # the hand is turned already
    assert (np.abs(action) <= 1).all()


def test_a_dropped_object_is_picked_up_again():
    state = seen([0.0, 0.2, 0.3], [0.0, 0.2, 0.04], **CLOSED)
    assert choose_phase(state, POSE, PLACEMENT) == "down"
    # Not before the fingers are open again, so the hand stays 0.10 m above the grasp.
    motion = choose_motion(state, "down", POSE, PLACEMENT)
    np.testing.assert_allclose(motion, [0, 0, 0.05 + 0.10 - 0.3])


def test_actions_are_errors_over_5_cm():
    state = seen([-0.03, 0.02, 0.30], ON_FLOOR)
    # Beside by 0.036 m, so held above by 4 x (0.036 - 0.012) = 0.096 m.
    height = 4 * (np.hypot(0.03, 0.02) - 0.012)
    motion = choose_motion(state, "above", POSE, PLACEMENT)
    np.testing.assert_allclose(motion, [0.03, -0.02, 0.05 + height - 0.30])
    action = choose_action(state, POSE, PLACEMENT)
    np.testing.assert_allclose(action, [0.6, -0.4, -1, 0, 0, 0, -1])


def test_carrying_aims_the_object_not_the_hand():
    state = seen([0.01, 0.0, 0.08], [0.0, 0.0, 0.07], **CLOSED)
    motion = choose_motion(state, "carry", POSE, PLACEMENT)
    # Its bottom, 0.03 m high, goes to 0.10 m above the target at 0.07 m.
    np.testing.assert_allclose(motion, [0.0, 0.5, 0.14])


def test_the_hand_turns_the_short_way_and_only_if_it_has_to():
    state = seen([0.0, 0.0, 0.2], ON_FLOOR, hand_angle_rad=np.pi / 2 + 0.2)
    assert yaw_error(state, POSE) == pytest.approx(-0.2)
    half_turn = GraspPose(POSE.offset, POSE.angle_rad + np.pi)
    assert yaw_error(state, half_turn) == pytest.approx(-0.2)
    assert choose_action(state, POSE, PLACEMENT)[5] == pytest.approx(-0.4)
    almost = state._replace(hand_angle_rad=np.pi / 2 + 0.09)
    assert choose_action(almost, POSE, PLACEMENT)[5] == 0.0
