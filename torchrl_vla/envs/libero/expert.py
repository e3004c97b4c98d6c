"""The scripted controller on a simulation: what it sees there, and how it fares.

    python -m torchrl_vla.envs.libero.expert --suite libero_object
    python -m torchrl_vla.envs.libero.expert --suite libero_spatial --tasks 0 2

plays every official initial state of the tasks and prints success and env steps.
"""

import argparse
from collections.abc import Sequence

import mujoco
import numpy as np

from torchrl_vla.data.random_streams import derive_seed
from torchrl_vla.envs.libero.goals import Goal, parse_goal
from torchrl_vla.envs.libero.grasps import GraspPose, choose_grasp, grasp_poses
from torchrl_vla.envs.libero.pick_and_place import (
    PickState,
    choose_action,
    choose_phase,
    look_up,
)
from torchrl_vla.envs.libero.simulation import Simulation
from torchrl_vla.envs.libero.tasks import (
    Task,
    load_official_states,
    load_task,
    num_tasks,
)

STRETCHED_M = 0.73
"""Horizontal distance from the robot's base at which the elbow is nearly straight."""


def load_goal(task: Task) -> Goal:
    """The goal of a task that the expert knows.

    Args:
        task: of any suite.

    Raises:
        ValueError: for another goal; it lists what is known.
    """
    with open(task.bddl_file) as file:
        text = file.read()
    try:
        goal = parse_goal(text)
        look_up(goal)
    except ValueError as error:
        raise ValueError(
            f"no expert for {task.suite} task {task.number}: {error}"
        ) from error
    return goal


