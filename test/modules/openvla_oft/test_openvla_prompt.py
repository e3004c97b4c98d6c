import copy
import json
import pickle

import pytest
import torch
from tokenizers import Tokenizer, processors

from torchrl_vla.modules.openvla_oft import (
    PromptEncoder,
    load_action_codec,
    load_statistics,
    select_statistics,
    tiny_tokenizer,
)


@pytest.fixture(scope="module")
def encoder():
    return PromptEncoder(tiny_tokenizer())


def byte_ids(text):
    """LLaMA-2's ids: 3 + byte, and 29871 for a space."""
    return [29871 if c == " " else 3 + ord(c) for c in text]


def test_prompts_equal_the_reference_texts(encoder, golden):
    recorded = golden("prompts.json")
    assert len(recorded) == 23
    for row in recorded:
        ids = encoder.encode(row["instruction"])
        assert ids == [1, *byte_ids(" " + row["prompt"]), 29871], row


def test_bos_is_added_when_the_tokenizer_does_not(encoder):
    tokenizer = Tokenizer.from_str(tiny_tokenizer().to_str())
    tokenizer.post_processor = processors.TemplateProcessing("$A", special_tokens=[])
    assert tokenizer.encode("a").ids[0] != 1
    assert PromptEncoder(tokenizer).encode("go") == encoder.encode("go")


def test_a_trailing_space_is_not_doubled(encoder):
    assert encoder._tokenize("Out: ") == [1, *byte_ids(" Out:"), 29871]
    assert encoder._tokenize("Out:") == [1, *byte_ids(" Out:"), 29871]


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_padded_on_either_side(side, encoder):
    texts = ["go", "pick up the bowl"]
    ids, mask = encoder(texts, padding_side=side)
    assert ids.dtype == mask.dtype == torch.int64
    for row, row_mask, text in zip(ids, mask, texts, strict=True):
        assert row[row_mask.bool()].tolist() == encoder.encode(text)
        assert (row[~row_mask.bool()] == 32000).all()
    assert mask[0].tolist() == sorted(mask[0].tolist(), reverse=side == "right")


def test_copies_and_processes_get_the_same_ids(encoder):
    expected = encoder.encode("open the drawer")
    assert copy.deepcopy(encoder).encode("open the drawer") == expected
    assert pickle.loads(pickle.dumps(encoder)).encode("open the drawer") == expected


def test_the_cache_is_bounded(encoder, monkeypatch):
    monkeypatch.setattr("torchrl_vla.modules.openvla_oft.prompt._CACHE_SIZE", 3)
    for i in range(10):
        encoder.encode(f"task {i}")
        assert len(encoder._cache) <= 4
    assert (
        encoder.encode("task 0")[1:]
        == encoder._tokenize("In: What action should the robot take to task 0?\nOut:")[
            1:
        ]
    )


def test_bad_instructions(encoder, tmp_path):
    for empty in ("", "  \n"):
        with pytest.raises(ValueError, match="instruction is empty"):
            encoder([empty])
    for other in (None, 3, b"go"):
        with pytest.raises(TypeError, match="expected is text"):
            encoder([other])
    with pytest.raises(ValueError, match="padding_side is 'middle'"):
        encoder(["go"], padding_side="middle")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        PromptEncoder.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        PromptEncoder.from_pretrained(tmp_path)


def test_statistics_of_the_folder_and_of_its_config(tiny_folder):
    found = load_statistics(tiny_folder)
    assert "libero_spatial_no_noops" in found
    assert "bridge_orig" in found
    entry = select_statistics(found, "libero_spatial")
    assert entry is found["libero_spatial_no_noops"]
    assert select_statistics(found, "bridge_orig") is found["bridge_orig"]


def test_statistics_of_another_folder(tiny_folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(FileNotFoundError, match=r"dataset_statistics\.json is missing"):
        load_action_codec(tiny_folder, "x", statistics_folder=other)
    action = {"min": [-2.0, 0.0], "max": [2.0, 1.0], "mask": [True, False]}
    (other / "dataset_statistics.json").write_text(
        json.dumps({"x": {"action": action}})
    )
    codec = load_action_codec(
        tiny_folder, "x", statistics_folder=other, normalization="bounds"
    )
    actions = codec.decode(torch.tensor([[255, 255], [1, 1]]))
    torch.testing.assert_close(
        actions,
        torch.tensor([[-1.992157, 1.0], [1.992157, -1.0]], dtype=torch.float64),
        rtol=0,
        atol=1e-6,
    )
    # Another folder's file replaces the checkpoint's own.
    with pytest.raises(KeyError, match="libero_spatial"):
        load_action_codec(tiny_folder, "libero_spatial", statistics_folder=other)


def test_missing_statistics_list_what_there_is(tiny_folder):
    with pytest.raises(
        KeyError, match=r"'libero_goal'.*bridge_orig.*libero_spatial_no"
    ):
        load_action_codec(tiny_folder, "libero_goal")
