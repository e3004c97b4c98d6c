"""What all tests share."""

import json
from pathlib import Path

import pytest
import torch
from recipe_scripts import load_script

# Small tensors: more threads only wait for each other, above all on busy cores.
torch.set_num_threads(1)

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def golden():
    """Recorded values of the reference program, by file name without its ending."""
    return lambda name: json.loads((GOLDENS / f"{name}.json").read_text())


@pytest.fixture(scope="session")
def recipe():
    """The recipe script ``vla-grpo.py``."""
    return load_script("vla-grpo")
