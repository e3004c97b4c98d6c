"""What the tests of several ranks run on each of them: one update, start to end."""

import torch
from tensordict import NonTensorStack, TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla.config.schema import DistributedConfig, PolicyConfig, UpdateConfig
from torchrl_vla.modules.factory import make_policy, make_reference
from torchrl_vla.objectives import GroupAdvantage, TokenGRPOLoss
from torchrl_vla.training.distributed import join_ranks
from torchrl_vla.training.global_batch import deal
from torchrl_vla.training.sharding import num_units, share_policy
from torchrl_vla.training.updater import make_updater

TEXTS = ("pick up the bowl", "open the drawer", "turn on the stove and wait")
SIZES = {"chunk_size": 8, "action_dim": 7, "state_dim": 8, "image_size": 224}
G = 4


def policy_of(checkpoint, **options):
    """The tiny OpenVLA-OFT of a folder, or without one a compact policy."""
    if checkpoint is None:
        cfg = PolicyConfig(num_bins=9, hidden_dim=16, cameras=["image"], **options)
    else:
        cfg = PolicyConfig(
            name="openvla_oft",
            checkpoint=str(checkpoint),
            cameras=["image"],
            min_window_mass=1e-3,
            gradient_checkpointing=True,
            **options,
        )
    return make_policy(cfg, SIZES, seed=1, device=torch.device("cpu"))


def episodes(num_episodes, size=224):
    """Decisions of whole episodes, 1 to 3 each, the last chunk cut short."""
    generator = torch.Generator().manual_seed(0)
    length_E = torch.randint(1, 4, (num_episodes,), generator=generator)
    episode_B = torch.arange(num_episodes).repeat_interleave(length_E)
    last_B = torch.cat([episode_B[1:] != episode_B[:-1], torch.tensor([True])])
    num = len(episode_B)
    image = torch.randint(0, 256, (num, 3, size, size), generator=generator)
    rows = TensorDict(
        {
            ("observation", "image"): image.to(torch.uint8),
            ("observation", "state"): torch.randn(num, 8, generator=generator),
            ("next", "reward"): (last_B & (episode_B % 3 == 0)).float().unsqueeze(-1),
            ("next", "done"): last_B.unsqueeze(-1),
            ("next", "num_executed"): torch.where(last_B, 3, 8).unsqueeze(-1),
            "group_id": (episode_B // G).unsqueeze(-1),
            "episode_id": episode_B.unsqueeze(-1),
            "sampling_seed": torch.arange(num).unsqueeze(-1),
        },
        [num],
    )
    rows["language_instruction"] = NonTensorStack(
        *[TEXTS[i // G % len(TEXTS)] for i in episode_B.tolist()]
    )
    return rows


def update(checkpoint, cfg, options):
    """Two optimizer steps; the gradients of each, metrics, weights, and more."""
    with join_ranks(DistributedConfig(**cfg)) as ranks:
        policy = policy_of(checkpoint, **options.get("policy", {}))
        rows = episodes(12, 224 if checkpoint else 32)
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            policy(rows)
        # Another policy has acted: ratios that are not 1, some of them clipped.
        rows["vla_action", "log_probs"] += 0.4 * torch.rand(
            rows["vla_action", "log_probs"].shape,
            generator=torch.Generator().manual_seed(5),
        )
        # Groups as they were played: rank 0 has two of three, the last rank none.
        player_B = (rows["group_id"].flatten() == 1).long() * (ranks.size > 1)
        mine = rows[player_B == ranks.rank]
        reference = make_reference(policy) if options.get("kl") else None
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.01)  # away from the reference, adapters too
        trained = share_policy(policy, DistributedConfig(**cfg), ranks)
        updater = make_updater(
            TokenGRPOLoss(policy, entropy_coef=0.01, kl_coef=options.get("kl", 0.0)),
            UpdateConfig(
                lr=1e-3, episodes_per_step=8, micro_batch_size=options["micro_batch"]
            ),
            behavior_log_prob=options.get("behavior", "rollout"),
            reference_policy=reference and trained.share(reference),
            ranks=ranks,
            is_sharded=trained.is_sharded,
        )
        gradients, held, steps = [], {}, []
        step = updater._step
        updater._step = lambda *rows: steps.append(step(*rows)) or steps[-1]

        def record(*_):
            named = policy.named_parameters()
            gradients.append({n: whole(p.grad) for n, p in named if p.grad is not None})
            held["gradients"] = num_bytes(p.grad for p in policy.parameters())

        updater.optimizer.register_step_pre_hook(record)
        batch = deal(mine if len(mine) else None, ranks, policy.in_keys)
        metrics = updater.prepare(batch)
        GroupAdvantage()(batch.rows)
        metrics |= updater.update(batch)
        weights = {n: whole(p.detach()) for n, p in policy.named_parameters()}
        unsharded = policy_of(checkpoint, **options.get("policy", {}))
        unsharded.load_state_dict(weights, strict=False)
        if cfg.get("mixed_precision"):
            unsharded = unsharded.bfloat16()
        with trained.acting() as actor:
            tokens = greedy(actor, checkpoint)
            gathered = num_bytes(actor.parameters())
        held["weights"] = num_bytes(policy.parameters())
        states = updater.optimizer.state.values()
        held["optimizer"] = num_bytes(v for state in states for v in state.values())
        return {
            "held": held,
            "gathered": gathered,
            "rank": ranks.rank,
            "units": num_units(policy),
            "own": batch.own()["episode_id"].flatten().tolist(),
            "metrics": metrics,
            "first_step": steps[0],
            "gradients": gradients,
            "weights": weights,
            "tokens": tokens,
            "unsharded_tokens": greedy(unsharded, checkpoint),
            "local_elements": sum(local(p).numel() for p in policy.parameters()),
        }


@torch.no_grad()
def greedy(policy, checkpoint):
    with set_exploration_type(ExplorationType.MODE):
        rows = policy(episodes(8, 224 if checkpoint else 32))
    return rows["vla_action", "tokens"]


def whole(value):
    return (
        value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()
    )


def num_bytes(values):
    values = [local(value) for value in values if value is not None]
    return sum(value.numel() * value.element_size() for value in values)


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value
