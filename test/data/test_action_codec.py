import json
from pathlib import Path

import pytest
import torch
from torchrl.data.vla import UniformActionTokenizer, VocabTailActionTokenizer

from torchrl_vla.data.action_codec import OpenVLAActionCodec, UniformActionCodec
from torchrl_vla.data.normalization import (
    NormalizationStatistics,
    quaternion_to_axis_angle,
)

GOLDENS = Path(__file__).parents[1] / "goldens"
FIRST_ID = 31744

STATISTICS = {
    "q01": [-0.2, -0.5, 0.0],
    "q99": [0.3, 0.7, 1.0],
    "min": [-0.4, -0.6, 0.0],
    "max": [0.5, 0.9, 1.0],
    "mask": [True, True, False],
}


def golden(name):
    return json.loads((GOLDENS / f"actions_{name}.json").read_text())


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_bins_equal_the_reference_table():
    table = golden("bins")
    ids = torch.tensor(table["token_ids"]) - FIRST_ID
    assert ids.tolist() == table["window_index"]
    same(OpenVLAActionCodec().decode(ids), f64(table["normalized_value"]))


def test_encoding_equals_the_reference_table():
    table, codec = golden("tokenize"), OpenVLAActionCodec()
    ids = codec.encode(f64(table["values"]))
    assert (ids + FIRST_ID).tolist() == table["token_ids"]
    same(codec.decode(ids), f64(table["decoded"]))
    ids = codec.encode(torch.tensor(table["values_float32"]))
    assert (ids + FIRST_ID).tolist() == table["token_ids_from_float32"]
    trip = table["roundtrip_of_every_token"]
    ids = codec.encode(codec.decode(torch.tensor(trip["token_ids"]) - FIRST_ID))
    assert (ids + FIRST_ID).tolist() == trip["encode_of_decode"]


