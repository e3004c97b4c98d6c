"""The decisions of an iteration: small entries on every rank, images on one of them."""

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import (
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
)
from torch import Tensor

from torchrl_vla.collectors.ranks import Ranks
from torchrl_vla.data import keys

_SMALL = (keys.INSTRUCTION,)


@dataclass
class GlobalBatch:
    """All decisions of an iteration in one order, the same on every rank.

    Rank ``r`` of ``W`` computes on rows ``r, r + W, r + 2 W, ...``, so every part of
    the batch is spread evenly, and only these rows' images are here. All else is here
    for all rows: advantages, weights and optimizer steps are those of a single process
    by construction, without a reduction.

    Attributes:
        rows: ``[B]``, every entry but the tensors that the policy reads (of one rank:
            these too).
        inputs: ``[B_own]``, those of this rank's rows; ``None`` for one rank.
        spare: ``[1]``, one row with everything, to keep step with ranks that have more.
        rank, size: this rank, of how many.
    """

    rows: TensorDictBase
    inputs: TensorDictBase | None = None
    spare: TensorDictBase | None = None
    rank: int = 0
    size: int = 1

    def own(self, start: int = 0, end: int | None = None) -> TensorDictBase:
        """This rank's part of the rows from ``start`` to ``end``, with everything."""
        end = len(self.rows) if end is None else end
        if self.inputs is None:
            return self.rows[start:end]
        first = start + (self.rank - start) % self.size
        own = self.rows[first : max(end, first) : self.size].clone(False)
        place = (first - self.rank) // self.size
        return own.update(self.inputs[place : place + len(own)])

    def num_own_at_most(self, start: int, end: int) -> int:
        """Rows of the part of the rank that has most of them."""
        return -(-(end - start) // self.size)

    def join(self, own: Tensor, ranks: Ranks) -> Tensor:
        """Put what the ranks have for their own rows together: ``[B, ...]``."""
        whole = own.new_empty(len(self.rows), *own.shape[1:])
        for rank, part in enumerate(ranks.gather(own)):
            whole[rank :: self.size] = part
        return whole


def deal(
    rows: TensorDictBase | None, ranks: Ranks, in_keys: list[Any]
) -> GlobalBatch | None:
    """Make one batch of what the ranks have played; every rank calls it.

    Args:
        rows: whole episodes ``[B_r]`` of this rank ordered by episode, or ``None``.
        ranks: of the run.
        in_keys: what the policy reads.

    Returns:
        The batch ordered by episode, or ``None`` when no rank has any.
    """
    if ranks.size == 1:
        return None if rows is None else GlobalBatch(rows)
    moving = [key for key in in_keys if key not in _SMALL]
    tables = ranks.gather(None if rows is None else _pack(rows.exclude(*moving)))
    likes = ranks.gather(None if rows is None else _pack(rows[:0].select(*moving)))
    if all(table is None for table in tables):
        return None
    like = next(each for each in likes if each is not None)
    source_B = torch.cat(
        [torch.full((_length(t),), rank) for rank, t in enumerate(tables)]
    )
    whole = _unpack([table for table in tables if table is not None])
    # Each episode is on one rank, in order: a stable sort gives the order of one rank.
    order_B = whole[keys.EPISODE_ID].flatten().argsort(stable=True)
    source_B, whole = source_B[order_B], whole[order_B]
    inputs = _send_inputs(rows, like, source_B, ranks)
    own_B = torch.arange(ranks.rank, len(whole), ranks.size)
    spare = whole[own_B[:1] if len(own_B) else torch.zeros(1, dtype=torch.int64)]
    batch = GlobalBatch(whole, inputs[: len(own_B)], None, ranks.rank, ranks.size)
    batch.spare = spare.update(inputs[:1])
    return batch


def _send_inputs(
    rows: TensorDictBase | None, like: dict, source_B: Tensor, ranks: Ranks
) -> TensorDictBase:
    """Images and states of this rank's rows; of row 0 where it has none."""
    wanted = [
        torch.arange(rank, len(source_B), ranks.size)
        if rank < len(source_B)
        else torch.zeros(1, dtype=torch.int64)
        for rank in range(ranks.size)
    ]
    mine_B = source_B == ranks.rank
    # Place of each row among those of the rank that played it.
    place_B = mine_B.cumsum(0) - 1
    sent = [place_B[index[mine_B[index]]] for index in wanted]
    # What comes from the ranks in turn belongs to these places.
    own = source_B[wanted[ranks.rank]]
    places = torch.cat(
        [(own == rank).nonzero().flatten() for rank in range(ranks.size)]
    )
    inputs = TensorDict({}, [len(own)])
    for key, empty in like["tensors"].items():
        value = empty if rows is None else rows[key]
        received = torch.cat(ranks.exchange([value[index] for index in sent]))
        inputs[key] = torch.empty_like(received).index_copy_(0, places, received)
    return inputs


def _pack(rows: TensorDictBase) -> dict[str, Any]:
    """Plain containers: a stack of texts would be sent row by row."""
    tensors, texts = {}, {}
    for key, value in rows.items(True, True, is_leaf=is_leaf_nontensor):
        if isinstance(value, Tensor):
            tensors[key] = value.contiguous()
        else:
            listed = value.tolist()
            texts[key] = listed if isinstance(listed, list) else [listed] * len(rows)
    return {"tensors": tensors, "texts": texts, "num": len(rows)}


def _unpack(tables: list[dict[str, Any]]) -> TensorDict:
    num = sum(table["num"] for table in tables)
    first = tables[0]
    whole = TensorDict({}, [num])
    for key in first["tensors"]:
        whole[key] = torch.cat([table["tensors"][key] for table in tables])
    for key in first["texts"]:
        texts = [text for table in tables for text in table["texts"][key]]
        whole[key] = NonTensorStack(*texts)
    return whole


def _length(table: dict[str, Any] | None) -> int:
    return 0 if table is None else table["num"]
