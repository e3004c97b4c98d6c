"""The mathematics, against hand-worked numbers and the reference program."""

import math

import pytest
import torch
from safetensors.torch import load_file

from torchrl_vla.objectives import functional as F

ATOL = {"float32": 1e-6, "float64": 1e-12}


def test_advantage_of_one_success_in_eight():
    returns = torch.zeros(8, dtype=torch.float64)
    returns[3] = 1
    advantage = F.group_advantage(returns, torch.full((8,), 5))
    # mean 1/8, unbiased deviation sqrt(1/8)
    assert advantage[3].item() == pytest.approx(2.47487, abs=1e-5)
    assert advantage[0].item() == pytest.approx(-0.35355, abs=1e-5)


def test_advantage_keeps_groups_apart_in_any_order():
    returns = torch.tensor([1.0, 5.0, 0.0, 5.0, 1.0])
    groups = torch.tensor([7, 2, 7, 2, 7])
    advantage = F.group_advantage(returns, groups, normalize_std=False)
    torch.testing.assert_close(
        advantage, torch.tensor([1 / 3, 0.0, -2 / 3, 0.0, 1 / 3]), atol=1e-6, rtol=0
    )


def test_a_coefficient_of_the_reward_cancels():
    returns = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    groups = torch.zeros(4, dtype=torch.int64)
    torch.testing.assert_close(
        F.group_advantage(5 * returns, groups),
        F.group_advantage(returns, groups),
        atol=1e-5,
        rtol=0,
    )


def test_advantage_equals_the_reference(golden):
    for case in golden("grpo_outcome_advantage")["cases"]:
        dtype = getattr(torch, case["dtype"])
        rewards = torch.tensor(case["token_level_rewards"], dtype=dtype)
        names = sorted(set(case["index"]))
        groups = torch.tensor([names.index(name) for name in case["index"]])
        advantage = F.group_advantage(rewards.sum(-1), groups)
        mask = torch.tensor(case["eos_mask"])
        expected = torch.tensor(case["advantages"], dtype=dtype)
        # The reference takes mean and deviation in float32, whatever the rewards are.
        torch.testing.assert_close(
            advantage.unsqueeze(-1) * mask, expected, atol=1e-6, rtol=0
        )


def test_policy_loss_and_gradient_equal_the_reference(golden):
    for case in golden("grpo_policy_loss")["cases"]:
        dtype = getattr(torch, case["dtype"])
        log_prob = torch.tensor(case["log_prob"], dtype=dtype, requires_grad=True)
        old = torch.tensor(case["old_log_prob"], dtype=dtype)
        advantage = torch.tensor(case["advantages"], dtype=dtype)
        mask = torch.tensor(case["eos_mask"])
        # The reference takes the mean over all tokens of one forward pass.
        weight = 1 / mask.sum().clamp(min=1).to(dtype)
        loss = F.clipped_policy_loss(
            log_prob - old, advantage, case["clip_ratio_low"], case["clip_ratio_high"]
        )
        loss = (loss.masked_fill(~mask, 0) * weight).sum()
        loss.backward()
        atol = ATOL[case["dtype"]]
        assert loss.item() == pytest.approx(case["pg_loss"], abs=atol)
        expected = torch.tensor(case["grad_log_prob"], dtype=dtype)
        torch.testing.assert_close(log_prob.grad, expected, atol=atol, rtol=0)


def test_filter_keeps_the_groups_of_the_reference(golden):
    for case in golden("grpo_filter")["cases"]:
        low, high = case["accuracy_lower_bound"], case["accuracy_upper_bound"]
        kept = [
            i
            for i, outcome in enumerate(case["acc"])
            if F.is_mixed(sum(outcome) / len(outcome), low, high)
        ]
        assert kept == case["kept_prompts"]


@pytest.mark.parametrize(
    ("mean", "kept"), [(0.0, False), (0.1, True), (0.9, True), (1.0, False)]
)
def test_bounds_are_inclusive(mean, kept):
    assert F.is_mixed(mean, 0.1, 0.9) is kept


def test_mask_counts_executed_actions_only():
    mask = F.executed_token_mask(torch.tensor([[0], [2], [3]]), 3, 2)
    assert mask.sum((-2, -1)).tolist() == [0, 4, 6]
    assert mask[1].tolist() == [[True, True], [True, True], [False, False]]