@pytest.mark.parametrize("case", golden("unnorm")["cases"])
def test_statistics_equal_the_reference(case):
    stats = NormalizationStatistics.from_dict(case["stats"], case["normalization_type"])
    actual = stats.unnormalize(f64(case["normalized"]))
    torch.testing.assert_close(actual, f64(case["actions"]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalization", ["bounds_q99", "bounds"])
def test_proprio_equals_the_reference(normalization):
    table = golden("proprio")
    stats = NormalizationStatistics.from_dict(table["stats"], normalization)
    actual = stats.normalize(f64(table["raw"]))
    torch.testing.assert_close(actual, f64(table[normalization]), rtol=0, atol=1e-12)


def test_rotation_vectors_equal_the_reference():
    table = golden("proprio")
    actual = quaternion_to_axis_angle(f64(table["quat_xyzw"]))
    torch.testing.assert_close(actual, f64(table["axis_angle"]), rtol=0, atol=1e-12)
    assert (actual.norm(dim=-1) > torch.pi).any()


def test_gripper_equals_the_reference_for_every_token():
    table = golden("gripper")["per_token"]
    stats = NormalizationStatistics.from_dict(STATISTICS)
    codec = OpenVLAActionCodec(stats, binarize_gripper=True)
    ids_VA = torch.tensor(table["token_ids"])[:, None].expand(-1, 3) - FIRST_ID
    same(codec.decode(ids_VA)[:, -1], f64(table["env_gripper"]))
    plain = OpenVLAActionCodec(stats).decode(ids_VA)
    same(plain[:, -1], f64(table["decoded"]))


def test_gripper_is_encoded_back():
    stats = NormalizationStatistics.from_dict(STATISTICS)
    codec = OpenVLAActionCodec(stats, binarize_gripper=True)
    actions = f64([[0.1, 0.2, -1.0], [0.1, 0.2, 1.0]])
    same(codec.decode(codec.encode(actions))[:, -1], actions[:, -1])


def test_encode_inverts_decode_with_statistics():
    for name in ("bounds_q99", "bounds"):
        stats = NormalizationStatistics.from_dict(STATISTICS, name)
        codec = OpenVLAActionCodec(stats)
        ids = torch.arange(256)[:, None].expand(-1, 3)
        # Ids 0 and 1 are one action.
        same(codec.encode(codec.decode(ids)), ids.clamp(min=1))


def test_torchrl_tokenizer_agrees_within_float32_when_decoding_only():
    stats = NormalizationStatistics.from_dict(STATISTICS)
    ours = OpenVLAActionCodec(stats, binarize_gripper=True)
    theirs = VocabTailActionTokenizer.from_norm_stats(
        {"key": {"action": STATISTICS}},
        "key",
        gripper_binarize=True,
        gripper_binarize_threshold=0.5,
        gripper_invert=True,
    )
    ids = torch.arange(256)[:, None].expand(-1, 3)
    same(ours.decode(ids).float(), theirs.decode(ids))
    table = golden("tokenize")
    values = f64(table["values"])
    expected = torch.tensor(table["token_ids"]) - FIRST_ID
    assert not torch.equal(VocabTailActionTokenizer().encode(values), expected)


@pytest.mark.parametrize("num_bins", [1, 5, 65, 255])
def test_odd_uniform_bins_contain_zero(num_bins):
    low, high = [-1.0, -0.3, -0.2, 0.5], [1.0, 0.3, 0.9, 2.0]
    codec = UniformActionCodec(num_bins, low=low, high=high)
    ids = codec.encode(torch.zeros(4))
    same(codec.decode(ids)[:3], torch.zeros(3, dtype=torch.float64))
    all_ids = torch.arange(num_bins)[:, None].expand(-1, 4)
    actions = codec.decode(all_ids)
    same(codec.encode(actions), all_ids)
    assert (actions >= f64(low)).all()
    assert (actions <= f64(high)).all()


def test_even_uniform_bins_are_torchrls():
    codec = UniformActionCodec(64, low=[-1.0, -0.5], high=[1.0, 2.0])
    low, high = torch.tensor([-1.0, -0.5]), torch.tensor([1.0, 2.0])
    theirs = UniformActionTokenizer(64, low=low, high=high)
    ids = torch.arange(64)[:, None].expand(-1, 2)
    torch.testing.assert_close(
        codec.decode(ids).float(), theirs.decode(ids), rtol=0, atol=2e-7
    )
    assert codec.decode(ids)[32, 0] == 1 / 64  # no bin is zero
    expected = torch.arange(64, dtype=torch.float64) / 32 - 1 + 1 / 64
    same(codec.decode(ids)[:, 0], expected)


def test_values_beyond_the_bounds_get_the_outermost_bin():
    codec = UniformActionCodec(5)
    assert codec.encode(torch.tensor([-9.0, 9.0])).tolist() == [0, 4]
    assert OpenVLAActionCodec().encode(torch.tensor([-9.0, 9.0])).tolist() == [255, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.decode(torch.tensor([0, 0, 256])), r"0\.\.256.*0\.\.255"),
        (lambda c: c.decode(torch.tensor([0, 0, -1])), r"-1\.\.0"),
        (lambda c: c.decode(torch.zeros(3)), "float32"),
        (lambda c: c.decode(torch.tensor([0, 0])), "action_dim = 3"),
        (lambda c: c.encode(torch.zeros(2, 7)), r"\(2, 7\)"),
        (lambda c: c.encode(torch.tensor([0.0, 0.0, torch.nan])), "NaN"),
    ],
)
def test_bad_values(call, message):
    codec = OpenVLAActionCodec(NormalizationStatistics.from_dict(STATISTICS))
    with pytest.raises(ValueError, match=message):
        call(codec)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: UniformActionCodec(0), ValueError, "num_bins is 0"),
        (lambda: UniformActionCodec(3, low=1.0, high=1.0), ValueError, "low < high"),
        (lambda: UniformActionCodec(3, low=[0.0], high=1.0), ValueError, "one shape"),
        (lambda: OpenVLAActionCodec(num_bins=1), ValueError, "num_bins is 1"),
        (
            lambda: OpenVLAActionCodec(
                NormalizationStatistics.from_dict({"q01": [0.0], "q99": [1.0]}),
                binarize_gripper=True,
            ),
            ValueError,
            "binarize_gripper",
        ),
        (
            lambda: NormalizationStatistics.from_dict(STATISTICS, "mean"),
            ValueError,
            "bounds_q99, bounds",
        ),
        (
            lambda: NormalizationStatistics.from_dict({"min": [0.0], "max": [1.0]}),
            KeyError,
            r"q01.*'max', 'min'",
        ),
        (
            lambda: NormalizationStatistics.from_dict({"q01": [0.0], "q99": [1, 2]}),
            ValueError,
            "equal lists",
        ),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()
