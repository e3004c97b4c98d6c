"""Options: every file composes, every rule speaks, every field says what it is."""

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from torchrl_vla.collectors import GroupCollector
from torchrl_vla.config import Config, ConfigError, SFTConfig, load, rules, schema
from torchrl_vla.config.load import load_config
from torchrl_vla.envs import ToyTaskEnv
from torchrl_vla.modules import CompactPolicy
from torchrl_vla.objectives import GroupAdvantage, TokenGRPOLoss
from torchrl_vla.training import Updater

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SCRIPT = ROOT / "sota-implementations" / "vla_grpo" / "vla-grpo.py"
# What a set-up cannot know: where the weights are.
WEIGHTS = "policy.checkpoint=somewhere"
PLACEHOLDERS = {
    "openvla_oft": [WEIGHTS, "env.image_transform=openvla"],
    "libero_spatial_openvla": [WEIGHTS],
    "openvla_tiny_smoke": [WEIGHTS],
}


def composed(*overrides):
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose("vla_grpo", list(overrides))


def names(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def option(path, value):
    """A nested dict with one option."""
    nested = value
    for name in reversed(path.split(".")):
        nested = {name: nested}
    return nested


def default(path):
    section, name = path.split(".")
    return getattr(getattr(Config(), section), name)


def test_the_default_composes_to_the_defaults():
    assert load_config(composed()) == load_config() == Config()


@pytest.mark.parametrize("name", names("env"))
def test_every_env_composes(name):
    assert load_config(composed(f"env={name}")).env.name == name


@pytest.mark.parametrize("name", names("policy"))
def test_every_policy_composes(name):
    overrides = [f"policy={name}", *PLACEHOLDERS.get(name, [])]
    env = "toy" if name == "compact" else "libero"
    assert load_config(composed(f"env={env}", *overrides)).policy.name == name


@pytest.mark.parametrize("name", names("logger"))
def test_every_logger_composes(name):
    assert load_config(composed(f"logger={name}")).logger.name == name


def experiments(*, supervised):
    """Those of ``sft.py`` have a name that says so."""
    return [n for n in names("experiment") if n.startswith("sft_") == supervised]


@pytest.mark.parametrize("name", experiments(supervised=True))
def test_every_experiment_of_supervised_fine_tuning_composes(name):
    overrides = [f"+experiment={name}", "demos.path=somewhere"]
    overrides += [WEIGHTS] if name.endswith("openvla") else []
    with initialize_config_dir(str(CONFIGS), version_base=None):
        raw = compose("sft", overrides)
    cfg = load.load_options(raw, SFTConfig)
    assert cfg.name == name, "its runs go into a folder of its name"


def test_supervised_fine_tuning_composes_to_its_defaults():
    with initialize_config_dir(str(CONFIGS), version_base=None):
        raw = compose("sft", ["demos.path=somewhere", "env=toy"])
    cfg = load.load_options(raw, SFTConfig)
    expected = {"path": "somewhere"}
    assert cfg.demos == schema.DemonstrationConfig(**expected)
    assert cfg.update == schema.SupervisedUpdateConfig()
    assert cfg.train == schema.SupervisedTrainConfig()


@pytest.mark.parametrize("name", experiments(supervised=False))
def test_every_experiment_composes(name):
    raw = composed(f"+experiment={name}")
    needs = PLACEHOLDERS.get(raw.policy.name, [])
    needs = needs if raw.policy.checkpoint is None else []
    cfg = load_config(composed(f"+experiment={name}", *needs))
    assert cfg.name == name, "its runs go into a folder of its name"


def test_presets_hold_differences_only():
    """A preset may say the default where it is the source's number; never all of it."""
    fields = dataclasses.fields(schema.EnvConfig)
    for name in names("env"):
        preset = OmegaConf.load(CONFIGS / "env" / f"{name}.yaml")
        assert len(preset) < len(fields)


WRONG = [
    # (options, what the message says)
    *[(option(path, "nonsense"), f"{path}=nonsense: allowed are {', '.join(allowed)}")
      for path, allowed in rules.CHOICES.items()],
    *[(option(path, low - 1), f"{path}={type(default(path))(low - 1)}: must be at")
      for path, low in rules.AT_LEAST.items()],
    *[(option(path, 0), f"{path}=0.0: must be greater than 0")
      for path in rules.POSITIVE],
    (option("env.cameras", ["top"]), "env.cameras has ['top']: allowed are image"),
    (option("policy.cameras", ["top"]), "policy.cameras has ['top']: allowed"),
    (option("env.success_tol", 0.6), "env.success_tol=0.6: must be in (0, 0.5]"),
    (option("env.success_tol", 0.0), "env.success_tol=0.0: must be in (0, 0.5]"),
    (option("env.task_ids", [-1]), "env.task_ids=[-1]: task numbers start at 0"),
    (option("env.task_ids", [1, 1]), "env.task_ids=[1, 1]: each task once"),
    (option("objective.clip_low", 1.0), "clip_low=1.0, clip_high=0.28: needed are"),
    (option("objective.clip_high", 0.0), "clip_high=0.0: needed are 0 <= clip_low < 1"),
    (option("objective.entropy_coef", float("nan")), "objective.entropy_coef=nan: "),
    (option("update.lr", float("nan")), "update.lr=nan: must be greater than 0"),
    (option("update.beta1", 1.0), "update.beta1=1.0: must be in [0, 1)"),
    (option("update.beta2", -0.1), "update.beta2=-0.1: must be in [0, 1)"),
    (option("policy.rollout_batch_size", 0), "policy.rollout_batch_size=0: must be at"),
    (option("policy.top_k", 12), "policy.top_k=12: at most num_bins=11"),
    (
        {"rollout": {"keep_low": 0.9, "keep_high": 0.1}},
        "rollout.keep_low=0.9, keep_high=0.1: needed is 0 <= keep_low <= keep_high",
    ),
    (option("rollout.keep_high", 1.5), "needed is 0 <= keep_low <= keep_high <= 1"),
    (option("rollout.keep_low", float("nan")), "rollout.keep_low=nan"),
    (
        {"rollout": {"keep_low": 0.3, "keep_high": 0.32}},
        "no group of 8 can have such a mean; widen the bounds",
    ),
    (
        option("rollout.num_candidates", 7),
        "rollout.num_candidates=7: must be at least group_size=8, or null",
    ),
    (
        option("rollout.group_size", 6),
        "update.episodes_per_step=64: must be a multiple of rollout.group_size=6",
    ),
    (
        option("rollout.num_groups", 33),
        "rollout.num_groups=33 x group_size=8 = 264 episodes: must be a multiple of "
        "update.episodes_per_step=64",
    ),
    (
        option("rollout.skip_solved", 2),
        "rollout.skip_solved=2: sampled starts never come back; set "
        "env.init_states=official",
    ),
    (
        {"objective": {"kl_target": 0.1, "kl_coef": 0.1}},
        "objective.kl_target=0.1: steers the KL in the reward; set objective.kl_in=",
    ),
    (
        {"objective": {"kl_target": 0.1, "kl_in": "reward"}},
        "objective.kl_target=0.1: a coefficient of 0 cannot be steered",
    ),
    (
        {"objective": {"kl_target": 0.0, "kl_in": "reward", "kl_coef": 0.1}},
        "objective.kl_target=0.0: must be greater than 0, or null",
    ),
    (
        option("env.chunk_size", 5),
        "env.max_episode_steps=24: must be a multiple of env.chunk_size=5",
    ),
    (
        {"env": {"name": "libero", "num_workers": 33}},
        "env.num_workers=33: at most one worker per group, rollout.num_groups=32",
    ),
    (option("env.num_workers", 2), "env.num_workers=2: the toy is vectorised"),
    (
        {"policy": {"cameras": ["wrist_image"]}},
        "policy.cameras has ['wrist_image'], which env.cameras=['image'] does not",
    ),
    (
        {"env": {"name": "libero"}, "policy": {"name": "openvla_oft"}},
        "policy.checkpoint is not set: openvla_oft needs a folder or a hub id",
    ),
    *[
        (
            option(f"distributed.{name}", True),
            f"distributed.{name}=True: needs a sharded policy; set distributed.strat",
        )
        for name in ("mixed_precision", "cpu_offload", "async_save")
    ],
    (
        option("distributed.num_replicas", 2),
        "distributed.num_replicas=2: needs a sharded policy; set",
    ),
    (
        {"distributed": {"strategy": "fsdp"}, "policy": {"lora_rank": 4}},
        "policy.lora_rank=4 with distributed.strategy=fsdp: only the adapters",
    ),
    (
        {"distributed": {"strategy": "fsdp", "mixed_precision": True}},
        "distributed.mixed_precision=True: the compact policy computes in float32",
    ),
    (
        {"policy": {"name": "openvla_oft", "checkpoint": "x"}},
        "policy.name=openvla_oft: needs a robot simulator; use env=libero",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "message"), WRONG, ids=[m[:50] for _, m in WRONG])
def test_every_rule_speaks(raw, message):
    with pytest.raises(ConfigError) as error:
        load_config(raw)
    assert message in str(error.value)


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as error:
        load_config({"update": {"lr": -1.0}, "env": {"name": "x", "num_envs": 0}})
    text = str(error.value)
    for path in ("update.lr=-1.0", "env.name=x", "env.num_envs=0"):
        assert path in text


def test_the_paths_of_rules_are_options():
    known = load.option_names()
    for path in [*rules.CHOICES, *rules.AT_LEAST, *rules.POSITIVE]:
        assert path in known


@pytest.mark.parametrize("path", rules.AT_LEAST)
def test_the_lowest_value_is_allowed(path):
    lowest = rules.AT_LEAST[path]
    problems = [*rules._ranges(load_with(path, lowest))]
    assert not [problem for problem in problems if problem.startswith(f"{path}=")]


def load_with(path, value):
    cfg = Config()
    section, name = path.split(".")
    setattr(getattr(cfg, section), name, value)
    return cfg


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rollout": {"num_grups": 3}}, "num_grups"),
        ({"sed": 1}, "sed"),
        ({"rollout": {"num_groups": "many"}}, "many"),
        ({"rollout": {"num_groups": 2.5}}, "2.5"),
        ({"rollout": {"dynamic_sampling": "maybe"}}, "maybe"),
        ({"env": {"task_ids": "all"}}, "env.task_ids"),
        ({"update": {"lr": None}}, "lr"),
    ],
)
def test_unknown_options_and_wrong_types(raw, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(raw)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argument", "suggestion"),
    [
        ("rollout.num_grups=3", "rollout.num_groups"),
        ("num_groups=3", "rollout.num_groups"),
        ("lr=1e-3", "update.lr"),
        ("+learner.lr=1e-3", "update.lr"),
        ("sed=1", "seed"),
        ("polcy=compact", "policy"),
    ],
)
def test_an_unknown_option_of_the_command_line_names_the_closest(argument, suggestion):
    with pytest.raises(SystemExit) as error:
        load.check_command_line([argument, "seed=1"])
    text = str(error.value)
    assert f"{argument}: there is no option" in text
    assert "did you mean" in text
    assert suggestion in text


