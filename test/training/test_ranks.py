"""Boards, exchange, agreement and heartbeat, by real ranks."""

import os
import sys
import time

import pytest
import torch
from rank_processes import end, on_ranks, start
from rank_talks import exchange_rows, share_numbers, tell_facts

from torchrl_vla.collectors.ranks import Alone
from torchrl_vla.config.schema import DistributedConfig
from torchrl_vla.training.agreement import (
    check_agreement,
    check_shared_folder,
    weights_digest,
)
from torchrl_vla.training.device import choose_device
from torchrl_vla.training.distributed import join_ranks, require_one_rank


def test_each_number_is_taken_once_and_notes_are_read_in_one_order(tmp_path):
    results = on_ranks(share_numbers, 3, tmp_path, 20)
    taken = sorted(number for own, _, _ in results for number in own)
    assert taken == list(range(len(taken)))
    assert len(taken) >= 20
    assert results[0][1] == results[1][1] == results[2][1]
    assert sorted(results[0][1]) == sorted(
        (rank, number) for rank, (own, _, _) in enumerate(results) for number in own
    )
    assert [empty for _, _, empty in results] == [[], [], []], "a new board is empty"


def test_a_board_of_one_rank():
    board = Alone().board()
    assert [board.take(), board.take(), board.num_taken()] == [0, 1, 2]
    board.post("a")
    board.wait()
    assert (board.read(), board.read()) == (["a"], [])
    with pytest.raises(RuntimeError, match="nobody to wait for"):
        board.wait()


def test_exchange_brings_each_rank_what_the_others_sent_it(tmp_path):
    results = on_ranks(exchange_rows, 3, tmp_path)
    for rank, received in enumerate(results):
        for source, rows in enumerate(received):
            expected = torch.full((source + rank, 2, 3), 10 * source + rank)
            assert torch.equal(rows, expected.to(rows.dtype))


def test_what_ranks_differ_in_is_named_with_the_ranks(tmp_path):
    errors = on_ranks(tell_facts, 3, tmp_path, str(tmp_path / "run"))
    for error, _ in errors:
        assert "code.torch: 2.0 on rank 0, 2, 3.0 on rank 1" in error
        assert "seed" not in error
    for _, folder_error in errors:
        assert "is not one folder for all ranks: rank 2 cannot see" in folder_error


def test_one_rank_agrees_with_itself(tmp_path):
    check_agreement(Alone(), {"seed": 1})
    check_shared_folder(Alone(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_tells_weights_apart_by_their_last_bit(dtype):
    layer = torch.nn.Linear(50, 40, dtype=dtype)
    before = weights_digest(layer)
    assert weights_digest(layer) == before
    up = torch.tensor(float("inf"), dtype=dtype)
    with torch.no_grad():
        layer.weight[3, 4] = torch.nextafter(layer.weight[3, 4], up)
    assert weights_digest(layer) != before


@pytest.mark.parametrize(
    ("variables", "cfg", "message"),
    [
        ({}, {"strategy": "none"}, "distributed.strategy=none: there are 2 ranks"),
        ({"RANK": None}, {}, "WORLD_SIZE is 2, but RANK not set; start with torchrun"),
        (
            {},
            {"strategy": "fsdp", "num_replicas": 3},
            "num_replicas=3: does not divide 2 ranks",
        ),
    ],
)
def test_ranks_that_cannot_work(monkeypatch, variables, cfg, message):
    names = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **variables}
    for name, value in names.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message), join_ranks(DistributedConfig(**cfg)):
        pass


@pytest.mark.parametrize("size", [None, "1"])
def test_one_rank_starts_nothing(monkeypatch, size):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size:
        monkeypatch.setenv("WORLD_SIZE", size)
    with join_ranks(DistributedConfig(strategy="fsdp")) as ranks:
        assert isinstance(ranks, Alone)
        assert not torch.distributed.is_initialized()


def test_scripts_of_one_process_refuse_ranks(monkeypatch):
    require_one_rank("sft.py")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"sft\.py runs in one process.* 2 ranks"):
        require_one_rank("sft.py")


def test_more_ranks_than_devices():
    assert choose_device("cpu", 1, 2).type == "cpu"
    num = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"which has {num} GPUs"):
        choose_device("cuda", 0, num + 2)
    with pytest.raises(ValueError, match="cuda:0: 2 ranks cannot share it"):
        choose_device("cuda:0", 0, 2)


SILENT = """
import os, sys, time
from torchrl_vla.config.schema import DistributedConfig
from torchrl_vla.training.distributed import join_ranks
from torchrl_vla.training import heartbeat
if os.environ["RANK"] == "1" and sys.argv[1] == "stopped":
    heartbeat._machine = lambda: ""  # as on another host: its process is not seen
with join_ranks(DistributedConfig(heartbeat_timeout_s=2.0)) as ranks:
    print("joined", flush=True)
    if ranks.rank == 1:
        if sys.argv[1] == "fails":
            raise FloatingPointError("the gradient is not finite")
        os.kill(os.getpid(), 19)  # SIGSTOP: neither ends nor answers
    ranks.gather(None)
"""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("stopped", "has been silent for"),
        ("fails", "failed: FloatingPointError: the gradient is not finite"),
    ],
)
def test_a_rank_that_falls_silent_or_fails_is_named(how, message):
    processes = start([[sys.executable, "-c", SILENT, how]] * 2)
    began = time.monotonic()
    try:
        text, _ = processes[0].communicate(timeout=120)
    finally:
        end(processes)
    assert processes[0].returncode == 1
    assert f"rank 1 (process {processes[1].pid} on {os.uname().nodename})" in text
    assert message in text
    assert time.monotonic() - began < 100
