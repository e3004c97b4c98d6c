"""Several members in one process: equal starts, partial steps and resets."""

import numpy as np
import pytest
import torch
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_vla.data.group_schedule import FIRST_SAMPLED_INIT_STATE
from torchrl_vla.envs.libero import LiberoEnv
from torchrl_vla.envs.transforms import MultiAction

SIZE = {"camera_height": 64, "camera_width": 64}
G = 3


@pytest.fixture(scope="module")
def group():
    env = LiberoEnv("libero_object", 0, num_envs=G, num_threads=2, **SIZE)
    yield env
    env.close()


def states(env):
    return np.stack([env.simulation.state(member) for member in range(G)])


def actions(num, seed=0):
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.uniform(-1, 1, (num, G, 7))).float()


def play(env, td, rows, mask=None):
    for row in rows:
        td = td.set("action", row)
        if mask is not None:
            td["_step"] = mask
        td = env.step(td)["next"]
    return td


def test_check_env_specs(group):
    check_env_specs(group)


def test_members_start_alike_and_are_drawn_once(group):
    renders = group.num_renders
    td = group.reset(init_state_id=4)
    assert group.num_renders == renders + 1
    assert (states(group) == states(group)[0]).all()
    image = td["observation", "image"]
    assert (image == image[0]).all()
    assert td["init_state_id"].flatten().tolist() == [4] * G


def test_members_play_as_if_alone(group):
    """On threads, in another order, or one at a time: the same bits."""
    rows = actions(5)
    play(group, group.reset(init_state_id=4), rows)
    together = states(group)
    assert not (together == together[0]).all()
    td = group.reset(init_state_id=4)
    for member in (2, 0, 1):
        mask = torch.arange(G) == member
        play(group, td.clone(), rows, mask)
    assert np.array_equal(states(group), together)


def test_a_partial_reset_leaves_the_others_alone(group):
    td = play(group, group.reset(init_state_id=4), actions(3))
    before = states(group)
    td["_reset"] = torch.tensor([[False], [True], [False]])
    ids = torch.tensor([[0], [FIRST_SAMPLED_INIT_STATE + 5], [0]])
    fresh = group.reset(td.clone(), init_state_id=ids)
    after = states(group)
    assert np.array_equal(before[[0, 2]], after[[0, 2]])
    assert not np.array_equal(before[1], after[1])
    numbers = fresh["init_state_id"].flatten().tolist()
    assert numbers == [4, FIRST_SAMPLED_INIT_STATE + 5, 4]
    image, previous = fresh["observation", "image"], td["observation", "image"]
    assert image[0].equal(previous[0])
    assert not image[1].equal(previous[1])


def test_chunks_render_each_member_once(group):
    chunks = TransformedEnv(group, MultiAction(4))
    td = chunks.reset(init_state_id=4)
    renders = group.num_renders
    td["vla_action", "chunk"] = actions(4).transpose(0, 1)
    td = chunks.step(td)["next"]
    assert group.num_renders == renders + G
    assert td["num_executed"].flatten().tolist() == [4] * G


def test_a_finished_member_is_not_stepped(group):
    td = group.reset(init_state_id=4)
    group._elapsed[1] = group.max_episode_steps
    with pytest.raises(ValueError, match=r"members \[1\] have ended"):
        group._step(td.set("action", torch.zeros(G, 7)))
    group._success[1] = True
    td["_step"] = torch.tensor([True, False, True])
    before = states(group)
    assert group.step(td)["next", "reward"].sum() == 0
    assert np.array_equal(before[1], states(group)[1])
    assert not np.array_equal(before[0], states(group)[0])


def test_members_have_one_task(group):
    with pytest.raises(ValueError, match="all members of one process have one task"):
        group.reset(task_id=torch.tensor([0, 1, 0]))
    td = group.reset()
    td["_reset"] = torch.tensor([[False], [True], [False]])
    with pytest.raises(ValueError, match="all members of one process have one task"):
        group.reset(td, task_id=1)


@pytest.mark.parametrize("num_envs", [0, -1])
def test_no_members(num_envs):
    with pytest.raises(ValueError, match=r"num_envs is .*must be >= 1"):
        LiberoEnv("libero_object", 0, num_envs=num_envs)


def test_a_worker_can_change_its_task(group):
    """Last in this file: it leaves the group with another scene."""
    first = group.reset(init_state_id=4)
    before = states(group)
    other = group.reset(task_id=1, init_state_id=4)
    assert other["task_id"].flatten().tolist() == [1] * G
    assert other["language_instruction"] != first["language_instruction"]
    assert len(group._compiled) == 1
    group.max_cached_tasks = 2
    for _ in range(2):  # compiled again, then from the cache
        again = group.reset(task_id=0, init_state_id=4)
        assert np.array_equal(states(group), before)
        assert again["observation", "image"].equal(first["observation", "image"])
        other_again = group.reset(task_id=1, init_state_id=4)
        for key in ("image", "state"):
            assert other_again["observation", key].equal(other["observation", key])
    assert len(group._compiled) == 2
