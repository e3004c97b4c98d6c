"""Checkpoint folders: all keys, both ways, and every kind of damage."""

import filecmp
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchrl_vla.modules.openvla_oft import (
    OpenVLAOFT,
    OpenVLAOFTConfig,
    folders,
    head_check,
    save_tiny_checkpoint,
    tiny_config,
    weights,
)

SHARD_1 = "model-00001-of-00002.safetensors"
SHARD_2 = "model-00002-of-00002.safetensors"
FC1 = "projector.fc1.weight"


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(tiny_folder, tmp_path / "copy")


def edit_shard(folder, change, shard=SHARD_1):
    tensors = load_file(folder / shard)
    change(tensors)
    save_file(tensors, folder / shard, metadata={"format": "pt"})


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_all_982_keys_of_the_real_model_are_mapped(golden):
    recorded = golden("real_7b_state_dict.json")
    with torch.device("meta"):
        model = OpenVLAOFT(OpenVLAOFTConfig.from_dict(golden("real_7b_config.json")))
    shapes = weights.checkpoint_shapes(model)
    assert shapes == {k: tuple(v) for k, v in recorded["state_dict"].items()}
    names = [name for parts in weights.key_map(model).values() for name in parts]
    assert sorted(names) == sorted(model.state_dict())
    unused = {weights.checkpoint_key(n)[0] for n, _ in model.named_buffers()}
    rotary = {n for n in unused if "rotary" in n}
    assert unused - rotary == set(recorded["unused_by_forward"])


