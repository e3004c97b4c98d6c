"""Sampling, greedy, log-probs: one distribution for all of them."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla.modules import TokenPolicy

H, A, V, S = 2, 3, 5, 4
TOKENS, LOG_PROBS = ("vla_action", "tokens"), ("vla_action", "log_probs")


class LinearPolicy(TokenPolicy):
    """Logits that are linear in the state."""

    def __init__(self, **kwargs):
        super().__init__(
            in_keys=[("observation", "state")],
            chunk_size=H,
            action_dim=A,
            num_bins=V,
            **kwargs,
        )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.linear = nn.Linear(S, H * A * V)
        self.batch_sizes = []

    def action_logits(self, tensordict):
        self.batch_sizes.append(len(tensordict))
        logits = self.linear(tensordict["observation", "state"])
        return 3 * logits.unflatten(-1, (H, A, V))


def make_rows(num, *, with_seeds=True, same=False):
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(1 if same else num, S, generator=generator).expand(num, S)
    rows = TensorDict({("observation", "state"): state.clone()}, [num])
    if with_seeds:
        rows["sampling_seed"] = torch.arange(num).unsqueeze(-1)
    return rows


def sample(policy, rows):
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        return policy(rows.clone())


@pytest.mark.parametrize("kind", ["DETERMINISTIC", "MODE", "MEAN"])
def test_exploration_type_decides(kind):
    policy, rows = LinearPolicy(), make_rows(50)
    best = policy.action_logits(rows).argmax(-1)
    with torch.no_grad(), set_exploration_type(ExplorationType[kind]):
        greedy = policy(rows.clone())
    assert torch.equal(greedy[TOKENS], best)
    sampled = sample(policy, rows)
    assert not torch.equal(sampled[TOKENS], best)
    with torch.no_grad():
        default = policy(rows.clone())
    assert torch.equal(default[TOKENS], sampled[TOKENS]), "as TorchRL: sampling"


@pytest.mark.parametrize("with_seeds", [True, False])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_sampling_follows_the_tempered_softmax(temperature, with_seeds):
    num = 20_000
    policy = LinearPolicy(temperature=temperature)
    rows = make_rows(num, with_seeds=with_seeds, same=True)
    torch.manual_seed(0)
    tokens = sample(policy, rows)[TOKENS]
    frequency = nn.functional.one_hot(tokens, V).double().mean(0)
    with torch.no_grad():
        expected = (policy.action_logits(rows[:1])[0] / temperature).softmax(-1)
    # Five standard deviations of a binomial share, at most 0.018.
    bound = 5 * (expected * (1 - expected) / num).sqrt()
    assert ((frequency - expected).abs() < bound + 1e-6).all()


def test_tokens_of_a_chunk_are_independent():
    tokens = sample(LinearPolicy(), make_rows(20_000, same=True))[TOKENS].double()
    flat = tokens.flatten(1)
    correlation = torch.corrcoef(flat.T) - torch.eye(H * A)
    assert correlation.abs().max() < 5 / len(flat) ** 0.5


def test_log_probs_are_those_of_the_distribution():
    policy = LinearPolicy(temperature=1.6)
    rows = sample(policy, make_rows(30))
    logits = policy.action_logits(rows) / 1.6
    by_hand = logits.log_softmax(-1).gather(-1, rows[TOKENS].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(rows[LOG_PROBS], by_hand.detach(), rtol=0, atol=1e-6)
    dist = policy.get_dist(rows)
    assert torch.equal(dist.log_prob(rows[TOKENS]).detach(), rows[LOG_PROBS])
    assert rows[LOG_PROBS].dtype == torch.float32
    assert rows[LOG_PROBS].shape == rows[TOKENS].shape == (30, H, A)
    assert rows[TOKENS].dtype == torch.int64


def test_entropy_by_hand():
    policy = LinearPolicy(temperature=2.0)
    rows = make_rows(3)
    p = (policy.action_logits(rows) / 2.0).softmax(-1)
    by_hand = -(p * p.log()).sum(-1)
    torch.testing.assert_close(
        policy.get_dist(rows).entropy(), by_hand, rtol=0, atol=1e-6
    )


def test_half_precision_logits_are_normalised_in_float32():
    policy, rows = LinearPolicy(), make_rows(4)
    full = policy.action_logits
    policy.action_logits = lambda td: full(td).to(torch.bfloat16)
    dist = policy.get_dist(rows)
    assert dist.logits.dtype == torch.float32
    total = dist.logits.exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-6)


def test_a_sampling_seed_makes_a_sample_a_function_of_its_row():
    policy, rows = LinearPolicy(), make_rows(64)
    whole = sample(policy, rows)
    state = torch.get_rng_state()
    alone = torch.cat([sample(policy, rows[i : i + 1]) for i in range(64)])
    assert torch.equal(torch.get_rng_state(), state), "no global number is drawn"
    assert torch.equal(alone[TOKENS], whole[TOKENS])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(policy, rows[order])[TOKENS], whole[TOKENS][order])
    other = rows.clone()
    other["sampling_seed"] += 1000
    assert not torch.equal(sample(policy, other)[TOKENS], whole[TOKENS])


@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_the_micro_batch_size_bounds_the_batch_and_changes_nothing(size):
    rows = make_rows(64)
    whole = sample(LinearPolicy(), rows)
    policy = LinearPolicy(micro_batch_size=size)
    parts = sample(policy, rows)
    assert max(policy.batch_sizes) == min(size, 64)
    assert sum(policy.batch_sizes) == 64
    assert torch.equal(parts[TOKENS], whole[TOKENS])
    torch.testing.assert_close(parts[LOG_PROBS], whole[LOG_PROBS], rtol=0, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, V])
def test_top_k_restricts_samples_but_not_log_probs(top_k):
    policy = LinearPolicy(top_k=top_k)
    rows = sample(policy, make_rows(2000, same=True))
    logits = policy.action_logits(rows[:1])[0]
    best = logits.topk(top_k, dim=-1).indices
    chosen = rows[TOKENS].unsqueeze(-1)
    assert (chosen == best).any(-1).all()
    if top_k == 2:
        assert (chosen == best).any(0).all(), "each of them is drawn"
    torch.testing.assert_close(
        rows[LOG_PROBS],
        policy.get_dist(rows).log_prob(rows[TOKENS]).detach(),
        rtol=0,
        atol=1e-6,
    )
    if top_k == V:
        free = sample(LinearPolicy(), make_rows(2000, same=True))
        assert torch.equal(rows[TOKENS], free[TOKENS])


def test_any_batch_shape():
    policy = LinearPolicy()
    flat = sample(policy, make_rows(6))
    grid = sample(policy, make_rows(6).reshape(2, 3))
    assert grid[TOKENS].shape == (2, 3, H, A)
    assert torch.equal(grid[TOKENS].reshape(6, H, A), flat[TOKENS])
    assert policy.get_dist(grid).logits.shape == (2, 3, H, A, V)


def test_gradients_reach_the_weights_through_get_dist():
    policy, rows = LinearPolicy(), sample(LinearPolicy(), make_rows(6))
    policy.get_dist(rows).log_prob(rows[TOKENS]).sum().backward()
    assert policy.linear.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0; it must be > 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": V + 1}, r"top_k is 6; allowed are 0 \(off\) to num_bins = 5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0; it must be >= 1 or None"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        LinearPolicy(**kwargs)


def test_logits_that_are_not_finite_end_the_rollout():
    policy, rows = LinearPolicy(), make_rows(3)
    policy.linear.bias.data[0] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(policy, rows)
