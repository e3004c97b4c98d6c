"""All benchmarks whose packages are installed, one after another.

    python -m benchmarks            # or the names of some: python -m benchmarks toy

Results are in ``benchmarks/results``: the report that a benchmark writes itself, or
what it prints.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
NEEDS = {
    "toy": "torchrl",
    "openvla_image": "simplejpeg",
    "openvla_loading": "transformers",
    "libero": "libero",
}


def bench(name: str) -> Path | None:
    """Run one; returns the file with its result, or ``None`` after a failure."""
    report = RESULTS / f"{name}.md"
    before = report.stat().st_mtime_ns if report.exists() else None
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(ended.stdout, end="", flush=True)
    if ended.returncode:
        return None
    if report.exists() and report.stat().st_mtime_ns != before:
        return report
    printed = RESULTS / f"{name}.txt"
    printed.write_text(ended.stdout)
    return printed


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    present = [name for name in NEEDS if (FOLDER / f"{name}.py").is_file()]
    names = sys.argv[1:] or present
    if unknown := set(names) - set(present):
        sys.exit(f"error: there is no {sorted(unknown)}; there are {present}")
    failed = False
    for name in names:
        if importlib.util.find_spec(NEEDS[name]) is None:
            print(f"{name}: left out, {NEEDS[name]} is not installed")
            continue
        print(f"{name}: ...", flush=True)
        result = bench(name)
        failed |= result is None
        print(f"{name}: {'failed' if result is None else result.relative_to(FOLDER)}")
    print(f"results are in {RESULTS}")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
