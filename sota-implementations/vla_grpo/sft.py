"""Supervised fine-tuning of a vision-language-action policy on demonstrations.

    python sft.py +experiment=sft_libero_object_cpu demos.path=FOLDER
    python sft.py --help                       # options; --cfg job prints them
    python vla-grpo.py policy.checkpoint=runs/.../policy.safetensors ...    # and then

One iteration: some optimizer steps on the cross-entropy of the demonstrated action
tokens, then a validation on held-out episodes. At the end the weights of the best
validation play every (task, initial state) pair in the simulator, greedily, and are
written for ``policy.checkpoint``. Any policy over action tokens is trained so:
the compact one from scratch, OpenVLA-OFT fully or with LoRA.

On purpose different from OpenVLA-OFT's fine-tuning: actions past the end of an episode
are masked rather than repeated; the best validation decides which weights are kept.
"""

import sys
from contextlib import ExitStack
from dataclasses import asdict

import hydra
import torch
from omegaconf import DictConfig
from torch import nn

from torchrl_vla.collectors.factory import make_pool
from torchrl_vla.config import SFTConfig, load
from torchrl_vla.data.action_chunks import ActionChunks, split_episodes
from torchrl_vla.data.action_codec import ActionCodec
from torchrl_vla.data.dataset_statistics import dataset_statistics
from torchrl_vla.data.demonstrations import Demonstration
from torchrl_vla.envs import factory as envs
from torchrl_vla.modules.factory import (
    TrainedWeights,
    codec_statistics,
    make_codec,
    make_policy,
    standardize_state,
)
from torchrl_vla.training import Evaluator
from torchrl_vla.training.demonstration_loader import check_fit, load_demonstrations
from torchrl_vla.training.device import choose_device
from torchrl_vla.training.distributed import require_one_rank
from torchrl_vla.training.early_stopping import EarlyStopping
from torchrl_vla.training.policy_export import export_policy
from torchrl_vla.training.recorder import SUPERVISED, Recorder, make_logger
from torchrl_vla.training.run_folder import SUPERVISED_MAY_DIFFER, RunFolder
from torchrl_vla.training.supervised import make_trainer


def run(cfg: SFTConfig) -> dict:
    """Train; returns what ``summary.json`` holds."""
    require_one_rank("sft.py")
    tasks = envs.task_ids(cfg.env)
    pairs = envs.evaluation_pairs(cfg.env, tasks, cfg.eval.num_init_states)
    device = choose_device(cfg.train.device)
    torch.set_num_threads(cfg.train.num_threads)
    folder = RunFolder(
        cfg.run_dir, cfg.name, cfg.resume, asdict(cfg), SUPERVISED_MAY_DIFFER
    )
    demos = load_demonstrations(cfg.demos, cfg.env, cfg.policy.cameras, cfg.seed)
    statistics = dataset_statistics(demos, cfg.policy.unnorm_key or cfg.env.task_suite)
    is_scaled = cfg.policy.name != "compact" or cfg.demos.action_bounds == "data"
    codec = make_codec(
        cfg.policy, cfg.env.task_suite, statistics if is_scaled else None
    )
    split = split_episodes(demos, cfg.demos.validation_fraction, cfg.seed)
    training, validation = (
        make_rows(part, codec, cfg.env.chunk_size, cfg.policy.cameras) for part in split
    )
    logger = make_logger(**asdict(cfg.logger), path=folder.path)

    with ExitStack() as stack:
        pool = make_pool(cfg.env, codec, seed=cfg.seed)
        stack.callback(pool.close)
        sizes = envs.sizes(pool.specs)
        check_fit(demos, sizes, envs.drawn_image_size(cfg.env, sizes))
        policy = make_policy(cfg.policy, sizes, seed=cfg.seed, device=device)
        standardize_state(policy, cfg.policy, statistics)
        trainer = make_trainer(
            policy,
            cfg.update,
            training,
            validation,
            num_steps=cfg.train.num_iterations * cfg.train.steps_per_iteration,
            shift_px=cfg.demos.shift_px,
            prepare=nn.Sequential(*envs.image_transforms(cfg.env)),
            seed=cfg.seed,
        )
        weights = TrainedWeights(policy)
        stopping = EarlyStopping(weights, cfg.train.stop_on, cfg.train.patience)
        evaluator = Evaluator(pool, pairs, envs.protocol(cfg.env))

        parts = {"policy": weights, "trainer": trainer, "stopping": stopping}
        counters = folder.restore(parts)
        recorder = Recorder(
            folder,
            counters,
            cfg.train.num_iterations,
            logger,
            fps=envs.decisions_per_second(cfg.env),
            recording=SUPERVISED,
        )
        stack.enter_context(recorder)

        def evaluate(is_last: bool) -> dict[str, float]:
            policy.eval()
            with recorder.time("eval"), stopping.best_weights():
                result = evaluator.evaluate(policy, cfg.eval.num_videos * is_last)
            return recorder.evaluated(result)

        for iteration in range(folder.iteration + 1, cfg.train.num_iterations + 1):
            if stopping.is_over:  # resumed after the end
                break
            with recorder.time("update"):
                metrics = trainer.train(cfg.train.steps_per_iteration)
            with recorder.time("validate"):
                metrics |= trainer.validate()
            stopping.update(iteration, metrics)
            is_last = stopping.is_over or iteration == cfg.train.num_iterations
            if is_last or is_due(iteration, cfg.eval.every):
                metrics |= evaluate(is_last)
            recorder.log(iteration, metrics)
            if is_last or is_due(iteration, cfg.checkpoint.every):
                folder.save(iteration, parts, recorder.counters, cfg.checkpoint.keep)
        if recorder.result is None:  # resumed with nothing left to do
            recorder.log(folder.iteration, evaluate(is_last=True))

        summary = recorder.finish(
            seed=cfg.seed,
            best_iteration=stopping.best_iteration,
            num_demonstrations=len(demos),
            num_validation_episodes=len(split[1]),
        )
        stopping.load_best()
        path = export_policy(
            folder.path,
            policy,
            codec,
            cfg.policy,
            sizes=sizes,
            statistics=codec_statistics(cfg.policy, cfg.env.task_suite, statistics),
            origin={"seed": cfg.seed, "options": asdict(cfg), "summary": summary},
        )
        recorder.say(f"policy.checkpoint={path}")
        return summary


def make_rows(
    demos: list[Demonstration],
    codec: ActionCodec,
    chunk_size: int,
    cameras: list[str],
) -> ActionChunks | None:
    """Rows of a part of the demonstrations; ``None`` where it has none."""
    return ActionChunks(demos, codec, chunk_size, cameras) if demos else None


def is_due(iteration: int, every: int) -> bool:
    """Whether something that happens every so many iterations happens now."""
    return every > 0 and iteration % every == 0


@hydra.main(version_base=None, config_path="../../configs", config_name="sft")
def main(raw: DictConfig) -> None:
    with load.one_clear_error():
        run(load.load_options(raw, SFTConfig))


if __name__ == "__main__":
    load.check_command_line(sys.argv[1:], SFTConfig)
    main()