def test_a_strange_option_points_to_help():
    with pytest.raises(SystemExit, match="there is no option qqq; see --help"):
        load.check_command_line(["qqq=1"])


def test_options_that_exist_pass_the_command_line():
    arguments = [f"{name}=1" for name in load.option_names()]
    arguments += ["env=libero", "+experiment=x", "policy=compact", "logger=wandb"]
    arguments += ["--help", "--cfg", "job", "hydra.verbose=true", "++seed=3", "~env"]
    load.check_command_line(arguments)


def test_one_clear_error_has_no_traceback():
    for error in (ConfigError("a\nb"), ModuleNotFoundError("a\nb")):
        with pytest.raises(SystemExit) as stop, load.one_clear_error():
            raise error
        assert str(stop.value) == "error: a\n       b"
    with pytest.raises(SystemExit) as stop, load.one_clear_error():
        raise KeyboardInterrupt
    assert stop.value.code == 130
    with pytest.raises(RuntimeError), load.one_clear_error():
        raise RuntimeError("a bug keeps its traceback")


def test_a_saved_file_gives_the_same_options(tmp_path):
    cfg = load_config({"env": {"task_ids": [3, 1]}, "run_dir": "x", "seed": 5})
    load.save_config(dataclasses.asdict(cfg), tmp_path / "config.yaml")
    assert load_config(OmegaConf.load(tmp_path / "config.yaml")) == cfg


