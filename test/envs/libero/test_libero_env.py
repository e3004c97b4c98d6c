"""LiberoEnv: equal to LIBERO as published evaluations play it, trap by trap."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_vla.data.group_schedule import FIRST_SAMPLED_INIT_STATE
from torchrl_vla.envs.libero import LiberoEnv
from torchrl_vla.envs.libero.tasks import load_official_states, load_task
from torchrl_vla.envs.transforms import MultiAction

SUITE = "libero_spatial"
SIZE = {"camera_height": 64, "camera_width": 64}
WRIST = "robot0_eye_in_hand"


@pytest.fixture(scope="module")
def env():
    env = LiberoEnv(SUITE, 0, wrist_camera=WRIST, from_pixels=True, **SIZE)
    yield env
    env.close()


def actions(num, seed=0):
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.uniform(-1, 1, (num, 7))).float()


def play(env, td, rows):
    for row in rows:
        td = env.step(td.set("action", row))["next"]
    return td


def test_check_env_specs(env):
    check_env_specs(env)


def test_keys_shapes_and_ranges(env):
    td = env.reset(init_state_id=3)
    assert td["observation", "image"].shape == (3, 64, 64)
    assert td["observation", "wrist_image"].dtype == torch.uint8
    assert td["observation", "state"].shape == (9,)
    assert td["pixels"].equal(td["observation", "image"].permute(1, 2, 0))
    assert td["task_id"].tolist() == [0]
    assert td["init_state_id"].tolist() == [3]
    assert td["language_instruction"] == load_task(SUITE, 0).instruction


# Traps 1 (stale controller), 3 (fixtures), 4 (states), 7 (orientation), 9 (settling).
def test_equals_the_published_evaluation(env, published):
    """States to rounding, pictures to the pixel, observations at the same moment."""
    td = env.reset(init_state_id=3)
    expected = published.start(load_official_states(SUITE, 0)[3])
    assert np.array_equal(env.simulation.state(), published.state)
    assert_same_observation(td, expected)
    for action in actions(12):
        td = env.step(td.set("action", action))["next"]
        expected, success = published.step(action.double().numpy())
        difference = np.abs(env.simulation.state() - published.state)
        assert difference.max() < 1e-12
        assert_same_observation(td, expected)
        assert bool(td["success"]) == success


def assert_same_observation(td, expected):
    for name, camera in (("image", "agentview"), ("wrist_image", WRIST)):
        pixels = expected[f"{camera}_image"][::-1, ::-1].transpose(2, 0, 1)
        assert np.array_equal(td["observation", name].numpy(), pixels)
    parts = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
    state = np.concatenate([expected[part] for part in parts]).astype(np.float32)
    np.testing.assert_allclose(td["observation", "state"].numpy(), state, atol=1e-6)


# Trap 2: the gripper, the controller and its buffers are not part of the state vector.
def test_a_start_does_not_depend_on_what_was_played(env):
    def start_and_play():
        td = env.reset(init_state_id=1)
        first = env.simulation.state(), td["observation", "image"].clone()
        return *first, play(env, td, actions(3, seed=1)), env.simulation.state()

    state, image, after, end = start_and_play()
    close = torch.tensor([0.5, -0.5, -1, 0.3, 0, 0, 1]).expand(6, 7)
    play(env, env.reset(init_state_id=7), close)
    play(env, env.reset(init_state_id=FIRST_SAMPLED_INIT_STATE), close[:2])
    again_state, again_image, again_after, again_end = start_and_play()
    assert np.array_equal(state, again_state)
    assert image.equal(again_image)
    assert after["observation", "image"].equal(again_after["observation", "image"])
    assert np.array_equal(end, again_end)


# Trap 3: TorchRL seeds siblings differently, which would part the members of a group.
def test_set_seed_does_not_move_fixtures(env):
    first = env.reset(init_state_id=0)
    state = env.simulation.state()
    env.set_seed(17)
    again = env.reset(init_state_id=0)
    assert np.array_equal(state, env.simulation.state())
    image = first["observation", "image"]
    assert image.equal(again["observation", "image"])


def test_fixtures_are_moved_by_their_own_seed(env):
    pictures = []
    for env.starts.fixture_seed in (0, 1, 0):
        pictures.append(env.reset(init_state_id=0)["observation", "image"])
    assert pictures[0].equal(pictures[2])
    assert not pictures[0].equal(pictures[1])


# Trap 5: 50 official states; further ones are sampled, and none is official.
def test_official_and_sampled_starts_are_disjoint(env):
    official = load_official_states(SUITE, 0)
    assert len(official) == 50
    starts = []
    for number in (0, 1, 0):
        env.reset(init_state_id=FIRST_SAMPLED_INIT_STATE + number)
        starts.append(env.simulation.state())
    assert np.array_equal(starts[0], starts[2])
    assert not np.allclose(starts[0], starts[1], atol=1e-4)
    distance = np.abs(official[:, 1:] - starts[0][1:]).max(axis=1)
    assert distance.min() > 1e-3


# Trap 8: robosuite counts 1,000 steps itself, and a step after its end raises.
def test_the_horizon_is_ours(env):
    env.reset(init_state_id=0)
    env.simulation.scene.env.timestep = 5_000
    env.max_episode_steps, usual = 3, env.max_episode_steps
    try:
        td = env.reset(init_state_id=0)
        flags = []
        for action in actions(3):
            td = env.step(td.set("action", action))["next"]
            flags.append((bool(td["truncated"]), bool(td["done"])))
        with pytest.raises(ValueError, match="have ended; reset them"):
            env._step(td.set("action", action))
    finally:
        env.max_episode_steps = usual
    assert flags == [(False, False), (False, False), (True, True)]
    assert not td["terminated"]


# Trap 10: -1 opens, +1 closes.
def test_gripper_directions(env):
    def width(value):
        td = env.reset(init_state_id=0)
        td = play(env, td, torch.tensor([0, 0, 0, 0, 0, 0, value]).expand(12, 7))
        left, right = td["observation", "state"][-2:]
        return float(left - right)

    assert width(-1.0) > 0.07
    assert width(1.0) < 0.02


def test_renders_once_per_chunk(env):
    chunks = TransformedEnv(env, MultiAction(4))
    td = chunks.reset(init_state_id=0)
    before, image = env.num_renders, td["observation", "image"]
    td["vla_action", "chunk"] = actions(4)
    td = chunks.step(td)["next"]
    assert env.num_renders - before == 2  # one per camera
    assert td["num_executed"] == 4
    assert not td["observation", "image"].equal(image)


def test_a_skipped_observation_is_the_previous_one(env):
    td, renders = env.reset(init_state_id=0), env.num_renders
    env.skip_observation = True
    after = play(env, td.clone(), actions(2))
    env.skip_observation = False
    assert env.num_renders == renders
    for name in ("image", "wrist_image", "state"):
        assert after["observation", name].equal(td["observation", name])


def position_of(env, name):
    """Where a state vector (time, positions, velocities) has an object's position."""
    robosuite_env = env.simulation.scene.env
    joint = robosuite_env.get_object(name).joints[-1]
    first, _ = robosuite_env.sim.model.get_joint_qpos_addr(joint)
    return slice(1 + first, 4 + first)


