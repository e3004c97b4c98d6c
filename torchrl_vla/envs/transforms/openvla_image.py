"""Camera images as OpenVLA-OFT was trained on them, bit for bit where it can be.

Shape legend: ``N`` images, ``C`` channels, ``Y, X`` pixels.
"""

import io
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded, TensorSpec
from torchrl.envs.transforms import ObservationTransform
from torchrl.envs.transforms.utils import _set_missing_tolerance

from torchrl_vla.data import keys

try:
    import simplejpeg
    from PIL import Image
except ModuleNotFoundError:  # the transform says what to install
    simplejpeg = Image = None

VARIANTS = ("libero", "raw_cropped", "bicubic")
CROP_AREA = 0.9
_LANCZOS_RADIUS = 3
_CACHED_SIZES = 32


def jpeg_round_trip(images_NCYX: Tensor, quality: int = 95) -> Tensor:
    """Encode and decode as the training data was, uint8 to uint8 of the same shape.

    Pillow's encoder (4:2:0) and TensorFlow's decoder (fast integer transform), which
    simplejpeg reproduces to the bit. Pillow's own decoder uses the accurate transform
    and differs by up to 14 grey levels.
    """
    decoded = []
    for image_CYX in images_NCYX:
        buffer = io.BytesIO()
        array = np.ascontiguousarray(image_CYX.permute(1, 2, 0).numpy())
        Image.fromarray(array).save(buffer, "JPEG", quality=quality)
        pixels = simplejpeg.decode_jpeg(
            buffer.getvalue(), "RGB", fastdct=True, fastupsample=False
        )
        decoded.append(torch.from_numpy(pixels).permute(2, 0, 1))
    return torch.stack(decoded)


def lanczos_resize(images_NCYX: Tensor, size: int) -> Tensor:
    """Antialiased Lanczos3 to ``size x size``, float32 0..255 before rounding.

    Source: ``tf.image.resize(method="lanczos3", antialias=True)``, as two products with
    matrices that are computed once per size.
    """
    rows, columns = images_NCYX.shape[-2:]
    if (rows, columns) == (size, size):
        return images_NCYX.float()
    vertical = _lanczos_matrix(rows, size)
    horizontal = _lanczos_matrix(columns, size)
    return vertical @ images_NCYX.float() @ horizontal.T


def center_crop(images_NCYX: Tensor, size: int, area: float = CROP_AREA) -> Tensor:
    """The central ``area`` of an image, bilinear to ``size x size``, float32 0..1.

    ``area`` 0.9 is 0.9487 of each side. The source position of pixel ``i`` is
    ``(side - 1) (offset + i (1 - 2 offset) / (size - 1))``: corners on corners.

    Source: ``tf.image.crop_and_resize`` as SimpleVLA-RL calls it (at 7c51662d).
    """
    top, bottom, y_lerp = _crop_grid(images_NCYX.shape[-2], size, area)
    left, right, x_lerp = _crop_grid(images_NCYX.shape[-1], size, area)
    # A product, not a quotient, and columns before rows: the reference's roundings, all
    # of which the truncation to integers would show.
    unit = images_NCYX.float() * torch.tensor(1 / 255)
    from_left = unit.index_select(-1, left)
    across = from_left + (unit.index_select(-1, right) - from_left) * x_lerp
    from_top = across.index_select(-2, top)
    down = across.index_select(-2, bottom) - from_top
    return (from_top + down * y_lerp.unsqueeze(-1)).clamp(0, 1)


