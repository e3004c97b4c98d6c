"""Recorded data of the reference, and its two small checkpoints put together again.

The fixtures leave out the rows of the embedding and of the head that no recorded prompt
or action touches; here they become zeros.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchrl_vla.modules.openvla_oft import tiny_tokenizer

GOLDENS = Path(__file__).parents[2] / "goldens" / "openvla_oft"


@pytest.fixture(scope="session")
def golden():
    def load(name):
        path = GOLDENS / name
        if path.suffix == ".json":
            return json.loads(path.read_text())
        return load_file(path)

    return load


@pytest.fixture(scope="session")
def images(golden):
    """The recorded uint8 images, ``[6, 3, 224, 224]``."""
    return golden("forward_vision.safetensors")["images"].permute(0, 3, 1, 2)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return rebuild("tiny_openvla_oft", tmp_path_factory.mktemp("fused"))


@pytest.fixture(scope="session")
def siglip_folder(tmp_path_factory):
    return rebuild("tiny_openvla_oft_siglip", tmp_path_factory.mktemp("siglip"))


def rebuild(name, folder):
    tensors = load_file(GOLDENS / f"{name}.safetensors")
    files = json.loads((GOLDENS / f"{name}.json").read_text())
    rows, window = tensors.pop("embed_rows"), tensors.pop("lm_head_window")
    embed = torch.zeros(32064, rows.shape[1], dtype=rows.dtype)
    embed[tensors.pop("embed_ids")] = rows
    head = torch.zeros_like(embed)
    head[31744:32000] = window
    tensors["language_model.model.embed_tokens.weight"] = embed
    tensors["language_model.lm_head.weight"] = head
    write_json(folder / "config.json", files["config"])
    write_json(folder / "dataset_statistics.json", files["dataset_statistics"])
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    weight_map = dict.fromkeys(tensors, "model.safetensors")
    if "index" in files:
        weight_map = files["index"]["weight_map"]
        write_json(folder / "model.safetensors.index.json", files["index"])
    for shard in set(weight_map.values()):
        part = {key: tensors[key] for key, file in weight_map.items() if file == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    return folder


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2) + "\n")
