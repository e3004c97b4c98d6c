"""Reinforcement fine-tuning of a vision-language-action policy with GRPO.

    python vla-grpo.py                              # the toy task, a minute on a laptop
    python vla-grpo.py +experiment=libero_smoke     # the same on real LIBERO
    torchrun --nproc-per-node 8 vla-grpo.py ...     # every rank plays, all ranks train
    python vla-grpo.py --help                       # options; --cfg job prints them

One iteration: play groups of episodes from shared starts until enough of them have both
successes and failures, give every episode its advantage over its group, take a few
clipped policy-gradient steps. The method is SimpleVLA-RL's (arXiv:2509.09674).

On purpose different from the paper: the groups of a batch are the first mixed ones in
the schedule's order rather than the first to finish, so short episodes are not
favoured; training starts can be disjoint from evaluation starts; behaviour log-probs
are those of the rollout by default (the ratio's measured deviation from 1 is a metric).
"""

import sys
from contextlib import ExitStack
from dataclasses import asdict

import hydra
import torch
from omegaconf import DictConfig

from torchrl_vla.collectors import GroupCollector
from torchrl_vla.collectors.factory import make_pool
from torchrl_vla.config import Config, load
from torchrl_vla.data.group_schedule import GroupSchedule
from torchrl_vla.envs import factory as envs
from torchrl_vla.modules.factory import make_codec, make_policy, make_reference
from torchrl_vla.objectives.factory import make_advantage, make_loss
from torchrl_vla.training import Evaluator
from torchrl_vla.training.agreement import check_agreement, weights_digest
from torchrl_vla.training.device import choose_device
from torchrl_vla.training.distributed import join_ranks
from torchrl_vla.training.global_batch import deal
from torchrl_vla.training.recorder import Recorder, make_logger
from torchrl_vla.training.run_folder import open_run_folder
from torchrl_vla.training.sharding import share_policy
from torchrl_vla.training.updater import make_updater


def run(cfg: Config) -> dict:
    """Train; returns what ``summary.json`` holds."""
    tasks = envs.task_ids(cfg.env)
    num_starts = envs.num_train_init_states(cfg.env)
    pairs = envs.evaluation_pairs(cfg.env, tasks, cfg.eval.num_init_states)
    torch.set_num_threads(cfg.train.num_threads)
    codec = make_codec(cfg.policy, cfg.env.task_suite)

    with ExitStack() as stack:
        ranks = stack.enter_context(join_ranks(cfg.distributed))
        device = choose_device(cfg.train.device, ranks.local_rank, ranks.local_size)
        folder = open_run_folder(cfg, ranks, data={"pairs": pairs, "codec": codec})
        logger = make_logger(
            **asdict(cfg.logger), path=folder.path, writes=folder.writes
        )
        gpu = device.index if ranks.size > 1 else None
        pool = make_pool(cfg.env, codec, seed=cfg.seed, render_device=gpu)
        stack.callback(pool.close)
        sizes = envs.sizes(pool.specs)
        policy = make_policy(cfg.policy, sizes, seed=cfg.seed, device=device)
        check_agreement(ranks, {"weights": weights_digest(policy)})
        reference = make_reference(policy) if cfg.objective.kl_coef else None
        trained = share_policy(policy, cfg.distributed, ranks)
        schedule = GroupSchedule(tasks, num_starts, cfg.seed)
        collector = GroupCollector(
            pool, schedule, **asdict(cfg.rollout), seed=cfg.seed, ranks=ranks
        )
        advantage = make_advantage(cfg.objective)
        updater = make_updater(
            make_loss(policy, cfg.objective),
            cfg.update,
            behavior_log_prob=cfg.objective.behavior_log_prob,
            mask_unexecuted=cfg.objective.mask_unexecuted,
            reference_policy=reference and trained.share(reference),
            ranks=ranks,
            is_sharded=trained.is_sharded,
            saves_optimizer=not trained.saves_shards,
            device=device,
        )
        evaluator = Evaluator(pool, pairs, envs.protocol(cfg.env), ranks)

        parts = {
            "policy": trained.state(updater.optimizer),
            "updater": updater,
            "collector": collector,
            "advantage": advantage,
        }
        counters = folder.restore(parts)
        fps = envs.decisions_per_second(cfg.env)
        recorder = Recorder(folder, counters, cfg.train.num_iterations, logger, fps=fps)
        stack.enter_context(recorder)

        def evaluate(with_videos: bool) -> dict[str, float]:
            with recorder.time("eval"), trained.acting() as actor:
                result = evaluator.evaluate(actor, cfg.eval.num_videos * with_videos)
            return recorder.evaluated(result)

        if folder.iteration == 0:
            recorder.log(0, evaluate(with_videos=True))
        for iteration in range(folder.iteration + 1, cfg.train.num_iterations + 1):
            with recorder.time("collect"):
                with trained.acting() as actor:
                    rows, metrics = collector.collect(actor)
                batch = deal(rows, ranks, policy.in_keys)
            if batch is not None:
                with recorder.time("update"):
                    metrics |= updater.prepare(batch)
                    advantage(batch.rows)
                    metrics |= updater.update(batch)
                    metrics["kl_coef"] = max(advantage.kl_coef, cfg.objective.kl_coef)
            is_idle = recorder.count_empty(batch is None) >= cfg.train.patience
            is_last = is_idle or iteration == cfg.train.num_iterations
            if is_last or is_due(iteration, cfg.eval.every):
                metrics |= evaluate(with_videos=is_last)
            recorder.log(iteration, metrics)
            folder.finish_save()  # of the iteration before
            if is_last or is_due(iteration, cfg.checkpoint.every):
                folder.save(iteration, parts, recorder.counters, cfg.checkpoint.keep)
            if is_idle:
                recorder.say_idle(metrics)
                break
        folder.finish_save()
        if recorder.result is None:  # resumed with nothing left to do
            recorder.log(folder.iteration, evaluate(with_videos=True))
        return recorder.finish(seed=cfg.seed)


def is_due(iteration: int, every: int) -> bool:
    """Whether something that happens every so many iterations happens now."""
    return every > 0 and iteration % every == 0


@hydra.main(version_base=None, config_path="../../configs", config_name="vla_grpo")
def main(raw: DictConfig) -> None:
    with load.one_clear_error():
        run(load.load_config(raw))


if __name__ == "__main__":
    load.check_command_line(sys.argv[1:])
    main()