def test_mask_equals_the_reference(golden):
    case = golden("grpo_traj_mask")
    executed = torch.tensor(case["finish_step"]).clamp(max=case["traj_len"])
    mask = F.executed_token_mask(executed.unsqueeze(-1), case["traj_len"], 1)
    assert mask.squeeze(-1).tolist() == case["mask"]


class TestLossWeights:
    tokens = torch.tensor([4, 2, 0, 6])
    episodes = torch.tensor([9, 9, 9, 3])

    def test_episode(self):
        # two episodes of six tokens each
        weights = F.loss_weights(self.tokens, self.episodes, "episode")
        torch.testing.assert_close(weights, torch.tensor([1 / 12, 1 / 12, 0, 1 / 12]))

    def test_token(self):
        weights = F.loss_weights(self.tokens, self.episodes, "token")
        torch.testing.assert_close(weights, torch.tensor([1 / 12, 1 / 12, 0, 1 / 12]))

    def test_decision(self):
        # three decisions have tokens
        weights = F.loss_weights(self.tokens, self.episodes, "decision")
        torch.testing.assert_close(weights, torch.tensor([1 / 12, 1 / 6, 0, 1 / 18]))

    @pytest.mark.parametrize("aggregation", F.AGGREGATIONS)
    def test_weights_times_tokens_sum_to_one(self, aggregation):
        weights = F.loss_weights(
            torch.tensor([4, 2, 7, 1]), torch.tensor([0, 0, 1, 2]), aggregation
        )
        assert (weights * torch.tensor([4, 2, 7, 1])).sum().item() == pytest.approx(1)

    @pytest.mark.parametrize("aggregation", F.AGGREGATIONS)
    def test_no_tokens_give_zero_not_nan(self, aggregation):
        weights = F.loss_weights(torch.zeros(3), torch.arange(3), aggregation)
        assert weights.tolist() == [0, 0, 0]

    def test_unknown_aggregation(self):
        with pytest.raises(ValueError, match="allowed are episode, token, decision"):
            F.loss_weights(self.tokens, self.episodes, "mean")


def test_kl_estimators_equal_the_reference(golden):
    for case in golden("grpo_kl")["cases"]:
        dtype = getattr(torch, case["dtype"])
        log_prob = torch.tensor(case["logprob"], dtype=dtype)
        reference = torch.tensor(case["ref_logprob"], dtype=dtype)
        for ours, theirs in (("k1", "kl"), ("k2", "mse")):
            torch.testing.assert_close(
                F.kl_estimate(log_prob, reference, ours),
                torch.tensor(case[theirs], dtype=dtype),
                atol=ATOL[case["dtype"]],
                rtol=0,
            )


def test_k3_is_not_negative_and_by_hand():
    difference = torch.tensor([math.log(2.0), -1.0, 0.0])
    k3 = F.kl_estimate(difference, torch.zeros(3), "k3")
    expected = [0.5 - 1 + math.log(2.0), math.e - 1 - 1, 0.0]
    torch.testing.assert_close(k3, torch.tensor(expected))


def test_adaptive_coefficient_equals_the_reference(golden):
    case = golden("grpo_kl")["adaptive_controller"]
    coef = case["init"]
    for step in case["updates"]:
        coef = F.adaptive_kl_coef(
            coef,
            step["current_kl"],
            target=case["target"],
            horizon=case["horizon"],
            num_episodes=step["n_steps"],
        )
        assert coef == pytest.approx(step["value"], abs=1e-12)


def test_reference_log_probs_file_is_readable():
    assert load_file("test/goldens/grpo_kl.safetensors")


class TestSelection:
    returns = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)

    def test_first(self):
        assert F.select_members(list(self.returns), 3, "first") == [0, 1, 2]

    def test_uniform(self):
        chosen = F.select_members(list(self.returns), 3, "uniform")
        assert [self.returns[i] for i in chosen].count(1.0) == 1

    def test_balanced_goes_for_the_middle_of_the_bounds(self):
        chosen = F.select_members(list(self.returns), 4, "balanced")
        assert sum(self.returns[i] for i in chosen) == 2

    def test_balanced_with_graded_returns(self):
        chosen = F.select_members([0.0, 0.2, 0.6, 0.9], 2, "balanced")
        assert chosen == [0, 3]

    def test_all_candidates_are_the_group(self):
        assert F.select_members([1.0, 1.0], 2, "balanced") == [0, 1]

    def test_too_few(self):
        with pytest.raises(ValueError, match="1 candidates"):
            F.select_members([1.0], 2)
