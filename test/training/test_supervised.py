"""The parts of supervised fine-tuning: loss, steps, schedule, stopping."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from torchrl_vla.config.schema import SupervisedUpdateConfig
from torchrl_vla.data.action_chunks import ActionChunks
from torchrl_vla.data.action_codec import UniformActionCodec
from torchrl_vla.data.demonstrations import Demonstration
from torchrl_vla.modules import CompactPolicy
from torchrl_vla.training.early_stopping import EarlyStopping
from torchrl_vla.training.supervised import (
    cosine_factor,
    make_trainer,
    token_cross_entropy,
)

NUM_BINS, CHUNK = 5, 3


def demonstration(number, length=7):
    """The action repeats the state, so it can be learned."""
    draw = np.random.default_rng(number)
    value = draw.uniform(-1, 1, (length, 2)).astype(np.float32)
    frames = draw.integers(0, 256, (length, 16, 16, 3), dtype=np.uint8)
    return Demonstration({"image": frames}, value, value, "go", 0, number, True)


def make(*, num_steps=20, cameras=(), prepare=None, **options):
    codec = UniformActionCodec(NUM_BINS)
    training, validation = (
        ActionChunks([demonstration(i) for i in numbers], codec, CHUNK, cameras)
        for numbers in (range(6), range(6, 8))
    )
    policy = CompactPolicy(
        chunk_size=CHUNK,
        action_dim=2,
        num_bins=NUM_BINS,
        state_dim=2,
        image_keys=[("observation", camera) for camera in cameras],
        hidden_dim=16,
        num_keypoints=8,
    )
    cfg = {"lr": 0.02, "warmup_steps": 0, "batch_size": 12, **options}
    trainer = make_trainer(
        policy,
        SupervisedUpdateConfig(**cfg),
        training,
        validation,
        num_steps=num_steps,
        shift_px=2,
        prepare=prepare or nn.Sequential(),
        seed=0,
    )
    return policy, trainer


def test_cross_entropy_by_hand():
    third = math.log(1 / 3)
    logits = torch.tensor([[0.5, 0.25, 0.25], [1 / 3] * 3, [0.1, 0.1, 0.8]]).log()
    logits = logits.reshape(1, 3, 1, 3)
    tokens = torch.tensor([[[0], [2], [0]]])
    mask = torch.tensor([[True, True, False]])
    loss, correct = token_cross_entropy(logits, tokens, mask)
    assert float(loss) == pytest.approx(-math.log(0.5) - third, abs=1e-6)
    assert float(correct) == 1
    loss, correct = token_cross_entropy(logits, tokens, ~mask)
    assert float(loss) == pytest.approx(-math.log(0.1), abs=1e-6)
    assert float(correct) == 0


def test_masked_tokens_give_no_gradient():
    logits = torch.randn(2, 3, 2, 5, requires_grad=True)
    tokens = torch.randint(0, 5, (2, 3, 2))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    token_cross_entropy(logits, tokens, mask)[0].backward()
    touched = logits.grad.abs().sum((-1, -2)) > 0
    assert torch.equal(touched, mask)


def weights(policy):
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def test_one_batch_of_four_equals_four_of_one():
    found = []
    for micro_batch_size in (12, 3, 5):
        policy, trainer = make(micro_batch_size=micro_batch_size)
        metrics = trainer.train(3)
        found.append((weights(policy), metrics))
    for value, metrics in found[1:]:
        torch.testing.assert_close(value, found[0][0], rtol=0, atol=2e-5)
        for name, number in metrics.items():
            assert number == pytest.approx(found[0][1][name], rel=1e-3), name


def test_it_learns_what_the_demonstrations_show():
    policy, trainer = make(num_steps=200)
    before = trainer.validate()
    assert before["val_loss"] == pytest.approx(math.log(NUM_BINS), abs=0.1)
    first = trainer.train(5)
    trainer.train(190)
    last = trainer.train(5)
    assert last["train_loss"] < 0.5 * first["train_loss"]
    # The first action of a chunk follows from the state, the others do not.
    batch = trainer.validation.batch(torch.arange(14))
    with torch.no_grad():
        best = policy.action_logits(batch).argmax(-1)
    hits = (best == batch["vla_action", "tokens"])[:, 0].float().mean()
    assert hits > 0.6, "chance is 0.2"
    assert last["optimizer_steps"] == 5
    assert trainer.num_optimizer_steps == 200


def test_validation_does_not_depend_on_the_size_of_its_batches():
    _, trainer = make()
    whole = trainer.validate()
    trainer.micro_batch_size = 3
    parts = trainer.validate()
    assert parts["val_loss"] == pytest.approx(whole["val_loss"], abs=1e-6)
    assert parts["val_token_accuracy"] == whole["val_token_accuracy"]
    trainer.validation = None
    assert trainer.validate() == {}


def test_images_are_moved_in_training_and_not_in_validation():
    seen = []

    class Spy(nn.Module):
        def forward(self, batch):
            seen.append(batch["observation", "image"].clone())
            return batch

    _, trainer = make(cameras=("image",), prepare=Spy())
    trainer.validate()
    plain = trainer.validation.batch(torch.arange(14))["observation", "image"]
    assert torch.equal(torch.cat(seen), plain)
    seen.clear()
    trainer.train(1)
    originals = trainer.training.batch(torch.arange(len(trainer.training)))
    originals = originals["observation", "image"]
    same = [(row == originals).flatten(1).all(1).any() for row in seen[0]]
    assert sum(map(bool, same)) < 4, "1 of 25 shifts is none"


def test_every_step_has_an_augmentation_of_its_own():
    _, trainer = make(cameras=("image",))
    seeds = []
    batch = trainer.training.batch

    def noted(rows, *, seed, shift_px):
        seeds.append(seed)
        return batch(rows, seed=seed, shift_px=shift_px)

    trainer.training.batch = noted
    trainer.train(3)
    assert len(set(seeds)) == 3


def test_resumed_steps_are_the_same_bit_for_bit():
    policy, trainer = make(cameras=("image",))
    trainer.train(3)
    state = {k: v.clone() for k, v in policy.state_dict().items()}
    place = copy.deepcopy(trainer.state_dict())
    trainer.train(3)
    other, resumed = make(cameras=("image",))
    other.load_state_dict(state)
    torch.manual_seed(99)
    resumed.load_state_dict(place)
    resumed.train(3)
    assert torch.equal(weights(other), weights(policy))
    assert resumed.num_optimizer_steps == 6


def test_the_gradient_is_clipped_and_one_that_is_not_finite_stops():
    policy, trainer = make(max_grad_norm=1e-9)
    metrics = trainer.train(1)
    assert metrics["grad_norm"] > 1e-3
    norm = sum(float(p.grad.norm()) ** 2 for p in policy.parameters()) ** 0.5
    assert norm <= 1.001e-9
    policy.head.bias.data.fill_(float("nan"))
    before = weights(policy)
    with pytest.raises(
        FloatingPointError, match=r"optimizer step 2 .*Lower update\.lr"
    ):
        trainer.train(1)
    assert torch.equal(weights(policy).nan_to_num(), before.nan_to_num())


def test_the_learning_rate_goes_up_and_down_to_nothing():
    factors = [cosine_factor(step, 110, 10) for step in range(111)]
    assert factors[0] == pytest.approx(1 / 11)
    assert factors[10] == 1.0
    assert factors[60] == pytest.approx(0.5)
    assert factors[110] == pytest.approx(0.0)
    assert all(a < b for a, b in itertools.pairwise(factors[:11]))
    assert all(a > b for a, b in itertools.pairwise(factors[10:]))
    _, trainer = make(num_steps=4)
    rates = [trainer.train(1)["learning_rate"] for _ in range(4)]
    expected = [0.02 * cosine_factor(step, 4, 0) for step in range(4)]
    assert rates == pytest.approx(expected)


class TestEarlyStopping:
    def run(self, values, name="val_token_accuracy", patience=2):
        module = nn.Linear(1, 1)
        stopping = EarlyStopping(module, name, patience)
        for iteration, value in enumerate(values, 1):
            nn.init.constant_(module.weight, iteration)
            stopping.update(iteration, {name: value})
            if stopping.is_over:
                break
        return module, stopping, iteration

    def test_it_ends_by_patience_and_keeps_the_best(self):
        module, stopping, end = self.run([0.1, 0.3, 0.2, 0.3, 0.9])
        assert (end, stopping.best_iteration, stopping.best_value) == (4, 2, 0.3)
        with stopping.best_weights():
            assert module.weight.item() == 2
        assert module.weight.item() == 4
        stopping.load_best()
        assert module.weight.item() == 2

    def test_a_lower_loss_is_better(self):
        _, stopping, end = self.run([3.0, 2.0, 2.5, 1.0, 5.0], name="val_loss")
        assert (end, stopping.best_iteration) == (5, 4)
        assert not stopping.is_over

    def test_without_validation_the_last_weights_are_the_best(self):
        module = nn.Linear(1, 1)
        stopping = EarlyStopping(module, patience=1)
        for iteration in (1, 2, 3):
            stopping.update(iteration, {})
        assert not stopping.is_over
        assert stopping.best_iteration == 3
        with stopping.best_weights():
            pass

    def test_its_state_is_a_checkpoints(self):
        module, stopping, _ = self.run([0.1, 0.3, 0.2])
        again = EarlyStopping(module, patience=2)
        again.load_state_dict(stopping.state_dict())
        again.update(4, {"val_token_accuracy": 0.0})
        assert again.is_over
        again.load_best()
        assert module.weight.item() == 2


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="batch_size is 0 and micro_batch_size 64"):
        make(batch_size=0)
