"""From the command line to checked dataclasses. The only place that knows Hydra."""

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrl_vla.config.rules import ConfigError, check
from torchrl_vla.config.schema import Config, DemosConfig, SFTConfig

GROUPS = ("env", "policy", "logger", "experiment")

# What a user can mend; anything else is a bug and keeps its traceback.
USER_ERRORS = (ValueError, ModuleNotFoundError, ChildProcessError, FloatingPointError)

ConfigStore.instance().store(name="schema", node=Config)
ConfigStore.instance().store(name="sft_schema", node=SFTConfig)
ConfigStore.instance().store(name="demos_schema", node=DemosConfig)

Options = TypeVar("Options", Config, SFTConfig, DemosConfig)


def load_config(raw: DictConfig | dict | None = None) -> Config:
    """Options of reinforcement fine-tuning; see :func:`load_options`.

    Example:
        >>> load_config({"rollout": {"num_groups": 8}}).rollout.num_groups
        8
    """
    return load_options(raw, Config)


def load_options(raw: DictConfig | dict | None, schema: type[Options]) -> Options:
    """Merge options over the defaults and check them.

    Args:
        raw: what Hydra composed, or a nested dict with the differences.
        schema: ``Config``, ``SFTConfig`` or ``DemosConfig``.

    Raises:
        ConfigError: for an unknown option, a value of the wrong type, or options that
            contradict each other.

    Example:
        >>> load_options({"env": {"name": "libero"}}, DemosConfig).num_episodes
        10
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), raw or {})
        cfg = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        # The lines behind the first name classes, which nobody can set.
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key}: {reason}") from error
    assert isinstance(cfg, schema)
    check(cfg)
    return cfg


def save_config(options: dict[str, Any], path: Path) -> None:
    """Write options, as nested containers, to a YAML file."""
    OmegaConf.save(OmegaConf.create(options), path)


def option_names(schema: type = Config) -> list[str]:
    """All options, dotted: ``seed``, ``env.chunk_size``, ..."""
    names = []
    for option in dataclasses.fields(schema):
        section = option.default_factory
        if dataclasses.is_dataclass(section):
            names += [f"{option.name}.{f.name}" for f in dataclasses.fields(section)]
        else:
            names.append(option.name)
    return names


def check_command_line(arguments: Sequence[str], schema: type = Config) -> None:
    """Refuse an override of an option that does not exist, and name the closest ones.

    Raises:
        SystemExit: with one line per unknown option.
    """
    known = [*option_names(schema), *GROUPS]
    problems = []
    for argument in arguments:
        name = argument.split("=")[0].lstrip("+~").split("@")[0]
        if argument.startswith("-") or "=" not in argument or name.startswith("hydra"):
            continue
        if name not in known:
            last = name.split(".")[-1]
            close = difflib.get_close_matches(name, known, 3, 0.5)
            close += [k for k in known if k.split(".")[-1] == last and k not in close]
            hint = f"did you mean {', '.join(close)}?" if close else "see --help"
            problems.append(f"{argument}: there is no option {name}; {hint}")
    if problems:
        sys.exit("error: " + "\n       ".join(problems))


@contextmanager
def one_clear_error() -> Iterator[None]:
    """End the program with the text of a user's error, without a traceback.

    Ctrl-C ends it with 130, as a shell does; the recorder has said how to go on.
    """
    try:
        yield
    except USER_ERRORS as error:
        sys.exit(f"error: {error}".replace("\n", "\n       "))
    except KeyboardInterrupt:
        sys.exit(130)
