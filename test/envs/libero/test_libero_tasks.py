"""Providers, stale configurations, suites; which OpenGL is chosen. No simulation."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrl_vla.envs.libero import rendering
from torchrl_vla.envs.libero.tasks import load_official_states, load_task, num_tasks

BOTH = {"egl": True, "osmesa": True}

# What matters of the official package: it asks for paths at its first import, reads
# them from a configuration file, and its initial states are pickled.
OFFICIAL = {
    "libero/__init__.py": "",
    "libero/libero/__init__.py": """
        import os, yaml
        folder = os.environ.get("LIBERO_CONFIG_PATH", os.path.expanduser("~/.libero"))
        file = os.path.join(folder, "config.yaml")
        if not os.path.exists(file):
            input("Do you want to specify a custom path for the dataset folder? ")
        def get_libero_path(key):
            with open(file) as stream:
                return yaml.safe_load(stream)[key]
    """,
    "libero/libero/benchmark/__init__.py": """
        import os, torch
        from types import SimpleNamespace
        from libero.libero import get_libero_path
        class Suite:
            n_tasks = 1
            def get_task(self, i):
                return SimpleNamespace(
                    language="lift", problem_folder="suite", bddl_file="lift.bddl"
                )
            def get_task_init_states(self, i):
                folder = get_libero_path("init_states")
                return torch.load(os.path.join(folder, "suite", "lift.pruned_init"))
        def get_benchmark_dict():
            return {"suite": Suite}
    """,
    "libero/libero/envs/__init__.py": "",
    "libero/libero/bddl_files/suite/lift.bddl": "",
    "libero/libero/assets/readme": "",
}

QUESTION = """
from torchrl_vla.envs.libero.tasks import load_official_states, load_task
print(load_task("suite", 0).bddl_file)
print(load_official_states("suite", 0).tolist())
"""


@pytest.fixture
def official(tmp_path):
    root = tmp_path / "site"
    for name, text in OFFICIAL.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    states = root / "libero/libero/init_files/suite"
    states.mkdir(parents=True)
    torch.save(np.array([[0.0, 1.5], [2.0, 3.0]]), states / "lift.pruned_init")
    return root


# Traps 4 (pickled states) and 6 (prompt at the first import, stale configuration).
@pytest.mark.parametrize(
    ("is_stale", "chosen"), [(False, None), (True, None), (True, "chosen")]
)
def test_an_official_provider(official, tmp_path, is_stale, chosen):
    config = tmp_path / (chosen or ".libero") / "config.yaml"
    stale = "".join(
        f"{key}: /gone/{key}\n" for key in ("bddl_files", "init_states", "assets")
    )
    if is_stale:
        config.parent.mkdir()
        config.write_text(stale)
    environ = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(official)}
    environ.pop("LIBERO_CONFIG_PATH", None)
    if chosen:
        environ["LIBERO_CONFIG_PATH"] = str(config.parent)
    answer = subprocess.run(
        [sys.executable, "-c", QUESTION],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    bddl_file, states = answer.stdout.splitlines()
    assert bddl_file == str(official / "libero/libero/bddl_files/suite/lift.bddl")
    assert states == "[[0.0, 1.5], [2.0, 3.0]]"
    if is_stale:
        assert config.read_text() == stale


# Trap 5: libero_spatial ships 100 states, of which 50 are official.
@pytest.mark.parametrize("suite", ["spatial", "object", "goal", "10"])
def test_official_states(suite):
    assert num_tasks(f"libero_{suite}") == 10
    states = load_official_states(f"libero_{suite}", 9)
    assert len(states) == 50
    assert states.dtype == np.float64
    assert np.isfinite(states).all()


# Trap 12: LIBERO-PRO's suites come along, with names of tasks that did not change.
def test_reworded_suites_have_their_own_words():
    usual = load_task("libero_spatial", 0).instruction
    assert usual.startswith("pick up the black bowl between the plate")
    reworded = load_task("libero_spatial_lan", 0)
    assert reworded.instruction != usual
    assert reworded.instruction in Path(reworded.bddl_file).read_text()
    assert load_task("libero_spatial_swap", 0).instruction == usual


def test_suites_that_are_listed_but_not_shipped():
    with pytest.raises(ValueError, match="does not ship its scenes"):
        load_task("libero_10_temp", 0)
    with pytest.raises(ValueError, match="ships no initial states"):
        load_official_states("libero_object_with_trigger", 0)


def test_the_choice_of_opengl():
    choose = rendering.choose_backend
    assert choose({}, gpu=True, libraries=BOTH) == "egl"
    assert choose({}, gpu=False, libraries=BOTH) == "osmesa"
    assert choose({}, gpu=False, libraries={"egl": True}) == "egl"
    assert choose({}, gpu=True, libraries={"osmesa": True}) == "osmesa"
    assert choose({"MUJOCO_GL": "egl"}, gpu=False, libraries=BOTH) == "egl"
    with pytest.raises(ImportError, match=r"neither libEGL.so.1 nor libOSMesa.so"):
        choose({}, gpu=True, libraries={})
    with pytest.raises(ImportError, match=r"MUJOCO_GL is 'egl' and libEGL.so.1 is not"):
        choose({"MUJOCO_GL": "egl"}, gpu=True, libraries={"osmesa": True})


# Trap 11: EGL does not count as CUDA does, and robosuite takes one for the other.
def test_a_device_that_does_not_exist():
    code = """
        from torchrl_vla.envs.libero import LiberoEnv
        LiberoEnv("libero_object", 0, render_gpu_device_id=77)
    """
    environ = {
        **os.environ,
        "MUJOCO_GL": "egl",
        "CUDA_VISIBLE_DEVICES": "3",
        "MUJOCO_EGL_DEVICE_ID": "0",
    }
    environ.pop("PYOPENGL_PLATFORM", None)
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 1
    assert "no OpenGL context could be made with MUJOCO_GL='egl'" in answer.stderr
    assert "render_gpu_device_id=77" in answer.stderr


def test_a_missing_extra(monkeypatch):
    from torchrl_vla.envs.libero import LiberoEnv, tasks

    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    tasks._suite.cache_clear()
    with pytest.raises(
        ModuleNotFoundError, match=r"pip install 'torchrl-vla\[libero\]'"
    ):
        LiberoEnv("libero_goal", 0)
