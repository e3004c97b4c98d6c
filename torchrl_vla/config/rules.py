"""What must hold between options, checked before anything is built."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torchrl_vla.config.schema import Config, DemosConfig, SFTConfig


class ConfigError(ValueError):
    """Options that cannot work; the text says which, and what to change."""


CHOICES = {
    "env.name": ("toy", "libero"),
    "env.init_states": ("sampled", "official"),
    "env.image_transform": ("none", "openvla"),
    "policy.name": ("compact", "openvla_oft"),
    "policy.dtype": ("float32", "bfloat16"),
    "rollout.selection": ("first", "uniform", "balanced"),
    "objective.aggregation": ("episode", "token", "decision"),
    "objective.ratio_level": ("token", "decision"),
    "objective.behavior_log_prob": ("rollout", "recompute"),
    "objective.kl_in": ("loss", "reward"),
    "objective.kl_estimator": ("k1", "k2", "k3"),
    "distributed.strategy": ("none", "ddp", "fsdp"),
    "logger.name": ("csv", "wandb"),
    "logger.mode": ("offline", "online"),
}

AT_LEAST = {
    "env.chunk_size": 1,
    "env.max_episode_steps": 1,
    "env.num_workers": 1,
    "env.num_envs": 1,
    "env.max_cached_tasks": 1,
    "env.max_restarts": 0,
    "env.image_size": 8,
    "env.settle_steps": 0,
    "env.success_steps": 1,
    "policy.num_bins": 2,
    "policy.hidden_dim": 1,
    "policy.top_k": 0,
    "policy.lora_rank": 0,
    "rollout.group_size": 2,
    "rollout.num_groups": 1,
    "rollout.max_sampling_factor": 1,
    "rollout.skip_solved": 0,
    "objective.entropy_coef": 0,
    "objective.kl_coef": 0,
    "update.weight_decay": 0,
    "update.warmup_steps": 0,
    "update.episodes_per_step": 1,
    "update.micro_batch_size": 1,
    "train.num_iterations": 0,
    "train.patience": 1,
    "train.num_threads": 1,
    "distributed.num_replicas": 1,
    "eval.every": 0,
    "eval.num_init_states": 1,
    "eval.num_videos": 0,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
}

POSITIVE = (
    "env.min_timeout_s",
    "policy.temperature",
    "update.lr",
    "update.max_grad_norm",
    "distributed.timeout_s",
    "distributed.heartbeat_timeout_s",
)

SFT_POSITIVE = tuple(path for path in POSITIVE if path.split(".")[0] != "distributed")


def _shared(table: dict[str, Any]) -> dict[str, Any]:
    """Entries of sections that both recipes have."""
    sections = ("env", "policy", "eval", "checkpoint", "logger")
    return {path: v for path, v in table.items() if path.split(".")[0] in sections}


SFT_CHOICES = {
    **_shared(CHOICES),
    "demos.format": ("lerobot", "libero_hdf5"),
    "demos.action_bounds": ("unit", "data"),
    "train.stop_on": ("val_token_accuracy", "val_loss"),
}

SFT_AT_LEAST = {
    **_shared(AT_LEAST),
    "demos.validation_fraction": 0,
    "demos.shift_px": 0,
    "update.weight_decay": 0,
    "update.warmup_steps": 0,
    "update.batch_size": 1,
    "update.micro_batch_size": 1,
    "train.num_iterations": 0,
    "train.steps_per_iteration": 1,
    "train.patience": 1,
    "train.num_threads": 1,
}


def check(cfg: Config | SFTConfig | DemosConfig) -> None:
    """Raise one :class:`ConfigError` that lists everything that is wrong."""
    if isinstance(cfg, SFTConfig):
        problems = [*_choices(cfg, SFT_CHOICES), *_sft_ranges(cfg)]
        problems = problems or [*_sft_relations(cfg)]
    elif isinstance(cfg, DemosConfig):
        problems = [*_demos_problems(cfg)]
    else:
        problems = [*_choices(cfg, CHOICES), *_ranges(cfg)] or [*_relations(cfg)]
    if problems:
        raise ConfigError("\n".join(problems))


def _value(cfg: Config | SFTConfig, path: str) -> object:
    section, name = path.split(".")
    return getattr(getattr(cfg, section), name)


def _choices(
    cfg: Config | SFTConfig, choices: dict[str, tuple[str, ...]]
) -> Iterator[str]:
    for path, allowed in choices.items():
        if (value := _value(cfg, path)) not in allowed:
            yield f"{path}={value}: allowed are {', '.join(allowed)}"
    for path in ("env.cameras", "policy.cameras"):
        cameras: list[str] = _value(cfg, path)  # type: ignore[assignment]
        if wrong := set(cameras) - {"image", "wrist_image"}:
            yield f"{path} has {sorted(wrong)}: allowed are image, wrist_image"


def _ranges(cfg: Config) -> Iterator[str]:
    yield from _bounds(cfg, AT_LEAST, POSITIVE)
    yield from _intervals(cfg)
    yield from _shared_ranges(cfg)


def _bounds(
    cfg: Config | SFTConfig, at_least: dict[str, int], positive: tuple[str, ...]
) -> Iterator[str]:
    for path, lowest in at_least.items():
        # Written so that NaN does not pass.
        if not (value := _value(cfg, path)) >= lowest:  # type: ignore[operator]
            yield f"{path}={value}: must be at least {lowest}"
    for path in positive:
        if not (value := _value(cfg, path)) > 0:  # type: ignore[operator]
            yield f"{path}={value}: must be greater than 0"


def _intervals(cfg: Config) -> Iterator[str]:
    if not 0 <= cfg.objective.clip_low < 1 or not cfg.objective.clip_high > 0:
        yield (
            f"objective.clip_low={cfg.objective.clip_low}, clip_high="
            f"{cfg.objective.clip_high}: needed are 0 <= clip_low < 1 and clip_high > 0"
        )
    target = cfg.objective.kl_target
    if target is not None and not target > 0:
        yield f"objective.kl_target={target}: must be greater than 0, or null"


def _shared_ranges(cfg: Config | SFTConfig) -> Iterator[str]:
    """Ranges of sections that both recipes have."""
    if not 0 < cfg.env.success_tol <= 0.5:
        yield f"env.success_tol={cfg.env.success_tol}: must be in (0, 0.5]"
    for path in ("update.beta1", "update.beta2"):
        if not 0 <= (value := _value(cfg, path)) < 1:  # type: ignore[operator]
            yield f"{path}={value}: must be in [0, 1)"
    size = cfg.policy.rollout_batch_size
    if size is not None and size < 1:
        yield f"policy.rollout_batch_size={size}: must be at least 1, or null"
    if any(task < 0 for task in cfg.env.task_ids):
        yield f"env.task_ids={cfg.env.task_ids}: task numbers start at 0"


def _relations(cfg: Config) -> Iterator[str]:
    yield from _group_relations(cfg)
    yield from _objective_relations(cfg)
    yield from _env_relations(cfg)
    yield from _policy_relations(cfg)
    yield from _distributed_relations(cfg)


def _group_relations(cfg: Config) -> Iterator[str]:
    rollout, update = cfg.rollout, cfg.update
    low, high = rollout.keep_low, rollout.keep_high
    if not 0 <= low <= high <= 1:
        yield (
            f"rollout.keep_low={low}, keep_high={high}: needed is "
            "0 <= keep_low <= keep_high <= 1; swap them"
        )
    elif rollout.dynamic_sampling and not any(
        low <= k / rollout.group_size <= high for k in range(1, rollout.group_size)
    ):
        yield (
            f"rollout.keep_low={low}, keep_high={high}: no group of "
            f"{rollout.group_size} can have such a mean; widen the bounds"
        )
    candidates = rollout.num_candidates
    if candidates is not None and candidates < rollout.group_size:
        yield (
            f"rollout.num_candidates={candidates}: must be at least group_size="
            f"{rollout.group_size}, or null"
        )
    if update.episodes_per_step % rollout.group_size:
        yield (
            f"update.episodes_per_step={update.episodes_per_step}: must be a multiple "
            f"of rollout.group_size={rollout.group_size}, so that no group is split"
        )
    num_episodes = rollout.num_groups * rollout.group_size
    if num_episodes % update.episodes_per_step:
        yield (
            f"rollout.num_groups={rollout.num_groups} x group_size="
            f"{rollout.group_size} = {num_episodes} episodes: must be a multiple of "
            f"update.episodes_per_step={update.episodes_per_step}; change either"
        )
    if cfg.env.num_workers > rollout.num_groups:
        yield (
            f"env.num_workers={cfg.env.num_workers}: at most one worker per group, "
            f"rollout.num_groups={rollout.num_groups}; lower it or ask for more groups"
        )
    if rollout.skip_solved and cfg.env.init_states == "sampled":
        yield (
            f"rollout.skip_solved={rollout.skip_solved}: sampled starts never come "
            "back; set env.init_states=official, or skip_solved=0"
        )


def _objective_relations(cfg: Config) -> Iterator[str]:
    objective = cfg.objective
    if objective.kl_target is None:
        return
    if objective.kl_in != "reward":
        yield (
            f"objective.kl_target={objective.kl_target}: steers the KL in the reward; "
            "set objective.kl_in=reward"
        )
    if objective.kl_coef == 0:
        yield (
            f"objective.kl_target={objective.kl_target}: a coefficient of 0 cannot be "
            "steered; set objective.kl_coef to a start above 0, or kl_target=null"
        )


def _distributed_relations(cfg: Config) -> Iterator[str]:
    distributed = cfg.distributed
    if distributed.strategy != "fsdp":
        for name in ("mixed_precision", "cpu_offload", "async_save"):
            if getattr(distributed, name):
                yield (
                    f"distributed.{name}=True: needs a sharded policy; set "
                    "distributed.strategy=fsdp"
                )
        if distributed.num_replicas > 1:
            yield (
                f"distributed.num_replicas={distributed.num_replicas}: needs a sharded "
                "policy; set distributed.strategy=fsdp"
            )
        return
    if cfg.policy.lora_rank:
        yield (
            f"policy.lora_rank={cfg.policy.lora_rank} with distributed.strategy=fsdp: "
            "only the adapters are trained, which fit on every rank; set "
            "distributed.strategy=ddp"
        )
    if distributed.mixed_precision and cfg.policy.name == "compact":
        yield (
            "distributed.mixed_precision=True: the compact policy computes in float32; "
            "use policy=openvla_oft, or mixed_precision=false"
        )


def _env_relations(cfg: Config | SFTConfig) -> Iterator[str]:
    env = cfg.env
    if env.max_episode_steps % env.chunk_size:
        yield (
            f"env.max_episode_steps={env.max_episode_steps}: must be a multiple of "
            f"env.chunk_size={env.chunk_size}"
        )
    if env.name == "toy" and env.num_workers != 1:
        yield (
            f"env.num_workers={env.num_workers}: the toy is vectorised in one process; "
            "use env.num_workers=1 and env.num_envs"
        )
    if len(set(env.task_ids)) != len(env.task_ids):
        yield f"env.task_ids={env.task_ids}: each task once"


def _policy_relations(cfg: Config | SFTConfig) -> Iterator[str]:
    env, policy = cfg.env, cfg.policy
    rendered = env.cameras or ["image"]
    if missing := [camera for camera in policy.cameras if camera not in rendered]:
        yield (
            f"policy.cameras has {missing}, which env.cameras={rendered} does not "
            "render; add them there"
        )
    if policy.top_k > policy.num_bins:
        yield f"policy.top_k={policy.top_k}: at most num_bins={policy.num_bins}"
    if policy.name == "openvla_oft" and policy.checkpoint is None:
        yield "policy.checkpoint is not set: openvla_oft needs a folder or a hub id"
    if policy.name == "openvla_oft" and env.image_transform != "openvla":
        yield (
            f"env.image_transform={env.image_transform}: openvla_oft was trained on "
            "images that are prepared; set env.image_transform=openvla"
        )
    if policy.name == "openvla_oft" and env.name == "toy":
        yield "policy.name=openvla_oft: needs a robot simulator; use env=libero"


def _sft_ranges(cfg: SFTConfig) -> Iterator[str]:
    yield from _bounds(cfg, SFT_AT_LEAST, SFT_POSITIVE)
    yield from _shared_ranges(cfg)
    num = cfg.demos.num_per_task
    if num is not None and num < 1:
        yield f"demos.num_per_task={num}: must be at least 1, or null"
    if not cfg.demos.validation_fraction < 1:
        yield (
            f"demos.validation_fraction={cfg.demos.validation_fraction}: must be "
            "below 1, so that something is left to train on"
        )


def _sft_relations(cfg: SFTConfig) -> Iterator[str]:
    yield from _env_relations(cfg)
    yield from _policy_relations(cfg)
    if cfg.demos.path is None:
        yield (
            "demos.path is not set: give a folder of demonstrations (LeRobot v3.0), or "
            "demos.format=libero_hdf5 and the benchmark's files"
        )


def _demos_problems(cfg: DemosConfig) -> Iterator[str]:
    # Everything but env is as by default; actions are played one by one, not in chunks.
    others = Config(env=replace(cfg.env, chunk_size=1))
    yield from [*_choices(others, CHOICES), *_ranges(others)] or _env_relations(others)
    if cfg.env.name == "toy":
        yield f"env.name={cfg.env.name}: the expert plays LIBERO; use env=libero"
    if cfg.env.init_states != "sampled":
        yield (
            f"env.init_states={cfg.env.init_states}: official starts are for "
            "evaluation; use env.init_states=sampled"
        )
    for name, lowest in (("num_episodes", 1), ("max_failures", 0), ("noise_std", 0)):
        if not (value := getattr(cfg, name)) >= lowest:
            yield f"{name}={value}: must be at least {lowest}"
