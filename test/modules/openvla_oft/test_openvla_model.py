"""The network against recorded outputs of the reference program, in float32."""

import copy
import time

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from torchrl_vla.data.action_codec import OpenVLAActionCodec
from torchrl_vla.modules.openvla_oft import (
    OpenVLAOFT,
    OpenVLAOFTConfig,
    language,
    load_action_codec,
    tiny_config,
)
from torchrl_vla.modules.openvla_oft.flops import flops_per_decision

FIRST_ID = 31744
ATOL = 2e-4
CASES = ["b1_i1", "b3_i1", "b1_i2", "siglip_b2_i1", "proprio"]


@pytest.fixture(scope="module")
def load(tiny_folder, siglip_folder, golden):
    """Model, inputs and recorded outputs of a case."""

    def load_case(case):
        recorded = golden(f"forward_{case}.safetensors")
        folder = siglip_folder if case.startswith("siglip") else tiny_folder
        options = {"num_images": recorded["image_index"].shape[1]}
        model = OpenVLAOFT.from_pretrained(folder, dtype=torch.float32, **options)
        if case == "proprio":
            config = OpenVLAOFTConfig.from_dict(
                model.config.raw, proprio_dim=7, **options
            )
            with_proprio = OpenVLAOFT(config).eval()
            with_proprio.load_state_dict(
                model.state_dict()
                | {k: v for k, v in recorded.items() if k.startswith("proprio_proj")}
            )
            model = with_proprio
        return model, recorded

    return load_case


def run(model, images, recorded, prefix=""):
    return model(
        model.normalize_images(images[recorded["image_index"]]),
        recorded[prefix + "input_ids"],
        recorded[prefix + "attention_mask"],
        recorded.get("proprio"),
    ).flatten(1, 2)


