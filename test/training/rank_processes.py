"""Run a function of this folder on several ranks, each a process of its own."""

import importlib
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


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


def on_ranks(function, size, folder, *args, timeout=300):
    """What ``function(*args)`` returns on each of ``size`` ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    call = pickle.dumps((function.__module__, function.__name__, args)).hex()
    outputs = [folder / f"rank{rank}.pkl" for rank in range(size)]
    processes = start(
        [[sys.executable, __file__, call, str(output)] for output in outputs]
    )
    try:
        texts = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        end(processes)
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 0, text
    return [pickle.loads(output.read_bytes()) for output in outputs]


def main():
    import torch

    torch.set_num_threads(1)
    module, name, args = pickle.loads(bytes.fromhex(sys.argv[1]))
    result = getattr(importlib.import_module(module), name)(*args)
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
