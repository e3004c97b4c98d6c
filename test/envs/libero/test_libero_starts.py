"""Which start is next, and that its scene is the one of a compile."""

import numpy as np
import pytest

from torchrl_vla.data.group_schedule import FIRST_SAMPLED_INIT_STATE as SAMPLED
from torchrl_vla.envs.libero.starts import Starts

STATES = np.arange(6.0).reshape(3, 2)


def test_a_list_of_states():
    starts = Starts("any", 4, init_states=STATES, first_id=1, seed=5, fixture_seed=7)
    assert [starts.choose(4) for _ in range(3)] == [1, 2, 0]
    seed, state = starts.load(4, 2)
    assert seed == 7, "the seed of a run does not move fixtures"
    assert state.tolist() == [4.0, 5.0]
    with pytest.raises(ValueError, match="states of task 4 and the task is 5"):
        starts.load(5, 2)


def test_sampled_starts_have_their_own_numbers_and_seeds():
    starts = Starts("any", init_states="sampled", first_id=3)
    assert [starts.choose(0), starts.choose(0)] == [SAMPLED + 3, SAMPLED + 4]
    seed, state = starts.load(0, SAMPLED + 3)
    assert state is None
    assert starts.load(0, SAMPLED + 3)[0] == seed
    others = [starts.load(0, SAMPLED + 4), starts.load(1, SAMPLED + 3)]
    assert seed not in [other[0] for other in others]
    again = Starts("any", init_states="sampled", seed=1)
    assert again.load(0, SAMPLED + 3)[0] != seed


def test_random_choice_is_seeded():
    starts = Starts("any", init_states=STATES, mode="random")
    starts.seed_choice(5)
    drawn = [starts.choose(0) for _ in range(20)]
    assert set(drawn) == {0, 1, 2}
    starts.seed_choice(5)
    assert [starts.choose(0) for _ in range(20)] == drawn


def test_out_of_range():
    with pytest.raises(ValueError, match=r"init_state_id is 3; any task 0 has 0 to 2"):
        Starts("any", init_states=STATES, first_id=3)


@pytest.mark.parametrize(
    ("suite", "task_id"),
    [("libero_spatial", 7), ("libero_spatial", 4), ("libero_10", 8)],
    ids=["on a stove", "in an open drawer", "a stove that is on"],
)
def test_later_soft_resets_equal_a_compile(suite, task_id):
    """Of scenes in which something is placed by where a fixture was before."""
    from torchrl_vla.envs.libero.scene import Scene
    from torchrl_vla.envs.libero.tasks import import_libero, load_task, quiet

    task = load_task(suite, task_id)
    scene = Scene(task)
    for seed in (6, 7, 5):
        scene.reset(seed, None)
    with quiet():
        compiled = import_libero().envs.env_wrapper.ControlEnv(
            bddl_file_name=task.bddl_file,
            use_camera_obs=False,
            has_offscreen_renderer=False,
        )
        compiled.seed(5)
        compiled.reset()
    try:
        data, model = compiled.sim.data._data, compiled.sim.model._model
        np.testing.assert_array_equal(scene.data.qpos, data.qpos)
        np.testing.assert_array_equal(scene.model.body_pos, model.body_pos)
        np.testing.assert_array_equal(scene.model.body_quat, model.body_quat)
        before = scene.data.qpos.copy()
        scene.reset(6, None)
        assert not np.array_equal(scene.data.qpos, before), "the seed moves something"
    finally:
        compiled.close()
        scene.close()
