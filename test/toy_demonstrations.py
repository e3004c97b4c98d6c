"""A scripted expert of the toy task: the target is where the hand must be."""

import torch

from torchrl_vla.data.demonstrations import Demonstration, DemonstrationWriter
from torchrl_vla.envs import ToyTaskEnv

SUCCESS_TOL, SUCCESS_STEPS = 0.2, 3


def play(number: int, *, seed: int) -> Demonstration:
    """An episode from the initial state ``number``; the hand approaches the target."""
    env = ToyTaskEnv(seed=seed, success_tol=SUCCESS_TOL, success_steps=SUCCESS_STEPS)
    td = env.reset(init_state_id=number)
    images, states, actions = [], [], []
    done = False
    while not done:
        hand, target = td["observation", "state"][0].split(2)
        action = hand + (target - hand).clamp(-0.3, 0.3)
        images.append(td["observation", "image"][0].permute(1, 2, 0))
        states.append(td["observation", "state"][0])
        actions.append(action)
        td["action"] = action.unsqueeze(0)
        td = env.step(td)["next"]
        done = bool(td["done"])
    return Demonstration(
        images={"image": torch.stack(images).numpy()},
        state=torch.stack(states).numpy(),
        action=torch.stack(actions).numpy(),
        instruction=env.instruction,
        task_id=0,
        init_state_id=number,
        success=bool(td["success"]),
    )


def record(folder, num: int, *, seed: int, first: int = 1_000_000) -> None:
    """Record ``num`` sampled starts, disjoint from those of an evaluation."""
    with DemonstrationWriter(folder, action_dim=None) as writer:
        for number in range(first, first + num):
            writer.add(play(number, seed=seed))
