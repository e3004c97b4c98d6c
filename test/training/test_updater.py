"""Optimizer steps: how many, over what, and that micro-batches do not matter."""

import copy
import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla.config.schema import UpdateConfig
from torchrl_vla.modules import CompactPolicy
from torchrl_vla.modules.factory import make_reference
from torchrl_vla.objectives import GroupAdvantage, TokenGRPOLoss
from torchrl_vla.training import Updater
from torchrl_vla.training.device import choose_device
from torchrl_vla.training.updater import make_updater

H, A, V, S = 2, 2, 5, 4
LOG_PROBS = ("vla_action", "log_probs")


def make_policy(seed=0):
    policy = CompactPolicy(
        chunk_size=H, action_dim=A, num_bins=V, state_dim=S, hidden_dim=16, seed=seed
    )
    return policy.double()  # so that the order of a sum is far below the tolerance


def make_batch(policy, num_episodes=16, group_size=4, seed=0):
    """Whole episodes of 1 to 4 decisions; the last chunk of each is cut short."""
    generator = torch.Generator().manual_seed(seed)
    length_E = torch.randint(1, 5, (num_episodes,), generator=generator)
    episode_B = torch.arange(num_episodes).repeat_interleave(length_E)
    last_B = torch.cat([episode_B[1:] != episode_B[:-1], torch.tensor([True])])
    win_E = torch.randint(0, 2, (num_episodes,), generator=generator)
    num = len(episode_B)
    batch = TensorDict(
        {
            ("observation", "state"): torch.randn(
                num, S, generator=generator, dtype=torch.float64
            ),
            ("next", "reward"): (last_B * win_E[episode_B]).float().unsqueeze(-1),
            ("next", "done"): last_B.unsqueeze(-1),
            ("next", "num_executed"): torch.where(last_B, 1, H).unsqueeze(-1),
            "group_id": (episode_B // group_size).unsqueeze(-1),
            "episode_id": (1000 + episode_B).unsqueeze(-1),
            "sampling_seed": torch.arange(num).unsqueeze(-1),
        },
        [num],
    )
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        return policy(batch)


def make(policy, batch=None, loss=None, **cfg):
    """An updater of AdamW and, with advantages written, the batch."""
    arguments = {"lr": 1e-2, "episodes_per_step": 8, "micro_batch_size": 7, **cfg}
    names = ("behavior_log_prob", "mask_unexecuted")
    behavior = {name: arguments.pop(name) for name in names if name in arguments}
    with_reference = arguments.pop("with_reference", False)
    updater = make_updater(
        TokenGRPOLoss(policy, **(loss or {})),
        UpdateConfig(**arguments),
        **behavior,
        reference_policy=make_reference(policy) if with_reference else None,
    )
    return updater


def weights(policy):
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def test_the_papers_setup_takes_four_optimizer_steps():
    """512 episodes, 128 per step: 4 steps, not one per 128 decisions."""
    policy = make_policy()
    batch = make_batch(policy, num_episodes=512, group_size=8)
    assert len(batch) > 1000, "decisions are more than episodes"
    updater = make(policy, episodes_per_step=128, micro_batch_size=64)
    metrics = updater.update(GroupAdvantage()(batch))
    assert metrics["optimizer_steps"] == 4
    assert updater.num_optimizer_steps == 4
    steps = {int(state["step"]) for state in updater.optimizer.state.values()}
    assert steps == {4}


@pytest.mark.parametrize("micro_batch_size", [1, 4, 5, 1000])
@pytest.mark.parametrize("aggregation", ["episode", "token", "decision"])
def test_the_micro_batch_size_does_not_matter(micro_batch_size, aggregation):
    results = []
    for size in (3, micro_batch_size):
        policy = make_policy()
        batch = GroupAdvantage(aggregation=aggregation)(make_batch(policy))
        updater = make(policy, micro_batch_size=size, loss={"entropy_coef": 0.01})
        metrics = updater.update(batch)
        results.append((weights(policy), metrics))
    (left, left_metrics), (right, right_metrics) = results
    assert (left - weights(make_policy())).abs().max() > 1e-3, "something was learned"
    torch.testing.assert_close(left, right, rtol=0, atol=1e-6)
    assert left_metrics.keys() == right_metrics.keys()
    for name, value in left_metrics.items():
        assert right_metrics[name] == pytest.approx(value, abs=1e-6), name


def test_gradients_of_one_times_four_equal_four_times_one():
    gradients = []
    for size in (1, 4):
        policy = make_policy()
        batch = GroupAdvantage()(make_batch(policy))
        batch = batch[batch["advantage"].flatten() != 0][:4]
        updater = make(policy, micro_batch_size=size, max_grad_norm=1e9)
        updater.scheduler = None
        updater.optimizer.step = lambda: None
        updater.update(batch)
        gradients.append(
            [p.grad.clone() for p in policy.parameters() if p.grad is not None]
        )
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)
    assert max(g.abs().max() for g in gradients[0]) > 1e-3


