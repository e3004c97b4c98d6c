"""The scripted expert on real scenes, and what it refuses."""

import numpy as np
import pytest


@pytest.fixture(scope="module")
def expert_module():
    from torchrl_vla.envs.libero import expert

    return expert


@pytest.fixture(scope="module")
def env():
    from torchrl_vla.envs.libero import LiberoEnv

    with_two = LiberoEnv(
        "libero_object", 0, camera_height=8, camera_width=8, num_envs=2, num_threads=1
    )
    yield with_two
    with_two.close()


@pytest.mark.parametrize(
    ("suite", "task_id"), [("libero_object", 1), ("libero_spatial", 2)]
)
def test_it_solves_official_starts(expert_module, suite, task_id):
    # A box whose neighbour is in the way of the palm, and a rim.
    lengths = expert_module.play_official(suite, task_id, num_episodes=3)
    assert len(lengths) == 3
    assert all(length is not None and length <= 130 for length in lengths), lengths


def play(env, expert, init_state_ids, max_steps=280):
    """Env steps to success of both members, and their first actions."""
    env.reset(init_state_id=np.array(init_state_ids))
    for index, number in enumerate(init_state_ids):
        expert.start(index, number)
    lengths, first = [None, None], None
    for step in range(1, max_steps + 1):
        waiting = [index for index in (0, 1) if lengths[index] is None]
        actions = np.array(
            [expert.disturb(expert.act(index), index) for index in waiting]
        )
        first = actions if first is None else first
        for index, success in zip(
            waiting, env.simulation.step(waiting, actions), strict=True
        ):
            lengths[index] = step if success else None
        if None not in lengths:
            break
    return lengths, first


def test_noise_is_named_by_the_start_and_does_not_keep_it_from_succeeding(
    expert_module, env
):
    expert = expert_module.Expert(env.simulation, noise_std=0.2, seed=5)
    lengths, first = play(env, expert, [3, 4])
    assert None not in lengths
    # The other way round, and the second time: the same episodes.
    again, first_again = play(env, expert, [4, 3])
    assert again == lengths[::-1]
    np.testing.assert_array_equal(first_again, first[::-1])
    other = expert_module.Expert(env.simulation, noise_std=0.2, seed=6)
    other.start(0, 3)
    env.reset(init_state_id=3)
    quiet = expert_module.Expert(env.simulation)
    quiet.start(0, 3)
    meant = other.act()
    np.testing.assert_array_equal(meant, quiet.act())
    np.testing.assert_array_equal(meant, quiet.disturb(meant))
    assert np.abs(other.disturb(meant) - first[0]).max() > 1e-3
    assert np.abs(first).max() <= 1


def test_it_goes_on_after_the_object_was_moved(expert_module, env):
    """The phase is not counted: an object that moves away is followed."""
    expert = expert_module.Expert(env.simulation)
    env.reset(init_state_id=0)
    expert.start(0, 0)
    for step in range(200):
        if step == 20:  # the hand comes down on it
            data = env.simulation.members[0].data
            data.joint("alphabet_soup_1_joint0").qpos[:2] += [0.0, 0.06]
        if env.simulation.step([0], expert.act(0)[None])[0]:
            break
    else:
        pytest.fail("not solved")


@pytest.mark.parametrize(
    ("suite", "task_id", "message"),
    [
        ("libero_goal", 0, r"libero_goal task 0: the goal is \(Open wooden_cabinet"),
        (
            "libero_goal",
            2,
            r"\(On wine_bottle_1 .*can hold akita_black_bowl, .*In a bas",
        ),
        ("libero_10", 0, "known are goals of one condition"),
    ],
)
def test_a_task_that_it_does_not_know(expert_module, suite, task_id, message):
    with pytest.raises(ValueError, match=message):
        expert_module.play_official(suite, task_id)


def test_the_command_prints_a_table(expert_module, capsys):
    expert_module.main(["--suite", "libero_object", "--tasks", "9", "--episodes", "1"])
    *_, row = capsys.readouterr().out.splitlines()
    assert row.startswith("| libero_object | 9 | 1/1 | ")
