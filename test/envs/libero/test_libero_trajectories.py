"""The compiled controller against robosuite's own loop, side by side in one scene.

Over 200 random or zero actions they differ by less than 1e-9 for at least 149 env steps
in these four tasks, and pictures at chunk ends in no pixel. Hard contacts end that: the
fingers' touch turns 1e-15 into 1e-3 within 8 env steps, and does so too between two
runs of robosuite, one of which has a position moved by 1e-15. So a grasp is compared as
long as robosuite agrees with itself.
"""

import numpy as np
import pytest

from torchrl_vla.envs.libero.tasks import load_official_states, load_task

TASKS = [
    ("libero_spatial", 0),
    ("libero_object", 0),
    ("libero_goal", 5),
    ("libero_10", 2),
]
COMPILED, ROBOSUITE, MOVED = 0, 1, 2
"""Members: ours, robosuite's loop, and that loop with a position moved by 1e-15."""


@pytest.fixture(scope="module", params=TASKS, ids=lambda task: f"{task[0]}-{task[1]}")
def simulation(request):
    from torchrl_vla.envs.libero.simulation import Simulation

    simulation = Simulation(load_task(*request.param), 3, height=64, width=64)
    for member in (ROBOSUITE, MOVED):
        simulation.members[member].controller.close()
        simulation.members[member].controller = None
    yield simulation
    simulation.close()


def play(simulation, members, num_steps, action_of):
    """States after each env step, ``[T, members, 1 + nq + nv]``."""
    task = simulation.task
    state = load_official_states(task.suite, task.number)[0]
    simulation.start(members, 0, state, settle_steps=10)
    simulation.members[MOVED].data.qpos[0] += 1e-15
    states = []
    for step in range(num_steps):
        action = np.asarray(action_of(step))
        successes = simulation.step(members, np.stack([action] * len(members)))
        assert len(set(successes)) == 1
        states.append([simulation.state(member) for member in members])
    return np.array(states)


def differences(states, one, other):
    return np.abs(states[:, one] - states[:, other]).max(axis=-1)


def test_random_actions(simulation):
    generator = np.random.default_rng(0)
    rows = generator.uniform(-1, 1, (120, 7))
    states = play(simulation, [COMPILED, ROBOSUITE], 120, rows.__getitem__)
    assert differences(states, COMPILED, ROBOSUITE).max() < 1e-9
    pictures = [simulation.render("agentview", m) for m in (COMPILED, ROBOSUITE)]
    assert np.array_equal(*pictures)


def test_zero_actions(simulation):
    states = play(simulation, [COMPILED, ROBOSUITE], 8, lambda _: np.zeros(7))
    assert differences(states, COMPILED, ROBOSUITE).max() < 1e-12


def test_a_scripted_grasp(simulation):
    """Over the first object of interest, down, close, lift."""
    states = play(simulation, [COMPILED, ROBOSUITE, MOVED], 64, Grasp(simulation))
    chaos = differences(states, ROBOSUITE, MOVED) > 1e-12
    horizon = int(chaos.argmax()) if chaos.any() else len(chaos)
    assert horizon >= 12
    assert differences(states, COMPILED, ROBOSUITE)[:horizon].max() < 1e-9


def test_other_controllers_are_left_to_robosuite(simulation):
    from torchrl_vla.envs.libero.arm_controller import unsupported

    robot = simulation.scene.robot
    assert unsupported(robot) is None
    robot.controller.impedance_mode = "variable"
    reason = "the controller's impedance_mode is 'variable', not 'fixed'"
    assert unsupported(robot) == reason
    robot.controller.impedance_mode = "fixed"


def test_physics_that_diverges_is_an_error(simulation, tmp_path, monkeypatch):
    """MuJoCo alone would start over from its default state, with a line in a log."""
    monkeypatch.chdir(tmp_path)  # where the log is written
    play(simulation, [COMPILED], 1, lambda _: np.zeros(7))
    simulation.members[COMPILED].data.qvel[:] = 1e11
    with pytest.raises(RuntimeError, match=r"task \d+ diverged after 1 env steps"):
        simulation.step([COMPILED], np.zeros((1, 7)))
    play(simulation, [COMPILED], 1, lambda _: np.zeros(7))


class Grasp:
    """A privileged controller: it reads positions from the simulator."""

    def __init__(self, simulation):
        scene = simulation.scene
        self.data = simulation.members[COMPILED].data
        self.body = scene.env.obj_body_id[scene.env.obj_of_interest[0]]
        self.hand = scene.robot.eef_site_id

    def __call__(self, step):
        if step < 48:
            self.target = self.data.xpos[self.body].copy()
        height = 0.12 if step < 24 or step >= 48 else 0.0
        goal = self.target + [0.0, 0.0, height]
        action = np.zeros(7)
        delta = (goal - self.data.site_xpos[self.hand]) / 0.05
        action[:3] = np.clip(delta, -1, 1)
        action[6] = 1.0 if step >= 40 else -1.0
        return action