def test_the_loss_of_a_step_is_the_mean_over_its_episodes():
    """By hand, for the first step: mean over tokens of an episode, then episodes."""
    policy = make_policy()
    batch = make_batch(policy)
    batch[LOG_PROBS] += 0.3 * torch.rand_like(batch[LOG_PROBS]) - 0.15
    batch = GroupAdvantage()(batch)
    log_prob = policy.get_dist(batch).log_prob(batch["vla_action", "tokens"]).detach()
    per_episode = []
    for episode in range(1000, 1008):
        tokens = []
        for row in (batch["episode_id"].flatten() == episode).nonzero().flatten():
            executed = int(batch["next", "num_executed"][row])
            ratio = (log_prob[row] - batch[LOG_PROBS][row]).exp()[:executed]
            advantage = batch["advantage"][row]
            clipped = ratio.clamp(0.8, 1.28) * advantage
            tokens += (-torch.minimum(ratio * advantage, clipped)).flatten().tolist()
        per_episode.append(sum(tokens) / len(tokens))
    expected = sum(per_episode) / len(per_episode)
    updater = make(policy, episodes_per_step=8)
    first = batch[batch["episode_id"].flatten() < 1008]
    metrics = updater.update(first)
    assert metrics["optimizer_steps"] == 1
    assert metrics["loss_objective"] == pytest.approx(expected, abs=1e-6)


def test_the_last_step_may_be_smaller_and_is_a_mean_of_its_own():
    policy = make_policy()
    batch = GroupAdvantage()(make_batch(policy, num_episodes=12))
    updater = make(policy, episodes_per_step=8)
    parts = updater._cut(batch)
    assert [len(part["episode_id"].unique()) for part in parts] == [8, 4]
    for part in parts:
        tokens = part["next", "num_executed"] * A
        total = (part["loss_weight"] * tokens).sum()
        assert total.item() == pytest.approx(1.0, abs=1e-6)
    assert updater.update(batch)["optimizer_steps"] == 2


def test_no_episode_is_split_over_steps():
    policy = make_policy()
    batch = GroupAdvantage()(make_batch(policy, num_episodes=64))
    parts = make(policy, episodes_per_step=8)._cut(batch)
    ids = [set(part["episode_id"].flatten().tolist()) for part in parts]
    assert sum(map(len, ids)) == len(set().union(*ids)) == 64
    assert sum(map(len, parts)) == len(batch)


def test_the_ratio_is_one_before_the_first_step_and_its_deviation_is_measured():
    policy = make_policy()
    batch = make_batch(policy)
    updater = make(policy)
    assert updater.prepare(batch)["ratio_deviation"] < 1e-6
    # Another policy has written the log-probs: the deviation is |ratio - 1|.
    batch[LOG_PROBS][0, 0, 0] -= 0.1
    deviation = updater.prepare(batch)["ratio_deviation"]
    assert deviation == pytest.approx(math.expm1(0.1), abs=1e-6)
    # A token that was never played does not count.
    batch = make_batch(policy)
    row = int((batch["next", "num_executed"].flatten() == 1).nonzero()[0])
    batch[LOG_PROBS][row, 1, 0] -= 9.0
    assert updater.prepare(batch)["ratio_deviation"] < 1e-6


def test_recompute_replaces_the_log_probs_of_the_rollout():
    policy = make_policy()
    batch = make_batch(policy)
    sampled = batch[LOG_PROBS].clone()
    batch[LOG_PROBS] = sampled - 0.5
    before = batch[LOG_PROBS].clone()
    make(policy).prepare(batch)
    assert torch.equal(batch[LOG_PROBS], before), "rollout: as sampled"
    metrics = make(policy, behavior_log_prob="recompute").prepare(batch)
    torch.testing.assert_close(batch[LOG_PROBS], sampled, rtol=0, atol=1e-6)
    assert metrics["ratio_deviation"] > 0.5, "the deviation is that of the rollout"