def test_help_and_cfg_and_an_error_on_the_command_line(tmp_path):
    def run(*arguments):
        command = [sys.executable, str(SCRIPT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    shown = run("--help")
    assert shown.returncode == 0
    for part in ("env: libero, toy", "group_size: 8", "+experiment=", "--cfg job"):
        assert part in shown.stdout, part
    shown = run("--cfg", "job")
    assert shown.returncode == 0
    printed = OmegaConf.create(shown.stdout)
    assert load_config(printed) == Config()
    wrong = run("rollout.keep_low=0.95", "update.lr=0.1")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith(
        "error: rollout.keep_low=0.95, keep_high=0.9: needed"
    )
    assert "Traceback" not in wrong.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def sections():
    return [
        c
        for c in vars(schema).values()
        if inspect.isclass(c) and c.__module__ == schema.__name__
    ]


@pytest.mark.parametrize("section", sections(), ids=lambda c: c.__name__)
def test_every_option_says_what_it_is(section):
    """A line follows every field; the sections of Config are said by their class."""
    (node,) = ast.parse(inspect.getsource(section)).body
    assert ast.get_docstring(node)
    decorator = ast.unparse(node.decorator_list[0])
    assert decorator == "dataclass(kw_only=True, slots=True)"
    for field, follower in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        if ast.unparse(field.annotation).endswith("Config"):
            continue
        said = isinstance(follower, ast.Expr) and ast.literal_eval(follower.value)
        assert isinstance(said, str), f"{section.__name__}.{field.target.id}"
        assert said.endswith(".")
        assert "\n" not in said, "one line"


# Where a default of the recipe differs from that of the class on purpose: the recipe's
# defaults are the toy's, the classes' are those of the reference set-up.
DIFFERS = {
    ("update", "episodes_per_step"): "128 is the paper's; the toy has 256 episodes",
    ("update", "micro_batch_size"): "a toy decision is 30 numbers",
    ("policy", "hidden_dim"): "LIBERO needs the wider trunk",
    ("env", "image_size"): "LIBERO only; the toy draws 32 px",
    ("env", "num_envs"): "the class is one environment unless asked",
    ("objective", "kl_estimator"): "k3 in the loss, k1 in the reward, as the reference",
}


@pytest.mark.parametrize(
    ("section", "callee"),
    [
        ("rollout", GroupCollector),
        ("objective", TokenGRPOLoss),
        ("objective", GroupAdvantage),
        ("objective", Updater),
        ("update", Updater),
        ("policy", CompactPolicy),
        ("env", ToyTaskEnv),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_defaults_are_those_of_the_arguments_they_feed(section, callee):
    options = getattr(Config(), section)
    parameters = inspect.signature(callee.__init__).parameters
    shared = {f.name for f in dataclasses.fields(options)} & parameters.keys()
    assert shared
    for name in shared:
        default = parameters[name].default
        if default is inspect.Parameter.empty or (section, name) in DIFFERS:
            continue
        assert getattr(options, name) == default, f"{section}.{name}"


def test_the_list_of_differences_is_up_to_date():
    for section, name in DIFFERS:
        assert f"{section}.{name}" in load.option_names()


def test_the_collector_takes_exactly_the_options_of_its_section():
    parameters = set(inspect.signature(GroupCollector).parameters)
    fields = {f.name for f in dataclasses.fields(schema.RolloutConfig)}
    assert parameters == fields | {"pool", "schedule", "seed", "ranks"}
