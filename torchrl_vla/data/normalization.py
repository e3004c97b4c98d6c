"""Units of actions and proprioception: statistics of a data set, and rotations.

Shape legend: ``A`` dimensions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NORMALIZATIONS = {"bounds_q99": ("q01", "q99"), "bounds": ("min", "max")}
"""Which two statistics are the bounds: quantiles (LIBERO) or extremes (ALOHA)."""

_RANGE_EPS = 1e-8


@dataclass(frozen=True)
class NormalizationStatistics:
    """Per-dimension bounds that are mapped to -1 and 1, and back.

    ``normalize(x) = clip(2 (x - low) / (high - low + 1e-8) - 1, -1, 1)`` and
    ``unnormalize(y) = (y + 1) / 2 * (high - low + 1e-8) + low``, both only where
    ``mask`` is true; other dimensions (a gripper) pass through unchanged.

    Source: openvla-oft (moojink/openvla-oft at 213c5ff8), ``_unnormalize_actions`` and
    ``normalize_proprio``; equal to them in float64.

    Args:
        low: float64 ``[A]``.
        high: float64 ``[A]``.
        mask: bool ``[A]``.

    Example:
        >>> stats = NormalizationStatistics.from_dict(
        ...     {"q01": [0.0, 0.0], "q99": [4.0, 1.0], "mask": [True, False]})
        >>> stats.unnormalize(torch.tensor([0.0, 0.5])).tolist()
        [2.000000005, 0.5]
    """

    low: Tensor
    high: Tensor
    mask: Tensor

    @classmethod
    def from_dict(
        cls,
        statistics: Mapping[str, Sequence[float]],
        normalization: str = "bounds_q99",
    ) -> "NormalizationStatistics":
        """From the ``"action"`` or ``"proprio"`` entry of ``dataset_statistics.json``.

        Args:
            statistics: lists by name; a missing ``mask`` is all true.
            normalization: ``bounds_q99`` (``q01``, ``q99``) or ``bounds`` (``min``,
                ``max``).

        Raises:
            ValueError: for another normalization or lists of unequal length.
            KeyError: when the two lists are not there.
        """
        if normalization not in NORMALIZATIONS:
            raise ValueError(
                f"normalization is {normalization!r}; allowed are "
                f"{', '.join(NORMALIZATIONS)}"
            )
        names = NORMALIZATIONS[normalization]
        for name in names:
            if name not in statistics:
                raise KeyError(
                    f"normalization {normalization!r} needs {names}; the statistics "
                    f"have {sorted(statistics)}. Choose another normalization."
                )
        low, high = (torch.tensor(statistics[n], dtype=torch.float64) for n in names)
        mask = torch.tensor(statistics.get("mask", [True] * len(low)))
        if not low.shape == high.shape == mask.shape or low.ndim != 1:
            raise ValueError(
                f"{names[0]}, {names[1]} and mask have shapes {tuple(low.shape)}, "
                f"{tuple(high.shape)} and {tuple(mask.shape)}; they must be equal lists"
            )
        return cls(low, high, mask.bool())

    def normalize(self, values: Tensor) -> Tensor:
        """``[*, A]`` in units to float64 ``[*, A]`` in -1..1 where masked."""
        values = values.to("cpu", torch.float64)
        scaled = 2 * (values - self.low) / (self.high - self.low + _RANGE_EPS) - 1
        return torch.where(self.mask, scaled.clamp(-1, 1), values)

    def unnormalize(self, values: Tensor) -> Tensor:
        """``[*, A]`` in -1..1 to float64 ``[*, A]`` in units where masked."""
        values = values.to("cpu", torch.float64)
        span = self.high - self.low + _RANGE_EPS
        return torch.where(self.mask, 0.5 * (values + 1) * span + self.low, values)


def quaternion_to_axis_angle(quaternion: Tensor) -> Tensor:
    """Rotation vectors, as the proprioception of LIBERO policies was recorded.

    ``2 acos(w) / sqrt(1 - w^2) * (x, y, z)``; zero where ``w`` is 1 or -1. Angles reach
    2 pi: a negative ``w`` is *not* turned into the shorter rotation.

    Source: SimpleVLA-RL at 7c51662d (robosuite's ``quat2axisangle``).

    Args:
        quaternion: floating ``[*, 4]``, unit length, order x, y, z, w.

    Returns:
        float64 ``[*, 3]``, radians.

    Example:
        >>> quaternion_to_axis_angle(torch.tensor([0.0, 0.0, 1.0, 0.0])).tolist()
        [0.0, 0.0, 3.141592653589793]
    """
    values = quaternion.to(torch.float64)
    cosine = values[..., 3:].clamp(-1, 1)
    sine = (1 - cosine * cosine).sqrt()
    # math.isclose(sine, 0) of the reference is exact equality.
    scale = torch.where(sine == 0, 0.0, 2 * cosine.acos() / sine)
    return values[..., :3] * scale
