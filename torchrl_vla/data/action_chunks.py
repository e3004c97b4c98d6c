"""From demonstrations to rows that a token policy is trained on.

Shape legend: ``N`` env steps of all demonstrations, ``B`` rows of a batch, ``H`` chunk,
``A`` action dimensions, ``S`` state.
"""

import random
from collections.abc import Sequence

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from torchrl_vla.data import keys
from torchrl_vla.data.action_codec import ActionCodec
from torchrl_vla.data.demonstrations import Demonstration
from torchrl_vla.data.random_streams import derive_seed, uniform

TOKEN_MASK = "token_mask"
"""Entry of a batch, bool ``[H]``: which actions of the chunk were shown."""


class ActionChunks:
    """Every env step of some demonstrations: its observation and the chunk from there.

    Row ``t`` of an episode has observation ``t`` and the tokens of actions
    ``t .. t + H - 1``. Actions past the episode's end were never shown, so they are
    masked out of the loss rather than padded with the last action: repeating it would
    teach to go on lowering, or pushing, after the task is done, which matters exactly
    when success did not come where the demonstration ended. The same tokens of earlier
    rows cover these places of the chunk.

    Source: chunking as in ACT (arXiv:2304.13705) and OpenVLA-OFT (arXiv:2502.19645);
    the mask is LeRobot's ``action_is_pad``. TorchRL's ``ActionChunkTransform`` works on
    sampled slices and continuous actions.

    Args:
        demonstrations: at least one; all with the same cameras.
        codec: what the policy's tokens mean.
        chunk_size: ``H``.
        cameras: whose images go into the rows.

    Raises:
        ValueError: without demonstrations, or for a camera that one of them lacks.

    Example:
        >>> from torchrl_vla.data.action_codec import UniformActionCodec
        >>> action = np.array([[-1.0], [0.0], [1.0]], np.float32)
        >>> demo = Demonstration({}, np.zeros((3, 2), np.float32), action, "go", 0, 0,
        ...                      True)
        >>> rows = ActionChunks([demo], UniformActionCodec(3), chunk_size=2)
        >>> rows.batch([0, 2])["vla_action", "tokens"].flatten(1).tolist()
        [[0, 1], [2, 2]]
        >>> rows.batch([0, 2])["token_mask"].tolist()
        [[True, True], [True, False]]
    """

    def __init__(
        self,
        demonstrations: Sequence[Demonstration],
        codec: ActionCodec,
        chunk_size: int,
        cameras: Sequence[str] = (),
    ) -> None:
        if not demonstrations:
            raise ValueError("there is no demonstration to train on")
        self.chunk_size = chunk_size
        length_E = torch.tensor([len(d) for d in demonstrations])
        action_NA = torch.from_numpy(np.concatenate([d.action for d in demonstrations]))
        self._token_NA = codec.encode(action_NA).to(torch.int16)
        self._state_NS = torch.from_numpy(
            np.concatenate([d.state for d in demonstrations])
        )
        self._end_N = length_E.cumsum(0).repeat_interleave(length_E)
        self._episode_N = torch.arange(len(length_E)).repeat_interleave(length_E)
        self._texts = [d.instruction for d in demonstrations]
        self._images = {name: _stacked(demonstrations, name) for name in cameras}

    def __len__(self) -> int:
        """``N``."""
        return len(self._end_N)

    def batch(
        self, rows: Sequence[int] | Tensor, *, seed: int = 0, shift_px: int = 0
    ) -> TensorDict:
        """Rows as a flat batch ``[B]``.

        Args:
            rows: numbers of rows, ``[B]``.
            seed: names the augmentation.
            shift_px: see :func:`random_shift`; 0 is no augmentation.

        Returns:
            The observations, the instruction, ``("vla_action", "tokens")`` int64
            ``[H, A]`` and ``"token_mask"`` bool ``[H]``.
        """
        row_B = torch.as_tensor(rows)
        step_BH = row_B.unsqueeze(-1) + torch.arange(self.chunk_size)
        end_B1 = self._end_N[row_B].unsqueeze(-1)
        td = TensorDict(
            {
                keys.STATE: self._state_NS[row_B],
                keys.TOKENS: self._token_NA[step_BH.minimum(end_B1 - 1)].long(),
                TOKEN_MASK: step_BH < end_B1,
            },
            [len(row_B)],
        )
        images = {name: values[row_B] for name, values in self._images.items()}
        if images:
            images = random_shift(images, seed=seed, shift_px=shift_px)
        for name, value in images.items():
            td["observation", name] = value
        texts = [self._texts[i] for i in self._episode_N[row_B].tolist()]
        return td.set(keys.INSTRUCTION, NonTensorStack(*texts))


