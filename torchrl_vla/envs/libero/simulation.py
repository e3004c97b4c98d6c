"""Several states of one compiled task, stepped and drawn separately."""

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import mujoco
import numpy as np

from torchrl_vla.envs.libero.arm_controller import ArmController, unsupported
from torchrl_vla.envs.libero.rendering import Renderer
from torchrl_vla.envs.libero.scene import Scene
from torchrl_vla.envs.libero.tasks import Task

IDLE_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
"""No motion, gripper open: what settles a scene (OpenVLA's evaluation)."""

_BROKEN = (
    mujoco.mjtWarning.mjWARN_BADQPOS,
    mujoco.mjtWarning.mjWARN_BADQVEL,
    mujoco.mjtWarning.mjWARN_BADQACC,
)


class ObservationClock:
    """After which physics substep of a control step robosuite takes its observations.

    robosuite 1.4 samples them once per control step, but not at its end: each update
    adds a substep to a timer, and forced updates at a reset shift its phase. Published
    policies were trained and evaluated on these observations, so it is kept, with the
    same floating-point arithmetic (``robosuite.utils.observables.Observable``).

    Args:
        period_s: of a control step.
        substep_s: of the physics.
        num_forced: observations taken at the reset.

    Example:
        >>> clock = ObservationClock(0.05, 0.002, num_forced=2)
        >>> [clock.next_step(25) for _ in range(3)]
        [24, 24, 24]
    """

    def __init__(self, period_s: float, substep_s: float, num_forced: int) -> None:
        self._period_s = period_s
        self._substep_s = substep_s
        self._elapsed_s = 0.0
        self._is_sampled = False
        for _ in range(num_forced):
            self._tick(forced=True)

    def next_step(self, num_substeps: int) -> int:
        """Count a control step; substeps before its last observation, 0 for none."""
        sampled = [n for n in range(1, num_substeps + 1) if self._tick()]
        return sampled[-1] if sampled else 0

    def copy(self) -> "ObservationClock":
        """A clock that stands at the same time."""
        clock = ObservationClock(self._period_s, self._substep_s, 0)
        clock._elapsed_s, clock._is_sampled = self._elapsed_s, self._is_sampled
        return clock

    def _tick(self, forced: bool = False) -> bool:
        self._elapsed_s += self._substep_s
        sample = forced or (not self._is_sampled and self._elapsed_s <= self._period_s)
        self._is_sampled = self._is_sampled or sample
        if self._elapsed_s >= self._period_s:
            self._elapsed_s %= self._period_s
            self._is_sampled = False
        return sample


class Member:
    """One simulation state of a scene, and what was last observed of it.

    Args:
        scene: whose model it shares.
        data: robosuite's own state for the member that robosuite itself resets.

    Attributes:
        data: the state.
        seen: copy of the state at the moment of the last observation.
        elapsed: control steps since the start, settling not counted.
    """

    def __init__(self, scene: Scene, data: mujoco.MjData | None = None) -> None:
        self._model = scene.model
        self.data = data or mujoco.MjData(scene.model)
        self.seen = mujoco.MjData(scene.model)
        self.hidden = scene.hidden
        self.look = scene.look.copy()
        self.seen_look = self.look
        self.clock: ObservationClock | None = None
        self.controller: ArmController | None = None
        self.elapsed = 0

    def observe(self) -> None:
        """Keep the state as it is now for pictures and proprioception."""
        mujoco.mj_copyData(self.seen, self._model, self.data)
        self.seen_look = self.look

    def copy_from(self, other: "Member") -> None:
        """Become the same, bit for bit."""
        mujoco.mj_copyData(self.data, self._model, other.data)
        mujoco.mj_copyData(self.seen, self._model, other.seen)
        self.look, self.seen_look = other.look, other.seen_look
        self.clock = other.clock.copy()
        self.elapsed = other.elapsed
        self.set_hidden(other.hidden)

    def set_hidden(self, hidden) -> None:
        """Take over robosuite's hidden state after it reset or stepped this member."""
        self.hidden = hidden
        if self.controller is not None:
            self.controller.load(hidden.controller, hidden.finger_action)

    @property
    def is_stale(self) -> bool:
        """Whether the next action is aimed from a pose of before the start."""
        return not self.hidden.controller["new_update"]


