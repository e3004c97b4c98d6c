"""Which device a rank computes on."""

import torch


def choose_device(name: str, local_rank: int = 0, local_size: int = 1) -> torch.device:
    """``auto`` is the rank's GPU, or the CPU where there is none.

    Args:
        name: ``auto``, ``cpu``, ``cuda`` (likewise the rank's), ``cuda:1``, ...
        local_rank, local_size: among the ranks of this host.

    Raises:
        ValueError: for a device that is not there, or one GPU for several ranks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and local_size > 1:
        if local_size > (num := torch.cuda.device_count()):
            raise ValueError(
                f"{local_size} ranks on this host, which has {num} GPUs; start as many "
                "ranks as there are GPUs, or use train.device=cpu"
            )
        name = f"cuda:{local_rank}"
    elif local_size > 1 and name != "cpu":
        raise ValueError(
            f"train.device={name}: {local_size} ranks cannot share it; use "
            "train.device=cuda, which is each rank's own"
        )
    try:
        device = torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"train.device={name} is not available here "
            f"({str(error).splitlines()[0]}); use train.device=auto"
        ) from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