def test_vision_equals_the_reference(load, images, golden):
    model, _ = load("b1_i1")
    recorded = golden("forward_vision.safetensors")
    pixels = model.normalize_images(images[:2, None])
    sub = pixels[0, :, 5::16, 5::16]
    assert_close(sub, recorded["pixel_values_image0"], rtol=0, atol=0)
    with torch.no_grad():
        features = model.vision_backbone(pixels, model._run)
        projected = model.projector(features)
    assert_close(features, recorded["vision_features"], rtol=0, atol=1e-5)
    assert_close(projected, recorded["projected"], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("prefix", ["", "padded_"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_reference(case, prefix, load, images, golden, tiny_folder):
    model, recorded = load(case)
    logits = run(model, images, recorded, prefix)
    assert_close(logits, recorded["action_logits"], rtol=0, atol=ATOL)
    tokens = logits.argmax(-1)
    assert torch.equal(tokens + FIRST_ID, recorded["greedy_tokens"])
    log_probs = (logits / 1.6).log_softmax(-1)
    given = (recorded["given_tokens"] - FIRST_ID).unsqueeze(-1)
    actual = log_probs.gather(-1, given).squeeze(-1)
    assert_close(actual, recorded["log_probs_given_T1.6"], rtol=0, atol=ATOL)
    entropy = -(log_probs * log_probs.exp()).sum(-1)
    assert_close(entropy, recorded["entropy_T1.6"], rtol=0, atol=ATOL)
    chunk = tokens.unflatten(1, (8, 7))
    normalized = OpenVLAActionCodec().decode(chunk)
    assert_close(normalized, recorded["normalized_actions"], rtol=0, atol=1e-12)
    key = golden("forward_cases.json")[case]["unnorm_key"]
    codec = load_action_codec(
        tiny_folder, key.removesuffix("_no_noops"), binarize_gripper=False
    )
    if case != "siglip_b2_i1":  # its folder has statistics of its own
        actions = codec.decode(chunk)
        assert_close(actions, recorded["actions"], rtol=0, atol=1e-12)


@torch.no_grad()
def test_every_layer_equals_the_reference(load, images):
    model, recorded = load("b3_i1")
    pixels = model.normalize_images(images[recorded["image_index"]])
    mask = recorded["attention_mask"].bool()
    embeds, mask, position = model.embed(pixels, recorded["input_ids"], mask, None)
    outputs = {"multimodal_embeddings": embeds}
    for i, layer in enumerate(model.language_model.model.layers):
        layer.register_forward_hook(
            lambda _, __, output, i=i: outputs.update({f"layer_{i}_output": output})
        )
    model.run_language_model(embeds, mask, position)
    assert torch.equal(mask.sum(1), recorded["multimodal_attention_mask"].sum(1))
    for name, values in outputs.items():
        for row in range(3):
            # The reference's memory order is our order of positions.
            actual = torch.empty_like(values[row][mask[row]])
            actual[position[row][mask[row]]] = values[row][mask[row]]
            expected = recorded[name][row, : len(actual)]
            assert_close(actual, expected, rtol=0, atol=ATOL)


@torch.no_grad()
@pytest.mark.parametrize("case", ["b1_i1", "b3_i1", "b1_i2"])
def test_causal_attention_is_something_else(case, load, images, golden):
    model, recorded = load(case)
    causal = golden(f"forward_{case}_causal.safetensors")["action_logits"]
    logits = run(model, images, recorded)
    assert (logits - causal).abs().max() > 1
    assert (logits.argmax(-1) == causal.argmax(-1)).float().mean() < 0.5


def test_refuses_to_run_where_attention_is_causal(monkeypatch):
    original = language.LlamaDecoderLayer.forward

    def causal(self, hidden_states, **kwargs):
        kwargs["attention_mask"] = None
        return original(self, hidden_states, **kwargs)

    monkeypatch.setattr(language.LlamaDecoderLayer, "forward", causal)
    language.check_bidirectional.cache_clear()
    with pytest.raises(RuntimeError, match="both directions"):
        OpenVLAOFT(tiny_config())
    monkeypatch.undo()
    language.check_bidirectional.cache_clear()
    OpenVLAOFT(tiny_config())


@torch.no_grad()
def test_rows_do_not_depend_on_padding_or_batch(load, images):
    model, recorded = load("b3_i1")
    ids, mask = recorded["input_ids"], recorded["attention_mask"]
    pixels = model.normalize_images(images[recorded["image_index"]])
    expected = model(pixels, ids, mask)
    right = torch.stack(
        [
            row[m.argsort(stable=True, descending=True)]
            for row, m in zip(ids, mask, strict=True)
        ]
    )
    right_mask = mask.sort(1, descending=True).values
    assert not torch.equal(right_mask, mask)
    assert_close(model(pixels, right, right_mask), expected, rtol=0, atol=5e-5)
    order = torch.tensor([2, 0])
    fewer = model(pixels[order], ids[order], mask[order])
    assert_close(fewer, expected[order], rtol=0, atol=5e-5)
    alone = model(pixels[:1], ids[:1, mask[0].bool()], mask[:1, mask[0].bool()])
    assert_close(alone, expected[:1], rtol=0, atol=5e-5)
    # What stands under a pad does not matter.
    other = torch.where(mask.bool(), ids, 7)
    assert torch.equal(model(pixels, other, mask), expected)


def test_gradient_checkpointing_changes_memory_only(load, images):
    model, recorded = load("b1_i1")
    gradients = []
    for switch in (False, True):
        model.zero_grad()
        model.gradient_checkpointing = switch
        run(model, images, recorded).logsumexp(-1).mean().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert len(gradients[0]) > 100
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_gradient_checkpointing_stores_fewer_tensors(load, images):
    model, recorded = load("b1_i1")
    counts = []
    for switch in (False, True):
        stored = []
        model.gradient_checkpointing = switch
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, stored=stored: stored.append(t.numel()) or t, lambda t: t
        ):
            run(model, images, recorded)
        counts.append(sum(stored))
    assert counts[1] < counts[0] / 2


def test_all_but_the_unused_weights_are_trained(load, images):
    model, recorded = load("b1_i1")
    run(model, images, recorded).logsumexp(-1).mean().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert without == []
    names = {n.split(".")[0] for n, _ in model.named_parameters()}
    assert names == {"vision_backbone", "projector", "language_model"}


def test_the_real_configuration_builds_in_seconds_on_the_meta_device(golden):
    start = time.perf_counter()
    config = OpenVLAOFTConfig.from_dict(golden("real_7b_config.json"))
    with torch.device("meta"):
        model = OpenVLAOFT(config)
    assert time.perf_counter() - start < 20
    total = sum(t.numel() for t in model.state_dict().values())
    assert total == golden("real_7b_state_dict.json")["num_parameters"]


def test_bfloat16_stays_close(tiny_folder, images, golden):
    recorded = golden("forward_b3_i1.safetensors")
    model = OpenVLAOFT.from_pretrained(tiny_folder)
    with torch.no_grad():
        logits = run(model, images, recorded)
    assert logits.dtype == torch.float32
    assert (logits - recorded["action_logits"]).abs().mean() < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_logits_equal_the_reference_on_a_gpu(load, images, golden):
    # float32 products of a GPU are rounded to TF32 unless told otherwise.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    model, recorded = load("b3_i1")
    on_gpu = {k: v.cuda() for k, v in recorded.items()}
    with torch.no_grad():
        logits = run(model.cuda(), images.cuda(), on_gpu)
    assert_close(logits.cpu(), recorded["action_logits"], rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": torch.zeros(1, 6, 224, 200)}, r"\(1, 6, 224, 224\)"),
        ({"pixel_values": torch.zeros(1, 3, 224, 224)}, "pixel_values"),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask.*\(1, 3\)"),
        ({"attention_mask": torch.zeros(1, 3)}, "at least BOS"),
    ],
)
def test_bad_inputs(change, message):
    model = OpenVLAOFT(tiny_config())
    inputs = {
        "pixel_values": torch.zeros(1, 6, 224, 224),
        "input_ids": torch.tensor([[1, 5, 29871]]),
        "attention_mask": torch.ones(1, 3),
    }
    with pytest.raises(ValueError, match=message):
        model(**(inputs | change))


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(1, 1, 3, 224, 224),
        torch.zeros(1, 1, 3, 200, 224, dtype=torch.uint8),
        torch.zeros(1, 2, 3, 224, 224, dtype=torch.uint8),
        torch.zeros(1, 3, 224, 224, dtype=torch.uint8),
    ],
)
def test_bad_images(bad):
    with pytest.raises(ValueError, match="expected is uint8"):
        OpenVLAOFT(tiny_config()).normalize_images(bad)


