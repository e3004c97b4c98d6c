"""What the tests of shards run on each rank: save, also on a full disk, and load."""

import resource
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace

import torch
from rank_updates import policy_of, whole

from torchrl_vla.config.schema import Config, DistributedConfig, UpdateConfig
from torchrl_vla.objectives import TokenGRPOLoss
from torchrl_vla.training.checkpoint import CheckpointError
from torchrl_vla.training.distributed import join_ranks
from torchrl_vla.training.run_folder import RunFolder
from torchrl_vla.training.sharding import share_policy
from torchrl_vla.training.updater import make_updater


@contextmanager
def running(checkpoint, folder, resume="never", asynchronous=False):
    """The parts of a run that a checkpoint of a cut policy is about."""
    cfg = DistributedConfig(strategy="fsdp", async_save=asynchronous)
    options = asdict(Config())
    options["policy"] |= {
        "name": "openvla_oft",
        "checkpoint": str(checkpoint),
        "cameras": ["image"],
        "min_window_mass": 0.0,
    }
    options["env"]["chunk_size"] = 8
    with join_ranks(cfg) as ranks:
        policy = policy_of(checkpoint)
        trained = share_policy(policy, cfg, ranks)
        updater = make_updater(
            TokenGRPOLoss(policy),
            UpdateConfig(lr=1e-3, warmup_steps=5),
            ranks=ranks,
            is_sharded=trained.is_sharded,
            saves_optimizer=False,
        )
        yield SimpleNamespace(
            rank=ranks.rank,
            policy=policy,
            updater=updater,
            parts={"policy": trained.state(updater.optimizer), "updater": updater},
            folder=RunFolder(
                str(folder),
                "name",
                resume,
                options,
                ranks=ranks,
                async_save=asynchronous,
            ),
        )


def save(checkpoint, folder, asynchronous, disk_bytes=None):
    """One optimizer step on made-up gradients, saved; then another, on a small disk."""
    with running(checkpoint, folder, asynchronous=asynchronous) as run:
        step(run)
        saved = held(run)
        run.folder.save(1, run.parts, {}, keep=1)
        if asynchronous:
            step(run)  # while it is written
        run.folder.finish_save()
        error = None
        if disk_bytes is not None:
            step(run)
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            if run.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (disk_bytes, most))
            try:
                run.folder.save(2, run.parts, {}, keep=1)
                run.folder.finish_save()
            except CheckpointError as problem:
                error = str(problem)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        return saved, error


def load(checkpoint, folder):
    """What a policy and its optimizer hold once the newest checkpoint is read."""
    with running(checkpoint, folder, resume="auto") as run:
        with torch.no_grad():
            for parameter in run.policy.parameters():
                parameter.zero_()
        run.folder.restore(run.parts)
        return held(run)


def step(run):
    for number, parameter in enumerate(run.policy.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 + number % 3)
    run.updater.optimizer.step()
    run.updater.scheduler.step()
    run.updater.num_optimizer_steps += 1


def held(run):
    """Weights, moments and place in the schedule, put together from all ranks."""
    states = run.updater.optimizer.state
    named = dict(run.policy.named_parameters())
    return {
        "weights": {name: whole(p.detach()) for name, p in named.items()},
        "optimizer": {
            f"{name} {key}": whole(value)
            for name, p in named.items()
            for key, value in sorted(states[p].items())
        },
        "updater": run.updater.state_dict(),
    }
