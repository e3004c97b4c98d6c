"""Collecting demonstrations, from the options to the folder."""

import importlib.util

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from recipe_scripts import ROOT, load_script

from torchrl_vla.config import ConfigError, load
from torchrl_vla.config.schema import DemosConfig
from torchrl_vla.data.demonstrations import read_demonstrations
from torchrl_vla.data.group_schedule import FIRST_SAMPLED_INIT_STATE

needs_libero = pytest.mark.skipif(
    importlib.util.find_spec("libero") is None,
    reason="LIBERO is not installed: pip install 'torchrl-vla[libero]'",
)


def options(*changes):
    """As the script would compose them."""
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        raw = compose("collect_demos", list(changes))
    return load.load_options(raw, DemosConfig)


@pytest.fixture(scope="module")
def script():
    return load_script("collect_demos")


def test_the_options_compose():
    cfg = options("num_episodes=3", "env.task_ids=[1,4]")
    assert cfg.env.name == "libero"
    assert cfg.env.init_states == "sampled"
    assert (cfg.num_episodes, cfg.env.task_ids) == (3, [1, 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("num_episodes=0", "num_episodes=0: must be at least 1"),
        ("max_failures=-1", "max_failures=-1: must be at least 0"),
        ("noise_std=nan", "noise_std=nan: must be at least 0"),
        ("env.init_states=official", "official starts are for evaluation"),
        ("env=toy", "the expert plays LIBERO; use env=libero"),
        ("env.image_size=4", "env.image_size=4: must be at least 8"),
        ("env.cameras=[front]", "allowed are image, wrist_image"),
        ("env.task_ids=[2,2]", "each task once"),
    ],
)
def test_options_that_cannot_work(change, message):
    with pytest.raises(ConfigError, match=message):
        options(change)


def test_an_unknown_option_is_refused():
    with pytest.raises(SystemExit, match="did you mean num_episodes"):
        load.check_command_line(["num_episode=3"], DemosConfig)


@pytest.mark.libero
@needs_libero
def test_a_task_without_expert_is_refused_before_anything_starts(script, tmp_path):
    folder = tmp_path / "demos"
    with pytest.raises(ValueError, match="no expert for libero_goal task 0"):
        script.run(options("env.task_suite=libero_goal", f"folder={folder}"))
    assert not folder.exists()


@pytest.mark.libero
@needs_libero
def test_it_writes_what_was_seen_and_done(script, tmp_path, capsys):
    cfg = options(
        "env.task_ids=[2]",
        "num_episodes=1",
        "env.image_size=32",
        "env.cameras=[image,wrist_image]",
        f"folder={tmp_path / 'demos'}",
    )
    summary = script.run(cfg)
    (demo,) = read_demonstrations(summary["folder"])
    count = summary["tasks"][2]
    assert count["num_episodes"] == 1
    assert count["num_steps"] == len(demo.action)
    assert 50 < len(demo.action) < 130
    assert demo.success
    assert demo.task_id == 2
    assert demo.init_state_id >= FIRST_SAMPLED_INIT_STATE
    assert demo.instruction == "pick up the salad dressing and place it in the basket"
    assert demo.state.shape == (len(demo.action), 9)
    assert demo.action.dtype == demo.state.dtype == np.float32
    assert np.abs(demo.action).max() == 1.0
    for name in ("image", "wrist_image"):
        frames = demo.images[name]
        assert frames.shape == (len(demo.action), 32, 32, 3)
        assert frames.dtype == np.uint8
        assert frames[0].std() > 10  # a scene
        assert (frames[0] != frames[-1]).any()
    # Entry t was seen before action t: the first action moves the hand, seen in 1.
    moved = np.linalg.norm(np.diff(demo.state[:, :3], axis=0), axis=1)
    assert moved[0] > 1e-3
    assert "1 in " in capsys.readouterr().out


@pytest.mark.libero
@needs_libero
def test_an_expert_that_fails_too_often_is_one_clear_error(script, tmp_path):
    cfg = options(
        "env.task_ids=[0]",
        "num_episodes=1",
        "max_failures=0",
        "env.max_episode_steps=2",
        "env.image_size=16",
        f"folder={tmp_path / 'demos'}",
    )
    with pytest.raises(ValueError, match=r"failed in 1 of 1 episodes .*raise env\.max"):
        script.run(cfg)