class Expert:
    """Actions for the members of a simulation, from what only the simulator knows.

    They are a function of the member's state, and of where it was decided to hold the
    object, which is decided anew whenever the hand is above it.

    Args:
        simulation: of the task to solve.
        noise_std: standard deviation of Gaussian noise on the translation, in units of
            the action (1 is 0.05 m).
        seed: names the noise, with the task and the start.

    Raises:
        ValueError: for a task whose goal the expert does not know.

    Example:
        >>> from torchrl_vla.envs.libero import LiberoEnv
        >>> env = LiberoEnv("libero_object", camera_height=16, camera_width=16)
        >>> td = env.reset(init_state_id=3)
        >>> expert = Expert(env.simulation)
        >>> expert.start(0, init_state_id=3)
        >>> expert.act(0).shape
        (7,)
        >>> env.close()
    """

    def __init__(
        self, simulation: Simulation, *, noise_std: float = 0.0, seed: int = 0
    ) -> None:
        self.simulation = simulation
        self.noise_std = noise_std
        self.seed = seed
        self.goal = load_goal(simulation.task)
        self.grasp, self.placement = look_up(self.goal)
        self._poses: dict[int, GraspPose | None] = {}
        self._noise: dict[int, np.random.Generator] = {}
        model = self._model = simulation.scene.model
        self._base = model.body("robot0_base").id
        self._hand = model.site("gripper0_grip_site").id
        sides = ("gripper0_leftfinger", "gripper0_rightfinger")
        self._fingers = [model.body(name).id for name in sides]
        joints = ("gripper0_finger_joint1", "gripper0_finger_joint2")
        self._finger_speeds = [model.joint(name).dofadr[0] for name in joints]
        self._control = model.actuator("gripper0_gripper_finger_joint1").id
        self._object = self._body(self.goal.object_name)
        sites = {model.site(number).name: number for number in range(model.nsite)}
        self._target_site = sites.get(self.goal.target_name)
        self._geoms, self._obstacles = self._solid_geoms()

    def _body(self, name: str) -> int:
        return self._model.body(f"{name}_main").id  # robosuite appends to the name

    def _solid_geoms(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the object's geoms, and of those that are in the hand's way."""
        model = self._model
        roots = model.body_rootid[model.geom_bodyid]
        is_solid = model.geom_contype > 0
        is_solid &= model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE
        is_object = roots == model.body_rootid[self._object]
        is_robot = roots == model.body_rootid[self._base]
        is_robot |= roots == model.body_rootid[self._fingers[0]]
        return (
            np.flatnonzero(is_solid & is_object),
            np.flatnonzero(is_solid & ~is_object & ~is_robot),
        )

    def start(self, index: int, init_state_id: int) -> None:
        """Begin an episode of a member, which has just been reset.

        Args:
            index: which member.
            init_state_id: its start, which names the noise.
        """
        names = ("expert", self.simulation.task.number, init_state_id)
        self._noise[index] = np.random.default_rng(derive_seed(self.seed, *names))
        self._poses[index] = None

    def act(self, index: int = 0) -> np.ndarray:
        """The action for a member's present state, float64 ``[7]`` in [-1, 1].

        Args:
            index: which member.
        """
        state = self.look(index)
        pose = self._poses[index]
        if pose is None or choose_phase(state, pose, self.placement) == "above":
            pose = self._poses[index] = self._choose_grasp(state, index)
        return choose_action(state, pose, self.placement)

    def disturb(self, action: np.ndarray, index: int = 0) -> np.ndarray:
        """The action to play instead of one that was meant, with noise.

        Where it leads, the next action shows how to come back. What was meant is what a
        policy should learn (DART, arXiv:1703.09327).
        """
        noise = np.zeros(7)
        noise[:3] = self.noise_std * self._noise[index].standard_normal(3)
        return np.clip(action + noise, -1.0, 1.0)

    def _choose_grasp(self, state: PickState, index: int) -> GraspPose:
        data = self.simulation.members[index].data
        rotation = data.xmat[self._object].reshape(3, 3)
        side = np.sign((state.hand - state.object_position)[1]) or 1.0

        def is_far(pose: GraspPose) -> bool:
            reach = state.object_position + pose.offset - data.xpos[self._base]
            return bool(np.linalg.norm(reach[:2]) > STRETCHED_M)

        poses = sorted(grasp_poses(self.grasp, rotation, side), key=is_far)
        boxes = bounding_boxes(self._model, data, self._obstacles)
        return choose_grasp(poses, state.object_position, boxes)

    def look(self, index: int = 0) -> PickState:
        """What the controller sees of a member.

        Args:
            index: which member.
        """
        model, data = self._model, self.simulation.members[index].data
        line = data.xpos[self._fingers[1]] - data.xpos[self._fingers[0]]
        opening_m, widest_m = data.ctrl[self._control], model.actuator_ctrlrange
        position = data.xpos[self._object].copy()
        bottom_m = float(bounding_boxes(model, data, self._geoms)[:, 0, 2].min())
        if self._target_site is None:
            target = data.xpos[self._body(self.goal.target_name)]
        else:
            target = data.site_xpos[self._target_site]
        return PickState(
            hand=data.site_xpos[self._hand].copy(),
            hand_angle_rad=float(np.arctan2(line[1], line[0])),
            grip=float(np.clip(1.0 - opening_m / widest_m[self._control, 1], 0.0, 1.0)),
            finger_speed_m_s=float(np.abs(data.qvel[self._finger_speeds]).max()),
            object_position=position,
            object_bottom_m=bottom_m,
            clearance_m=self._clearance_m(position, bottom_m, data),
            target=target.copy(),
        )

    def _clearance_m(
        self, position: np.ndarray, bottom_m: float, data: mujoco.MjData
    ) -> float:
        margin_m = 0.01  # a ray that starts inside the ground would miss it
        start = np.array([position[0], position[1], bottom_m + margin_m])
        down = np.array([0.0, 0.0, -1.0])
        geom = np.zeros(1, dtype=np.int32)
        distance_m = mujoco.mj_ray(
            self._model, data, start, down, None, 1, self._object, geom
        )
        return distance_m - margin_m if distance_m >= 0 else np.inf


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


def play_official(
    suite: str,
    task_id: int,
    *,
    num_episodes: int = 50,
    max_episode_steps: int = 280,
    noise_std: float = 0.0,
) -> list[int | None]:
    """Play the expert from a task's official initial states, without pictures.

    Args:
        suite: of the task.
        task_id: its number.
        num_episodes: initial states to play, numbers 0..
        max_episode_steps: env steps after which an episode is a failure.
        noise_std: see :class:`Expert`.

    Returns:
        Env steps to success of each episode, ``None`` for a failure.

    Raises:
        ValueError: for a task whose goal the expert does not know.
    """
    task = load_task(suite, task_id)
    load_goal(task)  # before the scene is compiled
    simulation = Simulation(task, height=8, width=8)
    try:
        expert = Expert(simulation, noise_std=noise_std)
        lengths: list[int | None] = []
        for number, state in enumerate(load_official_states(suite, task_id)):
            if number == num_episodes:
                break
            simulation.start([0], 0, state, settle_steps=10)
            expert.start(0, number)
            lengths.append(_play(simulation, expert, max_episode_steps))
        return lengths
    finally:
        simulation.close()


def _play(simulation: Simulation, expert: Expert, max_episode_steps: int) -> int | None:
    for step in range(1, max_episode_steps + 1):
        if simulation.step([0], expert.disturb(expert.act())[None])[0]:
            return step
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print success and env steps per task.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="libero_object")
    parser.add_argument("--tasks", type=int, nargs="*", help="all by default")
    parser.add_argument("--episodes", type=int, default=50, help="per task")
    parser.add_argument("--noise", type=float, default=0.0, help="in action units")
    options = parser.parse_args(arguments)
    print("| suite | task | success | mean env steps | most env steps |")
    print("| --- | --- | --- | --- | --- |")
    for task_id in options.tasks or range(num_tasks(options.suite)):
        lengths = play_official(
            options.suite,
            task_id,
            num_episodes=options.episodes,
            noise_std=options.noise,
        )
        solved = [length for length in lengths if length is not None] or [0]
        rate = f"{sum(n is not None for n in lengths)}/{len(lengths)}"
        steps = f"{np.mean(solved):.0f} | {max(solved)}"
        print(f"| {options.suite} | {task_id} | {rate} | {steps} |", flush=True)


if __name__ == "__main__":
    main()
