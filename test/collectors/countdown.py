"""A small deterministic simulator, and a policy that needs no learning."""

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv

from torchrl_vla.data.action_codec import UniformActionCodec
from torchrl_vla.data.random_streams import uniform
from torchrl_vla.envs import ActionTokensTransform, MultiAction, ToyTaskEnv


class CountdownEnv(EnvBase):
    """An episode lasts ``1 + init_state_id % 5`` env steps.

    Odd starts succeed, unless the last action's first dimension is below -0.5.
    """

    def __init__(self):
        super().__init__()
        number = Unbounded((1,), dtype=torch.int64)
        self.observation_spec = Composite(
            observation=Composite(state=Unbounded((3,))),
            language_instruction=NonTensor((), example_data="text"),
            task_id=number.clone(),
            init_state_id=number.clone(),
            success=Categorical(2, shape=(1,), dtype=torch.bool),
        )
        self.action_spec = Bounded(-1, 1, (2,))
        self.reward_spec = Unbounded((1,))
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        self.done_spec = Composite(
            {key: flag.clone() for key in ("done", "terminated", "truncated")}
        )
        self.num_steps = self.num_resets = 0

    def _reset(self, tensordict=None, *, task_id=0, init_state_id=0):
        self.num_resets += 1
        self.task, self.start, self.elapsed = int(task_id), int(init_state_id), 0
        return self._observe(is_good=False)

    def _step(self, tensordict):
        assert self.elapsed <= self.start % 5, "stepped after its end"
        self.num_steps += 1
        self.elapsed += 1
        out = self._observe(is_good=bool(tensordict["action"][0] > -0.5))
        out["reward"] = out["success"].float()
        return out

    def _observe(self, is_good):
        is_over = self.elapsed > self.start % 5
        success = is_over and is_good and self.start % 2 == 1
        flags = {
            "success": success,
            "terminated": success,
            "truncated": is_over and not success,
            "done": is_over,
        }
        state = torch.tensor([self.task, self.start, self.elapsed])
        return TensorDict(
            {
                "observation": {"state": state.float()},
                "language_instruction": f"task {self.task}",
                "task_id": torch.tensor([self.task]),
                "init_state_id": torch.tensor([self.start]),
                **{name: torch.tensor([value]) for name, value in flags.items()},
            }
        )

    def _set_seed(self, seed):
        pass


def with_tokens(env, chunk_size=2):
    env = TransformedEnv(env, MultiAction(chunk_size))
    return env.append_transform(ActionTokensTransform(UniformActionCodec(11)))


def make_countdown():
    return with_tokens(CountdownEnv())


def make_toy(num_envs=4, chunk_size=4, **kwargs):
    return with_tokens(ToyTaskEnv(num_envs=num_envs, **kwargs), chunk_size)


def make_workers(kind, num_workers=3):
    """Countdown environments, in workers or one alone."""
    if kind == "single":
        return make_countdown()
    if kind == "serial":
        return SerialEnv(num_workers, make_countdown)
    return ParallelEnv(num_workers, make_countdown, mp_start_method="fork")


class CoinPolicy:
    """Plays well with the chance of its start, by a coin per episode.

    The coin is thrown with ``sampling_seed``, so it does not depend on the batch.
    """

    def __init__(self, chances=(0.0, 0.3, 1.0, 1.0, 0.0, 0.7, 0.0, 0.5)):
        self.chances = torch.tensor(chances)

    def __call__(self, tensordict):
        seed = tensordict["sampling_seed"] - tensordict["decision_id"]
        start = tensordict["init_state_id"].flatten() % len(self.chances)
        heads = uniform(seed.flatten(), 1).flatten() < self.chances[start]
        tokens = (10 * heads).reshape(-1, 1, 1).expand(-1, 2, 2).clone()
        tensordict["vla_action", "tokens"] = tokens
        tensordict["vla_action", "log_probs"] = torch.zeros(tokens.shape)
        return tensordict


class RecordingPolicy:
    """Writes token 5 everywhere and notes what it was shown."""

    def __init__(self, chunk_size=2, action_dim=2, version=0):
        self.shape = (chunk_size, action_dim)
        self.version = version
        self.batches = []

    def __call__(self, tensordict):
        self.batches.append(tensordict.clone())
        tokens = torch.full((len(tensordict), *self.shape), 5)
        tensordict["vla_action", "tokens"] = tokens
        zeros = torch.zeros(len(tensordict), *self.shape)
        tensordict["vla_action", "log_probs"] = zeros
        tensordict["version"] = torch.full((len(tensordict), 1), self.version)
        return tensordict
