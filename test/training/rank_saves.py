"""What the tests of shards run on each rank: save, and save on a disk that is full."""

import resource
from dataclasses import asdict

import torch
from rank_updates import policy_of, whole

from torchrl_vla.config.schema import Config, DistributedConfig, UpdateConfig
from torchrl_vla.objectives import TokenGRPOLoss
from torchrl_vla.training.checkpoint import CheckpointError
from torchrl_vla.training.distributed import join_ranks
from torchrl_vla.training.run_folder import RunFolder
from torchrl_vla.training.sharding import share_policy
from torchrl_vla.training.updater import make_updater


def save(checkpoint, folder, asynchronous, disk_bytes=None):
    """One optimizer step on made-up gradients, saved; then another, on a small disk."""
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
            TokenGRPOLoss(policy), UpdateConfig(lr=1e-3), ranks=ranks, is_sharded=True,
            saves_optimizer=False,
        )  # fmt: skip
        run = RunFolder(
            str(folder), "name", "never", options, ranks=ranks, async_save=asynchronous
        )
        parts = {"policy": trained.state(updater.optimizer), "updater": updater}
        step(policy, updater)
        weights = {n: whole(p.detach()) for n, p in policy.named_parameters()}
        run.save(1, parts, {}, keep=1)
        if asynchronous:
            step(policy, updater)  # while it is written
        run.finish_save()
        error = None
        if disk_bytes is not None:
            step(policy, updater)
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            if ranks.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (disk_bytes, most))
            try:
                run.save(2, parts, {}, keep=1)
            except CheckpointError as problem:
                error = str(problem)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        return weights, error


def step(policy, updater):
    for number, parameter in enumerate(policy.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 + number % 3)
    updater.optimizer.step()
