"""The environment of a run, from its section of the options."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchrl.data import Composite
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import Transform

from torchrl_vla.config.schema import EnvConfig
from torchrl_vla.data import keys
from torchrl_vla.data.action_codec import ActionCodec
from torchrl_vla.envs.libero import make_libero_envs, tasks
from torchrl_vla.envs.libero.workers import make_worker_env
from torchrl_vla.envs.toy import ToyTaskEnv
from torchrl_vla.envs.transforms import (
    ActionTokensTransform,
    MultiAction,
    OpenVLAImageTransform,
)

NUM_OFFICIAL = 50
"""Official initial states of a LIBERO task."""

MakeTransforms = Callable[[], Sequence[Transform]]


def play_chunks(
    env: EnvBase,
    chunk_size: int,
    codec: ActionCodec,
    make_observation_transforms: MakeTransforms | None = None,
) -> TransformedEnv:
    """``env`` as a policy over action tokens sees it: one step is one decision.

    Observation transforms run once per decision, on the last observation of a chunk.
    """
    transforms = [MultiAction(chunk_size), ActionTokensTransform(codec)]
    transforms += make_observation_transforms() if make_observation_transforms else []
    env = TransformedEnv(env)
    for transform in transforms:
        env.append_transform(transform)
    return env


def make_env(
    cfg: EnvConfig,
    codec: ActionCodec,
    *,
    seed: int = 0,
) -> EnvBase:
    """An environment that takes tokens, for :class:`EnvPool`.

    Args:
        cfg: the section ``env`` of the options.
        codec: what the policy's tokens mean.
        seed: names the initial states of the toy and the sampled ones of LIBERO.

    Raises:
        ModuleNotFoundError: when the simulator's extra is not installed.
    """
    wrap = _wrap(cfg, codec)
    if cfg.name == "toy":
        toy = ToyTaskEnv(
            num_envs=cfg.num_envs,
            max_episode_steps=cfg.max_episode_steps,
            success_tol=cfg.success_tol,
            success_steps=cfg.success_steps,
            seed=seed,
        )
        return wrap(toy)
    return make_libero_envs(
        cfg.num_workers, wrap=wrap, **libero_arguments(cfg), seed=seed
    )


def make_libero_worker(
    cfg: EnvConfig, codec: ActionCodec, *, seed: int = 0
) -> Callable[[], EnvBase]:
    """Makes the environment of one worker process, for :class:`OverlapPool`."""
    num_cores = len(os.sched_getaffinity(0))
    return partial(
        make_worker_env,
        _wrap(cfg, codec),
        num_threads=max(1, num_cores // cfg.num_workers),
        **libero_arguments(cfg),
        seed=seed,
    )


def _wrap(cfg: EnvConfig, codec: ActionCodec) -> Callable[[EnvBase], EnvBase]:
    return partial(
        play_chunks,
        chunk_size=cfg.chunk_size,
        codec=codec,
        make_observation_transforms=partial(image_transforms, cfg),
    )


def image_transforms(cfg: EnvConfig) -> list[Transform]:
    """What is done to the images of a decision, in the worker."""
    if cfg.image_transform == "none":
        return []
    cameras = cfg.cameras or ["image"]
    return [OpenVLAImageTransform([("observation", camera) for camera in cameras])]


def libero_arguments(cfg: EnvConfig) -> dict[str, Any]:
    """Arguments of ``LiberoEnv`` that all workers share."""
    cameras = cfg.cameras or ["image"]
    return {
        "task_suite": cfg.task_suite,
        "task_id": task_ids(cfg)[0],
        "num_envs": cfg.num_envs,
        "max_cached_tasks": cfg.max_cached_tasks,
        "wrist_camera": "robot0_eye_in_hand" if "wrist_image" in cameras else None,
        "camera_height": cfg.image_size,
        "camera_width": cfg.image_size,
        "antialias": cfg.antialias,
        "max_episode_steps": cfg.max_episode_steps,
        "settle_steps": cfg.settle_steps,
        "render_gpu_device_id": cfg.render_gpu_device_id,
    }


def task_ids(cfg: EnvConfig) -> list[int]:
    """Numbers of the tasks of a run.

    Raises:
        ValueError: for an unknown suite or a task that the suite does not have.
    """
    if cfg.name == "toy":
        return [0]
    num_tasks = tasks.num_tasks(cfg.task_suite)
    chosen = cfg.task_ids or list(range(num_tasks))
    if wrong := [task for task in chosen if task >= num_tasks]:
        raise ValueError(
            f"env.task_ids has {wrong}; {cfg.task_suite} has tasks 0 to {num_tasks - 1}"
        )
    return chosen


def demonstration_files(cfg: EnvConfig, folder: Path) -> dict[int, Path]:
    """LIBERO's own file of demonstrations of each task, by the benchmark's names."""
    return {
        task: folder / f"{Path(tasks.load_task(cfg.task_suite, task).bddl_file).stem}"
        "_demo.hdf5"
        for task in task_ids(cfg)
    }


def num_train_init_states(cfg: EnvConfig) -> int | None:
    """Initial states per task to train on; ``None`` for sampled ones without end."""
    if cfg.init_states == "sampled":
        return None
    return NUM_OFFICIAL if cfg.name == "libero" else 500


def evaluation_pairs(
    cfg: EnvConfig, tasks: Sequence[int], num_init_states: int
) -> list[tuple[int, int]]:
    """(task, initial state) pairs of the official split, ordered by task.

    Raises:
        ValueError: for more initial states than LIBERO has.
    """
    if cfg.name == "libero" and num_init_states > NUM_OFFICIAL:
        raise ValueError(
            f"eval.num_init_states={num_init_states}; a LIBERO task has {NUM_OFFICIAL} "
            "official initial states"
        )
    return [(task, start) for task in tasks for start in range(num_init_states)]


def sizes(specs: Composite) -> dict[str, int]:
    """What a policy must know of the specs of an environment that takes tokens."""
    action_spec = specs["input_spec", "full_action_spec"]
    observation_spec = specs["output_spec", "full_observation_spec"]
    *_, chunk_size, action_dim = action_spec[keys.TOKENS].shape
    return {
        "chunk_size": chunk_size,
        "action_dim": action_dim,
        "state_dim": observation_spec[keys.STATE].shape[-1],
        "image_size": observation_spec[keys.IMAGE].shape[-1],
    }


def drawn_image_size(cfg: EnvConfig, sizes: dict[str, int]) -> int:
    """Side of the simulator's images, px, before ``env.image_transform``."""
    return sizes["image_size"] if cfg.image_transform == "none" else cfg.image_size


def protocol(cfg: EnvConfig) -> dict[str, Any]:
    """What must be equal for two success rates to be comparable."""
    shared = {
        "env": cfg.name,
        "split": "official",
        "max_episode_steps": cfg.max_episode_steps,
        "chunk_size": cfg.chunk_size,
    }
    if cfg.name == "toy":
        return shared
    return {
        **shared,
        "task_suite": cfg.task_suite,
        "settle_steps": cfg.settle_steps,
        "image_size": cfg.image_size,
        "antialias": cfg.antialias,
    }


def decisions_per_second(cfg: EnvConfig) -> float:
    """Decisions per second of the robot's time, at LIBERO's 20 env steps per second."""
    return 20 / cfg.chunk_size
