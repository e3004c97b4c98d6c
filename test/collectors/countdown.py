"""A small deterministic simulator, and a policy that needs no learning."""

import os
import signal

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv

from torchrl_vla.data.action_codec import UniformActionCodec
from torchrl_vla.data.random_streams import uniform
from torchrl_vla.envs import ActionTokensTransform, MultiAction, ToyTaskEnv


class CountdownEnv(EnvBase):
    """An episode lasts ``1 + init_state_id % 5`` env steps.

    Odd starts succeed, unless the last action's first dimension is below -0.5. Members,
    if any, share a task, and are stepped and reset by mask.
    """

    def __init__(self, num_envs=None):
        batch = [] if num_envs is None else [num_envs]
        super().__init__(batch_size=batch)

        def batched(spec):
            return spec.expand(*batch, *spec.shape).clone()

        number = Unbounded((1,), dtype=torch.int64)
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        self.observation_spec = batched(
            Composite(
                observation=Composite(state=Unbounded((3,))),
                language_instruction=NonTensor((), example_data="text"),
                task_id=number.clone(),
                init_state_id=number.clone(),
                success=flag.clone(),
            )
        )
        self.action_spec = batched(Bounded(-1, 1, (2,)))
        self.reward_spec = batched(Unbounded((1,)))
        self.done_spec = batched(
            Composite({k: flag.clone() for k in ("done", "terminated", "truncated")})
        )
        self.num_steps = self.num_resets = 0
        self.task = None
        self.start, self.elapsed = torch.zeros(2, num_envs or 1, dtype=torch.int64)

    def _mask(self, tensordict, name):
        mask = None if tensordict is None else tensordict.get(name, None)
        everyone = torch.ones(len(self.start), dtype=torch.bool)
        return everyone if mask is None else mask.reshape(-1)

    def _reset(self, tensordict=None, *, task_id=0, init_state_id=0):
        mask = self._mask(tensordict, "_reset")
        self.num_resets += int(mask.sum())
        tasks = torch.as_tensor(task_id).reshape(-1).expand(len(mask))[mask]
        assert mask.all() or (tasks == self.task).all(), "members of two tasks"
        if mask.any():
            (self.task,) = set(tasks.tolist())
        starts = torch.as_tensor(init_state_id).reshape(-1).expand(len(mask))
        self.start = starts.where(mask, self.start)
        self.elapsed[mask] = 0
        return self._observe(is_good=False)

    def _step(self, tensordict):
        mask = self._mask(tensordict, "_step")
        assert (self.elapsed <= self.start % 5)[mask].all(), "stepped after its end"
        self.num_steps += int(mask.sum())
        self.elapsed[mask] += 1
        is_good = tensordict["action"].reshape(-1, 2)[:, 0] > -0.5
        out = self._observe(is_good)
        return out.set("reward", out["success"].float())

    def _observe(self, is_good):
        is_over = self.elapsed > self.start % 5
        success = is_over & is_good & (self.start % 2 == 1)
        flags = {
            "success": success,
            "terminated": success,
            "truncated": is_over & ~success,
            "done": is_over,
        }
        task = torch.full_like(self.start, self.task)
        out = TensorDict(
            {
                "observation": {
                    "state": torch.stack([task, self.start, self.elapsed], -1).float()
                },
                "task_id": task.unsqueeze(-1),
                "init_state_id": self.start.unsqueeze(-1).clone(),
                **{name: value.unsqueeze(-1) for name, value in flags.items()},
            },
            batch_size=[len(self.start)],
        )
        out = out if self.batch_size else out[0]
        return out.set("language_instruction", f"task {self.task}")

    def _set_seed(self, seed):
        pass


class FaultyEnv(CountdownEnv):
    """Fails in the second env step of a chunk, once for every file in a folder.

    Args:
        faults: folder with a file for each failure to come, whose suffix is its kind:
            ``kill``, ``stop``, ``nan``, ``raise`` or ``refuse``.
    """

    def __init__(self, faults, num_envs=None):
        super().__init__(num_envs)
        self.faults = faults

    def _step(self, tensordict):
        out = super()._step(tensordict)
        if not (self.elapsed == 2).any() or not (fault := self._take_fault()):
            return out
        if fault in ("kill", "stop"):
            os.kill(os.getpid(), getattr(signal, f"SIG{fault.upper()}"))
        if fault == "nan":
            out["observation", "state"][..., 2] = torch.nan
        if fault == "raise":
            raise RuntimeError("the physics diverged")
        if fault == "refuse":
            raise ValueError("no such action")
        return out

    def _take_fault(self):
        for file in sorted(self.faults.iterdir()):
            try:
                file.unlink()  # one process succeeds
            except FileNotFoundError:
                continue
            return file.suffix[1:]
        return None


def with_tokens(env, chunk_size=2):
    env = TransformedEnv(env, MultiAction(chunk_size))
    return env.append_transform(ActionTokensTransform(UniformActionCodec(11)))


def make_countdown(num_envs=None):
    return with_tokens(CountdownEnv(num_envs))


def make_faulty(faults, num_envs=None):
    return with_tokens(FaultyEnv(faults, num_envs))


def make_toy(num_envs=4, chunk_size=4, **kwargs):
    return with_tokens(ToyTaskEnv(num_envs=num_envs, **kwargs), chunk_size)


def make_workers(kind, num_workers=3):
    """Countdown environments, in workers or one alone."""
    if kind == "single":
        return make_countdown()
    if kind == "members":
        return make_countdown(num_workers)
    if kind == "serial":
        return SerialEnv(num_workers, make_countdown)
    # Through pipes: in shared memory the main process spins until they answer.
    return ParallelEnv(
        num_workers, make_countdown, mp_start_method="fork", use_buffers=False
    )


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
