"""Time of OpenVLA-OFT's image path on one core, beside Pillow and TorchRL.

    python benchmarks/openvla_image.py

The limit is 8 ms per 256 px image.
"""

import argparse
import io
import time

import numpy as np
import torch
from PIL import Image

from torchrl_vla.envs.transforms.openvla_image import OpenVLAImageTransform


def pillow(image: torch.Tensor) -> np.ndarray:
    """The same stages with Pillow alone: another JPEG decode, integer weights."""
    buffer = io.BytesIO()
    array = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    Image.fromarray(array).save(buffer, "JPEG", quality=95)
    side = 224 * 0.9**0.5
    low, high = (224 - side) / 2, (224 + side) / 2
    resized = Image.open(buffer).resize((224, 224), Image.Resampling.LANCZOS)
    box = (low, low, high, high)
    return np.asarray(resized.resize((224, 224), Image.Resampling.BILINEAR, box=box))


def torchrl_preprocessors() -> dict:
    """TorchRL's preprocessor in the backends that are installed."""
    from torchrl.data.vla import OpenVLAImagePreprocessor

    found = {}
    for backend in ("torch_reference", "tensorflow", "pil"):
        try:
            made = OpenVLAImagePreprocessor(backend=backend, center_crop=True)
        except ImportError:
            continue
        found[f"torchrl ({backend})"] = made
    return found


def median_ms(function, image: torch.Tensor, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(image)
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((256, 256), (128, 128), (240, 320)):
        # Smooth like a camera image: noise would only time the JPEG entropy coder.
        coarse = torch.rand(1, 3, rows // 8, columns // 8, generator=generator)
        smooth = torch.nn.functional.interpolate(
            coarse, (rows, columns), mode="bicubic", align_corners=False
        )
        image = (smooth[0].clamp(0, 1) * 255).to(torch.uint8)
        candidates = {
            "OpenVLAImageTransform": OpenVLAImageTransform()._apply_transform,
            "raw_cropped": OpenVLAImageTransform(
                variant="raw_cropped"
            )._apply_transform,
            "Pillow": pillow,
        }
        for name, function in (candidates | torchrl_preprocessors()).items():
            milliseconds = median_ms(function, image, repeats)
            print(f"{rows}x{columns}  {name:28s} {milliseconds:7.2f} ms per image")


if __name__ == "__main__":
    main()