def test_success_in_a_chunk_keeps_its_reward_and_shows_the_end(env, published):
    """The bowl is let fall on the plate: success, some steps into the chunk."""
    state = load_official_states(SUITE, 0)[0].copy()
    bowl, plate = (position_of(env, name) for name in ("akita_black_bowl_1", "plate_1"))
    state[bowl] = state[plate] + [0.0, 0.0, 0.06]
    with_state = dict(init_states=state[None], settle_steps=0, **SIZE)
    dropped = LiberoEnv(SUITE, 0, **with_state)
    try:
        chunks = TransformedEnv(dropped, MultiAction(8))
        td = chunks.reset()
        assert not td["success"]
        start = td["observation", "image"]
        renders = dropped.num_renders
        td["vla_action", "chunk"] = torch.zeros(8, 7)
        td = chunks.step(td)["next"]
        assert td["success"]
        assert td["reward"] == 1.0
        assert td["terminated"]
        assert td["done"]
        assert not td["truncated"]
        published.start(state, settle_steps=0)
        successes = [published.step(np.zeros(7))[1] for _ in range(8)]
        assert td["num_executed"] == successes.index(True) + 1 < 8
        assert dropped.num_renders == renders + 1
        assert not td["observation", "image"].equal(start)
    finally:
        dropped.close()


def test_init_state_modes(env):
    def visited(mode):
        env.starts.mode, env.starts.next_id = mode, 48
        env.set_seed(3)
        return [int(env.reset()["init_state_id"]) for _ in range(3)]

    settle, env.settle_steps = env.settle_steps, 0
    try:
        assert visited("cycle") == [48, 49, 0]
        assert visited("fixed") == [48, 48, 48]
        drawn = visited("random")
        assert drawn == visited("random")
        assert all(0 <= number < 50 for number in drawn)
        assert int(env.reset(init_state_id=5)["init_state_id"]) == 5
    finally:
        env.starts.mode, env.settle_steps = "cycle", settle


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.zeros(6), r"shape \(6,\).*\(7,\)"),
        (torch.tensor([0, 0, 0, 0, 0, 0, float("nan")]), "not finite"),
    ],
)
def test_bad_actions_are_refused_before_a_step(env, action, message):
    td = env.reset(init_state_id=0)
    before = env.simulation.state()
    with pytest.raises(ValueError, match=message):
        env._step(td.set("action", action))
    assert np.array_equal(before, env.simulation.state())


def test_bad_arguments(env):
    with pytest.raises(ValueError, match=r"no task suite 'libero_spatia'.*libero_10"):
        LiberoEnv("libero_spatia", 0)
    with pytest.raises(ValueError, match="task_id is 10; libero_spatial has tasks 0"):
        LiberoEnv(SUITE, 10)
    with pytest.raises(ValueError, match="init_state_mode is 'next'; allowed are"):
        LiberoEnv(SUITE, 0, init_state_mode="next")
    with pytest.raises(ValueError, match="init_states is 'all'; allowed are"):
        LiberoEnv(SUITE, 0, init_states="all")
    with pytest.raises(ValueError, match=r"init_state_id is 50.*has 0 to 49"):
        env.reset(init_state_id=50)
    with pytest.raises(ValueError, match="task_id is 12"):
        env.reset(task_id=12)


PLAIN = """
import sys, numpy as np
from torchrl_vla.envs.libero import LiberoEnv
env = LiberoEnv("libero_spatial", 0, antialias=False, camera_height=64, camera_width=64)
np.save(sys.argv[1], env.reset(init_state_id=0)["observation", "image"].numpy())
env.close()
"""


def test_pictures_without_antialiasing_differ_at_edges_only(env, tmp_path):
    """Where neighbours are alike, one sample is as good as four."""
    path = tmp_path / "plain.npy"
    subprocess.run([sys.executable, "-c", PLAIN, str(path)], check=True)
    expected = env.reset(init_state_id=0)["observation", "image"].numpy()
    difference = np.abs(np.load(path).astype(float) - expected).max(0)
    assert 0.02 < (difference > 8).mean() < 0.4, "edges, and nothing but edges"
    assert np.median(difference) <= 2
    with pytest.raises(ValueError, match="this process renders with True already"):
        LiberoEnv(SUITE, 0, antialias=False, **SIZE)
