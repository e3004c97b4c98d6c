"""The files of the project: clean, portable, and what a wheel would hold."""

import re
import subprocess
from pathlib import Path

import pytest
from setuptools import find_packages

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = None

ROOT = Path(__file__).parents[1]
TEXT = {".py", ".md", ".yaml", ".toml", ".sh", ".json", ""}


def tracked():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def texts(*suffixes):
    for path in tracked():
        if path.suffix in (suffixes or TEXT) and path.is_file():
            yield path, path.read_text()


def test_python_is_ascii():
    for path, text in texts(".py", ".yaml", ".toml", ".sh"):
        assert text.isascii(), path


def test_no_path_of_one_machine():
    # Spelt so that this file does not find itself.
    local = re.compile("(?<![\\w.{}/])/" + "(tmp|home|work|root|Users)/")
    for path, text in texts():
        if "goldens" in path.parts:
            continue
        assert not (found := local.search(text)), f"{path}: {found}"


def test_no_large_file():
    """A checkout stays small: numeric fixtures, one small policy, no recordings."""
    for path in tracked():
        if path.is_file():
            limit = 10e6 if "shipped" in path.parts else 4e6
            assert path.stat().st_size < limit, path


def test_the_wheel_holds_the_policies_that_ship(project):
    patterns = project["tool"]["setuptools"]["package-data"]["torchrl_vla"]
    package = ROOT / "torchrl_vla"
    held = {path for pattern in patterns for path in package.glob(pattern)}
    assert held == {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix in (".safetensors", ".typed")
    }


def test_nothing_generated_is_tracked():
    for path in tracked():
        parts = path.relative_to(ROOT).parts
        assert not {"__pycache__", "runs", "outputs", ".venv"} & set(parts), path


@pytest.fixture(scope="module")
def project():
    if tomllib is None:
        pytest.skip("needs tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_wheel_holds_the_package_only(project):
    options = project["tool"]["setuptools"]["packages"]["find"]
    packages = find_packages(str(ROOT), include=options["include"])
    assert packages
    assert all(name.split(".")[0] == "torchrl_vla" for name in packages)
    on_disk = {path.parent for path in (ROOT / "torchrl_vla").rglob("*.py")}
    expected = {".".join(p.relative_to(ROOT).parts) for p in on_disk}
    assert set(packages) == expected, "a folder without __init__.py would be left out"


def test_the_project_names_its_extras(project):
    assert project["project"]["name"] == "torchrl-vla"
    assert project["project"]["requires-python"] == ">=3.10"
    extras = project["project"]["optional-dependencies"]
    assert set(extras) >= {"libero", "openvla", "wandb", "dev"}


def test_errors_name_extras_that_exist(project):
    extras = project["project"]["optional-dependencies"]
    named = set()
    for _, text in texts(".py"):
        named |= set(re.findall(r"torchrl-vla\[(\w+)\]", text))
    assert named <= set(extras)
    assert "wandb" in named


def test_test_files_have_names_of_their_own():
    """pytest imports them by name, so two of one name would hide each other."""
    names = [path.name for path in (ROOT / "test").rglob("test_*.py")]
    assert len(names) == len(set(names))
