"""The examples of docstrings and of the README run."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import torchrl_vla

README = Path(__file__).parents[1] / "README.md"
MODULES = [
    pytest.param(
        info.name, marks=[pytest.mark.libero] if ".libero." in info.name else []
    )
    for info in pkgutil.walk_packages(torchrl_vla.__path__, "torchrl_vla.")
    if not info.ispkg
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    extra = next((p for p in ("libero", "openvla_oft") if f".{p}" in name), None)
    if extra == "libero":
        pytest.importorskip("libero", reason="the extra libero is not installed")
    if extra == "openvla_oft" or name.endswith("lora"):
        pytest.importorskip("transformers", reason="the extra openvla is missing")
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed"


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    count = sum(
        len(found.examples)
        for name in ("data.action_codec", "envs.toy", "objectives.functional")
        for found in finder.find(importlib.import_module(f"torchrl_vla.{name}"))
    )
    assert count > 15


@pytest.mark.skipif(not README.exists(), reason="there is no README")
def test_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    assert blocks
    namespace = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
