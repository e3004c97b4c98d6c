"""The policy, and the reference's whole update reproduced with this project's loss."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.envs import TransformedEnv
from torchrl.envs.custom import ToyVLAEnv
from torchrl.envs.transforms import Compose
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla.data import keys
from torchrl_vla.data.normalization import NormalizationStatistics
from torchrl_vla.envs.transforms import MultiAction
from torchrl_vla.envs.transforms.action_tokens import ActionTokensTransform
from torchrl_vla.envs.transforms.openvla_image import OpenVLAImageTransform
from torchrl_vla.modules.openvla_oft import (
    OpenVLAOFT,
    OpenVLAOFTPolicy,
    PromptEncoder,
    load_action_codec,
    save_tiny_checkpoint,
    tiny_config,
    tiny_tokenizer,
)
from torchrl_vla.modules.openvla_oft.weights import checkpoint_key
from torchrl_vla.objectives import TokenGRPOLoss
from torchrl_vla.objectives.functional import executed_token_mask
from torchrl_vla.training.updater import Updater

FIRST_ID = 31744


class RecordedPrompts(PromptEncoder):
    """The recorded ids of LLaMA-2's tokenizer, in place of the small one's."""

    def __init__(self, ids):
        super().__init__(tiny_tokenizer())
        self._cache = ids


@pytest.fixture(scope="module")
def prompts(golden):
    ids = {}
    cases = golden("forward_cases.json")
    for case in ("b1_i1", "b3_i1"):
        recorded = golden(f"forward_{case}.safetensors")
        for text, row, mask in zip(
            cases[case]["instructions"],
            recorded["input_ids"],
            recorded["attention_mask"],
            strict=True,
        ):
            ids[text] = row[mask.bool()].tolist()
    return RecordedPrompts(ids)


@pytest.fixture
def policy(tiny_folder, prompts):
    model = OpenVLAOFT.from_pretrained(tiny_folder, dtype=torch.float32)
    return OpenVLAOFTPolicy(model, prompts, min_window_mass=0.0, temperature=1.6)


@pytest.fixture
def batch(golden, images):
    recorded = golden("forward_b3_i1.safetensors")
    return TensorDict(
        {
            keys.IMAGE: images[recorded["image_index"][:, 0]],
            keys.INSTRUCTION: golden("forward_cases.json")["b3_i1"]["instructions"],
        },
        batch_size=[3],
    )


def test_greedy_tokens_and_log_probs_equal_the_reference(policy, batch, golden):
    recorded = golden("forward_b3_i1.safetensors")
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        policy(batch)
    tokens = batch[keys.TOKENS].flatten(1)
    assert torch.equal(tokens + FIRST_ID, recorded["greedy_tokens"])
    log_probs = batch[keys.LOG_PROBS].flatten(1)
    assert_close(log_probs, recorded["log_probs_greedy_T1.6"], rtol=0, atol=2e-4)
    with torch.no_grad():
        dist = policy.get_dist(batch)
    given = (recorded["given_tokens"] - FIRST_ID).unflatten(1, (8, 7))
    actual = dist.log_prob(given).flatten(1)
    assert_close(actual, recorded["log_probs_given_T1.6"], rtol=0, atol=2e-4)
    entropy = dist.entropy().flatten(1)
    assert_close(entropy, recorded["entropy_T1.6"], rtol=0, atol=2e-4)


@torch.no_grad()
def test_sampling_does_not_depend_on_the_micro_batch(policy, batch):
    batch[keys.SAMPLING_SEED] = torch.tensor([[5], [6], [7]])
    tokens = []
    for size in (None, 1, 2):
        policy.micro_batch_size = size
        tokens.append(policy(batch.clone())[keys.TOKENS])
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])
    greedy = policy.get_dist(batch).logits.argmax(-1)
    assert (tokens[0] != greedy).any()
    policy.top_k = 1
    assert torch.equal(policy(batch.clone())[keys.TOKENS], greedy)


def test_one_instruction_may_stand_for_the_whole_batch(policy, batch):
    texts = batch.pop(keys.INSTRUCTION).tolist()
    batch.set_non_tensor(keys.INSTRUCTION, texts[0])
    with torch.no_grad():
        one = policy.action_logits(batch)
        batch[keys.INSTRUCTION] = [texts[0]] * 3
        each = policy.action_logits(batch)
    assert torch.equal(one, each)


def test_several_images_and_proprioception_are_read():
    config = tiny_config(num_images=2, proprio_dim=3)
    statistics = NormalizationStatistics.from_dict(
        {"q01": [0.0] * 3, "q99": [10.0] * 3}
    )
    policy = OpenVLAOFTPolicy(
        OpenVLAOFT(config),
        PromptEncoder(tiny_tokenizer()),
        image_keys=[keys.IMAGE, keys.WRIST_IMAGE],
        proprio_key=keys.STATE,
        proprio_statistics=statistics,
        min_window_mass=0.0,
    )
    assert policy.in_keys == [
        keys.IMAGE,
        keys.WRIST_IMAGE,
        keys.STATE,
        keys.INSTRUCTION,
    ]
    base = TensorDict(
        {
            keys.IMAGE: torch.zeros(1, 3, 224, 224, dtype=torch.uint8),
            keys.WRIST_IMAGE: torch.zeros(1, 3, 224, 224, dtype=torch.uint8),
            keys.STATE: torch.tensor([[0.0, 5.0, 99.0]]),
            keys.INSTRUCTION: ["go"],
        },
        batch_size=[1],
    )
    inputs = policy.model_inputs(base)
    assert_close(inputs["proprio"], torch.tensor([[-1.0, 0.0, 1.0]]), rtol=0, atol=1e-6)
    assert inputs["pixel_values"].shape == (1, 12, 224, 224)
    with torch.no_grad():
        expected = policy.action_logits(base)
        for key in policy.in_keys[:3]:
            other = base.clone()
            other[key] = other[key] + 1
            assert not torch.equal(policy.action_logits(other), expected), key


def test_from_pretrained_reads_everything_from_one_folder(tmp_path, batch):
    folder = save_tiny_checkpoint(tmp_path, proprio_dim=8)
    policy = OpenVLAOFTPolicy.from_pretrained(
        folder,
        proprio_dim=8,
        proprio_key=keys.STATE,
        unnorm_key="libero_spatial",
        min_window_mass=0.0,
    )
    batch[keys.STATE] = torch.zeros(3, 8)
    assert policy(batch)[keys.TOKENS].shape == (3, 8, 7)


def test_it_plays_in_an_environment(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    policy = OpenVLAOFTPolicy.from_pretrained(folder, min_window_mass=0.0)
    codec = load_action_codec(folder, "libero_spatial")
    env = ToyVLAEnv(action_dim=7, state_dim=7, image_shape=(3, 40, 60), batch_size=[2])
    env = TransformedEnv(env, Compose(MultiAction(8), ActionTokensTransform(codec)))
    env.append_transform(OpenVLAImageTransform())
    with torch.no_grad():
        played = env.rollout(2, policy)
    last_actions = codec.decode(played[keys.TOKENS])[:, :, -1].float()
    # The state of the toy echoes the last action; its gripper is -1 or 1.
    assert torch.equal(played["next", "observation", "state"], last_actions)
    assert played[keys.LOG_PROBS].shape == (2, 2, 8, 7)


def test_an_untrained_head_is_refused_before_it_acts(tiny_folder, batch, prompts):
    model = OpenVLAOFT.from_pretrained(tiny_folder, dtype=torch.float32)
    policy = OpenVLAOFTPolicy(model, prompts)
    with pytest.raises(ValueError, match=r"puts 0\.\d+ of its probability.*token-head"):
        policy(batch)
    # A head that prefers the window to all other ids is accepted.
    with torch.no_grad():
        hidden = model._action_hidden(**policy.model_inputs(batch)).flatten(0, 1)
        bias = 30 * hidden.mean(0) / hidden.mean(0).square().sum()
        model.language_model.lm_head.weight[FIRST_ID:32000] += bias
        assert policy.check_head(policy.model_inputs(batch)) > 0.5
    policy(batch)


def test_bad_input(policy, batch, tiny_folder, prompts):
    model = policy.model
    with pytest.raises(ValueError, match="image_keys has 2 cameras"):
        OpenVLAOFTPolicy(model, prompts, image_keys=[keys.IMAGE, keys.WRIST_IMAGE])
    with pytest.raises(ValueError, match="give both or neither"):
        OpenVLAOFTPolicy(model, prompts, proprio_key=keys.STATE)
    with pytest.raises(ValueError, match=r"float32.*expected is uint8"):
        policy(batch.clone().set(keys.IMAGE, batch[keys.IMAGE].float()))
    with pytest.raises(ValueError, match="OpenVLAImageTransform"):
        policy(batch.clone().set(keys.IMAGE, batch[keys.IMAGE][..., :200]))
    with pytest.raises(ValueError, match="instruction is empty"):
        policy(batch.clone().set(keys.INSTRUCTION, ["", "go", "go"]))
    with pytest.raises(KeyError, match="language_instruction"):
        policy(batch.exclude(keys.INSTRUCTION))


# ---- the reference's update_policy: 4 episodes of 2 decisions, 2 optimizer steps


@pytest.fixture
def update_batch(golden, images):
    recorded = golden("grpo_update_policy.safetensors")
    settings = golden("grpo_update_policy.json")
    instructions = [t for t in settings["instructions"] for _ in range(2)]
    finish_E = recorded["finish_step"]
    # The reference cuts an episode at a token, here always at a whole action.
    executed_ET = (finish_E[:, None] - torch.tensor([0, 8])).clamp(0, 8)
    advantage_E = torch.tensor(settings["advantage_per_sequence"])
    return TensorDict(
        {
            keys.IMAGE: images[recorded["image_index"].flatten()],
            keys.INSTRUCTION: instructions,
            keys.TOKENS: recorded["responses"].reshape(8, 8, 7) - FIRST_ID,
            keys.LOG_PROBS: recorded["old_log_probs"].reshape(8, 8, 7),
            keys.NUM_EXECUTED: executed_ET.reshape(8, 1),
            keys.EPISODE_ID: torch.arange(4).repeat_interleave(2)[:, None],
            keys.ADVANTAGE: advantage_E.repeat_interleave(2)[:, None],
            # Mean over the tokens of an episode, then over episodes.
            keys.LOSS_WEIGHT: (1 / (finish_E * 7)).repeat_interleave(2)[:, None],
        },
        batch_size=[8],
    )


@pytest.fixture
def gradients(policy, monkeypatch):
    """One snapshot of all gradients per optimizer step, before they are clipped."""
    snapshots = []
    clip = torch.nn.utils.clip_grad_norm_

    def record_and_clip(*args, **kwargs):
        named = policy.model.named_parameters()
        snapshots.append({n: p.grad.clone() for n, p in named})
        return clip(*args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record_and_clip)
    return snapshots


def by_checkpoint_key(named_tensors):
    """Tensors in the checkpoint's layout: the parts of a projection put together."""
    parts = {}
    for name, tensor in named_tensors:
        key, part = checkpoint_key(name)
        parts.setdefault(key, {})[part] = tensor
    return {key: torch.cat([p[i] for i in sorted(p)]) for key, p in parts.items()}


