"""The suites and tasks of whatever provider of ``libero.libero`` is installed."""

import atexit
import contextlib
import functools
import importlib.util
import io
import logging
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from torchrl_vla.envs.libero.rendering import environment, set_up_rendering

_REWORDED = ("_lan", "_task")
"""LIBERO-PRO's suites that keep file names, hence names of tasks, and change words."""


@dataclass(frozen=True)
class Task:
    """A task: where its scene is described, and in which words."""

    suite: str
    number: int
    instruction: str
    bddl_file: str


def import_libero() -> Any:
    """Import ``libero.libero`` without prompts, prints or a stale configuration.

    The official package asks for a path on standard input at its first import, and
    reads a configuration file in the home folder that may point to folders that are
    gone. It is given a fresh one in a temporary folder instead; the user's file is not
    touched, and a ``LIBERO_CONFIG_PATH`` that the user set is respected while the
    folders in it exist.

    Raises:
        ModuleNotFoundError: when the extra is not installed.
    """
    if importlib.util.find_spec("libero") is None:
        raise ModuleNotFoundError(
            "LIBERO is not installed: pip install 'torchrl-vla[libero]'"
        )
    set_up_rendering()
    _provide_config()
    # robosuite refuses an EGL device whose number is not among CUDA's at its import,
    # though the two do not count alike. It renders nothing here.
    hidden = {"CUDA_VISIBLE_DEVICES": None, "MUJOCO_EGL_DEVICE_ID": None}
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    with warnings.catch_warnings(), quiet(), environment(**hidden):
        # Deprecations inside third-party packages that nobody here can act on.
        warnings.simplefilter("ignore")
        import libero.libero.benchmark
        import libero.libero.envs
    return libero.libero


@functools.cache
def _provide_config() -> None:
    """Point ``LIBERO_CONFIG_PATH`` to a fresh folder unless what is there is usable."""
    source = Path(importlib.util.find_spec("libero").origin).parent / "libero"
    asks_for_paths = "input(" in (source / "__init__.py").read_text()
    chosen = os.environ.get("LIBERO_CONFIG_PATH")
    if chosen and _is_usable(Path(chosen) / "config.yaml", needed=asks_for_paths):
        return
    folder = Path(tempfile.mkdtemp(prefix="libero-config-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)
    if asks_for_paths:
        paths = {
            "benchmark_root": source,
            "bddl_files": source / "bddl_files",
            "init_states": source / "init_files",
            "datasets": source.parent / "datasets",
            "assets": source / "assets",
        }
    else:
        # It knows its own paths. Without a file TorchRL would write one that does not.
        paths = importlib.import_module("libero.libero").get_default_path_dict()
    text = yaml.safe_dump({key: str(path) for key, path in paths.items()})
    (folder / "config.yaml").write_text(text)


def _is_usable(file: Path, *, needed: bool) -> bool:
    """Whether the folders that a configuration names are still there."""
    if not file.exists():
        return not needed
    paths = yaml.safe_load(file.read_text()) or {}
    folders = [paths.get(key) for key in ("bddl_files", "init_states", "assets")]
    present = [folder for folder in folders if folder is not None]
    return all(map(os.path.isdir, present)) and (len(present) == 3 or not needed)


@contextlib.contextmanager
def quiet():
    """Keep what the benchmark prints to standard output to itself."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@functools.cache
def _suite(name: str) -> Any:
    benchmarks = import_libero().benchmark.get_benchmark_dict()
    if name not in benchmarks:
        raise ValueError(
            f"there is no task suite {name!r}; the installed LIBERO has "
            f"{', '.join(sorted(benchmarks))}"
        )
    with quiet():
        return benchmarks[name]()


def num_tasks(suite: str) -> int:
    """Number of tasks of a suite.

    Raises:
        ValueError: for a suite that the installed LIBERO does not have.
    """
    return _suite(suite).n_tasks


def load_task(suite: str, number: int) -> Task:
    """A task of a suite.

    Raises:
        ValueError: for an unknown suite or a number out of range.
    """
    if not 0 <= number < num_tasks(suite):
        raise ValueError(
            f"task_id is {number}; {suite} has tasks 0 to {num_tasks(suite) - 1}"
        )
    libero = import_libero()
    task = _suite(suite).get_task(number)
    folder = libero.get_libero_path("bddl_files")
    bddl_file = os.path.join(folder, task.problem_folder, task.bddl_file)
    if not os.path.exists(bddl_file):
        raise ValueError(
            f"the installed LIBERO lists {suite} but does not ship its scenes "
            f"({task.bddl_file} is missing); choose another task_suite"
        )
    instruction = task.language
    if suite.endswith(_REWORDED):
        info = libero.envs.bddl_utils.get_problem_info(bddl_file)
        instruction = info["language_instruction"]
    return Task(suite, number, str(instruction), bddl_file)


@functools.lru_cache(maxsize=16)
def load_official_states(suite: str, number: int) -> np.ndarray:
    """The official initial states of a task, float64 ``[N, 1 + nq + nv]``.

    Both layouts are read: the official pickled tensors and npz files.

    Raises:
        ValueError: when the installed LIBERO has none for this task.
    """
    try:
        states = _with_trusted_pickles(_suite(suite).get_task_init_states, number)
    except FileNotFoundError as error:
        raise ValueError(
            f"the installed LIBERO ships no initial states for {suite} task {number}; "
            "use init_states='sampled' or pass an array"
        ) from error
    return np.asarray(states, dtype=np.float64)


def _with_trusted_pickles(function, *arguments):
    """Call with ``torch.load`` as it was when LIBERO's state files were written.

    They hold NumPy arrays, which ``weights_only=True`` refuses; they come with the
    installed package, not from a user.
    """
    import torch

    load = torch.load
    torch.load = functools.partial(load, weights_only=False)
    try:
        return function(*arguments)
    finally:
        torch.load = load