def test_proprio_must_be_there():
    model = OpenVLAOFT(tiny_config(proprio_dim=8))
    ids = torch.tensor([[1, 29871]])
    with pytest.raises(ValueError, match=r"proprio has shape None.*\(1, 8\)"):
        model(torch.zeros(1, 6, 224, 224), ids, torch.ones_like(ids))


def test_flops_agree_with_what_torch_counts(golden):
    config = tiny_config(num_images=2)
    model = OpenVLAOFT(config)
    ids = torch.ones(1, 30, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    # Fused attention on a CPU is not counted.
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(1, 12, 224, 224), ids, ids)
    forward, total = flops_per_decision(config, prompt_length=30)
    assert forward == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert total == 3 * forward
    real = OpenVLAOFTConfig.from_dict(golden("real_7b_config.json"))
    assert 4.6e12 < flops_per_decision(real)[0] < 5.2e12


@torch.no_grad()
def test_any_chunk_and_three_images():
    config = tiny_config(num_images=3, chunk_size=5, action_dim=3, proprio_dim=4)
    model = OpenVLAOFT(config).eval()
    images = torch.randint(0, 256, (2, 3, 3, 224, 224), dtype=torch.uint8)
    pixels = model.normalize_images(images)
    ids = torch.tensor([[1, 9, 29871], [1, 29871, 0]])
    mask = (ids > 0).long()
    logits = model(pixels, ids, mask, torch.zeros(2, 4))
    assert logits.shape == (2, 5, 3, 256)
    # Each camera and the state matter.
    for i in range(3):
        other = pixels.clone()
        other[:, 6 * i] += 1
        assert not torch.equal(model(other, ids, mask, torch.zeros(2, 4)), logits)
    assert not torch.equal(model(pixels, ids, mask, torch.ones(2, 4)), logits)


def test_building_a_model_leaves_the_random_numbers_alone():
    language.check_bidirectional.cache_clear()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    language.check_bidirectional()
    assert torch.equal(torch.rand(2), expected)


def test_copies_are_independent():
    model = OpenVLAOFT(tiny_config())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.projector.fc1.weight.zero_()
    assert model.projector.fc1.weight.abs().sum() > 0