@pytest.mark.parametrize("name", ["tiny_folder", "siglip_folder"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_saved_folder_is_byte_for_byte_the_loaded_one(name, dtype, request, tmp_path):
    source = request.getfixturevalue(name)
    OpenVLAOFT.from_pretrained(source, dtype=dtype).save_pretrained(tmp_path)
    files = sorted(p.name for p in source.iterdir())
    assert sorted(p.name for p in tmp_path.iterdir()) == files
    _, different, errors = filecmp.cmpfiles(source, tmp_path, files, shallow=False)
    assert (different, errors) == ([], [])


def test_trained_weights_are_saved_under_the_right_keys(tiny_folder, tmp_path):
    model = OpenVLAOFT.from_pretrained(tiny_folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    model.save_pretrained(tmp_path)
    unused = {weights.checkpoint_key(n)[0] for n, _ in model.named_buffers()}
    assert len(unused) > 40
    for shard in (SHARD_1, SHARD_2):
        before, after = load_file(tiny_folder / shard), load_file(tmp_path / shard)
        assert before.keys() == after.keys()
        for key, value in before.items():
            shift = 0 if key in unused else 1
            assert torch.equal(value.float() + shift, after[key]), key


def test_dtype_and_eval_mode(tiny_folder):
    model = OpenVLAOFT.from_pretrained(tiny_folder)
    assert {t.dtype for t in model.state_dict().values()} == {torch.bfloat16}
    assert not model.training
    model = OpenVLAOFT.from_pretrained(tiny_folder, dtype=torch.float32)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def test_parameters_do_not_share_memory(tiny_folder):
    model = OpenVLAOFT.from_pretrained(tiny_folder)
    pointers = [p.untyped_storage().data_ptr() for p in model.state_dict().values()]
    assert len(set(pointers)) == len(pointers)
    for tensor in model.state_dict().values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_new_model_is_saved_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_SHARD_BYTES", 3 * 10**6)
    torch.manual_seed(0)
    model = OpenVLAOFT(tiny_config())
    model.save_pretrained(tmp_path)
    shards = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert shards[0] == "model-00001-of-00004.safetensors"
    assert len(shards) == 4
    loaded = OpenVLAOFT.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize("prefix", ["", "module."])
def test_proprio_projector_has_a_file_of_its_own(prefix, folder, tmp_path):
    config = tiny_config(proprio_dim=8)
    state = OpenVLAOFT(config).proprio_projector.state_dict()
    file = folder / "proprio_projector--150000_checkpoint.pt"
    torch.save({prefix + k: v for k, v in state.items()}, file)
    model = OpenVLAOFT.from_pretrained(folder, dtype=torch.float32, proprio_dim=8)
    for key, value in state.items():
        assert torch.equal(model.proprio_projector.state_dict()[key], value)
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    again = torch.load(saved / file.name, weights_only=True)
    assert again.keys() == {prefix + k for k in state}
    assert not any("proprio" in key for key in folders.find_weight_map(saved))


@pytest.mark.parametrize(
    ("damage", "error", "parts"),
    [
        (
            lambda f: (f / SHARD_2).unlink(),
            FileNotFoundError,
            [SHARD_2, "missing"],
        ),
        (
            lambda f: (f / SHARD_1).write_bytes((f / SHARD_1).read_bytes()[:-1000]),
            ValueError,
            [SHARD_1, "cut off"],
        ),
        (
            lambda f: (f / SHARD_1).write_bytes(b""),
            ValueError,
            [SHARD_1, "cut off"],
        ),
        (
            lambda f: edit_shard(f, lambda t: t.update({FC1: torch.zeros(3, 3)})),
            ValueError,
            [SHARD_1, FC1, "(3, 3)", "(256, 64)"],
        ),
        (
            lambda f: edit_shard(f, lambda t: t.pop(FC1)),
            ValueError,
            [SHARD_1, FC1, "places there"],
        ),
        (
            lambda f: edit_json(
                f / folders.INDEX, lambda j: j["weight_map"].update(new=SHARD_1)
            ),
            ValueError,
            ["1 are unknown ['new']"],
        ),
        (
            lambda f: edit_json(
                f / folders.INDEX,
                lambda j: j.update(weight_map=dict(list(j["weight_map"].items())[:75])),
            ),
            ValueError,
            ["76 of 151 keys are missing"],
        ),
        (
            lambda f: edit_json(f / folders.INDEX, lambda j: j.pop("weight_map")),
            ValueError,
            [folders.INDEX, "weight_map"],
        ),
        (
            lambda f: edit_json(
                f / folders.INDEX, lambda j: j["weight_map"].update({FC1: "../x"})
            ),
            ValueError,
            [folders.INDEX, "../x", "plain files"],
        ),
        (
            lambda f: edit_json(
                f / "config.json",
                lambda j: j.update(timm_model_kwargs=[{"img_size": 1}, {}]),
            ),
            ValueError,
            ["config.json", "img_size", "embed_dim"],
        ),
        (
            lambda f: (f / folders.INDEX).write_text("{"),
            ValueError,
            [folders.INDEX, "not valid JSON"],
        ),
        (
            lambda f: (f / "config.json").unlink(),
            FileNotFoundError,
            ["config.json"],
        ),
        (
            lambda f: edit_json(f / "config.json", lambda j: j.pop("timm_model_ids")),
            ValueError,
            ["config.json", "timm_model_ids"],
        ),
        (
            lambda f: edit_json(
                f / "config.json", lambda j: j.update(timm_model_ids=["resnet50"])
            ),
            ValueError,
            ["config.json", "resnet50", "vit_so400m_patch14_siglip_224"],
        ),
        (
            lambda f: edit_json(f / "config.json", lambda j: j.pop("text_config")),
            ValueError,
            ["config.json", "text_config"],
        ),
        (
            lambda f: edit_json(
                f / "config.json", lambda j: j.update(model_type="llava")
            ),
            ValueError,
            ["config.json", "llava", "openvla"],
        ),
        (
            lambda f: edit_json(
                f / "config.json", lambda j: j["text_config"].update(hidden_size=64)
            ),
            ValueError,
            [SHARD_1, "32", "64"],
        ),
        (
            lambda f: edit_json(
                f / "config.json", lambda j: j.update(use_fused_vision_backbone=False)
            ),
            ValueError,
            ["use_fused_vision_backbone"],
        ),
    ],
)
def test_damaged_folders(damage, error, parts, folder):
    damage(folder)
    with pytest.raises(error) as caught:
        OpenVLAOFT.from_pretrained(folder)
    for part in parts:
        assert part in str(caught.value)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="owner/name"):
        OpenVLAOFT.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        OpenVLAOFT.from_pretrained(tmp_path)


def test_a_repository_is_downloaded_without_pickled_weights(folder, monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    OpenVLAOFT.from_pretrained("owner/policy", revision="abc")
    assert (asked["name"], asked["revision"]) == ("owner/policy", "abc")
    assert not any(".bin" in pattern for pattern in asked["allow_patterns"])

    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match=r"owner/policy.*no network"):
        OpenVLAOFT.from_pretrained("owner/policy")


def test_pickled_weights_are_not_read(folder):
    (folder / folders.INDEX).unlink()
    for shard in (SHARD_1, SHARD_2):
        (folder / shard).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin.*not\s+read"):
        OpenVLAOFT.from_pretrained(folder)


class Bomb:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_nothing_of_a_folder_is_executed(folder, tmp_path):
    mark = tmp_path / "executed"
    code = f"open({str(mark)!r}, 'w')\n"
    for name in ("modeling_prismatic.py", "configuration_prismatic.py", "__init__.py"):
        (folder / name).write_text(code)
    model = OpenVLAOFT.from_pretrained(folder)
    torch.save({"fc1.weight": Bomb(mark)}, folder / "proprio_projector--1.pt")
    with pytest.raises(ValueError, match=r"proprio_projector--1\.pt.*weights_only"):
        OpenVLAOFT.from_pretrained(folder, proprio_dim=8)
    assert not mark.exists()
    # The files belong to the layout that the original tools read.
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "modeling_prismatic.py").read_text() == code


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "must have one"),
        (["proprio_projector--1.pt", "proprio_projector--2.pt"], r"--1\.pt.*--2\.pt"),
    ],
)
def test_proprio_file_must_be_one(files, message, folder):
    for name in files:
        torch.save({}, folder / name)
    with pytest.raises(FileNotFoundError, match=message):
        OpenVLAOFT.from_pretrained(folder, proprio_dim=8)


