"""The loss module: masks, weights, micro-batches, and TorchRL's where they agree."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torch.distributions import Categorical, Independent
from torchrl.objectives import ClipPPOLoss

from torchrl_vla.objectives import GroupAdvantage, TokenGRPOLoss
from torchrl_vla.objectives.functional import loss_weights

H, A, V, S = 3, 2, 5, 4


class LinearPolicy(TensorDictModuleBase):
    """Logits that are linear in the state, in float64."""

    in_keys = (("observation", "state"),)
    out_keys = ()

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(S, H * A * V, dtype=torch.float64)

    def get_dist(self, tensordict):
        logits = self.linear(tensordict["observation", "state"])
        return Categorical(logits=logits.unflatten(-1, (H, A, V)))


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return LinearPolicy()


def make_batch(policy, num=12):
    generator = torch.Generator().manual_seed(1)
    rand = lambda *size: torch.rand(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    tokens = (rand(num, H, A) * V).long()
    episode = torch.arange(num).reshape(-1, 1) // 3
    executed = (rand(num, 1) * (H + 1)).long()
    batch = TensorDict(
        {
            ("observation", "state"): rand(num, S),
            ("vla_action", "tokens"): tokens,
            ("next", "num_executed"): executed,
            "advantage": rand(num, 1) * 2 - 1,
            "episode_id": episode,
            "loss_weight": loss_weights(executed.flatten() * A, episode.flatten())
            .unsqueeze(-1)
            .double(),
        },
        [num],
    )
    log_probs = policy.get_dist(batch).log_prob(tokens).detach()
    batch["vla_action", "log_probs"] = log_probs + (rand(num, H, A) - 0.5)
    return batch


def gradient(policy, loss):
    policy.zero_grad()
    loss.backward()
    return policy.linear.weight.grad.clone()


def test_loss_by_hand(policy):
    batch = make_batch(policy)
    losses = TokenGRPOLoss(policy, clip_low=0.2, clip_high=0.28)(batch)
    log_prob = policy.get_dist(batch).log_prob(batch["vla_action", "tokens"])
    per_episode = []
    for first in range(0, 12, 3):
        tokens = []
        for row in range(first, first + 3):
            advantage = batch["advantage"][row]
            for h in range(int(batch["next", "num_executed"][row])):
                for a in range(A):
                    old = batch["vla_action", "log_probs"][row, h, a]
                    ratio = (log_prob[row, h, a] - old).exp()
                    clipped = ratio.clamp(0.8, 1.28)
                    tokens.append(-torch.min(ratio * advantage, clipped * advantage))
        per_episode.append(torch.cat(tokens).mean())
    torch.testing.assert_close(
        losses["loss_objective"], torch.stack(per_episode).mean(), rtol=0, atol=1e-7
    )


def test_actions_never_played_get_no_gradient(policy):
    batch = make_batch(policy)
    loss = TokenGRPOLoss(policy)
    before = gradient(policy, loss(batch)["loss_objective"])
    other = batch.clone()
    unplayed = (
        torch.arange(H).reshape(1, H, 1) >= batch["next", "num_executed"][..., None]
    )
    unplayed = unplayed.expand(-1, -1, A)
    other["vla_action", "tokens"][unplayed] = 0
    other["vla_action", "log_probs"][unplayed] = -torch.inf
    after = gradient(policy, loss(other)["loss_objective"])
    assert unplayed.any()
    assert torch.equal(before, after)


@pytest.mark.parametrize("size", [1, 5, 12])
def test_losses_gradients_and_metrics_of_micro_batches_add_up(policy, size):
    batch = make_batch(policy)
    loss = TokenGRPOLoss(policy, entropy_coef=0.1)
    whole = loss(batch)
    names = [n for n in whole.keys() if n not in ("ratio_max", "ratio_min")]
    expected = gradient(policy, whole["loss_objective"] + whole["loss_entropy"])
    parts = [loss(part) for part in batch.split(size)]
    for name in names:
        total = sum(part[name] for part in parts)
        torch.testing.assert_close(total, whole[name], rtol=0, atol=1e-12)
    total = sum(part["loss_objective"] + part["loss_entropy"] for part in parts)
    torch.testing.assert_close(gradient(policy, total), expected, rtol=0, atol=1e-12)


def test_order_does_not_matter(policy):
    batch = make_batch(policy)
    loss = TokenGRPOLoss(policy)
    shuffled = batch[torch.randperm(len(batch))]
    torch.testing.assert_close(
        loss(batch)["loss_objective"], loss(shuffled)["loss_objective"]
    )


def test_all_masked_gives_zero(policy):
    batch = make_batch(policy)
    batch["next", "num_executed"].zero_()
    losses = TokenGRPOLoss(policy)(batch)
    assert losses["loss_objective"].item() == 0
    assert not gradient(policy, losses["loss_objective"]).any()


def test_ratio_is_one_before_the_first_step(policy):
    batch = make_batch(policy)
    dist = policy.get_dist(batch)
    batch["vla_action", "log_probs"] = dist.log_prob(
        batch["vla_action", "tokens"]
    ).detach()
    losses = TokenGRPOLoss(policy)(batch)
    assert losses["ratio_max"].item() == losses["ratio_min"].item() == 1
    assert (
        losses["clip_fraction_low"].item() == losses["clip_fraction_high"].item() == 0
    )
    assert losses["kl_approx"].item() == 0


def test_clip_fractions_count_where_clipping_acts(policy):
    batch = make_batch(policy, num=3)
    batch["next", "num_executed"].fill_(H)
    batch["loss_weight"].fill_(1 / (3 * H * A))
    log_prob = policy.get_dist(batch).log_prob(batch["vla_action", "tokens"]).detach()
    shift = torch.tensor([1.0, -1.0, 1.0]).reshape(3, 1, 1)  # ratios e, 1/e, e
    batch["vla_action", "log_probs"] = log_prob - shift
    batch["advantage"] = torch.tensor([[1.0], [-1.0], [-1.0]], dtype=torch.float64)
    losses = TokenGRPOLoss(policy)(batch)
    assert losses["clip_fraction_high"].item() == pytest.approx(1 / 3)
    assert losses["clip_fraction_low"].item() == pytest.approx(1 / 3)


def test_decision_ratio_equals_torchrl_clip_ppo(policy):
    """Where they agree: one ratio per decision, all played, mean over decisions."""
    batch = make_batch(policy)
    batch["next", "num_executed"].fill_(H)
    tokens = torch.full((12,), H * A)
    batch["loss_weight"] = loss_weights(tokens, torch.arange(12), "decision")[:, None]
    ours = TokenGRPOLoss(policy, ratio_level="decision", clip_low=0.2, clip_high=0.28)
    mine = ours(batch)["loss_objective"]

    class Actor(LinearPolicy):
        def get_dist(self, tensordict):
            return Independent(super().get_dist(tensordict), 2)

    actor = Actor()
    actor.load_state_dict(policy.state_dict())
    theirs = ClipPPOLoss(
        actor,
        None,
        clip_epsilon=(0.2, 0.28),
        entropy_bonus=False,
        critic_coeff=None,
        functional=False,
    )
    theirs.set_keys(
        action=("vla_action", "tokens"),
        sample_log_prob=("vla_action", "log_prob"),
        advantage="advantage",
    )
    batch["vla_action", "log_prob"] = batch["vla_action", "log_probs"].sum((-2, -1))
    expected = theirs(batch)["loss_objective"]
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_keys_can_be_renamed(policy):
    batch = make_batch(policy)
    expected = TokenGRPOLoss(policy)(batch)["loss_objective"]
    loss = TokenGRPOLoss(policy)
    loss.set_keys(advantage="a", tokens=("deep", "tokens"))
    batch.rename_key_("advantage", "a")
    batch.rename_key_(("vla_action", "tokens"), ("deep", "tokens"))
    assert "a" in loss.in_keys
    assert torch.equal(loss(batch)["loss_objective"], expected)


def test_out_keys_are_what_is_written(policy):
    batch = make_batch(policy)
    batch["vla_action", "reference_log_probs"] = batch["vla_action", "log_probs"] - 0.1
    for options in ({}, {"entropy_coef": 0.1}, {"kl_coef": 0.1, "kl_estimator": "k2"}):
        loss = TokenGRPOLoss(policy, **options)
        assert set(loss(batch).keys()) == set(loss.out_keys)


def test_kl_term_by_hand(policy):
    batch = make_batch(policy)
    log_prob = policy.get_dist(batch).log_prob(batch["vla_action", "tokens"]).detach()
    batch["vla_action", "reference_log_probs"] = log_prob - 0.5
    losses = TokenGRPOLoss(policy, kl_coef=0.3, kl_estimator="k2")(batch)
    # 0.5**2 / 2 for every token; weights times tokens sum to 1
    assert losses["loss_kl"].item() == pytest.approx(0.3 * 0.125, abs=1e-6)


def test_missing_key_names_itself_and_what_writes_it(policy):
    batch = make_batch(policy).exclude("advantage")
    with pytest.raises(KeyError, match=r"advantage.*GroupAdvantage"):
        TokenGRPOLoss(policy)(batch)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_low": 1.0},
        {"clip_high": 0.0},
        {"ratio_level": "x"},
        {"kl_estimator": "x"},
    ],
)
def test_bad_options(policy, options):
    with pytest.raises(ValueError, match="allowed"):
        TokenGRPOLoss(policy, **options)


def test_trains_with_group_advantage_in_a_loop(policy):
    """Tokens of the better episode of a group become more likely."""
    batch = make_batch(policy, num=2).exclude("advantage", "loss_weight")
    batch["next", "num_executed"].fill_(H)
    batch["next", "reward"] = torch.tensor([[1.0], [0.0]])
    batch["next", "done"] = torch.ones(2, 1, dtype=torch.bool)
    batch["episode_id"] = torch.tensor([[4], [2]])
    batch["group_id"] = torch.zeros(2, 1, dtype=torch.int64)
    tokens = batch["vla_action", "tokens"]
    before = policy.get_dist(batch).log_prob(tokens).sum((-2, -1)).detach()
    batch["vla_action", "log_probs"] = policy.get_dist(batch).log_prob(tokens).detach()
    batch = GroupAdvantage()(batch)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    TokenGRPOLoss(policy)(batch)["loss_objective"].backward()
    optimizer.step()
    after = policy.get_dist(batch).log_prob(tokens).sum((-2, -1)).detach()
    assert after[0] > before[0]
    assert after[1] < before[1]
