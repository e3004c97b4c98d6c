"""The demonstrations of a run, from its sections of the options."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torchrl_vla.config.schema import DemonstrationConfig, EnvConfig
from torchrl_vla.data.demonstrations import Demonstration, read_demonstrations
from torchrl_vla.data.libero_hdf5 import read_libero_hdf5
from torchrl_vla.data.random_streams import derive_seed
from torchrl_vla.envs import factory as envs


def load_demonstrations(
    cfg: DemonstrationConfig, env: EnvConfig, cameras: Sequence[str], seed: int
) -> list[Demonstration]:
    """Read, and keep what the options ask for.

    Args:
        cfg: the section ``demos`` of the options.
        env: the section ``env``: which tasks.
        cameras: whose images the policy looks at; others are not kept.
        seed: names the draw of ``num_per_task``.

    Raises:
        ValueError: when there is nothing there, something is wrong with an episode, or
            a task has fewer than ``num_per_task``.
    """
    tasks = envs.task_ids(env)
    found = [d for d in _read(cfg, env, cameras) if d.task_id in tasks]
    if cfg.only_successful:
        found = [d for d in found if d.success]
    counts = Counter(d.task_id for d in found)
    needed = cfg.num_per_task or 1
    if short := {task: counts[task] for task in tasks if counts[task] < needed}:
        kind = "successful demonstrations" if cfg.only_successful else "demonstrations"
        raise ValueError(
            f"demos.path={cfg.path}: {needed} {kind} per task are needed, tasks have "
            f"{short}; record more, or change demos.num_per_task or env.task_ids"
        )
    return [d for task in tasks for d in _drawn(found, task, cfg.num_per_task, seed)]


def _read(
    cfg: DemonstrationConfig, env: EnvConfig, cameras: Sequence[str]
) -> list[Demonstration]:
    path = Path(str(cfg.path))
    if not path.exists():
        raise ValueError(f"demos.path={path}: there is no such file or folder")
    if cfg.format == "lerobot":
        action_dim = None if env.name == "toy" else 7
        return read_demonstrations(path, cameras=cameras, action_dim=action_dim)
    files = {envs.task_ids(env)[0]: path}
    if path.is_dir():
        files = envs.demonstration_files(env, path)
    elif len(envs.task_ids(env)) > 1:
        raise ValueError(
            f"demos.path={path}: a file of LIBERO has one task; give the folder, or "
            "one task in env.task_ids"
        )
    found = []
    for task, file in files.items():
        for demonstration in read_libero_hdf5(file, task_id=task):
            kept = {camera: demonstration.images[camera] for camera in cameras}
            demonstration.images = kept
            found.append(demonstration)
    return found


def _drawn(
    demonstrations: Sequence[Demonstration], task: int, num: int | None, seed: int
) -> list[Demonstration]:
    mine = [d for d in demonstrations if d.task_id == task]
    if num is None:
        return mine
    return random.Random(derive_seed(seed, "demonstrations", task)).sample(mine, num)


def check_fit(
    demonstrations: Sequence[Demonstration], sizes: dict[str, int], image_size: int
) -> None:
    """Refuse demonstrations that look different from what the environment shows.

    Args:
        demonstrations: of one kind.
        sizes: of state and action, see :func:`envs.factory.sizes`.
        image_size: side of the simulator's images, px, before they are prepared.

    Raises:
        ValueError: for another size of image, state or action; says what to set.
    """
    for demo in demonstrations:
        found = {"action_dim": demo.action.shape[1], "state_dim": demo.state.shape[1]}
        wrong = {k: v for k, v in found.items() if v != sizes[k]}
        if wrong:
            raise ValueError(
                f"the demonstrations have {wrong}, the environment has "
                f"{ {k: sizes[k] for k in wrong} }: they are from another one"
            )
        for camera, frames in demo.images.items():
            height, width = frames.shape[1:3]
            if (height, width) != (image_size, image_size):
                raise ValueError(
                    f"the demonstrations' {camera!r} is {height} x {width} px, the "
                    f"environment draws {image_size}; set env.image_size={height} or "
                    "record others"
                )
