"""Everything that can be set: the only list of options, the only place of defaults."""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class EnvConfig:
    """The simulator and its tasks."""

    name: str = "toy"
    """``toy`` (TorchRL's tracking task, vectorised) or ``libero``."""
    chunk_size: int = 4
    """Actions of a chunk, H (env steps)."""
    max_episode_steps: int = 24
    """Env steps after which an episode is truncated; a multiple of chunk_size."""
    num_workers: int = 1
    """Simulator processes of a rank (toy: 1, which is the main process)."""
    num_envs: int = 256
    """Members of a process; LIBERO: they share a compiled task and take no memory."""
    max_cached_tasks: int = 1
    """LIBERO only: compiled tasks that a worker keeps, 0.8 GB each after the first."""
    overlap: bool = True
    """LIBERO only: workers go on by themselves and are replaced; false is lockstep."""
    max_restarts: int = 3
    """LIBERO only: how often an episode may be lost with its worker."""
    min_timeout_s: float = 60.0
    """LIBERO only: shortest silence of a worker that counts as hanging, s."""
    init_states: str = "sampled"
    """Starts to train on: ``sampled`` (never used in evaluation) or ``official``."""
    task_suite: str = "libero_spatial"
    """LIBERO only: a suite of the installed benchmark."""
    task_ids: list[int] = field(default_factory=list)
    """LIBERO only: task numbers to train and evaluate on; empty is all of the suite."""
    cameras: list[str] = field(default_factory=list)
    """LIBERO only: ``image`` (agent view) and ``wrist_image``; empty is agent view."""
    image_size: int = 256
    """LIBERO only: rendered width and height in px."""
    antialias: bool = True
    """LIBERO only: four samples per px; false halves the time of software rendering."""
    settle_steps: int = 10
    """LIBERO only: env steps without motion after a reset (OpenVLA's evaluation)."""
    image_transform: str = "none"
    """LIBERO only: done to images: ``none`` or ``openvla`` (JPEG, 224 px, crop)."""
    render_gpu_device_id: int | None = None
    """LIBERO only: EGL device for rendering; None is the default, or the rank's."""
    success_tol: float = 0.35
    """Toy only: distance to the target per dimension that counts, in (0, 0.5]."""
    success_steps: int = 2
    """Toy only: env steps in a row within the tolerance that make a success."""


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    """The policy and how it samples."""

    name: str = "compact"
    """``compact`` (a few million weights, CPU) or ``openvla_oft`` (7 B)."""
    checkpoint: str | None = None
    """openvla_oft: folder or hub id. compact: a file, or ``shipped:NAME``."""
    temperature: float = 1.0
    """Divides the logits in sampling and update alike (SimpleVLA-RL: 1.6)."""
    top_k: int = 0
    """Sample among the k most likely bins; 0 is off."""
    num_bins: int = 11
    """compact only: bins per action dimension; odd, so that zero is a bin."""
    hidden_dim: int = 128
    """compact only: width of the trunk."""
    cameras: list[str] = field(default_factory=list)
    """Images the policy looks at: ``image``, ``wrist_image``; empty is state only."""
    rollout_batch_size: int | None = None
    """Rows per forward pass when acting; None is all that are ready."""
    dtype: str = "float32"
    """openvla_oft only: ``float32`` or ``bfloat16``."""
    unnorm_key: str | None = None
    """openvla_oft only: key of the action statistics; None derives it from suite."""
    statistics_folder: str | None = None
    """openvla_oft only: where dataset_statistics.json is; None is the checkpoint."""
    min_window_mass: float = 0.5
    """openvla_oft only: heads that give the action window less are refused."""
    lora_rank: int = 0
    """openvla_oft only: rank of the adapters (32 is usual); 0 trains everything."""
    gradient_checkpointing: bool = False
    """openvla_oft only: recompute activations in the backward pass."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """How groups are collected (algorithm: groups, dynamic sampling)."""

    group_size: int = 8
    """Episodes of a group, G (SimpleVLA-RL: 8)."""
    num_groups: int = 32
    """Mixed groups wanted per iteration (SimpleVLA-RL: 64)."""
    num_candidates: int | None = None
    """Episodes played per group, of which group_size are kept; None is group_size."""
    selection: str = "first"
    """Which candidates are kept: ``first``, ``uniform``, ``balanced`` (biased)."""
    dynamic_sampling: bool = True
    """Keep mixed groups only (DAPO); otherwise all."""
    keep_low: float = 0.1
    """Lowest mean return of a mixed group, inclusive (SimpleVLA-RL: 0.1)."""
    keep_high: float = 0.9
    """Highest mean return of a mixed group, inclusive (SimpleVLA-RL: 0.9)."""
    max_sampling_factor: int = 4
    """Budget of groups per iteration, in multiples of num_groups."""
    skip_solved: int = 0
    """Pass over starts solved by all members in their last k visits; 0 is off."""


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    """Advantage and loss."""

    clip_low: float = 0.2
    """Lower clip distance of the ratio (SimpleVLA-RL: 0.2)."""
    clip_high: float = 0.28
    """Upper clip distance of the ratio (SimpleVLA-RL: 0.28)."""
    aggregation: str = "episode"
    """Mean over ``episode`` (reference), ``token`` (DAPO) or ``decision``."""
    ratio_level: str = "token"
    """One importance ratio per ``token`` or per ``decision``."""
    behavior_log_prob: str = "rollout"
    """``rollout`` (as sampled) or ``recompute`` (one forward pass more)."""
    mask_unexecuted: bool = True
    """Tokens that were sampled but not played do not count; false is an ablation."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0 is off."""
    kl_coef: float = 0.0
    """Weight of the KL to the initial policy; 0 is off and costs nothing."""
    kl_in: str = "loss"
    """Where the KL enters: ``loss`` or ``reward``."""
    kl_estimator: str = "k3"
    """``k1``, ``k2`` or ``k3`` (Schulman 2020)."""
    kl_target: float | None = None
    """KL in the reward only: steer kl_coef to this KL; None keeps it fixed."""


