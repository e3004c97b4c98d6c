"""Evaluation: every pair exactly once, greedily, with a record of the conditions."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import TransformedEnv

from torchrl_vla.collectors import EnvPool
from torchrl_vla.data.action_codec import UniformActionCodec
from torchrl_vla.envs import ActionTokensTransform, MultiAction, ToyTaskEnv
from torchrl_vla.modules import CompactPolicy
from torchrl_vla.modules.token_policy import TokenPolicy
from torchrl_vla.training import EvaluationResult, Evaluator

TOL = 0.35


def make_pool(num_envs=4, **kwargs):
    toy = ToyTaskEnv(num_envs=num_envs, success_tol=TOL, **kwargs)
    env = TransformedEnv(toy, MultiAction(4))
    return EnvPool(env.append_transform(ActionTokensTransform(UniformActionCodec(11))))


class CentrePolicy(TokenPolicy):
    """Stays at the centre, but samples anything else."""

    def __init__(self):
        super().__init__(
            in_keys=[("observation", "state")], chunk_size=4, action_dim=2, num_bins=11
        )
        self.num_decisions = 0

    def action_logits(self, tensordict):
        self.num_decisions += len(tensordict)
        logits = torch.zeros(len(tensordict), 4, 2, 11)
        logits[..., 5] = 1e-3
        return logits


def targets(starts):
    return ToyTaskEnv(num_envs=len(starts)).reset(init_state_id=torch.tensor(starts))[
        "observation", "state"
    ][:, 2:4]


@pytest.mark.parametrize("num_envs", [1, 3, 8, 20])
def test_every_pair_exactly_once_whatever_the_number_of_slots(num_envs):
    pairs = [(0, start) for start in range(10)]
    policy = CentrePolicy()
    result = Evaluator(make_pool(num_envs), pairs).evaluate(policy)
    expected = (targets(range(10)).abs() <= TOL).all(-1).tolist()
    assert set(result.success) == set(pairs)
    assert [result.success[pair] for pair in pairs] == expected
    assert 0 < sum(expected) < 10, "the test can fail"
    # Short episodes (success after 2 env steps) and long ones (24) both count.
    steps = [result.num_env_steps[pair] for pair in pairs]
    assert steps == [2 if success else 24 for success in expected]
    decisions = sum(1 if success else 6 for success in expected)
    assert policy.num_decisions == decisions, "nothing was played twice"
    assert result.success_rate == sum(expected) / 10


def test_pairs_in_any_order_with_gaps():
    pairs = [(0, 7), (0, 1_000_003), (0, 2)]
    result = Evaluator(make_pool(2), pairs).evaluate(CentrePolicy())
    assert set(result.success) == set(pairs)


def test_it_is_greedy_and_repeats_itself():
    policy = CompactPolicy(chunk_size=4, action_dim=2, num_bins=11, state_dim=4)
    evaluator = Evaluator(make_pool(16), [(0, start) for start in range(30)])
    torch.manual_seed(0)
    first = evaluator.evaluate(policy)
    state = torch.get_rng_state()
    second = evaluator.evaluate(policy)
    assert first.success == second.success
    assert torch.equal(torch.get_rng_state(), state), "no random number is drawn"


@pytest.mark.parametrize("pairs", [[], [(0, 1), (0, 2), (0, 1)]])
def test_no_pairs_or_one_twice_is_refused(pairs):
    with pytest.raises(ValueError, match=f"{len(pairs)} pairs: .* each once"):
        Evaluator(make_pool(), pairs)


def test_a_pair_without_an_outcome_is_an_error():
    pool = make_pool()
    play = pool.play

    def lose_the_last_round(*args):
        rounds = list(play(*args))
        return iter(rounds[:-1])

    pool.play = lose_the_last_round
    with pytest.raises(RuntimeError, match=r"no outcome for \[\(0, "):
        Evaluator(pool, [(0, start) for start in range(10)]).evaluate(CentrePolicy())


def test_videos_show_every_decision_and_the_end():
    pairs = [(0, start) for start in range(10)]
    evaluator = Evaluator(make_pool(3), pairs)
    result = evaluator.evaluate(CentrePolicy(), num_videos=4)
    assert set(result.videos) == set(pairs[:4])
    for pair, frames in result.videos.items():
        num_decisions = 1 if result.success[pair] else 6
        assert frames.shape == (num_decisions + 1, 32, 32, 3)
        assert frames.dtype == np.uint8
        # The target is where it was all the time, the hand is at the centre at the end.
        start = ToyTaskEnv().reset(init_state_id=pair[1])
        assert np.array_equal(
            frames[0], start["observation", "image"][0].permute(1, 2, 0).numpy()
        )
        env = make_pool(1).env
        td = env.reset(init_state_id=pair[1])
        for _ in range(num_decisions):
            td["vla_action", "tokens"] = torch.full((1, 4, 2), 5)
            td = env.step(td)["next"]
        last = td["observation", "image"][0].permute(1, 2, 0).numpy()
        assert np.array_equal(frames[-1], last), "the last frame is the final picture"


def test_an_entry_pixels_is_what_is_recorded():
    from torchrl_vla.training.evaluator import _frame

    pixels = torch.arange(12, dtype=torch.uint8).reshape(2, 2, 3)
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    td = TensorDict({"pixels": pixels, ("observation", "image"): image})
    assert np.array_equal(_frame(td), pixels.numpy())


def test_videos_take_the_tasks_in_turn():
    pairs = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 9)]
    evaluator = Evaluator(make_pool(1), pairs)
    assert [pairs[number] for number in evaluator._in_turn()] == [
        (0, 0), (1, 0), (2, 9), (0, 1), (1, 1), (0, 2)
    ]  # fmt: skip


def test_more_videos_than_pairs():
    result = Evaluator(make_pool(2), [(0, 1)]).evaluate(CentrePolicy(), num_videos=5)
    assert len(result.videos) == 1


def test_summary_per_task_with_intervals():
    success = {(3, 0): True, (3, 1): True, (5, 0): True, (5, 1): False}
    steps = dict.fromkeys(success, 4)
    summary = EvaluationResult(success, steps, protocol={"a": 1}).summary()
    assert summary["success_rate"] == 0.75
    assert summary["num_episodes"] == 4
    assert summary["tasks"]["3"]["success_rate"] == 1.0
    assert summary["tasks"]["5"]["success_rate"] == 0.5
    assert summary["tasks"]["5"]["num_episodes"] == 2
    # 3 of 4, by hand: centre (0.75 + 0.48) / 1.96, half width 0.5 * 1.96 * ... = 0.327
    assert summary["interval"] == pytest.approx((0.30064, 0.95441), abs=1e-4)
    assert summary["tasks"]["5"]["interval"] == pytest.approx(
        (0.09453, 0.90547), abs=1e-4
    )
    assert summary["protocol"] == {"a": 1}


def test_the_protocol_names_the_conditions():
    evaluator = Evaluator(
        make_pool(), [(0, 0), (0, 1), (2, 5)], {"max_episode_steps": 24}
    )
    protocol = evaluator.protocol
    assert protocol["decoding"] == "greedy"
    assert protocol["max_episode_steps"] == 24
    assert protocol["pairs"] == {"0": "0-1", "2": "5"}
    assert protocol["versions"]["torch"] == torch.__version__
