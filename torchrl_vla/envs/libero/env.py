"""LIBERO as a TorchRL environment with the vision-language-action schema."""

import gc
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase

from torchrl_vla.data import keys
from torchrl_vla.envs.libero.starts import Starts
from torchrl_vla.envs.libero.tasks import load_task

if TYPE_CHECKING:
    from torchrl_vla.envs.libero.simulation import Simulation

NUM_ACTIONS = 7
"""Translation (3), rotation (3) and gripper (1), each in [-1, 1]."""


class LiberoEnv(EnvBase):
    """A LIBERO task: robosuite's physics and judgement, pictures only when wanted.

    Arguments are named as in ``torchrl.envs.LiberoEnv`` where they mean the same.
    Different from it: every provider of ``libero.libero`` works (official pickled
    initial states or npz); a start is a pure function of
    ``(seed, task_id, init_state_id)``, in any process and whatever was played before;
    only the cameras that are asked for are rendered, once per chunk under
    :class:`MultiAction`; a reset takes a hundredth of a compile; a worker can change
    its task. An env step is one call into MuJoCo with a compiled controller; its states
    agree with robosuite's own to rounding, observations are taken at the same moment.

    Args:
        task_suite: a suite of the installed LIBERO, ``libero_spatial`` for instance.
        task_id: number of the task in its suite; :meth:`reset` can change it.
        instruction: replaces the task's own instruction.
        init_states: ``"official"`` (the benchmark's list), ``"sampled"`` (drawn by the
            benchmark's placement rules, without end, none of them official) or an array
            float64 ``[N, 1 + nq + nv]``.
        init_state_mode: which of them a reset without ``init_state_id`` takes:
            ``cycle``, ``fixed`` or ``random``.
        init_state_id: the one of ``fixed``; where ``cycle`` begins.
        camera: rendered to ``("observation", "image")``.
        wrist_camera: rendered to ``("observation", "wrist_image")``, if given.
        camera_height, camera_width: px.
        antialias: four samples per pixel, as in robosuite's pictures. Without it,
            software takes half the time; a policy must be trained as it is played.
        from_pixels: add ``"pixels"`` for ``torchrl.record.VideoRecorder``.
        proprio_keys: low-dimensional observations of robosuite, concatenated.
        max_episode_steps: env steps after which an episode is truncated.
        settle_steps: control steps without motion at a start (OpenVLA: 10).
        seed: names sampled starts.
        fixture_seed: places fixtures of official starts; reference evaluations use 0.
        render_gpu_device_id: EGL device, which is not the CUDA number; ``None`` is the
            default device. One per process.
        num_envs: G, for batch size ``[G]``; ``None`` for batch size ``[]``. Members
            have one task, share its compiled scene and renderer, and are stepped and
            reset by the masks ``"_step"`` and ``"_reset"``.
        num_threads: members that are stepped at once; ``None`` takes the cores that
            this process may use.
        max_cached_tasks: compiled scenes to keep when the task changes. The first one
            takes 1.9 GB with software rendering, a further one 0.8 GB; a change to a
            task that is not kept takes about 1.5 s.

    ``reset(tensordict, task_id=..., init_state_id=...)``: both optional, integers or
    tensors with one number for all members or (``init_state_id``) one each. Numbers
    from ``FIRST_SAMPLED_INIT_STATE`` on are sampled starts with any ``init_states``.
    Members that start alike are settled and drawn once and copied.

    Keys written: ``("observation", "image")`` uint8 ``[3, Y, X]``, upright;
    ``("observation", "wrist_image")`` likewise; ``("observation", "state")`` float32
    ``[S]`` (m, quaternion xyzw, m); ``"language_instruction"``; ``"task_id"`` and
    ``"init_state_id"`` int64 ``[1]``; ``"success"`` bool ``[1]``; reward float32
    ``[1]``, 1 at success; ``done``, ``terminated`` (success), ``truncated``.
    Key read: ``"action"`` float32 ``[7]`` in [-1, 1]: translation of the hand (0.05 m
    at 1), its rotation (0.5 rad at 1), gripper (-1 opens, 1 closes).

    Attributes:
        skip_observation: while true, a step that does not end an episode returns the
            previous observation instead of taking and drawing one.
        num_renders: pictures rendered so far.

    Raises:
        ModuleNotFoundError: without the ``libero`` extra.
        ValueError: for an unknown suite, task, mode or initial state, members with
            different tasks, an action that has another shape or is not finite, or a
            step of a member whose episode has ended.
        RuntimeError: when no OpenGL context can be made, or physics diverged.

    Example:
        >>> env = LiberoEnv("libero_spatial", 0, camera_height=64, camera_width=64)
        >>> td = env.reset(init_state_id=3)
        >>> tuple(td["observation", "image"].shape)
        (3, 64, 64)
        >>> env.close()
    """

    def __init__(
        self,
        task_suite: str,
        task_id: int = 0,
        *,
        instruction: str | None = None,
        init_states: str | np.ndarray = "official",
        init_state_mode: str = "cycle",
        init_state_id: int = 0,
        camera: str = "agentview",
        wrist_camera: str | None = None,
        camera_height: int = 256,
        camera_width: int = 256,
        antialias: bool = True,
        from_pixels: bool = False,
        proprio_keys: Sequence[str] = (
            "robot0_eef_pos",
            "robot0_eef_quat",
            "robot0_gripper_qpos",
        ),
        max_episode_steps: int = 512,
        settle_steps: int = 10,
        seed: int = 0,
        fixture_seed: int = 0,
        render_gpu_device_id: int | None = None,
        num_envs: int | None = None,
        num_threads: int | None = None,
        max_cached_tasks: int = 1,
    ) -> None:
        _check_numbers(
            at_least_1={
                "camera_height": camera_height,
                "camera_width": camera_width,
                "max_episode_steps": max_episode_steps,
                "num_envs": 1 if num_envs is None else num_envs,
                "num_threads": 1 if num_threads is None else num_threads,
                "max_cached_tasks": max_cached_tasks,
            },
            at_least_0={"settle_steps": settle_steps, "init_state_id": init_state_id},
        )
        super().__init__(batch_size=[] if num_envs is None else [num_envs])
        self.num_members = num_envs or 1
        self.task_suite = task_suite
        self.instruction = instruction
        self.cameras = {"image": camera}
        if wrist_camera is not None:
            self.cameras["wrist_image"] = wrist_camera
        self.camera_height = camera_height
        self.camera_width = camera_width
        self.antialias = antialias
        self.from_pixels = from_pixels
        self.proprio_keys = tuple(proprio_keys)
        self.max_episode_steps = max_episode_steps
        self.settle_steps = settle_steps
        self.render_gpu_device_id = render_gpu_device_id
        self.num_threads = num_threads or len(os.sched_getaffinity(0))
        self.max_cached_tasks = max_cached_tasks
        self.skip_observation = False
        self.num_renders = 0
        load_task(task_suite, task_id)  # does it exist?
        self.starts = Starts(
            task_suite,
            task_id,
            init_states=init_states,
            mode=init_state_mode,
            first_id=init_state_id,
            seed=seed,
            fixture_seed=fixture_seed,
        )
        self._compiled: OrderedDict[int, Simulation] = OrderedDict()
        self.simulation = self._compile(task_id)
        self._make_specs()

    # -- starts --------------------------------------------------------------------

    def _compile(self, task_id: int) -> "Simulation":
        """The simulation of a task, from the cache if it is there."""
        task = load_task(self.task_suite, task_id)  # refuse it before closing another
        # MuJoCo and robosuite: only after the renderer was chosen, if installed at all.
        from torchrl_vla.envs.libero.simulation import Simulation

        if task_id in self._compiled:
            self._compiled.move_to_end(task_id)
            return self._compiled[task_id]
        while len(self._compiled) >= self.max_cached_tasks:
            self._compiled.popitem(last=False)[1].close()
            gc.collect()  # robosuite's objects refer to each other in circles
        self._compiled[task_id] = Simulation(
            task,
            self.num_members,
            height=self.camera_height,
            width=self.camera_width,
            antialias=self.antialias,
            num_threads=self.num_threads,
            render_gpu_device_id=self.render_gpu_device_id,
        )
        return self._compiled[task_id]

    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        task_id: int | torch.Tensor | None = None,
        init_state_id: int | torch.Tensor | None = None,
    ) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        members = self._members(mask)
        self._change_task(task_id, members)
        starts = self._start_of_each(init_state_id, members)
        self.skip_observation = False
        for start in dict.fromkeys(starts.values()):
            alike = [member for member in members if starts[member] == start]
            seed, state = self.starts.load(self.simulation.task.number, start)
            success = self.simulation.start(alike, seed, state, self.settle_steps)
            self._observe(alike[:1])
            for observation in self._observation.values():
                observation[alike] = observation[alike[0]].clone()
            self._init_state_id[alike] = start
            self._success[alike] = success
            self._elapsed[alike] = 0
        return self._output().exclude("reward")

    def _members(self, mask: torch.Tensor | None) -> list[int]:
        if mask is None:
            return list(range(self.num_members))
        return mask.reshape(self.num_members).nonzero().flatten().tolist()

    def _change_task(self, task_id: int | torch.Tensor | None, members: list[int]):
        if task_id is None:
            return
        numbers = torch.as_tensor(task_id).reshape(-1)
        if len(numbers) == self.num_members:
            numbers = numbers[members]
        numbers = set(numbers.tolist())
        if numbers == {self.simulation.task.number} or not members:
            return
        if len(numbers) > 1 or len(members) < self.num_members:
            raise ValueError(
                f"members {members} were to reset to tasks {sorted(numbers)}, the "
                f"others play task {self.simulation.task.number}; all members of one "
                "process have one task, so reset them together"
            )
        self.simulation = self._compile(numbers.pop())

    def _start_of_each(
        self, init_state_id: int | torch.Tensor | None, members: list[int]
    ) -> dict[int, int]:
        task_id = self.simulation.task.number
        if init_state_id is None:
            # One start for members that reset together: they are a group.
            return (
                dict.fromkeys(members, self.starts.choose(task_id)) if members else {}
            )
        numbers = torch.as_tensor(init_state_id).reshape(-1)
        numbers = numbers.expand(self.num_members).tolist()
        for member in members:
            self.starts.load(task_id, numbers[member])  # refuse it before any is reset
        return {member: numbers[member] for member in members}

    # -- steps ---------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        members = self._members(tensordict.get("_step", None))
        actions = self._checked(tensordict.get("action"), members)
        successes = self.simulation.step(members, actions)
        self._success[members] = torch.tensor(successes)
        self._elapsed[members] += 1
        ended = self._success | (self._elapsed >= self.max_episode_steps)
        # Nobody acts on the last picture of an episode, but videos show it.
        self._observe(m for m in members if ended[m] or not self.skip_observation)
        out = self._output()
        # A member that was left out keeps its last output, but earns nothing again.
        left_out = [m for m in range(self.num_members) if m not in members]
        if left_out:
            out["reward"][left_out] = 0.0
        return out

    def _checked(self, action: torch.Tensor, members: list[int]) -> np.ndarray:
        """Actions of the members that step, float64 ``[len(members), 7]``."""
        expected = (*self.batch_size, NUM_ACTIONS)
        if action.shape != expected:
            raise ValueError(
                f"the action has shape {tuple(action.shape)}; LIBERO takes "
                f"{expected}: translation (3), rotation (3), gripper (1)"
            )
        values = action.detach().cpu().numpy().astype(np.float64)
        values = values.reshape(self.num_members, NUM_ACTIONS)[members]
        if not np.isfinite(values).all():
            raise ValueError(
                f"the action {values.tolist()} has values that are not finite; look at "
                "the policy's logits and the action statistics"
            )
        ended = self._success | (self._elapsed >= self.max_episode_steps)
        if over := [member for member in members if ended[member]]:
            raise ValueError(
                f"the episodes of members {over} have ended; reset them, or leave them "
                'out of the step with the mask "_step"'
            )
        return values

    def _observe(self, members: Iterable[int]) -> None:
        simulation = self.simulation
        for member in members:
            proprioception = simulation.proprioception(self.proprio_keys, member)
            self._observation["state"][member] = torch.from_numpy(proprioception)
            for name, camera in self.cameras.items():
                pixels = torch.from_numpy(simulation.render(camera, member).copy())
                self._observation[name][member] = pixels.permute(2, 0, 1)
                self.num_renders += 1

    def _output(self) -> TensorDict:
        success = self._success.unsqueeze(-1)
        over = (self._elapsed >= self.max_episode_steps).unsqueeze(-1)
        out = {
            "observation": {k: v.clone() for k, v in self._observation.items()},
            keys.TASK_ID: torch.full_like(
                success, self.simulation.task.number, dtype=torch.int64
            ),
            keys.INIT_STATE_ID: self._init_state_id.unsqueeze(-1).clone(),
            "success": success.clone(),
            "reward": success.float(),
            "terminated": success.clone(),
            "truncated": over & ~success,
            "done": over | success,
        }
        if self.from_pixels:
            image = out["observation"]["image"]
            out["pixels"] = image.permute(0, 2, 3, 1).contiguous()
        td = TensorDict(out, batch_size=[self.num_members])
        td = td.reshape(self.batch_size) if self.batch_size else td[0]
        instruction = self.instruction or self.simulation.task.instruction
        return td.set(keys.INSTRUCTION, instruction)

    # -- TorchRL -------------------------------------------------------------------

    def _make_specs(self) -> None:
        members = self.num_members
        picture = (self.camera_height, self.camera_width)
        num_values = len(self.simulation.proprioception(self.proprio_keys))
        self._observation = {"state": torch.zeros(members, num_values)}
        for name in self.cameras:
            self._observation[name] = torch.zeros(members, 3, *picture).byte()
        self._init_state_id = torch.zeros(members, dtype=torch.int64)
        self._success = torch.zeros(members, dtype=torch.bool)
        self._elapsed = torch.zeros(members, dtype=torch.int64)

        observation = {
            name: Bounded(0, 255, shape=(3, *picture), dtype=torch.uint8)
            for name in self.cameras
        }
        observation["state"] = Unbounded((num_values,))
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        spec = {
            "observation": Composite(observation),
            keys.INSTRUCTION: NonTensor(shape=(), example_data="pick up the bowl"),
            keys.TASK_ID: Unbounded((1,), dtype=torch.int64),
            keys.INIT_STATE_ID: Unbounded((1,), dtype=torch.int64),
            "success": flag.clone(),
        }
        if self.from_pixels:
            spec["pixels"] = Bounded(0, 255, shape=(*picture, 3), dtype=torch.uint8)
        flags = {name: flag.clone() for name in ("done", "terminated", "truncated")}

        def batch(one):
            return one.expand(*self.batch_size, *one.shape).clone()

        self.observation_spec = batch(Composite(spec))
        self.action_spec = batch(Bounded(-1.0, 1.0, shape=(NUM_ACTIONS,)))
        self.reward_spec = batch(Bounded(0.0, 1.0, shape=(1,)))
        self.done_spec = batch(Composite(flags))

    def _set_seed(self, seed: int | None) -> None:
        # Starts stay where they are: TorchRL gives every worker another seed, and
        # the members of a group must begin alike in all of them.
        if seed is not None:
            self.starts.seed_choice(seed)

    def close(self, *, raise_if_closed: bool = True) -> None:
        while self._compiled:
            self._compiled.popitem()[1].close()
        super().close(raise_if_closed=raise_if_closed)


def _check_numbers(at_least_1: dict[str, int], at_least_0: dict[str, int]) -> None:
    for least, numbers in ((1, at_least_1), (0, at_least_0)):
        for name, number in numbers.items():
            if number < least:
                raise ValueError(f"{name} is {number}; it must be >= {least}")
