"""What a simulator process does first."""

import ctypes
import os
import signal
import sys

import torch

_PR_SET_PDEATHSIG = 1


def enter_worker_process(parent: int) -> None:
    """End with the parent, leave Ctrl-C to it, and use one thread of torch.

    Args:
        parent: process id. On Linux the kernel ends this process when that one ends,
            even by SIGKILL.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
