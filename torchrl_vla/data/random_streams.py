"""Random numbers that are pure functions of what they are for.

A stream is named by integers (run seed, group, episode, decision). Its numbers do not
depend on how many workers there are, on what else shares a batch, or on anything drawn
before, so a resumed run needs no generator state and one worker equals two.
"""

import hashlib

import torch

_GOLDEN_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def derive_seed(*parts: int | str) -> int:
    """Hash of ``parts`` (order matters), an integer in ``[0, 2**63)``."""
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    # `>>` on int64 copies the sign bit; the generator is defined on unsigned numbers.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function, element-wise on int64 (arithmetic modulo 2**64).

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014.
    """
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seeds: torch.Tensor, num: int) -> torch.Tensor:
    """``num`` uniform numbers for every seed.

    Args:
        seeds: int64, any shape ``[*B]``.
        num: numbers per seed.

    Returns:
        float32 ``[*B, num]`` strictly inside (0, 1), with a resolution of ``2**-23``.

    Example:
        >>> import torch
        >>> u = uniform(torch.tensor([1, 2]), 3)
        >>> torch.equal(u[1], uniform(torch.tensor([2]), 3)[0])
        True
    """
    counter = torch.arange(1, num + 1, device=seeds.device) * _GOLDEN_GAMMA
    bits = _shift_right(mix(mix(seeds).unsqueeze(-1) + counter), 41)
    return (bits.to(torch.float32) + 0.5) * 2.0**-23
