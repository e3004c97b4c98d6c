"""Time to learn the toy task, beside TorchRL's own components on the same task.

    python benchmarks/toy.py

Ours is the recipe with default options, until the greedy success rate over 500 starts
is at least 0.95. The other one is a loop of TorchRL's parts as its documentation
combines them: ``ToyVLAEnv`` with ``group_repeats``, ``MultiAction``, ``SuccessReward``,
``TinyVLA``, ``MCAdvantage`` and ``ClipPPOLoss``, in one process without waiting for
anything, for one iteration of as many episodes as ours plays.
"""

import argparse
import csv
import importlib.util
import io
import os
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from torchrl.data.vla import UniformActionTokenizer
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.envs.custom import ToyVLAEnv
from torchrl.envs.transforms import MultiAction, SuccessReward
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules.vla import TinyVLA
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.llm import MCAdvantage

from torchrl_vla.config.load import load_config
from torchrl_vla.training.report import versions

ROOT = Path(__file__).parents[1]
GOAL = 0.95
PHASES = ("collect", "update", "eval")
CFG = load_config({})


def load_recipe():
    path = ROOT / "sota-implementations" / "vla_grpo" / "vla-grpo.py"
    spec = importlib.util.spec_from_file_location("vla_grpo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def learn(recipe, seed: int) -> dict:
    """Run the recipe, ten iterations at a time, until the goal is reached."""
    every = CFG.eval.every
    with tempfile.TemporaryDirectory() as folder:
        options = {"seed": seed, "run_dir": folder, "resume": "auto"}
        options["eval"] = {"num_videos": 0}
        for end in range(every, CFG.train.num_iterations + 1, every):
            options["train"] = {"num_iterations": end}
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                summary = recipe.run(load_config(options))
            stopped = summary["num_iterations"] < end
            if summary["final_success_rate"] >= GOAL or stopped:
                break
        with (Path(folder) / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    seconds = {p: sum(float(r[f"seconds_{p}"]) for r in rows) for p in PHASES}
    played = rows[1:]
    return {
        "seed": seed,
        "success": summary["final_success_rate"],
        "iterations": summary["num_iterations"],
        "seconds": sum(seconds.values()),
        "train_seconds": seconds["collect"] + seconds["update"],
        "decisions_per_s": summary["num_decisions"] / seconds["collect"],
        "episodes_per_iteration": summary["num_episodes"] / len(played),
    }


def torchrl_iteration(num_episodes: int, max_seconds: float) -> dict:
    """One iteration of TorchRL's parts: episodes one by one, four optimizer steps."""
    torch.manual_seed(0)
    torch.set_num_threads(CFG.train.num_threads)
    group_size = 4
    env = TransformedEnv(
        ToyVLAEnv(
            action_dim=2,
            state_dim=4,
            image_shape=(3, 32, 32),
            success_steps=CFG.env.success_steps,
            success_tol=CFG.env.success_tol,
            group_repeats=group_size,
            seed=0,
        )
    )
    env.append_transform(MultiAction.from_vla(stack_rewards=False))
    env.append_transform(SuccessReward())
    num_decisions = CFG.env.max_episode_steps // CFG.env.chunk_size
    env.append_transform(StepCounter(max_steps=num_decisions))
    policy = TinyVLA(
        action_dim=2,
        chunk_size=CFG.env.chunk_size,
        action_head="tokens",
        vocab_size=CFG.policy.num_bins,
        hidden_dim=CFG.policy.hidden_dim,
        action_tokenizer=UniformActionTokenizer(CFG.policy.num_bins, low=-1, high=1),
        output_mode="both",
        return_log_probs=True,
    )
    with torch.no_grad():
        policy(env.reset())  # lazy layers
    advantage = MCAdvantage(
        group_size,
        prompt_key="group_id",
        trajectory_return="sum",
        keep_return_bounds=(0.05, 0.95),
    )
    loss = ClipPPOLoss(
        policy, None, clip_epsilon=(0.2, 0.28), entropy_bonus=False, critic_coeff=None
    )
    loss.set_keys(
        action=("vla_action", "tokens"), sample_log_prob=("vla_action", "log_probs")
    )
    optimizer = torch.optim.AdamW(loss.parameters(), lr=CFG.update.lr)

    start = time.perf_counter()
    kept, played, decisions = [], 0, 0
    with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        while played < num_episodes and time.perf_counter() - start < max_seconds:
            episode = env.rollout(num_decisions, policy)
            played += 1
            decisions += len(episode)
            group = advantage.inv(episode)
            if group is not None:
                kept.append(group)
    collected = time.perf_counter()
    batch = torch.cat(kept) if kept else None
    if batch is not None:
        for rows in torch.randperm(len(batch)).chunk(4):
            loss(batch[rows])["loss_objective"].backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), CFG.update.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    end = time.perf_counter()
    return {
        "decisions": decisions,
        "episodes": played,
        "kept_decisions": 0 if batch is None else len(batch),
        "decisions_per_s": decisions / (collected - start),
        "seconds": (end - start) * num_episodes / played,
    }


def report(ours: list[dict], theirs: dict, num_episodes: int) -> str:
    def mean(name):
        return sum(run[name] for run in ours) / len(ours)

    per_iteration = mean("train_seconds") / mean("iterations")
    lines = [
        "# Toy task",
        "",
        "    python benchmarks/toy.py",
        "",
        f"{len(os.sched_getaffinity(0))} CPU cores; "
        + ", ".join(f"{name} {number}" for name, number in versions().items()),
        "",
        f"Until greedy success >= {GOAL} over {CFG.eval.num_init_states} starts that "
        "training never uses (evaluated every "
        f"{CFG.eval.every} iterations), default options:",
        "",
        "| seed | greedy success | iterations | s in all | s of collect and update |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {run['seed']} | {run['success']:.3f} | {run['iterations']} | "
        f"{run['seconds']:.1f} | {run['train_seconds']:.1f} |"
        for run in ours
    ]
    speed = mean("decisions_per_s")
    lines += [
        "",
        f"One iteration of {num_episodes} episodes. TorchRL's parts: one environment, "
        f"one process, torch threads as for ours ({CFG.train.num_threads}), groups of "
        "4, TinyVLA (which reads the image too), 4 optimizer steps; "
        f"{theirs['episodes']} episodes were played and "
        f"{theirs['kept_decisions']} of {theirs['decisions']} decisions trained on.",
        "",
        "| | decisions / s | s per iteration |",
        "| --- | --- | --- |",
        f"| torchrl_vla | {speed:.0f} | {per_iteration:.2f} |",
        f"| TorchRL's parts | {theirs['decisions_per_s']:.0f} | "
        f"{theirs['seconds']:.2f} |",
        f"| ratio | {speed / theirs['decisions_per_s']:.1f} | "
        f"{theirs['seconds'] / per_iteration:.1f} |",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-seconds", type=float, default=20.0)
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/toy.md"))
    arguments = parser.parse_args()
    recipe = load_recipe()
    ours = []
    for seed in range(arguments.seeds):
        ours.append(learn(recipe, seed))
        print(ours[-1], flush=True)
    num_episodes = round(sum(run["episodes_per_iteration"] for run in ours) / len(ours))
    theirs = torchrl_iteration(num_episodes, arguments.max_seconds)
    text = report(ours, theirs, num_episodes)
    path = Path(arguments.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
