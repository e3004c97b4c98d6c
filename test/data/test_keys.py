"""The table of keys against what the toy and a policy really write."""

import pytest
import torch
from torchrl.data.vla import schema
from torchrl.envs import TransformedEnv

from torchrl_vla.collectors import EnvPool, GroupCollector
from torchrl_vla.data import keys
from torchrl_vla.data.action_codec import UniformActionCodec
from torchrl_vla.data.group_schedule import GroupSchedule
from torchrl_vla.envs import ActionTokensTransform, MultiAction, ToyTaskEnv
from torchrl_vla.modules import CompactPolicy
from torchrl_vla.objectives import GroupAdvantage

H, A, V = 4, 2, 11


@pytest.fixture(scope="module")
def batch():
    env = TransformedEnv(ToyTaskEnv(num_envs=8, success_tol=0.5), MultiAction(H))
    env.append_transform(ActionTokensTransform(UniformActionCodec(V)))
    policy = CompactPolicy(chunk_size=H, action_dim=A, num_bins=V, state_dim=4)
    collector = GroupCollector(
        EnvPool(env),
        GroupSchedule((0,), None, 0),
        num_groups=4,
        group_size=4,
        dynamic_sampling=False,
    )
    return GroupAdvantage()(collector.collect(policy)[0])


TABLE = {
    keys.IMAGE: ((3, 32, 32), torch.uint8),
    keys.STATE: ((4,), torch.float32),
    keys.TOKENS: ((H, A), torch.int64),
    keys.LOG_PROBS: ((H, A), torch.float32),
    keys.REWARD: ((1,), torch.float32),
    keys.DONE: ((1,), torch.bool),
    keys.SUCCESS: ((1,), torch.bool),
    keys.NUM_EXECUTED: ((1,), torch.int64),
    keys.TASK_ID: ((1,), torch.int64),
    keys.INIT_STATE_ID: ((1,), torch.int64),
    keys.GROUP_ID: ((1,), torch.int64),
    keys.EPISODE_ID: ((1,), torch.int64),
    keys.DECISION_ID: ((1,), torch.int64),
    keys.SAMPLING_SEED: ((1,), torch.int64),
    keys.ADVANTAGE: ((1,), torch.float32),
    keys.LOSS_WEIGHT: ((1,), torch.float32),
}


@pytest.mark.parametrize("key", TABLE, ids=str)
def test_shape_and_dtype(batch, key):
    shape, dtype = TABLE[key]
    assert batch[key].shape == (len(batch), *shape)
    assert batch[key].dtype == dtype


def test_ranges(batch):
    assert batch[keys.TOKENS].min() >= 0
    assert batch[keys.TOKENS].max() < V
    assert batch[keys.LOG_PROBS].max() <= 0
    assert batch[keys.NUM_EXECUTED].min() >= 1
    assert batch[keys.NUM_EXECUTED].max() <= H
    assert set(batch[keys.REWARD].unique().tolist()) <= {0.0, 1.0}
    assert isinstance(batch[keys.INSTRUCTION], str)


def test_names_are_torchrls_where_torchrl_has_one():
    assert schema.IMAGE_KEY == keys.IMAGE
    assert schema.STATE_KEY == keys.STATE
    assert schema.INSTRUCTION_KEY == keys.INSTRUCTION
    assert schema.ACTION_TOKENS_KEY == keys.TOKENS
    assert schema.ACTION_CHUNK_KEY == keys.CHUNK
    assert schema.ACTION_KEY == keys.ACTION


def test_names_are_unique():
    names = [v for k, v in vars(keys).items() if k.isupper() and "_KEY" not in k]
    assert len(names) == len(set(names))
