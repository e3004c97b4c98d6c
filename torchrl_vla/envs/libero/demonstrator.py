"""The scripted controller on a simulation: what it sees there, and how it fares.

    python -m torchrl_vla.envs.libero.demonstrator --suite libero_object
"""

import mujoco
import numpy as np

from torchrl_vla.data.random_streams import derive_seed
from torchrl_vla.envs.libero.expert import (
    PLACEMENTS,
    PickState,
    Placement,
    choose_action,
    choose_phase,
)
from torchrl_vla.envs.libero.goals import Goal, parse_goal
from torchrl_vla.envs.libero.grasps import GRASPS, Grasp, choose_grasp, grasp_poses
from torchrl_vla.envs.libero.simulation import Simulation


def look_up(goal: Goal) -> tuple[Grasp, Placement]:
    """How the object of a goal is held and put down.

    Args:
        goal: of a task.

    Raises:
        ValueError: for an object or a target that is in no table.
    """
    placement = (goal.predicate, goal.target_kind)
    if goal.object_kind not in GRASPS or placement not in PLACEMENTS:
        raise ValueError(
            f"the goal is ({goal.predicate} {goal.object_name} {goal.target_name}); "
            f"the expert can hold {', '.join(GRASPS)} and put them "
            f"{', '.join(' '.join(key) for key in PLACEMENTS)}"
        )
    return GRASPS[goal.object_kind], PLACEMENTS[placement]


class Demonstrator:
    """Actions for the members of a simulation, from what only the simulator knows.

    Args:
        simulation: of the task to solve.
        noise_std: of Gaussian noise on the translation, in units of the action.
        seed: names the noise.

    Raises:
        ValueError: for a task whose goal the expert does not know.
    """

    def __init__(
        self, simulation: Simulation, *, noise_std: float = 0.0, seed: int = 0
    ) -> None:
        self.simulation = simulation
        self.noise_std = noise_std
        self.seed = seed
        with open(simulation.task.bddl_file) as file:
            self.goal = parse_goal(file.read())
        self.grasp, self.placement = look_up(self.goal)
        self._poses = {}
        self._noise = {}
        model = simulation.scene.model
        self._hand = model.site("gripper0_grip_site").id
        names = ("gripper0_leftfinger", "gripper0_rightfinger")
        self._fingers = [model.body(name).id for name in names]
        joints = (f"gripper0_finger_joint{number}" for number in (1, 2))
        self._finger_speeds = [model.joint(name).dofadr[0] for name in joints]
        self._control = model.actuator("gripper0_gripper_finger_joint1").id
        self._object = _main_body(model, self.goal.object_name)
        sites = {model.site(number).name for number in range(model.nsite)}
        self._target_is_site = self.goal.target_name in sites
        roots = model.body_rootid[model.geom_bodyid]
        is_solid = (model.geom_contype > 0) & (model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE)
        self._geoms = np.flatnonzero(is_solid & (roots == self._object))
        robot = model.body_rootid[self._fingers[0]]
        self._others = np.flatnonzero(
            is_solid & (roots != self._object) & (roots != robot)
        )

    def start(self, index: int, init_state_id: int) -> None:
        """Begin an episode of a member, which names its noise."""
        self._poses[index] = None
        self._noise[index] = np.random.default_rng(
            derive_seed(self.seed, "expert", self.simulation.task.number, init_state_id)
        )

    def act(self, index: int = 0) -> np.ndarray:
        """The action for a member's present state, float64 ``[7]``."""
        state = self.look(index)
        pose = self._poses[index]
        if pose is None or choose_phase(state, pose, self.placement) == "above":
            pose = self._poses[index] = self._plan(state, index)
        action = choose_action(state, pose, self.placement)
        noise = self.noise_std * self._noise[index].standard_normal(3)
        action[:3] = np.clip(action[:3] + noise, -1.0, 1.0)
        return action

    def _plan(self, state, index):
        data = self.simulation.members[index].data
        rotation = data.xmat[self._object].reshape(3, 3)
        angle = state.hand_angle_rad
        line = np.array([np.cos(angle), np.sin(angle)])
        side = np.sign((state.hand - state.object_position)[:2] @ line) or 1.0
        poses = grasp_poses(self.grasp, rotation, angle, side)
        boxes = bounding_boxes(self.simulation.scene.model, data, self._others)
        return choose_grasp(poses, state.object_position, boxes)

    def look(self, index: int = 0) -> PickState:
        """What the controller sees of a member."""
        model, data = self.simulation.scene.model, self.simulation.members[index].data
        line = data.xpos[self._fingers[1]] - data.xpos[self._fingers[0]]
        opening, widest = data.ctrl[self._control], model.actuator_ctrlrange[self._control, 1]
        name = self.goal.target_name
        position = data.xpos[self._object].copy()
        bottom_m = bounding_boxes(model, data, self._geoms)[:, 0, 2].min()
        if self._target_is_site:
            target = data.site(name).xpos
        else:
            target = data.xpos[_main_body(model, name)]
        return PickState(
            hand=data.site_xpos[self._hand].copy(),
            hand_angle_rad=float(np.arctan2(line[1], line[0])),
            grip=float(np.clip(1.0 - opening / widest, 0.0, 1.0)),
            finger_speed_m_s=float(np.abs(data.qvel[self._finger_speeds]).max()),
            object_position=position,
            object_bottom_m=float(bottom_m),
            clearance_m=self._free_below(position, bottom_m, data),
            target=target.copy(),
        )

    def _free_below(self, position, bottom_m, data) -> float:
        margin = 0.01  # a ray that starts inside the ground would miss it
        start = np.array([position[0], position[1], bottom_m + margin])
        hit = np.zeros(1, dtype=np.int32)
        down = np.array([0.0, 0.0, -1.0])
        distance = mujoco.mj_ray(
            self.simulation.scene.model, data, start, down, None, 1, self._object, hit
        )
        return distance - margin if distance >= 0 else np.inf


def _main_body(model, name: str) -> int:
    """The body of an object's instance; robosuite appends to its name."""
    return model.body(f"{name}_main").id


def bounding_boxes(
    model: mujoco.MjModel, data: mujoco.MjData, geoms: np.ndarray
) -> np.ndarray:
    """Lower and upper corners of geoms along the world's axes, m ``[K, 2, 3]``.

    Args:
        model: the compiled scene.
        data: its state.
        geoms: their numbers, ``[K]``.
    """
    rotation = data.geom_xmat[geoms].reshape(-1, 3, 3)
    local = model.geom_aabb[geoms]
    middle = data.geom_xpos[geoms] + np.einsum("kij,kj->ki", rotation, local[:, :3])
    half = np.einsum("kij,kj->ki", np.abs(rotation), local[:, 3:])
    return np.stack([middle - half, middle + half], axis=1)
