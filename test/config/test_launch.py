"""What starts a run on several hosts: the Slurm script, without Slurm."""

import os
import subprocess

import pytest
from test_config import ROOT, composed

from torchrl_vla.config.load import load_config

STUBS = {
    "scontrol": "echo first; echo second",
    "srun": 'printf "%s\\n" "$@"',
}


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job of two hosts, whose ``srun`` prints its arguments."""
    for name, line in STUBS.items():
        stub = tmp_path / name
        stub.write_text(f"#!/bin/sh\n{line}\n")
        stub.chmod(0o755)
    return {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "hosts",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
    }


def submit(environment):
    script = ["bash", "scripts/slurm.sbatch"]
    return subprocess.run(
        script, cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_the_slurm_script_starts_a_set_up_that_composes(slurm):
    done = submit({**slurm, "CHECKPOINT": "weights", "RUN_DIR": "shared"})
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\n")[:-1]
    assert words[words.index("--nnodes") + 1] == "2"
    assert words[words.index("--rdzv-endpoint") + 1] == "first:29500"
    (script,) = [word for word in words if word.endswith(".py")]
    assert (ROOT / script).is_file()
    cfg = load_config(composed(*words[words.index(script) + 1 :]))
    assert cfg.name == "libero_spatial_2x8gpu"
    assert (cfg.policy.checkpoint, cfg.run_dir, cfg.resume) == (
        "weights",
        "shared",
        "auto",
    )
    assert cfg.distributed.num_replicas == 2


def test_the_slurm_script_says_what_it_needs(slurm):
    done = submit({**slurm, "CHECKPOINT": "weights"})
    assert done.returncode != 0
    assert "RUN_DIR: folder of the run, seen by all hosts" in done.stderr
