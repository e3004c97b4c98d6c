"""Workers that go on by themselves against lockstep, and against TorchRL's pool.

Subjects of ``benchmarks/libero.py``, which runs each in a process of its own.
"""

import time
import warnings

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import AsyncEnvPool, EnvBase

from torchrl_vla.collectors import EpisodeRequest, OverlapPool
from torchrl_vla.collectors.factory import make_pool
from torchrl_vla.config.schema import EnvConfig
from torchrl_vla.data.action_codec import UniformActionCodec
from torchrl_vla.data.random_streams import uniform

NUM_WORKERS = 4
NUM_MEMBERS = 2
NUM_DECISIONS = 6
NUM_EPISODES = 8 * NUM_WORKERS * NUM_MEMBERS


class SleepyPolicy:
    """Random actions, after a time per row in which no core is used: as on a GPU."""

    def __init__(self, row_s: float = 0.0) -> None:
        self.row_s = row_s

    def __call__(self, tensordict):
        time.sleep(self.row_s * len(tensordict))
        noise = uniform(tensordict["sampling_seed"].flatten(), 8 * 7)
        tensordict["vla_action", "tokens"] = (noise * 256).long().reshape(-1, 8, 7)
        return tensordict


def play(pool, policy: SleepyPolicy) -> float:
    """Seconds for groups of fixed length, each worker one at a time."""
    groups = NUM_EPISODES // NUM_MEMBERS
    waiting = iter(
        EpisodeRequest(group * NUM_MEMBERS + member, group, 0, group, 1000 * group)
        for group in range(groups)
        for member in range(NUM_MEMBERS)
    )
    begin_s = time.perf_counter()
    for _ in pool.play(policy, lambda worker: next(waiting, None)):
        pass
    return time.perf_counter() - begin_s


def collection(suite: str, task: int) -> dict[str, float]:
    """Lockstep and overlap with a policy that takes as long as the simulator."""
    options = {
        "name": "libero",
        "task_suite": suite,
        "task_ids": [task],
        "chunk_size": 8,
        "max_episode_steps": 8 * NUM_DECISIONS,
        "num_workers": NUM_WORKERS,
        "num_envs": NUM_MEMBERS,
    }
    codec = UniformActionCodec(256, low=-1.0, high=1.0)
    result = {}
    row_s = 0.0
    for name, overlap in [("lockstep", False), ("overlap", True)]:
        pool = make_pool(EnvConfig(**options, overlap=overlap), codec)
        play(pool, SleepyPolicy())  # compiles and warms up
        row_s = row_s or play(pool, SleepyPolicy()) / (NUM_EPISODES * NUM_DECISIONS)
        # The better of two: other work on the machine only makes it slower.
        result[f"{name}_s"] = min(play(pool, SleepyPolicy(row_s)) for _ in range(2))
        pool.close()
    return {**result, "row_s": row_s}


# -- what an answer costs ------------------------------------------------------------


class InstantEnv(EnvBase):
    """As many pixels as eight members have, which cost nothing to make.

    It has no batch size: ``AsyncEnvPool`` failed with an environment that has one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.image = torch.zeros(24, 256, 256, dtype=torch.uint8)
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        image = Bounded(0, 255, self.image.shape, dtype=torch.uint8)
        self.observation_spec = Composite(observation=Composite(image=image))
        tokens = Bounded(0, 255, (8, 7), dtype=torch.int64)
        self.action_spec = Composite(vla_action=Composite(tokens=tokens))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Composite(
            {name: flag.clone() for name in ("done", "terminated", "truncated")}
        )

    def _reset(self, tensordict=None, **kwargs):
        flags = dict.fromkeys(
            ("done", "terminated", "truncated"), torch.tensor([False])
        )
        return TensorDict({"observation": {"image": self.image}, **flags})

    def _step(self, tensordict):
        return self._reset().set("reward", torch.zeros(1))

    def _set_seed(self, seed):
        pass


def answers(suite: str, task: int, num_answers: int = 200) -> dict[str, float]:
    """Seconds from a question to its answer, with an environment that needs none."""
    tokens = torch.zeros(1, 8, 7, dtype=torch.int64)
    result = {}
    pool = OverlapPool(InstantEnv, 1)
    (worker,) = pool._workers
    one = torch.ones(1, dtype=torch.bool)
    worker.ask("reset", one, *torch.zeros(2, 1, 1, dtype=torch.int64))
    pool._answers.get()
    begin_s = time.perf_counter()
    for _ in range(num_answers):
        worker.ask("step", one, tokens)
        pool._answers.get()
    result["overlap_ms"] = (time.perf_counter() - begin_s) / num_answers * 1e3
    pool.close()

    for exchange in ("queue", "shm"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = AsyncEnvPool(
                [InstantEnv], backend="multiprocessing", exchange=exchange
            )
        td = theirs.reset()
        td["vla_action", "tokens"] = tokens
        begin_s = time.perf_counter()
        for _ in range(num_answers):
            theirs.async_step_send(td)
            theirs.async_step_recv(min_get=1)
        name = f"async_env_pool_{exchange}_ms"
        result[name] = (time.perf_counter() - begin_s) / num_answers * 1e3
        theirs.close()
    return result


SUBJECTS = {"collection": collection, "answers": answers}
