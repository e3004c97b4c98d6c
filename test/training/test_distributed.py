"""Loss, gradients and optimizer steps do not depend on the number of ranks."""

import pytest
import torch
from rank_processes import on_ranks
from rank_updates import policy_of, update

from torchrl_vla.modules.openvla_oft.tiny import save_tiny_checkpoint
from torchrl_vla.training.memory import memory_table


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


OPTIONS = {"micro_batch": 3, "kl": 0.1}
CASES = [
    ("compact", "ddp", 4, {"behavior": "recompute"}),
    ("compact", "fsdp", 4, {"cfg": {"num_replicas": 2, "cpu_offload": True}}),
    ("tiny", "ddp", 2, {"policy": {"lora_rank": 2}}),
    ("tiny", "fsdp", 2, {}),
    ("tiny", "fsdp", 4, {"behavior": "recompute"}),
]


@pytest.mark.parametrize(
    ("kind", "strategy", "size", "changes"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_update_is_that_of_one_process(
    tiny, tmp_path, kind, strategy, size, changes
):
    checkpoint = None if kind == "compact" else tiny
    options = {**OPTIONS, **changes}
    cfg = {"strategy": strategy, **options.pop("cfg", {})}
    alone = update(checkpoint, {"strategy": strategy}, options)
    several = on_ranks(update, size, tmp_path, checkpoint, cfg, options)
    rows = sorted(row for rank in several for row in rank["own"])
    assert rows == alone["own"], "each decision on one rank"
    spread = [len(rank["own"]) for rank in several]
    assert max(spread) - min(spread) <= 1
    for rank in several:
        assert len(rank["gradients"]) == len(alone["gradients"]) == 2
        for mine, theirs in zip(rank["gradients"], alone["gradients"], strict=True):
            assert mine.keys() == theirs.keys()
        assert close(rank["gradients"][0], alone["gradients"][0]) < 1e-6
        assert max(g.abs().max() for g in alone["gradients"][0].values()) > 5e-4
        for name in ("loss_objective", "loss_kl", "loss_entropy", "grad_norm"):
            loss = alone["first_step"][name]
            assert rank["first_step"][name] == pytest.approx(loss, abs=1e-6), name
        # AdamW's first steps are lr x sign of the gradient: where it is rounding
        # noise, so are they.
        assert close(rank["weights"], alone["weights"]) < 2.5e-3
        for name, value in alone["metrics"].items():
            assert rank["metrics"][name] == pytest.approx(value, abs=2e-5), name
        assert torch.equal(rank["tokens"], rank["unsharded_tokens"])
    first = alone["metrics"]
    assert first["optimizer_steps"] == 2
    assert (first["clip_fraction"] > 0) == ("behavior" not in options)
    assert abs(first["reference_kl"]) > 0
    shapes = policy_of(checkpoint, **options.get("policy", {}))
    num_shards = size // cfg.get("num_replicas", 1) if strategy == "fsdp" else 1
    expected = memory_table(shapes, num_shards=num_shards)
    for part, num_bytes in several[0]["held"].items():
        assert num_bytes == expected["update"][part], part
    for part, num_bytes in alone["held"].items():
        assert num_bytes == memory_table(shapes)["update"][part], part
    if strategy == "fsdp":
        assert several[0]["gathered"] == expected["rollout"]["gathered"]
        total = alone["local_elements"] * cfg.get("num_replicas", 1)
        assert several[0]["units"] > 3
        for rank in several:
            assert rank["local_elements"] < total * 1.1 / size + 200


def test_mixed_precision_keeps_weights_in_float32_and_acts_in_bfloat16(tiny, tmp_path):
    cfg = {"strategy": "fsdp", "mixed_precision": True}
    alone = update(tiny, {"strategy": "fsdp"}, OPTIONS)
    several = on_ranks(update, 2, tmp_path, tiny, cfg, OPTIONS)
    expected = memory_table(policy_of(tiny), num_shards=2, mixed_precision=True)
    for rank in several:
        assert {value.dtype for value in rank["weights"].values()} == {torch.float32}
        assert torch.equal(rank["tokens"], rank["unsharded_tokens"])
        assert rank["gathered"] == expected["rollout"]["gathered"]
        mine, theirs = (
            torch.cat([g.flatten() for g in run["gradients"][0].values()])
            for run in (rank, alone)
        )
        assert torch.cosine_similarity(mine, theirs, dim=0) > 0.99
    for part, num_bytes in several[0]["held"].items():
        assert num_bytes == expected["update"][part], part


def close(left, right):
    """Largest difference of two dicts of tensors."""
    return max((left[name] - right[name]).abs().max().item() for name in right)