class OpenVLAImageTransform(ObservationTransform):
    """Make camera images what OpenVLA-OFT's towers expect, in the environment's worker.

    ``libero``: JPEG round trip, Lanczos3 to ``size``, rounding, central crop of 0.9 of
    the area back to ``size``, ``trunc(255.5 x)``. ``raw_cropped`` (RoboTwin): the crop
    alone, straight from the camera image. ``bicubic``: Pillow's bicubic resize, the
    image processor of the checkpoint without any crop.

    Source: SimpleVLA-RL at 7c51662d. TorchRL's ``OpenVLAImagePreprocessor`` needs
    torchvision or TensorFlow for this path and decodes JPEG with another transform;
    its results are off by some grey levels.

    Args:
        in_keys: cameras.
        out_keys: where the results go; the same keys by default.
        size: pixels per side.
        variant: ``libero``, ``raw_cropped`` or ``bicubic``.
        crop: of ``libero``; off for a policy that was trained without augmentation.
        jpeg_quality: of ``libero``; ``None`` leaves the round trip out.

    Keys read: ``in_keys`` uint8 ``[*B, 3, Y, X]``, 0..255, any size. Keys written:
    ``out_keys`` uint8 ``[*B, 3, size, size]``.

    Raises:
        ModuleNotFoundError: without Pillow and simplejpeg.
        ValueError: for an unknown variant, another dtype, or images that are no RGB.

    Example:
        >>> from tensordict import TensorDict
        >>> transform = OpenVLAImageTransform()
        >>> image = torch.full((2, 3, 256, 256), 128, dtype=torch.uint8)
        >>> td = transform(TensorDict({("observation", "image"): image}, [2]))
        >>> td["observation", "image"].shape, td["observation", "image"].unique()
        (torch.Size([2, 3, 224, 224]), tensor([128], dtype=torch.uint8))
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey] = (keys.IMAGE,),
        out_keys: Sequence[NestedKey] | None = None,
        *,
        size: int = 224,
        variant: str = "libero",
        crop: bool = True,
        jpeg_quality: int | None = 95,
    ) -> None:
        if variant not in VARIANTS:
            raise ValueError(
                f"variant is {variant!r}; allowed are {', '.join(VARIANTS)}"
            )
        if size < 2 or (jpeg_quality is not None and not 1 <= jpeg_quality <= 100):
            raise ValueError(
                f"size is {size} and jpeg_quality {jpeg_quality}; allowed are size >= "
                "2 and a quality of 1 to 100 or None"
            )
        if simplejpeg is None:
            raise ModuleNotFoundError(
                "OpenVLAImageTransform needs Pillow and simplejpeg: "
                "pip install 'torchrl-vla[openvla]'"
            )
        super().__init__(list(in_keys), list(in_keys if out_keys is None else out_keys))
        self.size = size
        self.variant = variant
        self.crop = crop
        self.jpeg_quality = jpeg_quality

    def _apply_transform(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8 or images.ndim < 3 or images.shape[-3] != 3:
            raise ValueError(
                f"an image is {images.dtype} {tuple(images.shape)}; expected is uint8 "
                "[*B, 3, Y, X], 0..255"
            )
        if 0 in images.shape:
            return images.new_zeros(*images.shape[:-2], self.size, self.size)
        flat_NCYX = images.reshape(-1, *images.shape[-3:]).cpu()
        result = getattr(self, f"_{self.variant}")(flat_NCYX)
        return result.reshape(*images.shape[:-2], self.size, self.size).to(
            images.device
        )

    def _libero(self, images_NCYX: Tensor) -> Tensor:
        if self.jpeg_quality is not None:
            images_NCYX = jpeg_round_trip(images_NCYX, self.jpeg_quality)
        resized = lanczos_resize(images_NCYX, self.size)
        resized = resized.round_().clamp_(0, 255).to(torch.uint8)
        return self._raw_cropped(resized) if self.crop else resized

    def _raw_cropped(self, images_NCYX: Tensor) -> Tensor:
        # TensorFlow's conversion to integers: scale by 255.5 and truncate.
        return (center_crop(images_NCYX, self.size) * 255.5).to(torch.uint8)

    def _bicubic(self, images_NCYX: Tensor) -> Tensor:
        resized = [
            np.asarray(
                Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).resize(
                    (self.size, self.size), Image.Resampling.BICUBIC
                )
            )
            for image in images_NCYX
        ]
        return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).contiguous()

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        with _set_missing_tolerance(self, True):
            return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            spec = observation_spec[in_key]
            observation_spec[out_key] = Bounded(
                0,
                255,
                shape=(*spec.shape[:-2], self.size, self.size),
                dtype=torch.uint8,
                device=spec.device,
            )
        return observation_spec


@lru_cache(_CACHED_SIZES)
def _lanczos_matrix(size_in: int, size_out: int) -> Tensor:
    """Weights ``[size_out, size_in]``; rows sum to 1.

    In float32 throughout, as the reference computes them: positions of some hundreds
    leave so few digits for the fraction that exact weights differ visibly.
    """
    f32 = np.float32
    ratio = f32(1) / (f32(size_out) / f32(size_in))
    # Downscaling widens the kernel, which is what antialiasing means.
    kernel_scale = max(ratio, f32(1))
    center = (np.arange(size_out, dtype=f32)[:, None] + f32(0.5)) * ratio
    position = np.arange(size_in, dtype=f32)[None] + f32(0.5) - center
    x = np.abs(position * (f32(1) / kernel_scale))
    radius, pi = f32(_LANCZOS_RADIUS), f32(math.pi)
    near = np.maximum(x, f32(1e-3))
    weights = radius * np.sin(pi * near) * np.sin(pi * near / radius)
    weights /= pi * pi * near * near
    weights[x <= f32(1e-3)] = 1
    weights[x > radius] = 0
    weights *= f32(1) / weights.sum(1, keepdims=True)
    return torch.from_numpy(weights)


@lru_cache(_CACHED_SIZES)
def _crop_grid(side: int, size: int, area: float) -> tuple[Tensor, Tensor, Tensor]:
    """Lower and upper source index and the weight of the upper one, per pixel."""
    f32 = np.float32
    length = np.sqrt(f32(area))
    offset = (f32(1) - length) / f32(2)
    first = offset * f32(side - 1)
    step = (offset + length - offset) * f32(side - 1) / f32(size - 1)
    source = first + np.arange(size, dtype=f32) * step
    lower, upper = np.floor(source), np.ceil(source)
    return (
        torch.from_numpy(lower.astype(np.int64)),
        torch.from_numpy(upper.astype(np.int64)),
        torch.from_numpy(source - lower),
    )
