"""The toy task: numbered starts, a step limit, members that go their own ways."""

import pytest
import torch
from torchrl.envs.utils import check_env_specs

from torchrl_vla.data.group_schedule import FIRST_SAMPLED_INIT_STATE
from torchrl_vla.envs import ToyTaskEnv

STATE, IMAGE = ("observation", "state"), ("observation", "image")


def act(env, td, action):
    td["action"] = (
        action if torch.is_tensor(action) else torch.full((env.numel(), 2), action)
    )
    return env.step(td)["next"]


def target(td):
    return td[STATE][:, 2:4]


@pytest.mark.parametrize("num_envs", [1, 3])
def test_specs_hold(num_envs):
    check_env_specs(ToyTaskEnv(num_envs=num_envs))


def test_members_of_a_group_start_bit_identically():
    td = ToyTaskEnv(num_envs=5, seed=4).reset(init_state_id=torch.tensor(7))
    for key in (STATE, IMAGE, "init_state_id", "task_id"):
        assert (td[key] == td[key][0]).all(), key
    assert (td["init_state_id"] == 7).all()
    # And so in any other process, among other members, after other resets.
    other = ToyTaskEnv(num_envs=2, seed=4)
    other.reset()
    again = other.reset(init_state_id=torch.tensor([9, 7]))
    assert torch.equal(again[STATE][1], td[STATE][0])
    assert torch.equal(again[IMAGE][1], td[IMAGE][0])
    assert not torch.equal(again[STATE][0], td[STATE][0])


def test_starts_differ_between_seeds_and_between_numbers():
    ids = torch.arange(200)
    starts = [
        target(ToyTaskEnv(num_envs=200, seed=s).reset(init_state_id=ids))
        for s in (0, 1)
    ]
    together = torch.cat(starts)
    assert len(together.unique(dim=0)) == 400
    sampled = ToyTaskEnv(num_envs=200, seed=0).reset(
        init_state_id=FIRST_SAMPLED_INIT_STATE + ids
    )
    assert len(torch.cat([together, target(sampled)]).unique(dim=0)) == 600
    assert together.min() >= -0.5
    assert together.max() <= 0.5
    assert abs(together.mean()) < 0.05


def test_without_a_number_every_reset_takes_the_next_ones():
    env = ToyTaskEnv(num_envs=3)
    assert env.reset()["init_state_id"].flatten().tolist() == [0, 1, 2]
    assert env.reset()["init_state_id"].flatten().tolist() == [3, 4, 5]


def test_an_oracle_solves_it_in_success_steps():
    env = ToyTaskEnv(num_envs=50, success_steps=2)
    td = env.reset()
    td = act(env, td, target(td))
    assert not td["success"].any()
    assert (td["reward"] == 0).all()
    td = act(env, td, target(td))
    assert td["success"].all()
    assert td["terminated"].all()
    assert td["done"].all()
    assert not td["truncated"].any()
    assert (td["reward"] == 1).all()


def test_the_streak_must_not_break():
    env = ToyTaskEnv(num_envs=1, success_steps=2)
    td = env.reset()
    for good in (True, False, True):
        td = act(env, td, target(td) if good else -1.0)
        assert not td["success"]
    assert act(env, td, target(td))["success"]


def test_the_tolerance_is_per_dimension():
    env = ToyTaskEnv(num_envs=4, success_steps=1, success_tol=0.25)
    td = env.reset(init_state_id=3)
    offsets = torch.tensor([[0.24, -0.24], [0.26, 0.0], [0.0, -0.26], [0.0, 0.0]])
    td = act(env, td, target(td) + offsets)
    assert td["success"].flatten().tolist() == [True, False, False, True]


def test_the_step_limit_truncates():
    env = ToyTaskEnv(num_envs=2, max_episode_steps=5)
    td = env.reset()
    for step in range(1, 6):
        assert not td["done"].any()
        td = act(env, td, -1.0)
        assert td["truncated"].all() == (step == 5)
    assert td["done"].all()
    assert not td["terminated"].any()
    assert not td["success"].any()


def test_success_at_the_limit_is_a_success():
    env = ToyTaskEnv(num_envs=1, max_episode_steps=3, success_steps=2)
    td = env.reset()
    td = act(env, td, -1.0)
    td = act(env, td, target(td))
    td = act(env, td, target(td))
    assert td["terminated"]
    assert not td["truncated"]