def test_without_the_mask_every_sampled_token_counts():
    fractions, weight_sums = {}, {}
    for mask_unexecuted in (True, False):
        policy = make_policy()
        batch = make_batch(policy)
        updater = make(policy, mask_unexecuted=mask_unexecuted)
        updater.prepare(batch)
        GroupAdvantage()(batch)
        weight_sums[mask_unexecuted] = float(batch["loss_weight"].sum() * H * A)
        fractions[mask_unexecuted] = updater.update(batch)["masked_fraction"]
    assert fractions[True] > 0.1
    assert fractions[False] == 0
    assert weight_sums[False] == pytest.approx(1), "weights count all tokens as well"
    assert weight_sums[True] > 1.1


def test_the_reference_is_the_initial_policy_and_stays_so():
    policy = make_policy()
    initial = copy.deepcopy(policy)
    updater = make(policy, loss={"kl_coef": 0.1}, with_reference=True)
    batch = make_batch(policy)
    assert updater.prepare(batch)["reference_kl"] == pytest.approx(0.0, abs=1e-7)
    updater.update(GroupAdvantage()(batch))
    batch = make_batch(policy, seed=1)
    metrics = updater.prepare(batch)
    key = ("vla_action", "reference_log_probs")
    expected = initial.get_dist(batch).log_prob(batch["vla_action", "tokens"])
    torch.testing.assert_close(batch[key], expected.detach(), rtol=0, atol=1e-6)
    mask = torch.arange(H).reshape(H, 1) < batch["next", "num_executed"].unsqueeze(-1)
    difference = (batch[LOG_PROBS] - expected.detach())[mask.expand(-1, H, A)]
    assert metrics["reference_kl"] == pytest.approx(difference.mean().item(), abs=1e-6)
    assert abs(metrics["reference_kl"]) > 1e-4
    assert not any(p.requires_grad for p in updater.reference_policy.parameters())


def test_no_reference_forward_without_a_coefficient():
    policy = make_policy()
    updater = make(policy)
    assert updater.reference_policy is None
    batch = make_batch(policy)
    assert "reference_kl" not in updater.prepare(batch)
    assert ("vla_action", "reference_log_probs") not in batch.keys(True)


def test_tokens_that_were_never_played_get_no_gradient():
    moved = []
    for change in (False, True):
        policy = make_policy()
        batch = make_batch(policy)
        if change:
            row = batch["next", "num_executed"].flatten() == 1
            batch["vla_action", "tokens"][row, 1] = 0
            batch[LOG_PROBS][row, 1] = -3.0
        make(policy).update(GroupAdvantage()(batch))
        moved.append(weights(policy))
    assert torch.equal(moved[0], moved[1])


