import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import ParallelEnv, TransformedEnv
from torchrl.envs.custom import ToyVLAEnv
from torchrl.envs.transforms import Compose
from torchrl.envs.utils import check_env_specs

from torchrl_vla.data import keys
from torchrl_vla.data.action_codec import UniformActionCodec
from torchrl_vla.envs.transforms import MultiAction
from torchrl_vla.envs.transforms.action_tokens import ActionTokensTransform


def make_env(batch_size=()):
    env = ToyVLAEnv(action_dim=2, state_dim=4, seed=0, batch_size=batch_size)
    codec = UniformActionCodec(5, low=[-1.0, -0.5], high=[1.0, 0.5])
    return TransformedEnv(env, Compose(MultiAction(3), ActionTokensTransform(codec)))


@pytest.mark.parametrize("batch_size", [(), (2,)])
def test_specs_hold(batch_size):
    env = make_env(batch_size)
    check_env_specs(env)
    spec = env.full_action_spec[keys.TOKENS]
    assert isinstance(spec, Categorical)
    assert (spec.n, spec.dtype, spec.shape) == (5, torch.int64, (*batch_size, 3, 2))
    assert keys.CHUNK not in env.full_action_spec.keys(True, True)


def test_tokens_are_played_and_kept():
    env = make_env()
    tokens = torch.tensor([[0, 0], [2, 2], [4, 3]])
    td = env.step(env.reset().set(keys.TOKENS, tokens))
    # The state echoes the last action that was executed.
    state = td["next", "observation", "state"]
    torch.testing.assert_close(state[:2], torch.tensor([0.8, 0.2]), rtol=0, atol=1e-7)
    assert torch.equal(td[keys.TOKENS], tokens)
    assert td["next", "num_executed"].item() == 3


def test_inside_parallel_workers():
    env = ParallelEnv(2, make_env, mp_start_method="fork")
    try:
        tokens = torch.tensor([[[4, 4]] * 3, [[0, 0]] * 3])
        td = env.step(env.reset().set(keys.TOKENS, tokens))
        state = td["next", "observation", "state"][:, :2]
    finally:
        env.close()
    expected = torch.tensor([[0.8, 0.4], [-0.8, -0.4]])
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-7)


def test_replay_buffer_encodes_demonstrations():
    codec = UniformActionCodec(5)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4),
        transform=ActionTokensTransform(codec),
        batch_size=4,
    )
    chunk = torch.full((4, 3, 2), 0.9)
    buffer.extend(TensorDict({keys.CHUNK: chunk}, batch_size=[4]))
    assert torch.equal(buffer.sample()[keys.TOKENS], torch.full((4, 3, 2), 4))


def test_bad_input():
    env = make_env()
    with pytest.raises(ValueError, match=r"tokens span 0\.\.5; allowed"):
        env.step(env.reset().set(keys.TOKENS, torch.tensor([[0, 0], [0, 0], [5, 0]])))
    with pytest.raises(KeyError, match="tokens"):
        env.step(env.reset().set(keys.CHUNK, torch.zeros(3, 2)))
