"""The advantage transform: by call, in a replay buffer, and against TorchRL's."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import TransformedEnv
from torchrl.envs.custom import ToyVLAEnv
from torchrl.objectives.llm import MCAdvantage

from torchrl_vla.objectives import GroupAdvantage


def make_batch(lengths, returns, groups):
    """Episodes of the given lengths; the return comes with the last decision."""
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    last = torch.tensor([i + 1 == n for n in lengths for i in range(n)])
    reward = torch.tensor(returns)[episode] * last
    batch = TensorDict(
        {
            ("next", "reward"): reward[:, None],
            ("next", "done"): last[:, None],
            ("next", "num_executed"): torch.full((len(last), 1), 2),
            ("vla_action", "tokens"): torch.zeros(len(last), 2, 3, dtype=torch.int64),
            "group_id": torch.tensor(groups)[episode][:, None],
            "episode_id": 100 + episode[:, None],
        },
        [len(last)],
    )
    return batch


def test_one_value_per_episode():
    batch = GroupAdvantage()(make_batch([2, 1, 3], [1.0, 0.0, 0.0], [5, 5, 5]))
    a, b = 2 / 3 / (1 / 3) ** 0.5, -1 / 3 / (1 / 3) ** 0.5
    torch.testing.assert_close(
        batch["advantage"].flatten(),
        torch.tensor([a, a, b, b, b, b]),
        atol=1e-5,
        rtol=0,
    )


def test_weights_are_means_over_episodes():
    batch = GroupAdvantage()(make_batch([2, 1, 3], [1.0, 0.0, 0.0], [5, 5, 5]))
    per_token = torch.tensor([1 / 12, 1 / 12, 1 / 6, 1 / 18, 1 / 18, 1 / 18]) / 3
    torch.testing.assert_close(batch["loss_weight"].flatten(), per_token)


def test_episodes_are_found_by_done_without_an_id():
    batch = make_batch([2, 1, 3], [1.0, 0.0, 0.0], [5, 5, 5])
    expected = GroupAdvantage()(batch.clone())["advantage"]
    found = GroupAdvantage()(batch.exclude("episode_id"))["advantage"]
    assert torch.equal(found, expected)


def test_order_of_rows_does_not_matter_with_an_id():
    batch = make_batch([2, 1, 3], [1.0, 0.0, 0.0], [5, 5, 5])
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    expected = GroupAdvantage()(batch.clone())["advantage"][order]
    assert torch.equal(GroupAdvantage()(batch[order])["advantage"], expected)


def test_cut_off_episode():
    batch = make_batch([2, 1], [1.0, 0.0], [5, 5]).exclude("episode_id")
    with pytest.raises(ValueError, match="middle of an episode"):
        GroupAdvantage()(batch[:1])


def test_episode_in_two_groups():
    batch = make_batch([2, 1], [1.0, 0.0], [5, 5])
    batch["group_id"][0] = 6
    with pytest.raises(ValueError, match="several"):
        GroupAdvantage()(batch)


def test_a_group_of_one_keeps_its_return():
    batch = GroupAdvantage()(make_batch([2], [1.0], [5]))
    assert batch["advantage"].flatten().tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


def test_in_a_replay_buffer():
    batch = make_batch([2, 1, 3], [1.0, 0.0, 0.0], [5, 5, 5])
    expected = GroupAdvantage()(batch.clone())["advantage"]
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(6),
        sampler=SamplerWithoutReplacement(shuffle=False),
        transform=GroupAdvantage(),
        batch_size=6,
    )
    buffer.extend(batch)
    sample = buffer.sample()
    torch.testing.assert_close(sample["advantage"], expected)
    assert "loss_weight" in sample.keys()


def test_equals_torchrl_mc_advantage():
    lengths, returns = [2, 1, 3, 2], [1.0, 0.0, 0.0, 1.0]
    theirs = MCAdvantage(grpo_size=4, prompt_key="group_id", trajectory_return="sum")
    batch = make_batch(lengths, returns, [5] * 4)
    expected = None
    for episode in batch.split(lengths):
        expected = theirs.inv(episode.clone())
    mine = GroupAdvantage()(batch)
    torch.testing.assert_close(
        mine["advantage"], expected["advantage"], atol=1e-4, rtol=0
    )


def test_refuses_to_sit_on_an_environment():
    env = TransformedEnv(ToyVLAEnv(), GroupAdvantage())
    with pytest.raises(RuntimeError, match="whole episodes"):
        _ = env.observation_spec


def test_reference_rewards_and_advantages(golden):
    case = golden("grpo_reward_advantage")
    groups = [int(uid[1:]) for uid in case["uid"]]
    outcome = [float(done) for done in case["complete"]]
    batch = make_batch([1] * len(groups), outcome, groups)
    advantage = GroupAdvantage()(batch)["advantage"].flatten()
    expected = torch.tensor(case["advantage_per_sequence"])
    # the reference multiplies rewards by 5 before its epsilon is added
    torch.testing.assert_close(advantage, expected, atol=1e-5, rtol=0)


@pytest.fixture
def kl_case(golden):
    from safetensors.torch import load_file

    case = golden("grpo_kl")["apply_kl_penalty"]
    return case, load_file("test/goldens/grpo_kl.safetensors")


def test_kl_penalty_equals_the_reference(kl_case, golden):
    case, tensors = kl_case
    uid = golden("grpo_reward_advantage")["uid"]
    log_probs, reference = tensors["old_log_probs"], tensors["ref_log_prob"]
    num, chunk, action = len(uid), 16, 7
    batch = TensorDict(
        {
            ("vla_action", "log_probs"): log_probs.reshape(num, chunk, action),
            ("vla_action", "reference_log_probs"): reference.reshape(
                num, chunk, action
            ),
            ("vla_action", "tokens"): torch.zeros(num, chunk, action),
            ("next", "num_executed"): torch.tensor(case["finish_step"])[:, None],
            ("next", "reward"): 5.0 * torch.tensor(case["complete"])[:, None],
            ("next", "done"): torch.ones(num, 1, dtype=torch.bool),
            "group_id": torch.tensor([int(name[1:]) for name in uid])[:, None],
        },
        [num],
    )
    for result, estimator in zip(case["results"], ("k1", None, "k2"), strict=True):
        if estimator is None:  # their |d| has no place here
            continue
        coef = result["metrics"]["critic/kl_coeff"]
        transform = GroupAdvantage(kl_coef=coef, kl_estimator=estimator)
        advantage = transform(batch.clone())["advantage"].flatten()
        expected = torch.tensor(result["advantage_per_sequence"])
        torch.testing.assert_close(advantage, expected, atol=2e-4, rtol=0)


def test_the_coefficient_follows_its_target_and_is_saved():
    batch = make_batch([1, 1], [1.0, 0.0], [0, 0])
    batch["vla_action", "log_probs"] = torch.zeros(2, 2, 3)
    batch["vla_action", "reference_log_probs"] = torch.full((2, 2, 3), -2.0)
    transform = GroupAdvantage(kl_coef=0.1, kl_target=1.0, kl_horizon=10)
    transform(batch)
    assert transform.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
    other = GroupAdvantage(kl_coef=0.1, kl_target=1.0, kl_horizon=10)
    other.load_state_dict(transform.state_dict())
    assert other.kl_coef == transform.kl_coef