def test_proprio_file_of_another_size(folder):
    state = OpenVLAOFT(tiny_config(proprio_dim=7)).proprio_projector.state_dict()
    torch.save(state, folder / "proprio_projector--1.pt")
    with pytest.raises(ValueError, match=r"\(32, 7\).*\(32, 8\)"):
        OpenVLAOFT.from_pretrained(folder, proprio_dim=8)


@pytest.mark.parametrize(
    "name", ["action_head--150000_checkpoint.pt", "vision_backbone--1.pt"]
)
def test_continuous_checkpoints_are_refused(name, folder):
    (folder / name).write_bytes(b"")
    with pytest.raises(
        ValueError, match=rf"{name} belongs to.*language head.*token-head"
    ):
        OpenVLAOFT.from_pretrained(folder)


@pytest.mark.parametrize("value", [0.0, torch.nan, 0.5])
def test_heads_whose_action_rows_are_blank_are_refused(value, folder):
    def blank(tensors):
        tensors["language_model.lm_head.weight"][31744:32000] = value

    edit_shard(folder, blank, SHARD_2)
    with pytest.raises(ValueError, match=r"lm_head\.weight.*never trained"):
        OpenVLAOFT.from_pretrained(folder)


def test_random_rows_pass_the_check_of_rows(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    head_check.check_files(folder)
    OpenVLAOFT.from_pretrained(folder)


def test_config_options():
    with pytest.raises(ValueError, match="num_images is 4"):
        tiny_config(num_images=4)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        tiny_config(chunk_size=0)
    config = tiny_config(num_images=3, chunk_size=25, action_dim=14)
    assert (config.num_action_tokens, config.window_start) == (350, 31744)
