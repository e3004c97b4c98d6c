"""The recipe on the real simulator: what it writes, and how it ends when it is killed.

A start of LIBERO takes longer than an iteration, so the tests share one run folder,
which each start takes further, from the last complete checkpoint if there is one.
"""

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from recipe_scripts import ROOT

from torchrl_vla.config import load

pytestmark = [
    pytest.mark.libero,
    pytest.mark.skipif(
        importlib.util.find_spec("libero") is None,
        reason="LIBERO is not installed: pip install 'torchrl-vla[libero]'",
    ),
]

SCRIPT = ROOT / "sota-implementations" / "vla_grpo" / "vla-grpo.py"
SECONDS = 60
"""Within this time everything has to end; starting takes longer."""
SMALL = [
    "+experiment=libero_smoke",
    "env.task_ids=[0]",
    "env.max_episode_steps=16",
    "env.image_size=64",
    "policy.hidden_dim=32",
    "policy.num_bins=9",
    "rollout.group_size=2",
    "update.episodes_per_step=2",
    "train.patience=1000",
    "eval.num_init_states=1",
    "eval.num_videos=1",
]


def options(folder, *changes):
    """Options of a run as the script would compose them."""
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        raw = compose("vla_grpo", [*SMALL, f"run_dir={folder}", *changes])
    return load.load_config(raw)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("libero") / "run"


@pytest.fixture(scope="module")
def summary(recipe, folder):
    """Of one iteration more, in this process: what was killed goes on to its end."""
    end = last_iteration(folder) + 1
    return recipe.run(options(folder, "resume=auto", f"train.num_iterations={end}"))


def last_iteration(folder):
    files = (folder / "checkpoints").glob("iteration_*.pt")
    return max((int(path.stem.split("_")[1]) for path in files), default=0)


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def descendants(pid):
    """Processes below ``pid``, by number, with their command lines."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = stat.with_name("cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1]), command
    found, new = {}, {pid}
    while new:
        new = {p for p, (parent, _) in parents.items() if parent in new}
        found |= {p: parents[p][1] for p in new}
    return found


def workers_of(pid):
    found = descendants(pid)
    return sorted(p for p, command in found.items() if "spawn_main" in command)


def is_running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, seconds, what):
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"{what} took over {seconds} s"
        time.sleep(0.02)


@contextmanager
def endless_run(folder, output, *changes):
    """The script as it collects, after one more checkpoint: process and workers."""
    command = [sys.executable, str(SCRIPT), *SMALL, f"run_dir={folder}"]
    command += ["resume=auto", "train.num_iterations=100000", "checkpoint.keep=2"]
    command += changes
    before = last_iteration(folder)
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            cwd=folder.parent,
            start_new_session=True,
            # Started in the background by a shell, tests ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        wait_until(
            lambda: last_iteration(folder) > before or process.poll() is not None,
            120,
            "an iteration",
        )
        assert process.poll() is None, output.read_text()
        left = descendants(process.pid)
        time.sleep(0.5)  # it collects again
        yield process, workers_of(process.pid)
        wait_until(
            lambda: process.poll() is not None, SECONDS, "the end of the main process"
        )
        wait_until(
            lambda: not any(is_running(pid) for pid in left),
            SECONDS,
            "the end of its processes",
        )
    finally:
        process.kill()
        process.wait()


def test_a_killed_worker_ends_the_run_by_name(folder, tmp_path):
    """Where none is to be started again."""
    output = tmp_path / "output"
    with endless_run(folder, output, "env.max_restarts=0") as (process, workers):
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
    assert process.returncode == 1
    text = output.read_text()
    assert f"(process {workers[0]}) ended with SIGKILL" in text.split("error: ")[1]
    assert "Traceback" not in text
    assert f"resume=auto run_dir={folder}" in text


def test_ctrl_c_ends_the_run(folder, tmp_path):
    output = tmp_path / "output"
    with endless_run(folder, output) as (process, workers):
        # A terminal sends it to every process.
        for pid in (*workers, process.pid):
            os.kill(pid, signal.SIGINT)
    assert process.returncode == 130
    assert f"resume=auto run_dir={folder}" in output.read_text()


def test_killing_the_main_process_leaves_no_worker(folder, tmp_path):
    with endless_run(folder, tmp_path / "output") as (process, _):
        process.kill()
    assert process.returncode == -signal.SIGKILL


def test_a_run_writes_everything(summary, folder):
    assert json.loads((folder / "summary.json").read_text()) == json.loads(
        json.dumps(summary)
    )
    end = last_iteration(folder)
    assert summary["num_iterations"] == end
    assert summary["num_episodes"] == 4 * end
    assert summary["num_decisions"] == 8 * end
    assert summary["num_env_steps"] == 64 * end
    assert summary["num_optimizer_steps"] == 2 * end
    assert summary["num_eval_episodes"] == 1
    assert summary["initial_success_rate"] == summary["final_success_rate"] == 0
    for phase in ("total", "collect", "update", "eval"):
        assert summary[f"seconds_{phase}"] > 0
    table = rows(folder)
    assert [int(row["iteration"]) for row in table] == list(range(end + 1))
    assert table[-1]["groups_kept"] == "2"
    assert float(table[-1]["ratio_deviation"]) < 1e-5
    for name in ("config.yaml", "curves.png"):
        assert (folder / name).stat().st_size > 0
    protocol = summary["evaluation"]["protocol"]
    assert protocol["task_suite"] == "libero_spatial"
    assert protocol["pairs"] == {"0": "0"}
    assert "mujoco" in protocol["versions"]


def test_no_process_is_left(summary):
    assert workers_of(os.getpid()) == []


def test_the_video_shows_the_scene_upright(summary, folder):
    from torchrl_vla.envs import LiberoEnv

    (path,) = (folder / "videos").glob("task0_start0_after_*.mp4")
    frames = decode(path, size=256)
    assert len(frames) == 3, "one per decision and the last"
    env = LiberoEnv("libero_spatial", 0, camera_height=64, camera_width=64)
    try:
        image = env.reset(init_state_id=0)["observation", "image"]
    finally:
        env.close()
    # The video is enlarged four times and compressed.
    expected = image.permute(1, 2, 0).numpy().astype(float)
    shown = frames[0].reshape(64, 4, 64, 4, 3).mean((1, 3))
    assert expected.std() > 10, "a black picture"
    error = np.abs(shown - expected).mean()
    assert error < 10
    for other in (expected[::-1], expected[:, ::-1], expected[::-1, ::-1]):
        assert np.abs(shown - other).mean() > 2 * error, "upside down or mirrored"


def decode(path, size):
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(path)]
    command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, size, size, 3).astype(float)