def test_a_partial_reset_leaves_the_others_alone():
    env = ToyTaskEnv(num_envs=3, max_episode_steps=4, success_steps=3)
    td = env.reset(init_state_id=torch.tensor([1, 2, 3]))
    td = act(env, td, target(td))
    before = td.clone()
    td["_reset"] = torch.tensor([[False], [True], [False]])
    td = env.reset(td.exclude("reward"), init_state_id=torch.tensor([50, 60, 70]))
    assert td["init_state_id"].flatten().tolist() == [1, 60, 3]
    for key in (STATE, IMAGE):
        assert torch.equal(td[key][[0, 2]], before[key][[0, 2]]), key
        assert not torch.equal(td[key][1], before[key][1]), key
    # Streaks and clocks of the others go on: two steps more make three in a row.
    td = act(env, td, target(td))
    td = act(env, td, target(td))
    assert td["success"].flatten().tolist() == [True, False, True]
    assert not td["truncated"].any()


def test_a_masked_member_is_frozen():
    env = ToyTaskEnv(num_envs=2, max_episode_steps=4, success_steps=2)
    td = env.reset(init_state_id=5)
    td = act(env, td, target(td))
    for _ in range(3):
        td["_step"] = torch.tensor([True, False])
        td = act(env, td, -1.0)
        assert td["reward"][1] == 0
    assert td["truncated"].flatten().tolist() == [True, False], "its clock stands"
    td["_step"] = torch.tensor([False, True])
    td = act(env, td, target(td))
    assert td["success"].flatten().tolist() == [False, True], "so does its streak"
    assert td["reward"].flatten().tolist() == [0.0, 1.0]
    td["_step"] = torch.tensor([True, False])
    td = act(env, td, -1.0)
    assert td["success"].flatten().tolist() == [False, True]
    assert td["reward"].flatten().tolist() == [0.0, 0.0], "success is paid once"


def test_the_picture_shows_hand_and_target():
    env = ToyTaskEnv(num_envs=1, image_size=64, success_tol=0.25)
    td = env.reset(init_state_id=2)
    image = td[IMAGE][0]
    assert image.dtype == torch.uint8
    place = torch.linspace(-1, 1, 64)

    def centre(channel):
        y, x = (image[channel] == 220).nonzero().float().mean(0).round().long()
        return torch.stack([place[x], place[y]])

    torch.testing.assert_close(centre(1), target(td)[0], rtol=0, atol=0.05)
    torch.testing.assert_close(centre(0), torch.zeros(2), rtol=0, atol=0.05)
    width = (image[1] == 220).any(0).sum().item() / 64 * 2
    assert width == pytest.approx(2 * 0.25, abs=0.06)
    image = act(env, td, torch.tensor([[0.7, -0.3]]))[IMAGE][0]
    torch.testing.assert_close(centre(0), torch.tensor([0.7, -0.3]), rtol=0, atol=0.05)


def test_skipped_observations_are_drawn_at_the_end_nonetheless():
    env = ToyTaskEnv(num_envs=2, success_steps=1)
    td = env.reset(init_state_id=torch.tensor([0, 1]))
    first = td[IMAGE].clone()
    env.skip_observation = True
    td = act(env, td, -1.0)
    assert torch.equal(td[IMAGE], first), "not drawn again"
    td = act(env, td, target(td))
    assert not torch.equal(td[IMAGE], first)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"task_id": 1}, r"task_id is 1; the toy has task 0 only"),
        ({"init_state_id": -1}, r"init_state_id is .*-1.*; must be >= 0"),
        ({"init_state_id": torch.tensor([3, -2])}, r"must be >= 0"),
    ],
)
def test_bad_starts(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ToyTaskEnv(num_envs=2).reset(**kwargs)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_actions_that_are_not_finite(value):
    env = ToyTaskEnv(num_envs=2)
    td = env.reset()
    action = torch.zeros(2, 2)
    action[1, 0] = value
    with pytest.raises(ValueError, match="not finite"):
        act(env, td, action)


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_envs is 0; it must be >= 1"):
        ToyTaskEnv(num_envs=0)
    with pytest.raises(ValueError, match="success_tol must be in"):
        ToyTaskEnv(success_tol=0.9)
