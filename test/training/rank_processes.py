"""Run a function or a command on several ranks, each a process of its own."""

import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch

HERE = Path(__file__).parent
FORKS = multiprocessing.get_context("forkserver")
# Ranks are forked from a process that has imported all this, which takes seconds.
FORKS.set_forkserver_preload(
    [
        "torchrl_vla.collectors.factory",
        "torchrl_vla.config.load",
        "torchrl_vla.modules.factory",
        "torchrl_vla.modules.openvla_oft",
        "torchrl_vla.training.recorder",
        "torchrl_vla.training.shards",
        "torchrl_vla.training.updater",
    ]
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(rank, size, port):
    """What torchrun sets."""
    return {
        **os.environ,
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
    }


def start(commands):
    """One process per command, as the ranks of a run; with their output as text."""
    port = free_port()
    return [
        subprocess.Popen(
            command,
            env=environment(rank, len(commands), port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]


def end(processes):
    """Kill what still runs, and close its pipes."""
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def on_ranks(function, size, folder, *args, timeout_s=300):
    """What ``function(*args)`` returns on each of ``size`` ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    outputs = [folder / f"rank{rank}.pkl" for rank in range(size)]
    processes = [
        FORKS.Process(
            target=_run, args=(environment(rank, size, port), output, function, args)
        )
        for rank, output in enumerate(outputs)
    ]
    give_up_s = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(give_up_s - time.monotonic())
    finally:
        for process in processes:
            process.kill()
    errors = [error.read_text() for error in folder.glob("rank*.txt")]
    assert [process.exitcode for process in processes] == [0] * size, errors
    return [pickle.loads(output.read_bytes()) for output in outputs]


def launch(command):
    """What a script prints that is started with ``[python, path, *arguments]``."""
    sys.argv = command[1:]
    with redirect_stdout(StringIO()) as text, redirect_stderr(text):
        runpy.run_path(sys.argv[0], run_name="__main__")
    return text.getvalue()


def _run(variables, output, function, args):
    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        output.write_bytes(pickle.dumps(function(*args)))
    except BaseException:
        output.with_suffix(".txt").write_text(traceback.format_exc())
        raise
