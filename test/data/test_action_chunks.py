"""Rows of demonstrations: chunks, masks, augmentation, order and split."""

import numpy as np
import pytest
import torch

from torchrl_vla.data.action_chunks import (
    ActionChunks,
    random_shift,
    split_episodes,
    step_rows,
)
from torchrl_vla.data.action_codec import UniformActionCodec
from torchrl_vla.data.demonstrations import Demonstration

TOKENS, MASK = ("vla_action", "tokens"), "token_mask"


def make(length, number=0, task=0, size=6):
    """Tokens of 9 bins over -1..1 are the env step and the number of the episode."""
    step = np.arange(length, dtype=np.float32)
    frames = np.zeros((length, size, size, 3), np.uint8)
    frames[:, 0, 0, 0] = step + 1
    return Demonstration(
        images={"image": frames, "wrist_image": frames + 100},
        state=np.stack([step, np.full(length, number, np.float32)], -1),
        action=np.stack([step, np.full(length, number)], -1) / 4.5 - 0.9,
        instruction=f"task {task}",
        task_id=task,
        init_state_id=number,
        success=True,
    )


def rows(*demonstrations, chunk_size=3, cameras=("image", "wrist_image")):
    return ActionChunks(demonstrations, UniformActionCodec(9), chunk_size, cameras)


def test_chunks_start_at_their_row_and_end_with_their_episode():
    chunks = rows(make(4), make(2, number=1, task=5))
    assert len(chunks) == 6
    batch = chunks.batch(torch.arange(6))
    token, mask = batch[TOKENS], batch[MASK]
    assert token.dtype == torch.int64
    assert mask.tolist() == [
        [True, True, True],
        [True, True, True],
        [True, True, False],
        [True, False, False],
        [True, True, False],
        [True, False, False],
    ]
    shown = [t[m].tolist() for t, m in zip(token, mask, strict=True)]
    assert shown[0] == [[0, 0], [1, 0], [2, 0]]
    assert shown[2] == [[2, 0], [3, 0]]
    assert shown[4] == [[0, 1], [1, 1]]
    assert batch["observation", "state"].tolist() == [
        [0, 0], [1, 0], [2, 0], [3, 0], [0, 1], [1, 1]
    ]  # fmt: skip
    image = batch["observation", "image"]
    assert image.shape == (6, 3, 6, 6)
    assert image.dtype == torch.uint8
    assert image[:, 0, 0, 0].tolist() == [1, 2, 3, 4, 1, 2]
    assert batch.get("language_instruction").tolist() == ["task 0"] * 4 + ["task 5"] * 2


def test_without_cameras_there_are_no_images():
    batch = rows(make(3), cameras=()).batch([0, 1])
    assert ("observation", "image") not in batch.keys(True)


def test_cameras_and_sizes_must_be_there():
    lacking = make(3)
    del lacking.images["image"]
    with pytest.raises(ValueError, match="episode 1: images of 'image' are missing"):
        rows(make(3), lacking)
    with pytest.raises(ValueError, match="'image' are of mixed sizes"):
        rows(make(3), make(3, size=7))
    with pytest.raises(ValueError, match="no demonstration"):
        rows()


def test_a_shift_is_whole_pixels_alike_for_all_cameras_and_named_by_its_seed():
    image = torch.randint(0, 256, (64, 3, 9, 7), dtype=torch.uint8)
    images = {"image": image, "wrist_image": 255 - image}
    moved = random_shift(images, seed=3, shift_px=2)
    again = random_shift(images, seed=3, shift_px=2)
    other = random_shift(images, seed=4, shift_px=2)
    assert moved["image"].dtype == torch.uint8
    assert torch.equal(moved["image"], again["image"])
    assert not torch.equal(moved["image"], other["image"])
    assert torch.equal(moved["wrist_image"], 255 - moved["image"]), "the same shift"
    padded = torch.nn.functional.pad(image.float(), (2, 2, 2, 2), mode="replicate")
    offsets = set()
    for row in range(64):
        found = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if torch.equal(
                padded[row, :, y : y + 9, x : x + 7], moved["image"][row].float()
            )
        ]
        assert len(found) == 1
        offsets |= set(found)
    assert len(offsets) > 15, "both directions, both signs"
    assert {y for y, _ in offsets} == {x for _, x in offsets} == set(range(5))
    assert random_shift(images, seed=3, shift_px=0)["image"] is image


def test_augmentation_leaves_all_but_the_images_alone():
    chunks = rows(make(4), make(4, number=1))
    plain = chunks.batch(torch.arange(8))
    moved = chunks.batch(torch.arange(8), seed=1, shift_px=2)
    assert not torch.equal(plain["observation", "image"], moved["observation", "image"])
    for key in (TOKENS, MASK, ("observation", "state")):
        assert torch.equal(plain[key], moved[key])


def test_the_split_keeps_episodes_whole_and_takes_from_every_task():
    all_of = [make(2, number=i, task=i % 3) for i in range(30)]
    training, validation = split_episodes(all_of, 0.2, seed=1)
    assert len(validation) == 6
    for task in range(3):
        assert sum(d.task_id == task for d in validation) == 2
    numbers = sorted(d.init_state_id for d in training + validation)
    assert numbers == list(range(30))
    again = split_episodes(all_of, 0.2, seed=1)[1]
    other = split_episodes(all_of, 0.2, seed=2)[1]
    assert [d.init_state_id for d in validation] == [d.init_state_id for d in again]
    assert [d.init_state_id for d in validation] != [d.init_state_id for d in other]
    assert split_episodes(all_of, 0.0, seed=1)[1] == []
    assert len(split_episodes(all_of[:6], 0.01, seed=1)[1]) == 3, "one of each at least"
    with pytest.raises(ValueError, match=r"demos\.validation_fraction=0"):
        split_episodes(all_of[:3], 0.5, seed=1)


def test_every_row_comes_once_per_epoch_in_another_order():
    found = torch.cat([step_rows(10, 4, step, seed=0) for step in range(10)])
    epochs = found.reshape(4, 10)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(10))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4
    assert torch.equal(found[16:20], step_rows(10, 4, 4, seed=0)), "no state"
    assert not torch.equal(found[:4], step_rows(10, 4, 0, seed=1))
    assert len(step_rows(3, 8, 0, seed=0)) == 8, "fewer rows than a batch"
