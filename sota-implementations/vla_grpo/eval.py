"""Greedy evaluation of a run: every (task, initial state) pair exactly once.

    python eval.py run_dir=runs/toy/NAME            # its newest complete checkpoint
    python eval.py resume=runs/toy/NAME/checkpoints/iteration_000020.pt
    python eval.py run_dir=... env.task_suite=libero_spatial_swap eval.num_init_states=5
    python eval.py env=libero policy=openvla_oft policy.checkpoint=PATH ...

Options are those that the checkpoint holds; the command line may change what is played
(suite, tasks, initial states) and on what (workers, device), not the policy or the
rules of an episode. Without a checkpoint, options of a policy give the policy that
training would begin with.

``evaluation/SUITE_iteration_NUMBER/`` in the run's folder, a new one each time, gets
``evaluation.json`` (rates, Wilson intervals, protocol) and the videos.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from torchrl_vla.collectors.factory import make_pool
from torchrl_vla.config import Config, ConfigError, load
from torchrl_vla.envs import factory as envs
from torchrl_vla.modules.factory import make_codec, make_policy
from torchrl_vla.training import Evaluator, report, videos
from torchrl_vla.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    load_newest_checkpoint,
)
from torchrl_vla.training.device import choose_device
from torchrl_vla.training.distributed import require_one_rank
from torchrl_vla.training.evaluator import EvaluationResult
from torchrl_vla.training.run_folder import RunFolder
from torchrl_vla.training.shards import load_weights

MAY_CHANGE = ("eval", "env.task_suite", "env.task_ids", "env.num_workers")
MAY_CHANGE += ("env.num_envs", "env.max_cached_tasks", "env.overlap")
MAY_CHANGE += ("env.render_gpu_device_id",)
MAY_CHANGE += ("train.device", "train.num_threads")


def run(raw: DictConfig | dict, given: Sequence[str]) -> dict[str, Any]:
    """Evaluate; returns what ``evaluation.json`` holds.

    Args:
        raw: options, nested.
        given: names, dotted, of those that were chosen; others are the checkpoint's.
    """
    require_one_rank("eval.py")
    raw = OmegaConf.create(raw)
    state = find_checkpoint(raw.get("run_dir"), raw.get("resume", "auto"), given)
    cfg = load.load_config(
        raw if state is None else merge(state["options"], raw, given)
    )
    task_suite = (state["options"] if state else asdict(cfg))["env"]["task_suite"]
    tasks = envs.task_ids(cfg.env)
    pairs = envs.evaluation_pairs(cfg.env, tasks, cfg.eval.num_init_states)
    device = choose_device(cfg.train.device)
    torch.set_num_threads(cfg.train.num_threads)
    # The policy keeps the action statistics of the suite that it was trained on.
    codec = make_codec(cfg.policy, task_suite)

    with ExitStack() as stack:
        pool = make_pool(cfg.env, codec, seed=cfg.seed)
        stack.callback(pool.close)
        sizes = envs.sizes(pool.specs)
        policy = make_policy(cfg.policy, sizes, seed=cfg.seed, device=device)
        if state is not None:
            load_weights(policy, state)
        evaluator = Evaluator(pool, pairs, envs.protocol(cfg.env))
        result = evaluator.evaluate(policy, cfg.eval.num_videos)
    return save(result, cfg, iteration=state["iteration"] if state else 0)


def find_checkpoint(
    run_dir: str | None, resume: str, given: Sequence[str]
) -> dict[str, Any] | None:
    """The named or newest checkpoint; ``None`` where a new policy is asked for.

    Raises:
        CheckpointError: where there is none, or it is cut off.
    """
    if resume not in ("auto", "never"):
        state = load_checkpoint(Path(resume))
        refuse_supervised(state, resume)
        # Results go to the run that the file belongs to.
        state["options"]["run_dir"] = run_dir or str(Path(resume).resolve().parents[1])
        return state
    state = load_newest_checkpoint(Path(run_dir) / "checkpoints") if run_dir else None
    if state is not None:
        refuse_supervised(state, run_dir)
        state["options"]["run_dir"] = run_dir
    elif not any(name.split(".")[0] in ("policy", "experiment") for name in given):
        where = (
            f"{run_dir} has no complete checkpoint" if run_dir else "no run is named"
        )
        raise CheckpointError(
            f"{where}; give run_dir=FOLDER or resume=FILE of a run, or options of a "
            "policy (policy=..., +experiment=...) to evaluate a new one"
        )
    return state


def refuse_supervised(state: dict[str, Any], name: str) -> None:
    """A checkpoint of ``sft.py`` has the last weights, not the best, and no bins.

    Raises:
        CheckpointError: for such a checkpoint; says what to evaluate instead.
    """
    if "demos" in state["options"]:
        raise CheckpointError(
            f"{name} is a run of sft.py, which evaluates at its end; evaluate what it "
            "wrote with policy.checkpoint=.../policy.safetensors and the env.* and "
            "policy.* options of its config.yaml"
        )


def given_names(overrides: Sequence[str]) -> list[str]:
    """Names of the options on the command line: ``+a.b=1`` is ``a.b``."""
    return [override.split("=")[0].lstrip("+~") for override in overrides]


def merge(
    saved: dict[str, Any], raw: DictConfig, given: Sequence[str]
) -> dict[str, Any]:
    """Options of a checkpoint with what the command line changes in them.

    Raises:
        ConfigError: for an option that belongs to the run.
    """
    given = [name for name in given if name not in ("run_dir", "resume")]
    if fixed := [n for n in given if not {n, n.split(".")[0]} & set(MAY_CHANGE)]:
        raise ConfigError(
            f"{', '.join(fixed)}: fixed by the checkpoint; an evaluation can change "
            f"{', '.join(MAY_CHANGE)}"
        )
    merged = OmegaConf.create(saved)
    for name in given:
        OmegaConf.update(merged, name, OmegaConf.select(raw, name))
    # No groups are played here: there may be more workers than training has groups.
    merged.rollout.num_groups *= merged.env.num_workers
    return merged


def save(result: EvaluationResult, cfg: Config, iteration: int) -> dict[str, Any]:
    """Write ``evaluation.json`` and videos, print a table."""
    run_dir = cfg.run_dir or RunFolder(None, cfg.name, "never", {}).path
    played = cfg.env.task_suite if cfg.env.name == "libero" else cfg.env.name
    name = f"{played}_iteration_{iteration:06d}"
    folder = new_folder(Path(run_dir) / "evaluation" / name)
    fps = envs.decisions_per_second(cfg.env)
    videos.save_episodes(folder, result.videos, result.success, fps)
    summary = {"iteration": iteration, "seed": cfg.seed, **result.summary()}
    report.save_json(folder / "evaluation.json", summary)
    print(f"{'task':>8} {'success':>8} {'95 % interval':>16} {'episodes':>9}")
    for name, row in [*summary["tasks"].items(), ("all", summary)]:
        low, high = row["interval"]
        interval = f"[{low:.3f}, {high:.3f}]"
        rate, episodes = row["success_rate"], row["num_episodes"]
        print(f"{name:>8} {rate:>8.3f} {interval:>16} {episodes:>9}")
    print(f"{folder}/evaluation.json")
    return summary


def new_folder(path: Path) -> Path:
    """Make ``path``, or the first of ``path_2``, ``path_3``, ... that is not there."""
    folder, number = path, 1
    while folder.exists():
        number += 1
        folder = path.with_name(f"{path.name}_{number}")
    folder.mkdir(parents=True)
    return folder


@hydra.main(version_base=None, config_path="../../configs", config_name="eval")
def main(raw: DictConfig) -> None:
    with load.one_clear_error():
        run(raw, given_names(HydraConfig.get().overrides.task))


if __name__ == "__main__":
    load.check_command_line(sys.argv[1:])
    main()
