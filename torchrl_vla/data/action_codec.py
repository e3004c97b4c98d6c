"""Between action tokens and the numbers an environment executes.

A policy emits window ids ``0..V-1``. A codec says what they mean: ``decode`` on the way
into the environment, ``encode`` on the way from a demonstration to a training target.
Both work in float64 on the CPU, because the reference programs do, and closed-loop
simulations amplify a rounding difference.

Shape legend: ``A`` action dimensions, ``V`` bins.
"""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torchrl.data.vla import ActionTokenizerBase

from torchrl_vla.data.normalization import NormalizationStatistics


class ActionCodec(ActionTokenizerBase):
    """What every codec is: ``num_bins`` ids per dimension, ``decode`` and ``encode``.

    It is a TorchRL ``ActionTokenizerBase`` (``vocab_size`` is ``num_bins``), so it also
    fits ``torchrl.envs.transforms.ActionTokenizerTransform``. The difference: values
    are checked, and float64 from end to end.

    Args:
        num_bins: ``V``, ids per dimension.
        action_dim: ``A``; ``None`` is any number of dimensions.
    """

    def __init__(self, num_bins: int, action_dim: int | None) -> None:
        super().__init__()
        self.num_bins = num_bins
        self.action_dim = action_dim

    @property
    def vocab_size(self) -> int:
        """``num_bins``, under TorchRL's name."""
        return self.num_bins

    def decode(self, tokens: Tensor) -> Tensor:
        """Actions of window ids.

        Args:
            tokens: integers ``[*, A]`` in ``[0, num_bins)``.

        Returns:
            float64 ``[*, A]`` in env units, on the device of ``tokens``.

        Raises:
            ValueError: for ids outside the window, a floating dtype or another ``A``.
        """
        self._check_dim("tokens", tokens)
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(f"tokens are {tokens.dtype}; integers are expected")
        ids = tokens.to("cpu", torch.int64)
        if ids.numel() and not 0 <= ids.min() <= ids.max() < self.num_bins:
            raise ValueError(
                f"tokens span {ids.min()}..{ids.max()}; allowed are window ids "
                f"0..{self.num_bins - 1} (subtract the first id of the action window "
                "from vocabulary ids)"
            )
        return self._decode(ids).to(tokens.device)

    def encode(self, actions: Tensor) -> Tensor:
        """Window ids of actions; values beyond the bounds get the outermost bin.

        Args:
            actions: floating ``[*, A]`` in env units.

        Returns:
            int64 ``[*, A]`` in ``[0, num_bins)``, on the device of ``actions``.

        Raises:
            ValueError: for another ``A``, NaN or infinity.
        """
        self._check_dim("actions", actions)
        values = actions.to("cpu", torch.float64)
        if not values.isfinite().all():
            raise ValueError("actions hold NaN or infinity; finite values are expected")
        return self._encode(values).to(actions.device)

    def _check_dim(self, name: str, values: Tensor) -> None:
        if self.action_dim is not None and values.shape[-1:] != (self.action_dim,):
            raise ValueError(
                f"{name} have shape {tuple(values.shape)}; the last dimension must be "
                f"action_dim = {self.action_dim}"
            )

    @abstractmethod
    def _decode(self, ids: Tensor) -> Tensor: ...

    @abstractmethod
    def _encode(self, values: Tensor) -> Tensor: ...


