"""A task's scene as robosuite compiles, places, controls and judges it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mujoco
import numpy as np

from torchrl_vla.envs.libero.tasks import Task, import_libero, quiet


class Hidden(NamedTuple):
    """What robosuite keeps outside the state of MuJoCo and physics depends on."""

    controller: dict[str, Any]
    finger_action: np.ndarray


class Scene:
    """robosuite's environment of one task, compiled once, without its observables.

    Thirty observables would be computed in every physics substep, cameras included.
    robosuite works on one state at a time; :meth:`attach` says on which.

    Args:
        task: which scene and goal.

    Attributes:
        model: the compiled scene, ``mujoco.MjModel``.
        data: robosuite's own state, ``mujoco.MjData``.
        robot: robosuite's robot.
        changes_look: whether the task shows something by changing the model (a stove's
            flame), so that states that share the model must put their own look back.
    """

    def __init__(self, task: Task) -> None:
        libero = import_libero()
        self.task = task
        with quiet():
            self._wrapper = libero.envs.env_wrapper.ControlEnv(
                bddl_file_name=task.bddl_file,
                use_camera_obs=False,
                has_offscreen_renderer=False,
                # A seeded soft reset gives the same scene as a compile, 100 x faster.
                hard_reset=False,
                ignore_done=True,
            )
        self.env = env = self._wrapper.env
        # Published evaluations reset once before they play, which reads the task a
        # second time; robosuite appends its list of joints to place then, and so draws
        # that many more numbers before it places fixtures.
        env.object_property_initializers *= 2
        self.robot = env.robots[0]
        self.model = env.sim.model._model
        self.data = env.sim.data._data
        self.changes_look = bool(env.tracking_object_states_change)
        self._fresh_look = self.look.copy()
        self._fresh_poses = list(self._compiled_poses())
        self._sensors = {
            name: observable._sensor for name, observable in env._observables.items()
        }
        env._observables.clear()
        self.num_substeps = int(env.control_timestep / env.model_timestep)
        self.control_period_s = env.control_timestep
        self.substep_s = env.model_timestep

    def close(self) -> None:
        """Let robosuite free the scene."""
        self._wrapper.close()

    @property
    def look(self) -> np.ndarray:
        """Opacity of every site, a view of the model: flames are sites."""
        return self.model.site_rgba[:, 3]

    def attach(self, data: mujoco.MjData) -> None:
        """Have robosuite read and step ``data``."""
        self.env.sim.data._data = data

    def reset(self, seed: int, init_state: np.ndarray | None) -> None:
        """Reset robosuite's own state, as after compiling the scene anew.

        The seed places fixtures (they have no joints and are not part of an initial
        state) and, without ``init_state``, the objects. As in every published
        evaluation the controller still has the pose from before the initial state was
        set when it gets its first goal.

        Args:
            seed: of the placement.
            init_state: float64 ``[1 + nq + nv]``, or ``None`` for a sampled start.
        """
        self.attach(self.data)
        self.look[:] = self._fresh_look
        # What stands on a fixture is placed by where the model has the fixture before
        # the seed moves it.
        for body, position, rotation in self._fresh_poses:
            self.model.body_pos[body] = position
            self.model.body_quat[body] = rotation
        generator_state = np.random.get_state()
        np.random.seed(seed)
        try:
            self._wrapper.reset()
        finally:
            np.random.set_state(generator_state)
        # robosuite clears it by building a new gripper, that is by compiling.
        self.robot.gripper.current_action = np.zeros(2)
        if init_state is not None:
            self._wrapper.set_init_state(init_state)

    def _compiled_poses(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Number, position and quaternion of fixtures, as the XML has them."""
        for fixture in self.env.fixtures_dict.values():
            body = self.env.model.worldbody.find(
                f".//body[@name='{fixture.root_body}']"
            )
            yield (
                self.model.body(fixture.root_body).id,
                np.array(body.get("pos", "0 0 0").split(), float),
                np.array(body.get("quat", "1 0 0 0").split(), float),
            )

    @property
    def hidden(self) -> Hidden:
        """robosuite's hidden state, to be put back by assigning it."""
        controller = dict(vars(self.robot.controller))
        return Hidden(controller, self.robot.gripper.current_action)

    @hidden.setter
    def hidden(self, value: Hidden) -> None:
        vars(self.robot.controller).update(value.controller)
        self.robot.gripper.current_action = value.finger_action

    def step(self, action: np.ndarray, after_substep: Callable[[int], None]) -> None:
        """One control step of robosuite's own loop; substeps are counted from 1."""
        for substep in range(self.num_substeps):
            self.env.sim.forward()
            self.env._pre_action(action, substep == 0)
            self.env.sim.step()
            after_substep(substep + 1)

    def judge(self) -> bool:
        """Update what the scene shows; whether the task's goal holds."""
        self.env._post_process()
        return bool(self.env._check_success())

    def proprioception(self, names: Sequence[str]) -> np.ndarray:
        """Concatenated low-dimensional observations of robosuite, float32 ``[S]``.

        Raises:
            ValueError: for an observation that robosuite does not have.
        """
        cache: dict[str, np.ndarray] = {}
        for name in names:
            if name not in self._sensors:
                raise ValueError(
                    f"there is no observation {name!r}; allowed are "
                    f"{', '.join(sorted(self._sensors))}"
                )
            cache[name] = np.atleast_1d(self._sensors[name](cache))
        return np.concatenate([cache[name] for name in names]).astype(np.float32)
