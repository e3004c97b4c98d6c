"""LIBERO itself, stepped as published evaluations step it, to compare with."""

import importlib.util

import numpy as np
import pytest


def pytest_collection_modifyitems(items):
    missing = importlib.util.find_spec("libero") is None
    for item in items:
        if "libero" not in item.path.parts[-2]:
            continue
        item.add_marker(pytest.mark.libero)
        if missing:
            reason = "LIBERO is not installed: pip install 'torchrl-vla[libero]'"
            item.add_marker(pytest.mark.skip(reason=reason))


class PublishedEvaluation:
    """LIBERO's ``OffScreenRenderEnv`` with both its cameras on, and no short cut."""

    def __init__(self, task, size):
        from torchrl_vla.envs.libero.tasks import import_libero, quiet

        libero = import_libero()
        with quiet():
            self.env = libero.envs.OffScreenRenderEnv(
                bddl_file_name=task.bddl_file,
                camera_heights=size,
                camera_widths=size,
            )

    def start(self, init_state, settle_steps=10, seed=0):
        self._make_current()
        self.env.seed(seed)
        observation = self.env.reset()
        if init_state is not None:
            observation = self.env.set_init_state(init_state)
        for _ in range(settle_steps):
            observation = self.step(np.array([0.0, 0, 0, 0, 0, 0, -1]))[0]
        return observation

    def step(self, action):
        self._make_current()
        observation, _, success, _ = self.env.step(action)
        return observation, bool(success)

    def _make_current(self):
        # robosuite draws with, and frees, whichever context is current.
        self.env.sim._render_context_offscreen.gl_ctx.make_current()

    @property
    def state(self):
        return self.env.get_sim_state()


@pytest.fixture(scope="session")
def published():
    """A reference simulation of ``libero_spatial`` 0 at 64 px."""
    from torchrl_vla.envs.libero.tasks import load_task

    reference = PublishedEvaluation(load_task("libero_spatial", 0), size=64)
    yield reference
    reference.env.close()