def _stacked(demonstrations: Sequence[Demonstration], camera: str) -> Tensor:
    """uint8 ``[N, 3, Y, X]``."""
    for number, demonstration in enumerate(demonstrations):
        if camera not in demonstration.images:
            raise ValueError(
                f"episode {number}: images of {camera!r} are missing; there are "
                f"{sorted(demonstration.images)}"
            )
    shapes = {d.images[camera].shape[1:] for d in demonstrations}
    if len(shapes) > 1:
        raise ValueError(f"images of {camera!r} are of mixed sizes {sorted(shapes)}")
    num = sum(map(len, demonstrations))
    height, width, channels = shapes.pop()
    stacked = torch.empty(num, channels, height, width, dtype=torch.uint8)
    start = 0
    for demonstration in demonstrations:
        frames = torch.from_numpy(demonstration.images[camera]).permute(0, 3, 1, 2)
        stacked[start : start + len(frames)] = frames
        start += len(frames)
    return stacked


def random_shift(
    images: dict[str, Tensor], *, seed: int, shift_px: int
) -> dict[str, Tensor]:
    """Move each row's pictures by up to ``shift_px``, the same for all cameras.

    The border is repeated into what comes into view. A shift by whole pixels keeps
    uint8 exact.

    Source: random shift of DrQ (arXiv:2004.13649).

    Args:
        images: uint8 ``[B, C, Y, X]`` by camera.
        seed: names the numbers drawn.
        shift_px: largest shift each way; 0 is none.

    Returns:
        uint8 of the same shapes.
    """
    if shift_px == 0:
        return images
    num = len(next(iter(images.values())))
    drawn_B2 = uniform(derive_seed(seed, "shift") + torch.arange(num), 2)
    offset_B2 = (drawn_B2 * (2 * shift_px + 1)).long() - shift_px
    moved = {}
    for name, image in images.items():
        y_BY = _positions(image.shape[-2], offset_B2[:, 0])
        x_BX = _positions(image.shape[-1], offset_B2[:, 1])
        rows = torch.arange(num)[:, None, None]
        picked = image.permute(0, 2, 3, 1)[rows, y_BY[:, :, None], x_BX[:, None, :]]
        moved[name] = picked.permute(0, 3, 1, 2).contiguous()
    return moved


def _positions(size: int, offset_B: Tensor) -> Tensor:
    return (torch.arange(size) + offset_B.unsqueeze(-1)).clamp(0, size - 1)


def split_episodes(
    demonstrations: Sequence[Demonstration], fraction: float, seed: int
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Training and validation part, whole episodes, of every task alike.

    Args:
        demonstrations: all.
        fraction: of the episodes of each task that go to validation, rounded, but at
            least one of a task with two or more; 0 is none.
        seed: names the draw.

    Raises:
        ValueError: when no episode is left for validation though some are asked for.
    """
    training, validation = [], []
    for task in sorted({d.task_id for d in demonstrations}):
        mine = [d for d in demonstrations if d.task_id == task]
        random.Random(derive_seed(seed, "validation", task)).shuffle(mine)
        num = max(round(fraction * len(mine)), 1) if fraction and len(mine) > 1 else 0
        validation += mine[:num]
        training += mine[num:]
    if fraction and not validation:
        raise ValueError(
            "no episode is left for validation: there is one per task. Set "
            "demos.validation_fraction=0 or record more"
        )
    return training, validation


def epoch_rows(num_rows: int, epoch: int, seed: int) -> Tensor:
    """All row numbers in the shuffled order of an epoch, int64 ``[num_rows]``."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
    return torch.randperm(num_rows, generator=generator)


def step_rows(num_rows: int, batch_size: int, step: int, seed: int) -> Tensor:
    """Row numbers of the batch of an optimizer step, a function of its arguments.

    Batches run on across epochs, so every batch is full and every row comes once per
    epoch.

    Example:
        >>> rows = torch.cat([step_rows(6, 4, step, seed=0) for step in range(3)])
        >>> sorted(rows[:6].tolist()), sorted(rows[6:].tolist())
        ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    """
    start = step * batch_size
    found = []
    while start < (step + 1) * batch_size:
        epoch, place = divmod(start, num_rows)
        rows = epoch_rows(num_rows, epoch, seed)[place:]
        found.append(rows[: (step + 1) * batch_size - start])
        start += len(found[-1])
    return torch.cat(found)