@dataclass(kw_only=True, slots=True)
class UpdateConfig:
    """Optimizer and batch sizes."""

    lr: float = 2e-3
    """Learning rate of AdamW (SimpleVLA-RL, 7 B: 5e-6)."""
    beta1: float = 0.9
    """AdamW's first moment."""
    beta2: float = 0.999
    """AdamW's second moment."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up, then a constant rate."""
    episodes_per_step: int = 64
    """Episodes per optimizer step (SimpleVLA-RL: 128)."""
    micro_batch_size: int = 512
    """Decisions per forward and backward pass of a rank: as many as fit the memory."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The length of a run."""

    num_iterations: int = 150
    """Iterations of collect and update."""
    patience: int = 2
    """End after this many iterations in a row without a mixed group."""
    device: str = "auto"
    """Device of the policy: ``auto``, ``cpu``, ``cuda`` (of the rank), ``cuda:1``."""
    num_threads: int = 1
    """torch's CPU threads; more make small policies slower, much so on busy cores."""


@dataclass(kw_only=True, slots=True)
class DistributedConfig:
    """How the ranks that torchrun started share a policy; nothing with one rank."""

    strategy: str = "ddp"
    """``ddp`` (a policy on each rank), ``fsdp`` (one, cut up), ``none`` (one rank)."""
    num_replicas: int = 1
    """fsdp only: copies of the policy, each cut over its ranks (number of hosts)."""
    mixed_precision: bool = False
    """fsdp only: compute in bfloat16, keep and step weights in float32."""
    cpu_offload: bool = False
    """fsdp only: weights, gradients and optimizer in host memory while not needed."""
    async_save: bool = False
    """fsdp only: write a checkpoint during the iteration after it."""
    timeout_s: float = 1800.0
    """Longest wait for the other ranks, s: above the slowest episode."""
    heartbeat_timeout_s: float = 60.0
    """Silence after which a rank on another host counts as lost, s."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Greedy evaluation on official initial states, every pair exactly once."""

    every: int = 10
    """Iterations between evaluations; 0 evaluates before and after training only."""
    num_init_states: int = 500
    """Initial states per task, numbers 0.. (LIBERO has 50 official ones)."""
    num_videos: int = 4
    """Episodes of the last evaluation that are recorded; 0 is none."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """What is saved, and when."""

    every: int = 20
    """Iterations between checkpoints (the last one is always saved)."""
    keep: int = 2
    """Newest checkpoints that are kept."""


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    """Where metrics go besides metrics.csv."""

    name: str = "csv"
    """``csv`` (metrics.csv only) or ``wandb`` (an extra)."""
    project: str = "torchrl-vla"
    """wandb only: project."""
    mode: str = "offline"
    """wandb only: ``offline`` (no account needed) or ``online``."""


@dataclass(kw_only=True, slots=True)
class Config:
    """Options of the recipe."""

    seed: int = 0
    """Names all random numbers of the run."""
    name: str = "toy"
    """Name of the set-up: the folder under runs/."""
    run_dir: str | None = None
    """Folder of the run; None is runs/<name>/<time>."""
    resume: str = "never"
    """``never``, ``auto`` (the newest complete checkpoint, if any) or a checkpoint."""
    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


@dataclass(kw_only=True, slots=True)
class DemonstrationConfig:
    """The demonstrations that supervised fine-tuning learns from."""

    path: str | None = None
    """A LeRobot v3.0 folder, or (format libero_hdf5) a file or a folder of files."""
    format: str = "lerobot"
    """``lerobot`` or ``libero_hdf5`` (the benchmark's own files, one task each)."""
    num_per_task: int | None = None
    """Demonstrations of each task, drawn by the seed; None is all."""
    only_successful: bool = True
    """Leave out demonstrations that did not succeed."""
    validation_fraction: float = 0.1
    """Share of each task's episodes that is held out; 0 is none."""
    shift_px: int = 4
    """Images are moved by up to this many px each way in training; 0 is off."""
    action_bounds: str = "data"
    """compact only: bins span -1..1 (``unit``) or the ``data`` (q01 to q99)."""


@dataclass(kw_only=True, slots=True)
class SupervisedUpdateConfig:
    """Optimizer and batch sizes of supervised fine-tuning."""

    lr: float = 1e-3
    """Highest learning rate of AdamW; it falls to 0 along a half cosine."""
    beta1: float = 0.9
    """AdamW's first moment."""
    beta2: float = 0.999
    """AdamW's second moment."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    warmup_steps: int = 50
    """Optimizer steps of linear warm-up."""
    batch_size: int = 64
    """Rows (env steps of demonstrations) per optimizer step."""
    micro_batch_size: int = 64
    """Rows per forward and backward pass: as many as fit the memory."""


@dataclass(kw_only=True, slots=True)
class SupervisedTrainConfig:
    """The length of supervised fine-tuning."""

    num_iterations: int = 50
    """Iterations: some optimizer steps and a validation."""
    steps_per_iteration: int = 100
    """Optimizer steps of an iteration."""
    stop_on: str = "val_token_accuracy"
    """What decides which weights are best: ``val_token_accuracy`` or ``val_loss``."""
    patience: int = 15
    """End after this many iterations in a row that were not the best."""
    device: str = "auto"
    """Device of the policy: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ..."""
    num_threads: int = 1
    """torch's CPU threads; more make small policies slower, much so on busy cores."""


@dataclass(kw_only=True, slots=True)
class SFTConfig:
    """Options of supervised fine-tuning."""

    seed: int = 0
    """Names all random numbers of the run."""
    name: str = "sft"
    """Name of the set-up: the folder under runs/."""
    run_dir: str | None = None
    """Folder of the run; None is runs/<name>/<time>."""
    resume: str = "never"
    """``never``, ``auto`` (the newest complete checkpoint, if any) or a checkpoint."""
    demos: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    update: SupervisedUpdateConfig = field(default_factory=SupervisedUpdateConfig)
    train: SupervisedTrainConfig = field(default_factory=SupervisedTrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


@dataclass(kw_only=True, slots=True)
class DemosConfig:
    """Options of collecting demonstrations with LIBERO's scripted expert."""

    seed: int = 0
    """Names the starts and the noise."""
    folder: str | None = None
    """Folder that is written; None is demos/<task_suite>."""
    num_episodes: int = 10
    """Successful episodes per task."""
    max_failures: int = 10
    """Episodes per task that may fail; they are left out."""
    noise_std: float = 0.15
    """Noise on the translation, in units of the action; shows how to recover."""
    env: EnvConfig = field(default_factory=EnvConfig)