def test_warm_up_is_linear_and_then_constant():
    policy = make_policy()
    updater = make(policy, lr=1.0, warmup_steps=3, episodes_per_step=16)
    batch = GroupAdvantage()(make_batch(policy))
    rates = [updater.update(batch)["learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    plain = make(make_policy(), lr=0.5, episodes_per_step=16)
    assert plain.update(batch)["learning_rate"] == 0.5


@pytest.mark.parametrize("largest", [1e-3, 1e3])
def test_the_gradient_is_clipped_to_its_norm(largest):
    policy = make_policy()
    updater = make(policy, max_grad_norm=largest, episodes_per_step=16)
    applied = []

    def step():
        grads = [p.grad for p in policy.parameters() if p.grad is not None]
        applied.append(torch.cat([g.flatten() for g in grads]).norm().item())

    updater.scheduler = None
    updater.optimizer.step = step
    metrics = updater.update(GroupAdvantage()(make_batch(policy)))
    expected = min(metrics["grad_norm"], largest)
    assert applied[0] == pytest.approx(expected, rel=1e-3)
    assert metrics["grad_norm"] > 1e-3, "reported before clipping"


def test_adamw_gets_its_options():
    options = UpdateConfig(lr=3e-3, beta1=0.8, beta2=0.9, weight_decay=0.2)
    optimizer = make_updater(TokenGRPOLoss(make_policy()), options).optimizer
    group = optimizer.param_groups[0]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (group["lr"], group["betas"], group["weight_decay"]) == (
        3e-3,
        (0.8, 0.9),
        0.2,
    )


def test_frozen_weights_are_left_out():
    policy = make_policy()
    policy.stem.weight.requires_grad_(False)
    before = policy.stem.weight.clone()
    updater = make(policy)
    updater.update(GroupAdvantage()(make_batch(policy)))
    assert torch.equal(policy.stem.weight, before)
    trained = {id(p) for p in updater.optimizer.param_groups[0]["params"]}
    assert id(policy.stem.weight) not in trained


def test_state_dict_goes_on_exactly(tmp_path):
    policy = make_policy()
    updater = make(policy, warmup_steps=5)
    updater.update(GroupAdvantage()(make_batch(policy)))
    torch.save(
        {"policy": policy.state_dict(), "updater": updater.state_dict()},
        tmp_path / "state.pt",
    )
    batch = GroupAdvantage()(make_batch(policy, seed=1))
    expected = updater.update(batch.clone())

    other = make_policy(seed=9)
    resumed = make(other, warmup_steps=5)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other.load_state_dict(state["policy"])
    resumed.load_state_dict(state["updater"])
    assert resumed.update(batch.clone()) == expected
    assert torch.equal(weights(other), weights(policy))
    assert resumed.num_optimizer_steps == updater.num_optimizer_steps == 4


def test_metrics_are_those_of_all_steps():
    policy = make_policy()
    batch = make_batch(policy)
    batch[LOG_PROBS] -= 0.5  # ratios of 1.65: clipped where the advantage is positive
    batch = GroupAdvantage()(batch)
    metrics = make(policy, lr=1e-9).update(batch)
    assert metrics["ratio_mean"] == pytest.approx(math.exp(0.5), abs=1e-4)
    assert metrics["ratio_max"] == pytest.approx(metrics["ratio_min"], abs=1e-4)
    assert metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
    positive = (batch["advantage"] > 0).flatten()
    tokens = batch["next", "num_executed"].flatten() * A
    weight = batch["loss_weight"].flatten() * tokens
    assert metrics["clip_fraction_high"] == pytest.approx(
        weight[positive].sum().item(), abs=1e-4
    )
    assert metrics["clip_fraction_low"] == 0.0
    assert metrics["clip_fraction"] == metrics["clip_fraction_high"]
    assert metrics["kl_approx"] == pytest.approx(-0.5, abs=1e-4)
    steps = [part["next", "num_executed"].float() for part in make(policy)._cut(batch)]
    masked = sum(1 - step.mean().item() / H for step in steps) / len(steps)
    assert metrics["masked_fraction"] == pytest.approx(masked, abs=1e-6)
    assert 0 < metrics["masked_fraction"] < 1
    assert metrics["advantage_mean"] == pytest.approx(batch["advantage"].mean().item())
    deviation = batch["advantage"].std(correction=0).item()
    assert metrics["advantage_std"] == pytest.approx(deviation)


def test_the_reference_shares_nothing():
    policy = make_policy()
    frozen = make_reference(policy)
    with torch.no_grad():
        policy.head.bias += 1
    assert frozen.head.bias.abs().max() == 0
    assert policy.head.bias.requires_grad
    assert not frozen.head.bias.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"episodes_per_step": 0}, "episodes_per_step is 0"),
        ({"micro_batch_size": 0}, "micro_batch_size 0"),
        ({"behavior_log_prob": "old"}, "'old'; allowed are 'rollout' and 'recompute'"),
    ],
)
def test_bad_arguments(arguments, message):
    loss = TokenGRPOLoss(make_policy())
    optimizer = torch.optim.AdamW(loss.parameters())
    with pytest.raises(ValueError, match=message):
        Updater(loss, optimizer, **arguments)


def test_choose_device():
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert choose_device("auto").type == expected
    assert choose_device("cpu") == torch.device("cpu")
    for name in ("cuda:99", "nonsense"):
        with pytest.raises(ValueError, match=f"train.device={name} is not available"):
            choose_device(name)


def test_a_gradient_that_is_not_finite_is_not_applied():
    policy = make_policy()
    batch = make_batch(policy)
    updater = make(policy, lr=1e-2)
    batch = GroupAdvantage()(batch)
    batch["advantage"][0] = torch.nan
    before = weights(policy).clone()
    with pytest.raises(FloatingPointError, match="step 1 is not finite"):
        updater.update(batch)
    assert torch.equal(weights(policy), before)
