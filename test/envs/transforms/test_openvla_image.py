"""Images against recorded stages of the reference's TensorFlow path."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torchrl.envs import TransformedEnv
from torchrl.envs.custom import ToyVLAEnv
from torchrl.envs.utils import check_env_specs

from torchrl_vla.data import keys
from torchrl_vla.envs.transforms import MultiAction
from torchrl_vla.envs.transforms.openvla_image import (
    OpenVLAImageTransform,
    center_crop,
    jpeg_round_trip,
    lanczos_resize,
)

GOLDENS = Path(__file__).parents[2] / "goldens" / "openvla_oft"
IMAGES = ["scene_256", "noise_256", "gradient_256", "scene_128", "scene_224"]


@pytest.fixture(scope="module")
def stages():
    def load(name):
        recorded = np.load(GOLDENS / f"preprocess_{name}.npz", allow_pickle=False)
        return {
            key: torch.from_numpy(value).permute(2, 0, 1)[None]
            for key, value in recorded.items()
            if value.ndim == 3 and value.shape[-1] == 3
        }

    return load


def transform(image, **options):
    return OpenVLAImageTransform(**options)._apply_transform(image)


def assert_same_image(actual, expected):
    """At most one grey level on less than 0.1 % of the values."""
    difference = (actual.int() - expected.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).double().mean() < 1e-3


@pytest.mark.parametrize("name", IMAGES)
def test_stages_equal_the_reference(name, stages):
    recorded = stages(name)
    image = recorded["input"]
    assert_same_image(transform(image), recorded["cropped"])
    if "jpeg" in recorded:
        assert torch.equal(jpeg_round_trip(image), recorded["jpeg"])
    if "resized" in recorded:
        assert_same_image(transform(image, crop=False), recorded["resized"])
    if "raw_cropped" in recorded:
        raw = transform(image, variant="raw_cropped")
        assert torch.equal(raw, recorded["raw_cropped"])


def test_float_stages_equal_the_reference(stages):
    recorded = stages("scene_256")
    resized = lanczos_resize(recorded["jpeg"], 224)[..., 5::8, 5::8]
    assert_close(resized, recorded["resized_float"], rtol=0, atol=5e-4)
    cropped = center_crop(recorded["resized"], 224)[..., 5::8, 5::8]
    assert_close(cropped, recorded["cropped_float"], rtol=0, atol=1e-6)


def test_both_cameras_of_libero_equal_the_reference(stages):
    recorded = stages("libero_env_path")
    # LIBERO's images come upside down and mirrored.
    for source, result in (
        ("agentview_image", "libero_image"),
        ("wrist_source", "libero_wrist_image"),
    ):
        upright = recorded[source].flip(-1, -2)
        assert_same_image(transform(upright, crop=False), recorded[result])


def test_bicubic_equals_the_image_processor(stages):
    recorded = stages("scene_256")
    actual = transform(recorded["input"], variant="bicubic")
    assert torch.equal(actual, recorded["processor_direct_u8"])


def test_crop_is_09_of_the_area():
    ramp = torch.arange(224, dtype=torch.uint8).expand(1, 3, 224, 224)
    row = center_crop(ramp, 224)[0, 0, 0] * 255
    offset = (1 - 0.9**0.5) / 2 * 223
    assert_close(row[[0, -1]], torch.tensor([offset, 223 - offset]), rtol=0, atol=1e-3)


def test_constant_images_stay_constant_in_any_size():
    for rows, columns in ((256, 256), (240, 320), (480, 640), (97, 31), (224, 100)):
        image = torch.full((1, 3, rows, columns), 77, dtype=torch.uint8)
        for variant in ("libero", "raw_cropped", "bicubic"):
            result = transform(image, variant=variant)
            assert result.shape == (1, 3, 224, 224)
            assert result.unique().tolist() == [77], (rows, columns, variant)


def test_rows_and_columns_are_not_mixed_up(stages):
    image = stages("scene_256")["input"][..., :160, :]
    resized = lanczos_resize(image, 224)
    turned = lanczos_resize(image.transpose(-1, -2), 224)
    assert_close(resized, turned.transpose(-1, -2), rtol=0, atol=1e-3)
    cropped = center_crop(image, 224)
    turned = center_crop(image.transpose(-1, -2), 224)
    assert_close(cropped, turned.transpose(-1, -2), rtol=0, atol=1e-6)
    assert not torch.equal(cropped, turned)


def test_lanczos_against_pillow_on_a_non_square_image(stages):
    from PIL import Image

    # Without extremes, since Pillow clips and rounds between its two passes.
    image = stages("noise_256")["input"][..., :180, :] // 2 + 64
    pil = Image.fromarray(image[0].permute(1, 2, 0).contiguous().numpy())
    pil = pil.resize((224, 224), Image.Resampling.LANCZOS)
    expected = torch.from_numpy(np.array(pil)).permute(2, 0, 1)[None]
    actual = lanczos_resize(image, 224).round().clamp(0, 255)
    assert (actual - expected).abs().max() <= 1


def test_batches_equal_single_images(stages):
    first, second = stages("scene_256")["input"], stages("noise_256")["input"]
    batch = torch.stack([first, second])  # [2, 1, 3, Y, X]
    result = transform(batch)
    assert torch.equal(result[0], transform(first))
    assert torch.equal(result[1], transform(second))
    assert transform(batch[:0]).shape == (0, 1, 3, 224, 224)


@pytest.mark.parametrize("batch_size", [(), (2,)])
def test_inside_an_environment(batch_size):
    env = ToyVLAEnv(image_shape=(3, 32, 48), batch_size=batch_size, seed=0)
    env = TransformedEnv(env, MultiAction(2))
    env.append_transform(OpenVLAImageTransform(size=56))
    check_env_specs(env)
    image = env.rollout(2)["next"][keys.IMAGE]
    assert image.shape == (*batch_size, 2, 3, 56, 56)
    assert image.dtype == torch.uint8
    assert env.observation_spec[keys.IMAGE].shape == (*batch_size, 3, 56, 56)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(3, 8, 8),
        torch.zeros(8, 8, 3, dtype=torch.uint8),
        torch.zeros(8, 8, dtype=torch.uint8),
    ],
)
def test_bad_images(bad):
    with pytest.raises(ValueError, match=r"expected is uint8 \[\*B, 3, Y, X\]"):
        transform(bad)


def test_bad_arguments():
    with pytest.raises(ValueError, match="libero, raw_cropped, bicubic"):
        OpenVLAImageTransform(variant="lanczos")
    with pytest.raises(ValueError, match="jpeg_quality 0"):
        OpenVLAImageTransform(jpeg_quality=0)
