"""Statistics of demonstrations, and that they stay with their checkpoint."""

import json

import numpy as np
import pytest
import torch
from test_demonstrations import make

from torchrl_vla.data.action_codec import UniformActionCodec
from torchrl_vla.data.dataset_statistics import (
    action_bounds,
    check_statistics,
    dataset_statistics,
    save_statistics,
    statistics_id,
)
from torchrl_vla.data.normalization import NormalizationStatistics


def test_statistics_are_those_of_all_env_steps_in_openvlas_layout():
    demonstrations = [make(i, length=4 + i) for i in range(5)]
    found = dataset_statistics(demonstrations, "libero_object")
    entry = found["libero_object"]
    action = np.concatenate([d.action for d in demonstrations]).astype(float)
    for name, value in {
        "mean": action.mean(0),
        "std": action.std(0),
        "min": action.min(0),
        "max": action.max(0),
        "q01": np.quantile(action, 0.01, axis=0),
    }.items():
        np.testing.assert_allclose(entry["action"][name], value, atol=1e-12)
    assert entry["action"]["mask"] == [True] * 6 + [False]
    assert (entry["num_transitions"], entry["num_trajectories"]) == (30, 5)
    assert len(entry["proprio"]["mean"]) == 9
    assert NormalizationStatistics.from_dict(entry["action"]).mask.sum() == 6
    with pytest.raises(ValueError, match="no demonstration"):
        dataset_statistics([], "x")


def test_bounds_are_symmetric_so_that_zero_is_a_bin():
    entry = {
        "q01": [-0.2, 0.3, 0.0, -5.0, -1.0],
        "q99": [0.6, 0.4, 0.0, 5.0, 1.0],
        "mask": [True] * 4 + [False],
    }
    low, high = action_bounds(entry)
    assert high == [0.6, 0.4, 0.05, 1.0, 1.0]
    assert low == [-value for value in high]
    codec = UniformActionCodec(65, low=low, high=high)
    zero = torch.zeros(1, 5)
    assert torch.equal(codec.decode(codec.encode(zero)), zero.double())


def test_a_hash_names_the_content_not_its_text(tmp_path):
    content = {"a": {"q01": [0.1, -1.0]}, "b": 2}
    path = tmp_path / "dataset_statistics.json"
    save_statistics(path, content)
    check_statistics(path, statistics_id(content), "policy")
    path.write_text(json.dumps({"b": 2, "a": {"q01": [0.1, -1.0]}}))
    check_statistics(path, statistics_id(content), "policy")
    path.write_text(json.dumps({"b": 2, "a": {"q01": [0.2, -1.0]}}))
    with pytest.raises(ValueError, match="does not belong to policy"):
        check_statistics(path, statistics_id(content), "policy")
    path.write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        check_statistics(path, "x", "policy")
    path.unlink()
    with pytest.raises(ValueError, match="is missing: the statistics of policy"):
        check_statistics(path, "x", "policy")
