"""Chunk execution: on a counting environment, on ToyVLAEnv, batched and in workers."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.custom import ToyVLAEnv
from torchrl.envs.transforms import RewardSum
from torchrl.envs.utils import check_env_specs

from torchrl_vla.envs import MultiAction

CHUNK = ("vla_action", "chunk")


class CountingEnv(EnvBase):
    """Counts its steps; succeeds (reward 1) at the step numbers of ``success_at``."""

    def __init__(self, success_at=100, batch_size=()):
        super().__init__(batch_size=torch.Size(batch_size))
        self.observation_spec = Composite(
            count=Unbounded((*batch_size, 1), dtype=torch.int64), shape=batch_size
        )
        self.action_spec = Bounded(-1, 1, (*batch_size, 2))
        self.reward_spec = Unbounded((*batch_size, 1))
        self.done_spec = Categorical(2, shape=(*batch_size, 1), dtype=torch.bool)
        self.success_at = torch.as_tensor(success_at).expand(batch_size).unsqueeze(-1)
        self.count = torch.zeros(*batch_size, 1, dtype=torch.int64)
        self.num_renders = 0
        self.skip_observation = False
        self.actions = []

    def _reset(self, tensordict=None, **kwargs):
        self.count = torch.zeros_like(self.count)
        return TensorDict({"count": self.count.clone()}, self.batch_size)

    def _step(self, tensordict):
        mask = tensordict.get("_step", None)
        mask = torch.ones_like(self.count, dtype=torch.bool) if mask is None else mask
        mask = mask.reshape(self.count.shape)
        self.actions.append(tensordict["action"].clone())
        self.count = self.count + mask
        success = self.count >= self.success_at
        self.num_renders += (not self.skip_observation) or bool(success.any())
        return TensorDict(
            {
                "count": self.count.clone(),
                "reward": (success & mask).float(),
                "done": success,
                "terminated": success,
            },
            self.batch_size,
        )

    def _set_seed(self, seed):
        pass


def make_env(num_actions=4, transforms=(), **kwargs):
    env = TransformedEnv(CountingEnv(**kwargs), MultiAction(num_actions))
    for transform in transforms:
        env.append_transform(transform)
    return env


def chunk_for(env):
    spec = env.full_action_spec[CHUNK]
    return torch.arange(spec.shape.numel()).reshape(spec.shape) / spec.shape.numel()


def play(env, td=None):
    td = env.reset() if td is None else td
    td[CHUNK] = chunk_for(env)
    return env.step(td)


def test_success_in_the_middle_of_a_chunk_keeps_its_reward():
    env = make_env(num_actions=8, success_at=3)
    td = play(env)
    assert td["next", "reward"].item() == 1.0
    assert td["next", "done"].item()
    assert td["next", "num_executed"].item() == 3
    assert len(env.base_env.actions) == 3


def test_without_success_all_actions_are_played_in_order():
    env = make_env(num_actions=4)
    td = play(env)
    assert td["next", "num_executed"].item() == 4
    assert td["next", "count"].item() == 4
    assert torch.equal(torch.stack(env.base_env.actions), chunk_for(env))
    assert td["next", "reward"].item() == 0.0
    assert torch.equal(td[CHUNK], chunk_for(env)), "the chunk of the batch is untouched"


def test_rewards_of_the_chunk_are_summed():
    env = TransformedEnv(
        ToyVLAEnv(action_dim=2, state_dim=4, seed=0), MultiAction(num_actions=3)
    )
    td = env.reset()
    td[CHUNK] = torch.tensor([[0.3, 0.4], [0.0, 0.0], [0.6, 0.8]])
    torch.testing.assert_close(
        env.step(td)["next", "reward"], torch.tensor([-1.5]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("num_actions", [1, 4])
def test_intermediate_observations_are_skipped(num_actions):
    env = make_env(num_actions=num_actions)
    play(env)
    assert env.base_env.num_renders == 1
    assert not env.base_env.skip_observation


def test_a_chunk_that_ends_early_is_rendered_once():
    env = make_env(num_actions=8, success_at=3)
    play(env)
    assert env.base_env.num_renders == 1
    assert not env.base_env.skip_observation


def test_members_of_a_batch_stop_by_themselves():
    env = make_env(num_actions=4, success_at=[1, 3, 9], batch_size=(3,))
    td = play(env)
    assert td["next", "num_executed"].flatten().tolist() == [1, 3, 4]
    assert td["next", "reward"].flatten().tolist() == [1.0, 1.0, 0.0]
    assert td["next", "done"].flatten().tolist() == [True, True, False]
    assert td["next", "count"].flatten().tolist() == [1, 3, 4]


def test_a_step_mask_leaves_members_out():
    env = make_env(num_actions=4, success_at=[9, 2], batch_size=(2,))
    td = env.reset()
    td["_step"] = torch.tensor([True, False])
    td = play(env, td)
    assert td["next", "num_executed"].flatten().tolist() == [4, 0]
    assert td["next", "reward"].flatten().tolist() == [0.0, 0.0]
    assert env.base_env.count.flatten().tolist() == [4, 0]


def test_transforms_behind_run_once_per_decision_also_after_an_early_end():
    env = make_env(
        num_actions=8,
        success_at=3,
        transforms=[StepCounter(), RewardSum()],
    )
    td = play(env)
    assert td["next", "step_count"].item() == 1
    assert td["next", "episode_reward"].item() == 1.0


def test_transforms_before_run_once_per_env_step():
    env = TransformedEnv(CountingEnv(), StepCounter(max_steps=6))
    env.append_transform(MultiAction(4))
    td = play(env)
    assert td["next", "step_count"].item() == 4
    td = play(env, env.step_mdp(td))
    assert td["next", "num_executed"].item() == 2
    assert td["next", "truncated"].item()


def test_chunk_is_read_from_any_key():
    for key in ["action", ("deep", "er", "chunk")]:
        env = TransformedEnv(CountingEnv(success_at=2), MultiAction(3, chunk_key=key))
        td = env.reset()
        td[key] = torch.full((3, 2), 0.5)
        td = env.step(td)
        assert td["next", "num_executed"].item() == 2
        assert td[key].shape == (3, 2)


@pytest.mark.parametrize("batch_size", [(), (3,)])
def test_specs_hold_on_toy(batch_size):
    env = TransformedEnv(
        ToyVLAEnv(
            action_dim=2, state_dim=4, success_steps=2, batch_size=batch_size, seed=0
        ),
        MultiAction(4),
    )
    check_env_specs(env)
    assert env.full_action_spec[CHUNK].shape == (*batch_size, 4, 2)


def test_rollout_on_batched_toy_counts_the_streak():
    env = TransformedEnv(
        ToyVLAEnv(action_dim=2, state_dim=4, success_steps=3, batch_size=[5], seed=0),
        MultiAction(4),
    )
    td = env.reset()
    target = td["observation", "state"][:, 2:4]
    td[CHUNK] = target.unsqueeze(1).expand(5, 4, 2).clone()
    td[CHUNK][0] += 0.9  # never within the tolerance
    td = env.step(td)
    assert td["next", "success"].flatten().tolist() == [False] + [True] * 4
    assert td["next", "num_executed"].flatten().tolist() == [4, 3, 3, 3, 3]
    assert td["next", "language_instruction"] == td["language_instruction"]


def make_worker(success_at):
    return make_env(num_actions=4, success_at=success_at)


@pytest.mark.parametrize("use_buffers", [True, False])
def test_inside_parallel_workers(use_buffers):
    env = ParallelEnv(
        2,
        make_worker,
        create_env_kwargs=[{"success_at": 2}, {"success_at": 9}],
        use_buffers=use_buffers,
        mp_start_method="fork",
    )
    try:
        td = play(env)
        assert td["next", "num_executed"].flatten().tolist() == [2, 4]
        assert td["next", "reward"].flatten().tolist() == [1.0, 0.0]
    finally:
        env.close()


@pytest.mark.parametrize("batched", [SerialEnv, ParallelEnv])
def test_around_a_batched_environment(batched):
    kwargs = {"mp_start_method": "fork"} if batched is ParallelEnv else {}
    inner = batched(
        2,
        CountingEnv,
        create_env_kwargs=[{"success_at": 2}, {"success_at": 9}],
        **kwargs,
    )
    env = TransformedEnv(inner, MultiAction(4))
    try:
        td = play(env)
        assert td["next", "num_executed"].flatten().tolist() == [2, 4]
        assert td["next", "reward"].flatten().tolist() == [1.0, 0.0]
        assert td["next", "count"].flatten().tolist() == [2, 4]
    finally:
        env.close()


def test_bad_input():
    with pytest.raises(ValueError, match="num_actions is 0"):
        MultiAction(0)
    env = make_env(num_actions=4)
    td = env.reset()
    with pytest.raises(KeyError, match="chunk_key"):
        env.step(td.clone())
    td[CHUNK] = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"shape \(3, 2\).*\(4, 2\)"):
        env.step(td)
    td[CHUNK] = torch.zeros(4, 2)
    td[CHUNK][3, 1] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        env.step(td)
    assert env.base_env.actions == [], "nothing was stepped"


def test_values_of_members_that_do_not_step_are_not_looked_at():
    env = make_env(num_actions=4, batch_size=(2,))
    td = env.reset()
    td[CHUNK] = torch.zeros(2, 4, 2)
    td[CHUNK][1] = torch.nan
    td["_step"] = torch.tensor([True, False])
    assert env.step(td)["next", "num_executed"].flatten().tolist() == [4, 0]
