"""The interval by hand, and a file of metrics that survives a kill."""

import csv

import pytest

from torchrl_vla.training.metrics import METRICS, MetricsFile, wilson_interval


@pytest.mark.parametrize(
    ("num_success", "num", "low", "high"),
    [
        # Newcombe (1998), Statistics in Medicine 17, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # By hand: 490 of 500.
        (490, 500, 0.9636, 0.9891),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson_interval(num_success, num, low, high):
    assert wilson_interval(num_success, num) == pytest.approx((low, high), abs=1e-4)


def test_wilson_interval_of_nothing_says_nothing():
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_names_are_unique():
    assert len(set(METRICS)) == len(METRICS)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_on_disk_as_soon_as_they_are_appended(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.csv")
    assert tuple((tmp_path / "metrics.csv").read_text().strip().split(",")) == METRICS
    metrics.append({"iteration": 0, "success_rate": 0.25})
    (row,) = read(tmp_path / "metrics.csv")
    assert row["iteration"] == "0"
    assert row["success_rate"] == "0.25"
    assert row["entropy"] == "", "what was not measured is empty"


def test_an_unknown_metric_is_refused(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.csv")
    with pytest.raises(KeyError, match="sucess_rate"):
        metrics.append({"iteration": 0, "sucess_rate": 0.5})
    assert read(tmp_path / "metrics.csv") == []


def test_resuming_keeps_rows_up_to_the_checkpoint_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.csv"
    metrics = MetricsFile(path)
    rows = [
        {"iteration": i, "groups_kept": i, "loss_objective": -i / 3, "entropy": 1e-20}
        for i in range(5)
    ]
    for row in rows[:3]:
        metrics.append(row)
    expected = path.read_bytes()
    for row in rows[3:]:
        metrics.append(row)
    resumed = MetricsFile(path, last_iteration=2)
    assert path.read_bytes() == expected
    assert resumed.rows == rows[:3]
    resumed.append(rows[3])
    assert [row["iteration"] for row in read(path)] == ["0", "1", "2", "3"]
    MetricsFile(path)
    assert read(path) == [], "a run that starts afresh starts with nothing"


@pytest.mark.parametrize("cut", [2, 10, 60])
def test_a_half_written_row_is_dropped(tmp_path, cut):
    path = tmp_path / "metrics.csv"
    metrics = MetricsFile(path)
    metrics.append({"iteration": 10, "success_rate": 0.5, "groups_kept": 4})
    whole = path.read_text()
    metrics.append(dict.fromkeys(METRICS, 11))
    last = path.read_text()[len(whole) :]
    path.write_text(whole + last[:cut])
    assert [row["iteration"] for row in MetricsFile(path, 10).rows] == [10]