class OpenVLAActionCodec(ActionCodec):
    """OpenVLA's bins, statistics and gripper.

    256 edges from -1 to 1 give 255 bins; window id ``w`` (vocabulary id ``31744 + w``)
    is bin ``255 - w``, so a **higher id is a lower action**. Ids 0 and 1 both decode to
    the highest centre, and 0 never comes back from encoding one. Then
    :meth:`NormalizationStatistics.unnormalize`, and for the gripper (last dimension,
    outside the mask) ``-sign(2 g - 1)``: the switch is at ``g = 0.5``, not 0.

    Source: openvla-oft at 213c5ff8 (``ActionTokenizer``) and SimpleVLA-RL at 7c51662d
    (gripper). TorchRL's ``VocabTailActionTokenizer`` with statistics,
    ``gripper_binarize_threshold=0.5`` and ``gripper_invert=True`` decodes to the same
    numbers rounded to float32, but encodes in the dtype it is given, which moves values
    at bin edges.

    Args:
        statistics: of the actions; ``None`` leaves them in -1..1.
        binarize_gripper: rescale, binarise and negate the last dimension (LIBERO: -1
            opens, 1 closes). Encoding maps it back, -1 to 1 and 1 to 0.
        num_bins: ``V``, edges and ids.

    Raises:
        ValueError: for ``num_bins < 2``, or a gripper that the mask also normalises.

    Example:
        >>> codec = OpenVLAActionCodec()
        >>> codec.decode(torch.tensor([0, 128, 255])).tolist()
        [0.996078431372549, 0.0, -0.996078431372549]
        >>> codec.encode(torch.tensor([1.0, 0.0, -1.0])).tolist()
        [0, 128, 255]
    """

    def __init__(
        self,
        statistics: NormalizationStatistics | None = None,
        *,
        binarize_gripper: bool = False,
        num_bins: int = 256,
    ) -> None:
        if num_bins < 2:
            raise ValueError(f"num_bins is {num_bins}; it must be >= 2")
        if binarize_gripper and statistics is not None and bool(statistics.mask[-1]):
            raise ValueError(
                "binarize_gripper is on, but the statistics normalise the last "
                "dimension too (its mask is true); switch binarize_gripper off or use "
                "statistics whose mask leaves the gripper out"
            )
        super().__init__(num_bins, None if statistics is None else len(statistics.low))
        self.statistics = statistics
        self.binarize_gripper = binarize_gripper
        # numpy's linspace, not torch's: they differ in the last bit.
        edges = np.linspace(-1.0, 1.0, num_bins)
        self._edges = torch.from_numpy(edges)
        self._centers = torch.from_numpy((edges[:-1] + edges[1:]) / 2.0)

    def _decode(self, ids: Tensor) -> Tensor:
        actions = self._centers[(self.num_bins - 1 - ids).clamp(max=self.num_bins - 2)]
        if self.statistics is not None:
            actions = self.statistics.unnormalize(actions)
        if self.binarize_gripper:
            gripper = -torch.sign(2 * actions[..., -1:] - 1)
            actions = torch.cat([actions[..., :-1], gripper], -1)
        return actions

    def _encode(self, values: Tensor) -> Tensor:
        if self.binarize_gripper:
            gripper = (1 - values[..., -1:]) / 2
            values = torch.cat([values[..., :-1], gripper], -1)
        if self.statistics is not None:
            values = self.statistics.normalize(values)
        inside = values.clamp(-1, 1).contiguous()
        return self.num_bins - torch.bucketize(inside, self._edges, right=True)


class UniformActionCodec(ActionCodec):
    """Equal bins over ``[low, high]`` per dimension; an odd number contains zero.

    ``centre_i = low + (i + 1/2) / V * (high - low)``. With an odd ``num_bins`` zero is
    exactly a centre: in a dimension whose range is not symmetric the centres are
    shifted by less than half a bin for it. A policy without a zero bin cannot keep
    still: with 64 bins every command that should be 0 is 0.016, and a hand drifts away.

    Source: as TorchRL's ``UniformActionTokenizer`` (the same ids and, but for its
    float32, the same centres where nothing is shifted).

    Args:
        num_bins: ``V``.
        low: lower bound per dimension, ``[A]``, or a float for all dimensions.
        high: upper bound likewise.

    Raises:
        ValueError: for ``num_bins < 1`` or bounds that are not ``low < high``.

    Example:
        >>> codec = UniformActionCodec(5, low=[-1.0, -0.25], high=[1.0, 1.0])
        >>> codec.decode(torch.tensor([[2, 1], [4, 3]])).tolist()
        [[0.0, 0.0], [0.8, 0.5]]
    """

    def __init__(
        self,
        num_bins: int,
        *,
        low: float | Sequence[float] | Tensor = -1.0,
        high: float | Sequence[float] | Tensor = 1.0,
    ) -> None:
        if num_bins < 1:
            raise ValueError(f"num_bins is {num_bins}; it must be >= 1")
        self_low = torch.as_tensor(low, dtype=torch.float64)
        self_high = torch.as_tensor(high, dtype=torch.float64)
        if self_low.shape != self_high.shape or not (self_low < self_high).all():
            raise ValueError(
                f"low is {low} and high is {high}; they must have one shape and "
                "low < high in every dimension"
            )
        super().__init__(num_bins, len(self_low) if self_low.ndim else None)
        self._low = self_low
        self._span = self_high - self_low
        self._shift = self._zero_shift() if num_bins % 2 else torch.zeros_like(self_low)

    @property
    def low(self) -> Tensor:
        """Lower bounds, ``[A]`` or one number, float64."""
        return self._low

    @property
    def high(self) -> Tensor:
        """Upper bounds likewise."""
        return self._low + self._span

    def _zero_shift(self) -> Tensor:
        """Minus the centre that is closest to zero, where the range contains zero."""
        at_zero = torch.zeros_like(self._low)
        nearest = self._center(self._bin(at_zero))
        inside = (self._low < 0) & (self._low + self._span > 0)
        return torch.where(inside, -nearest, at_zero)

    def _bin(self, values: Tensor) -> Tensor:
        scaled = (values - self._low) / self._span
        ids = (scaled * self.num_bins).floor().to(torch.int64)
        return ids.clamp(0, self.num_bins - 1)

    def _center(self, ids: Tensor) -> Tensor:
        return self._low + (ids.double() + 0.5) / self.num_bins * self._span

    def _decode(self, ids: Tensor) -> Tensor:
        return self._center(ids) + self._shift

    def _encode(self, values: Tensor) -> Tensor:
        return self._bin(values - self._shift)
