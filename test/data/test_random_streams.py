"""Numbers that are pure functions of their seeds, and look random."""

import hashlib

import pytest
import torch

from torchrl_vla.data.random_streams import derive_seed, mix, uniform


def test_mix_is_splitmix64():
    """The first outputs for state 1234567 of the public reference (Vigna, 2015)."""
    gamma = 0x9E3779B97F4A7C15
    states = [(1234567 + gamma * i) % 2**64 for i in range(1, 4)]
    signed = [s - 2**64 if s >= 2**63 else s for s in states]
    out = [x % 2**64 for x in mix(torch.tensor(signed)).tolist()]
    assert out == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_same_seed_gives_the_same_numbers():
    seeds = torch.tensor([0, 1, -5, 2**62])
    assert torch.equal(uniform(seeds, 9), uniform(seeds.clone(), 9))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    uniform(seeds, 9)
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_do_not_depend_on_what_else_is_in_the_batch():
    seeds = torch.arange(100, 164)
    whole = uniform(seeds, 16)
    for row in (0, 17, 63):
        assert torch.equal(uniform(seeds[row : row + 1], 16)[0], whole[row])
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(seeds[shuffled], 16), whole[shuffled])
    # More numbers begin with the same ones.
    assert torch.equal(uniform(seeds, 40)[:, :16], whole)
    assert uniform(seeds.reshape(8, 8), 3).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("num_seeds", "num"), [(1, 100_000), (100_000, 1), (1000, 100)]
)
@pytest.mark.parametrize("first", [0, 10**12])
def test_numbers_are_uniform(num_seeds, num, first):
    """Chi-square over 100 bins, along a seed's numbers and across seeds in a row."""
    u = uniform(first + torch.arange(num_seeds), num).flatten().double()
    counts = torch.histc(u, bins=100, min=0, max=1)
    expected = u.numel() / 100
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    # 99 degrees of freedom: 99.9 % of good generators are in 58 .. 149.
    assert 58 < chi_square < 149
    assert abs(u.mean().item() - 0.5) < 4 * (1 / 12 / u.numel()) ** 0.5


def test_neighbours_are_not_correlated():
    u = uniform(torch.arange(1000), 100).double() - 0.5
    for left, right in [
        (u[:, :-1], u[:, 1:]),  # numbers in a row
        (u[:-1], u[1:]),  # seeds in a row: an episode's decisions
        (u[:-1, 1:], u[1:, :-1]),  # a shifted copy
    ]:
        correlation = (left * right).mean().item() * 12
        assert abs(correlation) < 4 / left.numel() ** 0.5


def test_the_interval_is_open():
    """Zero or one would make a logarithm infinite."""
    u = uniform(torch.arange(2000), 1000)
    assert u.dtype == torch.float32
    assert u.min() > 0
    assert u.max() < 1
    smallest, largest = 2.0**-24, 1 - 2.0**-24
    assert u.min() >= smallest
    assert u.max() <= largest
    assert torch.isfinite(-(-u.log()).log()).all()

    # Odd multiples of 2**-24: neither end can be hit, however many are drawn.
    assert (u.double() * 2**24 % 2 == 1).all()


def test_no_seed_is_another_one_shifted():
    """Seeds that differ by the counter's stride would share numbers if unmixed."""
    stride = 0x9E3779B97F4A7C15 - 2**64
    u = uniform(torch.tensor([5, 5 + stride]), 100)
    assert not (u[1, :-1] == u[0, 1:]).any()


def test_derive_seed():
    seeds = {
        derive_seed(*parts)
        for parts in [(1,), (2,), (1, 2), (2, 1), (12,), (1, 2, 0), (0, 1, 2), ("1a",)]
    }
    assert len(seeds) == 8, "order and cut matter"
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Fixed for all times: a resumed run must draw the same.
    digest = hashlib.blake2b(b"0/1/2", digest_size=8).digest()
    assert derive_seed(0, 1, 2) == int.from_bytes(digest, "big") >> 1
