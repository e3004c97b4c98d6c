"""What the tests of ranks run on each of them."""

from pathlib import Path

import torch

from torchrl_vla.config.schema import DistributedConfig
from torchrl_vla.training.agreement import check_agreement, check_shared_folder
from torchrl_vla.training.distributed import join_ranks


def share_numbers(num):
    """Take numbers until ``num`` are taken; what was taken, and all notes."""
    with join_ranks(DistributedConfig()) as ranks:
        board = ranks.board()
        own, notes = [], []
        while board.num_taken() < num:
            own.append(board.take())
            board.post((ranks.rank, own[-1]))
            notes += board.read()
        total = sum(ranks.gather(len(own)))
        while len(notes) < total:
            board.wait()
            notes += board.read()
        ranks.gather(None)
        board.close()
        return own, notes, ranks.board().read()


def exchange_rows():
    """Rank s sends s + r rows of 10 s + r to rank r; what came."""
    with join_ranks(DistributedConfig()) as ranks:
        dtype = torch.int16
        parts = [
            torch.full((ranks.rank + r, 2, 3), 10 * ranks.rank + r, dtype=dtype)
            for r in range(ranks.size)
        ]
        return ranks.exchange(parts)


def tell_facts(folder):
    """The errors of ranks of which the second differs, and the third is elsewhere."""
    with join_ranks(DistributedConfig()) as ranks:
        facts = {"seed": 1, "code": {"torch": f"{2 + (ranks.rank == 1)}.0"}}
        errors = []
        try:
            check_agreement(ranks, facts)
        except ValueError as error:
            errors.append(str(error))
        own = Path(folder) if ranks.rank < 2 else Path(folder + "-of-another-host")
        try:
            check_shared_folder(ranks, own)
        except ValueError as error:
            errors.append(str(error))
        return errors
