"""Demonstrations of LIBERO tasks by a scripted expert that sees the simulator's state.

    python collect_demos.py                               # libero_object, all tasks
    python collect_demos.py env.task_ids=[0,3] num_episodes=50 folder=demos/two
    python collect_demos.py env.task_suite=libero_spatial env.task_ids=[0,1,2]
    python collect_demos.py --help                        # options

Starts are sampled ones, so the official initial states stay unseen. Pictures are taken
before every action, at the size that the policy will see. The noise (noise_std) is on
what is played; what is written is the action that was meant. Episodes in which the
expert fails are left out, and the next start is played instead.
"""

import itertools
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDictBase
from tqdm import tqdm

from torchrl_vla.config import load
from torchrl_vla.config.schema import DemosConfig
from torchrl_vla.data import keys
from torchrl_vla.data.demonstrations import Demonstration, DemonstrationWriter
from torchrl_vla.data.group_schedule import FIRST_SAMPLED_INIT_STATE
from torchrl_vla.envs import LiberoEnv
from torchrl_vla.envs import factory as envs
from torchrl_vla.envs.libero.tasks import load_task

FPS = 20
"""Env steps per second of the robot's time."""


def run(cfg: DemosConfig) -> dict[str, Any]:
    """Collect; returns the folder, and counts per task."""
    tasks = envs.task_ids(cfg.env)
    check_expert_knows(cfg.env.task_suite, tasks)
    folder = Path(cfg.folder or Path("demos") / cfg.env.task_suite)
    torch.set_num_threads(1)
    counts = {}

    with ExitStack() as stack:
        writer = stack.enter_context(DemonstrationWriter(folder, fps=FPS))
        arguments = {**envs.libero_arguments(cfg.env), "num_envs": None}
        env = LiberoEnv(**arguments, init_states="sampled", seed=cfg.seed)
        stack.callback(env.close, raise_if_closed=False)
        bar = stack.enter_context(tqdm(total=len(tasks) * cfg.num_episodes))
        for task_id in tasks:
            bar.set_description(f"{cfg.env.task_suite} task {task_id}")
            counts[task_id] = {"num_episodes": 0, "num_failures": 0, "num_steps": 0}
            for demo in demonstrations(env, task_id, cfg, counts[task_id]):
                writer.add(demo)
                bar.update()
    print(f"{sum(count['num_episodes'] for count in counts.values())} in {folder}")
    return {"folder": str(folder), "tasks": counts}


def check_expert_knows(suite: str, tasks: list[int]) -> None:
    """Refuse a task without an expert before anything is compiled."""
    # MuJoCo: only after the renderer was chosen.
    from torchrl_vla.envs.libero.expert import load_goal

    for task_id in tasks:
        load_goal(load_task(suite, task_id))


def demonstrations(env: LiberoEnv, task_id: int, cfg: DemosConfig, count: dict):
    """Successful episodes of a task, as many as wanted.

    Raises:
        ValueError: when the expert failed too often.
    """
    for init_state_id in itertools.count(FIRST_SAMPLED_INIT_STATE):
        if count["num_episodes"] == cfg.num_episodes:
            return
        demo = play(env, task_id, init_state_id, cfg.noise_std, cfg.seed)
        if demo.success:
            count["num_episodes"] += 1
            count["num_steps"] += len(demo.action)
            yield demo
            continue
        count["num_failures"] += 1
        if count["num_failures"] > cfg.max_failures:
            raise ValueError(
                f"the expert failed in {count['num_failures']} of "
                f"{sum(count.values()) - count['num_steps']} episodes of "
                f"{cfg.env.task_suite} task {task_id}; lower noise_std="
                f"{cfg.noise_std}, raise env.max_episode_steps="
                f"{cfg.env.max_episode_steps} or max_failures={cfg.max_failures}, or "
                "leave the task out with env.task_ids"
            )


def play(
    env: LiberoEnv, task_id: int, init_state_id: int, noise_std: float, seed: int
) -> Demonstration:
    """One episode of the expert, with what was seen before each action."""
    from torchrl_vla.envs.libero.expert import Expert

    td = env.reset(task_id=task_id, init_state_id=init_state_id)
    expert = Expert(env.simulation, noise_std=noise_std, seed=seed)
    expert.start(0, init_state_id)
    seen, actions = [], []
    while not td["done"]:
        seen.append(td["observation"])
        meant = expert.act()
        actions.append(meant.astype(np.float32))
        played = torch.from_numpy(expert.disturb(meant)).float()
        td = env.step(td.set("action", played))["next"]
    return Demonstration(
        images={
            name: np.stack([frame(one, name) for one in seen]) for name in env.cameras
        },
        state=np.stack([one["state"].numpy() for one in seen]),
        action=np.stack(actions),
        instruction=td[keys.INSTRUCTION],
        task_id=task_id,
        init_state_id=init_state_id,
        success=bool(td["success"]),
    )


def frame(observation: TensorDictBase, name: str) -> np.ndarray:
    """A picture as uint8 ``[Y, X, 3]``."""
    return observation[name].permute(1, 2, 0).numpy()


@hydra.main(version_base=None, config_path="../../configs", config_name="collect_demos")
def main(raw: DictConfig) -> None:
    with load.one_clear_error():
        run(load.load_options(raw, DemosConfig))


if __name__ == "__main__":
    load.check_command_line(sys.argv[1:], DemosConfig)
    main()
