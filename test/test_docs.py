"""The documents say what is there, and nothing that is not."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import torchrl_vla
from torchrl_vla.training.metrics import METRICS, SUPERVISED_METRICS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
DOCUMENTS += sorted(ROOT.glob("sota-implementations/**/*.md"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PACKAGES = ["envs", "modules", "objectives", "collectors", "training", "config"]


def test_every_metric_is_explained_and_nothing_else():
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.MULTILINE)
    explained = [name for name, _ in rows]
    assert sorted(explained) == sorted({*METRICS, *SUPERVISED_METRICS})
    for name, rest in rows:
        assert len(rest.split("|")[-1].strip()) > 10, (
            f"{name} is listed without meaning"
        )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path):
    for target in LINK.findall(path.read_text()):
        if target.startswith(("http://", "https://", "#", "mailto:")):
            continue
        file = path.parent / target.split("#")[0]
        assert file.exists(), f"{path.name} links to {target}"


def public_symbols():
    for name in PACKAGES:
        package = importlib.import_module(f"torchrl_vla.{name}")
        for symbol in package.__all__:
            yield pytest.param(getattr(package, symbol), id=f"{name}.{symbol}")


def is_plain(symbol):
    """Whether it is a record or an error: said by its fields, or by its name."""
    is_record = hasattr(symbol, "__dataclass_fields__")
    return is_record or (
        inspect.isclass(symbol) and issubclass(symbol, tuple | Exception)
    )


def arguments_of(symbol):
    """Names of arguments that a caller gives."""
    target = symbol.__init__ if inspect.isclass(symbol) else symbol
    return [p for p in inspect.signature(target).parameters if p != "self"]


@pytest.mark.parametrize("symbol", list(public_symbols()))
def test_public_symbols_are_documented(symbol):
    text = inspect.getdoc(symbol)
    assert text, "no docstring"
    if inspect.ismodule(symbol):
        return
    assert symbol.__doc__, "a docstring of its own, not an inherited one"
    if is_plain(symbol):
        return
    assert "Args:" in text
    for name in arguments_of(symbol):
        described = re.search(rf"(^|[\s,`]){name}([:,\s`]|$)", text)
        assert described or name in ("args", "kwargs"), f"{name} is not described"


# Shown by the example of the class beside them, or too large for a docstring.
WITHOUT_EXAMPLE = {"GroupCollector", "Updater", "Evaluator", "TokenPolicy"}


@pytest.mark.parametrize("symbol", list(public_symbols()))
def test_public_classes_have_an_example(symbol):
    if not inspect.isclass(symbol) or is_plain(symbol):
        return
    assert ">>> " in symbol.__doc__ or symbol.__name__ in WITHOUT_EXAMPLE


def test_every_module_says_what_it_is():
    for info in pkgutil.walk_packages(torchrl_vla.__path__, "torchrl_vla."):
        source = Path(info.module_finder.path) / info.name.rsplit(".", 1)[-1]
        file = source / "__init__.py" if info.ispkg else source.with_suffix(".py")
        text = file.read_text()
        assert not text or text.startswith('"""'), info.name


def test_the_table_of_keys_has_every_key():
    from torchrl_vla.data import keys

    names = {
        value if isinstance(value, str) else value[-1]
        for name, value in vars(keys).items()
        if name.isupper() and not name.endswith("_KEY")
    }
    for name in names:
        assert f'"{name}"' in keys.__doc__ or f"``{name}``" in keys.__doc__, name


def test_equations_point_to_functions_and_tests_that_exist():
    text = (ROOT / "docs" / "algorithm.md").read_text()
    names = re.findall(r"`(torchrl_vla(?:\.\w+)+)`", text)
    assert len(names) > 10
    for name in names:
        resolve(name)
    tests = re.findall(r"`(test/[\w/]+\.py)::(\w+)`", text)
    assert len(tests) > 10
    for file, function in tests:
        assert f"def {function}(" in (ROOT / file).read_text(), f"{file}::{function}"


def resolve(name):
    """The object of a dotted name."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(f"there is no {name}")
