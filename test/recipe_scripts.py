"""The recipe's scripts as modules, which ``import`` cannot name."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_script(name: str) -> ModuleType:
    """``vla-grpo``, ``sft`` or ``eval`` of the recipe's folder."""
    path = ROOT / "sota-implementations" / "vla_grpo" / f"{name}.py"
    module_name = name.replace("-", "_")
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