class Simulation:
    """A compiled task and ``num_members`` simulation states of it.

    robosuite compiles the scene, resets it, settles it and judges success. Steps are
    calls into MuJoCo with the controller of :mod:`osc`, on threads; with controller
    settings that it does not have, robosuite's own loop is used after a warning.

    Args:
        task: which scene and goal.
        num_members: G.
        height, width: of pictures, px.
        antialias: see :class:`Renderer`.
        num_threads: members that are stepped at once.
        render_gpu_device_id: EGL device, ``None`` for the default.
    """

    def __init__(
        self,
        task: Task,
        num_members: int = 1,
        *,
        height: int = 256,
        width: int = 256,
        antialias: bool = True,
        num_threads: int = 1,
        render_gpu_device_id: int | None = None,
    ) -> None:
        self.task = task
        self.height, self.width = height, width
        self.scene = Scene(task)
        self._template = Member(self.scene, self.scene.data)
        self.members = [Member(self.scene) for _ in range(num_members)]
        self._renderer = Renderer(
            self.scene.model,
            height,
            width,
            antialias=antialias,
            device_id=render_gpu_device_id,
        )
        self._start: tuple | None = None
        self._start_success = False
        self._threads = None
        if min(num_threads, num_members) > 1:
            self._threads = ThreadPoolExecutor(min(num_threads, num_members))
        if reason := unsupported(self.scene.robot):
            warnings.warn(
                f"{task.suite} task {task.number} is stepped by robosuite's own loop, "
                f"four times slower: {reason}",
                stacklevel=2,
            )
        else:
            for member in self.members:
                member.controller = ArmController(
                    self.scene.robot, self.scene.model, member.data
                )

    def close(self) -> None:
        """Free the states, the renderer and the scene."""
        for member in self.members:
            if member.controller is not None:
                member.controller.close()
        if self._threads is not None:
            self._threads.shutdown()
        self._renderer.close()
        self.scene.close()

    def state(self, index: int = 0) -> np.ndarray:
        """Time, positions and velocities of a member, float64 ``[1 + nq + nv]``."""
        data = self.members[index].data
        return np.concatenate([[data.time], data.qpos, data.qvel])

    # -- starts --------------------------------------------------------------------

    def start(
        self,
        indices: Sequence[int],
        seed: int,
        init_state: np.ndarray | None,
        settle_steps: int,
    ) -> bool:
        """Put members to one start, which depends on the arguments only.

        It is made once, copied, and kept for a next call with the same arguments.

        Args:
            indices: which members.
            seed: of the placement.
            init_state: float64 ``[1 + nq + nv]``, or ``None`` for a sampled start.
            settle_steps: control steps without motion.

        Returns:
            Whether the goal holds at the start.
        """
        key = (seed, None if init_state is None else init_state.tobytes(), settle_steps)
        if key != self._start:
            self._start = None
            self._make_start(seed, init_state, settle_steps)
            self._start = key
        for index in indices:
            self.members[index].copy_from(self._template)
        return self._start_success

    def _make_start(self, seed, init_state, settle_steps) -> None:
        scene, member = self.scene, self._template
        scene.reset(seed, init_state)
        member.look = member.seen_look = scene.look.copy()
        member.hidden = scene.hidden
        member.clock = ObservationClock(
            scene.control_period_s,
            scene.substep_s,
            num_forced=1 if init_state is None else 2,
        )
        member.observe()
        self._start_success = scene.judge()
        for _ in range(settle_steps):
            self._step_robosuite(member, IDLE_ACTION)
            self._start_success = self._judge(member)
        member.elapsed = 0

    # -- steps ---------------------------------------------------------------------

    def step(self, indices: Sequence[int], actions: np.ndarray) -> list[bool]:
        """One control step (50 ms) of some members.

        Args:
            indices: which members.
            actions: their actions, float64 ``[len(indices), 7]``.

        Returns:
            Success of each.

        Raises:
            RuntimeError: when physics diverged.
        """
        jobs = []
        for index, action in zip(indices, actions, strict=True):
            member = self.members[index]
            if member.controller is None or member.is_stale:
                self._step_robosuite(member, action)
            else:
                member.controller.set_action(action)
                jobs.append(member)
        if self._threads is not None and len(jobs) > 1:
            list(self._threads.map(self._step_compiled, jobs))
        else:
            for member in jobs:
                self._step_compiled(member)
        return [self._judge(self.members[index]) for index in indices]

    def _step_compiled(self, member: Member) -> None:
        model, num_substeps = self.scene.model, self.scene.num_substeps
        observed_after = member.clock.next_step(num_substeps)
        mujoco.mj_step(model, member.data, nstep=observed_after)
        if observed_after:
            member.observe()
        mujoco.mj_step(model, member.data, nstep=num_substeps - observed_after)

    def _step_robosuite(self, member: Member, action: np.ndarray) -> None:
        scene = self.scene
        scene.attach(member.data)
        scene.hidden = member.hidden
        observed_after = member.clock.next_step(scene.num_substeps)
        scene.step(action, partial(_observe_at, member, observed_after))
        member.set_hidden(scene.hidden)

    def _judge(self, member: Member) -> bool:
        scene = self.scene
        if any(member.data.warning[kind].number for kind in _BROKEN):
            raise RuntimeError(
                f"the physics of {self.task.suite} task {self.task.number} diverged "
                f"after {member.elapsed} env steps; actions must be within [-1, 1]"
            )
        scene.attach(member.data)
        if scene.changes_look:
            scene.look[:] = member.look
        success = scene.judge()
        if scene.changes_look:
            member.look = scene.look.copy()
        member.elapsed += 1
        return success

    # -- observations --------------------------------------------------------------

    def render(self, camera: str, index: int = 0) -> np.ndarray:
        """A picture of a member's last observation, uint8 ``[height, width, 3]``."""
        member = self.members[index]
        self.scene.look[:] = member.seen_look
        number = self.scene.model.camera(camera).id
        return self._renderer.render(member.seen, number, self.height, self.width)

    def proprioception(self, names: Sequence[str], index: int = 0) -> np.ndarray:
        """A member's last low-dimensional observations, float32 ``[S]``."""
        self.scene.attach(self.members[index].seen)
        return self.scene.proprioception(names)


def _observe_at(member: Member, observed_after: int, substep: int) -> None:
    if substep == observed_after:
        member.observe()
