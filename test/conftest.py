"""What all tests share."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

# Small tensors: more threads only wait for each other, above all on busy cores.
torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]
GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def golden():
    """Recorded values of the reference program, by file name without its ending."""
    return lambda name: json.loads((GOLDENS / f"{name}.json").read_text())


def load_script(name: str):
    """A recipe script as a module, as ``import`` cannot name it."""
    path = ROOT / "sota-implementations" / "vla_grpo" / f"{name}.py"
    module_name = name.replace("-", "_")
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def recipe():
    """The recipe script ``vla-grpo.py``."""
    return load_script("vla-grpo")
