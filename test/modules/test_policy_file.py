"""A trained compact policy in a file, and what is refused when it is read."""

import json

import pytest
import torch

from torchrl_vla.config.schema import PolicyConfig
from torchrl_vla.data.dataset_statistics import save_statistics
from torchrl_vla.modules import policy_file
from torchrl_vla.modules.factory import compact_shape, make_codec, make_policy

CPU = torch.device("cpu")
SIZES = {"chunk_size": 8, "action_dim": 7, "state_dim": 9, "image_size": 96}
OPTIONS = {"num_bins": 33, "hidden_dim": 16, "cameras": ["image"]}
STATISTICS = {"libero_object": {"action": {"q01": [-0.5] * 7, "q99": [0.25] * 7}}}
BOUND = [0.5] * 6 + [1.0]


def options(path=None, **changes):
    checkpoint = None if path is None else str(path)
    return PolicyConfig(**{**OPTIONS, "checkpoint": checkpoint, **changes})


@pytest.fixture
def saved(tmp_path):
    policy = make_policy(options(), SIZES, seed=1, device=CPU)
    path = tmp_path / "policy.safetensors"
    metadata = {
        "shape": compact_shape(options(), SIZES),
        "action_low": [-b for b in BOUND],
        "action_high": BOUND,
        "statistics": STATISTICS,
        "seed": 1,
    }
    policy_file.save_policy(path, policy.state_dict(), metadata)
    save_statistics(tmp_path / "dataset_statistics.json", STATISTICS)
    return path, policy


def test_a_new_run_starts_from_its_weights_and_its_bins(saved):
    path, policy = saved
    assert path.stat().st_size < 10_000_000
    again = make_policy(options(path), SIZES, seed=2, device=CPU)
    for name, value in policy.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    codec = make_codec(options(path), "libero_object")
    assert codec.high.tolist() == BOUND
    assert codec.decode(torch.full((1, 7), 16)).tolist() == [[0.0] * 7]
    plain = make_codec(options(), "libero_object")
    assert plain.high.tolist() == 1.0, "without a checkpoint: -1..1"


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"num_bins": 11}, {}, "policy.num_bins=11, .* 33. Set policy.num_bins=33"),
        ({"hidden_dim": 32}, {}, "policy.hidden_dim=32, .* Set policy.hidden_dim=16"),
        (
            {"cameras": ["image", "wrist_image"]},
            {},
            r"policy.cameras=\[image,wrist_image\], .* Set policy.cameras=\[image\]$",
        ),
        ({}, {"image_size": 128}, "env.image_size=128, .* Set env.image_size=96"),
        ({}, {"chunk_size": 4}, "env.chunk_size=4, .* Set env.chunk_size=8"),
        (
            {"num_bins": 11, "hidden_dim": 32},
            {},
            "Set policy.num_bins=33 policy.hidden_dim=16",
        ),
    ],
)
def test_options_of_another_policy_are_refused(saved, changes, sizes, message):
    path, _ = saved
    with pytest.raises(ValueError, match=message) as error:
        make_policy(options(path, **changes), {**SIZES, **sizes}, seed=0, device=CPU)
    assert f"policy.checkpoint={path}" in str(error.value)


def test_statistics_of_another_checkpoint_are_refused(saved):
    path, _ = saved
    other = {"libero_object": {"action": {"q01": [-1.0] * 7, "q99": [0.25] * 7}}}
    save_statistics(path.parent / "dataset_statistics.json", other)
    for load in (
        lambda: make_codec(options(path), "libero_object"),
        lambda: make_policy(options(path), SIZES, seed=0, device=CPU),
    ):
        with pytest.raises(ValueError, match=r"statistics\.json does not belong to"):
            load()
    (path.parent / "dataset_statistics.json").unlink()
    make_codec(options(path), "libero_object")  # the file itself has what is needed


def test_the_metadata_comes_back(saved):
    path, _ = saved
    metadata = policy_file.read_metadata(path)
    assert metadata["statistics"] == STATISTICS
    assert metadata["seed"] == 1
    assert metadata["shape"]["policy.cameras"] == ["image"]
    json.dumps(metadata)


def test_a_damaged_or_missing_or_foreign_file(saved, tmp_path):
    path, _ = saved
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"cut\.safetensors is damaged"):
        make_policy(options(cut), SIZES, seed=0, device=CPU)
    for name in ("none.safetensors", "none.pt"):
        with pytest.raises(ValueError, match=f"policy.checkpoint=.*{name} is no file"):
            make_policy(options(tmp_path / name), SIZES, seed=0, device=CPU)
    from safetensors.torch import save_file

    foreign = tmp_path / "foreign.safetensors"
    save_file({"a": torch.zeros(2)}, foreign)
    assert policy_file.read_metadata(foreign) == {}
    with pytest.raises(ValueError, match="the weights are of another policy"):
        make_policy(options(foreign), SIZES, seed=0, device=CPU)


def test_what_is_too_large_is_not_written(tmp_path):
    path = tmp_path / "policy.safetensors"
    weights = {"a": torch.zeros(2_500_001)}
    with pytest.raises(ValueError, match=r"10\.0 MB of weights; at most 10 MB"):
        policy_file.save_policy(path, weights, {})
    assert not path.exists()


@pytest.mark.parametrize("path", sorted(policy_file.SHIPPED_FOLDER.iterdir()))
def test_what_ships_says_how_it_was_made(path):
    assert path.suffix == ".safetensors"
    assert path.stat().st_size < policy_file.MAX_BYTES
    metadata = policy_file.read_metadata(path)
    assert metadata["command"].startswith("sft.py ")
    assert " /" not in metadata["command"], "nothing of one machine"
    assert isinstance(metadata["seed"], int)
    assert metadata["statistics"].keys() == {metadata["options"]["env"]["task_suite"]}
    cfg = PolicyConfig(
        checkpoint=policy_file.SHIPPED + path.stem,
        **{
            name: metadata["options"]["policy"][name]
            for name in ("num_bins", "hidden_dim", "cameras")
        },
    )
    policy = make_policy(cfg, SIZES, seed=0, device=CPU)
    assert policy.state_std.max() != 1, "weights and statistics are its own"
    codec = make_codec(cfg, "libero_object")
    assert codec.high.tolist() == pytest.approx(metadata["action_high"])


def test_a_name_that_does_not_ship_is_refused_with_those_that_do():
    message = "policy.checkpoint=shipped:none: what ships is shipped:libero_object"
    for make in (
        lambda cfg: make_policy(cfg, SIZES, seed=0, device=CPU),
        lambda cfg: make_codec(cfg, "libero_object"),
    ):
        with pytest.raises(ValueError, match=message):
            make(options("shipped:none"))
