"""OpenVLA-OFT of random weights on real LIBERO, cut over two ranks."""

import importlib.util
import json
import subprocess
import sys

import pytest
from rank_processes import end, start
from test_distributed_recipe import SCRIPT, moved, state_of

from torchrl_vla.modules.openvla_oft.tiny import save_tiny_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.libero,
    pytest.mark.skipif(
        importlib.util.find_spec("libero") is None,
        reason="LIBERO is not installed: pip install 'torchrl-vla[libero]'",
    ),
]
OPTIONS = [
    "+experiment=openvla_tiny_smoke",
    "env.num_workers=1",
    "env.max_episode_steps=16",
    "objective.behavior_log_prob=recompute",
    # Nothing succeeds, so without it there is no gradient; small steps of AdamW.
    "objective.entropy_coef=0.01",
    "eval.num_init_states=1",
    "train.device=cpu",
]


def test_two_ranks_play_and_learn_what_one_process_does(tmp_path):
    weights = save_tiny_checkpoint(tmp_path / "weights")
    line = [sys.executable, str(SCRIPT), *OPTIONS, f"policy.checkpoint={weights}"]
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    done = subprocess.run(
        [*line, f"run_dir={alone}"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rank = [*line, f"run_dir={shared}", "distributed.strategy=fsdp"]
    processes = start([rank, rank])
    try:
        texts = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        end(processes)
    assert [process.returncode for process in processes] == [0, 0], texts
    one, two = (json.loads((f / "summary.json").read_text()) for f in (alone, shared))
    for name in ("num_iterations", "num_optimizer_steps", "num_episodes"):
        assert two[name] == one[name], name
    assert two["evaluation"]["tasks"] == one["evaluation"]["tasks"]
    before, after = state_of(alone, 2), state_of(shared, 2)
    assert after["collector"] == before["collector"]
    assert moved(after, before) < 1e-4
    assert moved(state_of(alone, 1), before) > 2e-4, "it was trained"