def assert_gradients_equal(actual, recorded, prefix):
    actual["lm_head_window"] = actual["language_model.lm_head.weight"][FIRST_ID:32000]
    rows = actual["language_model.model.embed_tokens.weight"][[2, 29871, 1]]
    actual["embed_rows_2_29871_1"] = rows
    names = [k.removeprefix(prefix) for k in recorded if k.startswith(prefix)]
    assert len(names) == 13
    for name in names:
        expected = recorded[prefix + name]
        atol = 1e-3 * float(expected.abs().max())
        assert_close(actual[name], expected, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_the_references_update_is_reproduced(
    micro_batch_size, policy, update_batch, golden, gradients
):
    recorded = golden("grpo_update_policy.safetensors")
    settings = golden("grpo_update_policy.json")
    tokens = update_batch[keys.TOKENS]
    played = executed_token_mask(update_batch[keys.NUM_EXECUTED], 8, 7)

    def assert_dist_equals(log_probs, atol):
        with torch.no_grad():
            dist = policy.get_dist(update_batch)
        # The reference records zeros for actions that were never played.
        actual = dist.log_prob(tokens) * played
        assert_close(actual, recorded[log_probs].view(8, 8, 7), rtol=0, atol=atol)
        return dist.entropy() * played

    entropy = assert_dist_equals("log_probs_before", 2e-4)
    expected = recorded["entropy_before"].view(8, 8, 7)
    assert_close(entropy, expected, rtol=0, atol=2e-4)

    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.01)
    updater = Updater(
        TokenGRPOLoss(policy),
        optimizer,
        episodes_per_step=2,
        micro_batch_size=micro_batch_size,
    )
    for i, rows in enumerate(update_batch.split(4)):
        metrics = updater.update(rows)
        assert metrics["optimizer_steps"] == 1
        losses = settings["metrics"]["actor/pg_loss"][2 * i : 2 * i + 2]
        assert metrics["loss_objective"] == pytest.approx(sum(losses) / 2, abs=1e-5)
        clipped = settings["metrics"]["actor/pg_clipfrac"][2 * i : 2 * i + 2]
        assert metrics["clip_fraction"] == pytest.approx(sum(clipped) / 2, abs=1e-5)
        norm = settings["metrics"]["actor/grad_norm"][i]
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        actual = by_checkpoint_key(gradients[i].items())
        norms = {key: float(value.norm()) for key, value in actual.items()}
        expected = settings["steps"][i]["grad_norms"]
        assert norms == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert_gradients_equal(actual, recorded, f"step{i}.grad.")

    state = by_checkpoint_key(policy.model.named_parameters())
    state["lm_head_window"] = state["language_model.lm_head.weight"][FIRST_ID:32000]
    final = {k: v for k, v in recorded.items() if k.startswith("final.")}
    assert len(final) == 12
    for key, expected in final.items():
        error = (state[key.removeprefix("final.")] - expected).abs()
        # AdamW's first steps are the sign of a gradient, however small it is.
        assert (error > 1e-4).double().mean() <= 0.01, key
        assert error.max() <= 4e-3, key
    assert_dist_equals("log_probs_after", 2e-3)


def test_loss_and_gradient_do_not_depend_on_batch_or_padding(policy, update_batch):
    loss_module = TokenGRPOLoss(policy)
    parameter = policy.model.projector.fc1.weight

    def gradient(batches):
        policy.zero_grad()
        losses = [loss_module(batch)["loss_objective"] for batch in batches]
        sum(losses).backward()
        return float(sum(losses).detach()), parameter.grad.clone()

    loss, expected = gradient([update_batch])
    order = torch.tensor([5, 0, 7, 2, 1, 3, 6, 4])
    others = {
        "one by one": update_batch.split(1),
        "in another order": [update_batch[order]],
        "in unequal parts": update_batch.split([3, 5]),
    }
    for name, batches in others.items():
        other_loss, other = gradient(batches)
        assert other_loss == pytest.approx(loss, abs=1e-5), name
        assert_close(other, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_a_copy_is_a_frozen_reference(policy, batch):
    reference = copy.deepcopy(policy).requires_grad_(False)
    with torch.no_grad():
        expected = reference.action_logits(batch)
        policy.model.projector.fc1.weight.zero_()
        assert torch.equal(reference.action_logits(batch), expected)
        assert not torch.equal(policy.action_logits(batch), expected)
