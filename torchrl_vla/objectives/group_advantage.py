"""Group-relative advantages and loss weights, written onto a batch of decisions."""

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data import Composite
from torchrl.envs.transforms import Transform

from torchrl_vla.data import keys
from torchrl_vla.objectives.functional import (
    adaptive_kl_coef,
    executed_token_mask,
    group_advantage,
    kl_estimate,
    loss_weights,
)


class GroupAdvantage(Transform):
    """Write ``"advantage"`` and ``"loss_weight"`` onto a batch of whole episodes.

    The return of an episode is the sum of ``("next", "reward")`` over its decisions;
    its advantage over the group, :func:`functional.group_advantage`, goes to each of
    them. ``"loss_weight"`` carries the aggregation, :func:`functional.loss_weights`.

    Works by call (``GroupAdvantage()(batch)``), and as the transform of a TorchRL
    replay buffer, where each ``extend`` must bring whole groups. Unlike TorchRL's
    ``MCAdvantage`` it holds no queue: what it writes depends on the batch alone (and,
    with ``kl_target``, on the coefficient it has steered to).

    Args:
        aggregation: ``episode``, ``token`` or ``decision``.
        normalize_std: divide by the group's standard deviation.
        kl_coef: coefficient of the KL to a reference policy, subtracted from the reward
            of a decision (sum over its played tokens); 0 is off.
        kl_estimator: ``k1``, ``k2`` or ``k3``.
        kl_horizon: episodes over which the coefficient can change by a fifth.
        kl_target: steer ``kl_coef`` to this mean KL per token after each batch;
            ``None`` keeps it fixed.
        reward_key, done_key, num_executed_key, tokens_key, group_key, episode_key,
            advantage_key, loss_weight_key, log_probs_key, reference_key: names of the
            entries.

    Keys read: ``("next", "reward")`` float ``[1]``, ``"group_id"`` int64 ``[1]``;
    ``"episode_id"`` int64 ``[1]`` if there is one, otherwise episodes end where
    ``("next", "done")`` is true, in the order of the flattened batch;
    ``("next", "num_executed")`` int64 ``[1]`` and ``("vla_action", "tokens")`` for the
    number of tokens, each decision counting the same where these are missing.

    Keys written: ``"advantage"`` float32 ``[1]``, ``"loss_weight"`` float32 ``[1]``,
    with weights times tokens summing to 1 over the batch. A batch that has an advantage
    already (a sample of the buffer) is returned as it is.

    Raises:
        ValueError: when an episode is cut off, or spans groups.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({
        ...     ("next", "reward"): torch.tensor([[0.0], [1.0], [0.0]]),
        ...     ("next", "done"): torch.tensor([[False], [True], [True]]),
        ...     "group_id": torch.tensor([[7], [7], [7]]),
        ... }, batch_size=[3])
        >>> GroupAdvantage()(batch)["advantage"].squeeze(-1)
        tensor([ 0.7071,  0.7071, -0.7071])
    """

    def __init__(
        self,
        *,
        aggregation: str = "episode",
        normalize_std: bool = True,
        kl_coef: float = 0.0,
        kl_estimator: str = "k1",
        kl_target: float | None = None,
        kl_horizon: int = 10_000,
        reward_key: NestedKey = keys.REWARD,
        done_key: NestedKey = keys.DONE,
        num_executed_key: NestedKey = keys.NUM_EXECUTED,
        tokens_key: NestedKey = keys.TOKENS,
        group_key: NestedKey = keys.GROUP_ID,
        episode_key: NestedKey = keys.EPISODE_ID,
        advantage_key: NestedKey = keys.ADVANTAGE,
        loss_weight_key: NestedKey = keys.LOSS_WEIGHT,
        log_probs_key: NestedKey = keys.LOG_PROBS,
        reference_key: NestedKey = keys.REFERENCE_LOG_PROBS,
    ) -> None:
        super().__init__(
            in_keys=[reward_key, group_key], out_keys=[advantage_key, loss_weight_key]
        )
        self.aggregation = aggregation
        self.normalize_std = normalize_std
        self.kl_coef = kl_coef
        self.kl_estimator = kl_estimator
        self.kl_target = kl_target
        self.kl_horizon = kl_horizon
        self.reward_key = reward_key
        self.done_key = done_key
        self.num_executed_key = num_executed_key
        self.tokens_key = tokens_key
        self.group_key = group_key
        self.episode_key = episode_key
        self.advantage_key = advantage_key
        self.loss_weight_key = loss_weight_key
        self.log_probs_key = log_probs_key
        self.reference_key = reference_key

    def get_extra_state(self) -> dict[str, float]:
        return {"kl_coef": self.kl_coef}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.kl_coef = state["kl_coef"]

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.forward(tensordict)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        raise RuntimeError(
            "GroupAdvantage needs whole episodes: call it on a batch, or give it to a "
            "replay buffer, not to an environment."
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.advantage_key in tensordict.keys(True):
            return tensordict  # sampled from a buffer: it was written on the way in
        episode_B = self._episodes(tensordict)
        weight_B = loss_weights(
            self._num_tokens(tensordict), episode_B, self.aggregation
        )
        reward_B = tensordict.get(self.reward_key).reshape(-1).to(torch.float64)
        if self.kl_coef:
            reward_B = reward_B - self._kl_penalty(tensordict, weight_B, episode_B)
        advantage_B = self._advantage(tensordict, reward_B, episode_B)
        column = (*tensordict.shape, 1)
        tensordict.set(self.advantage_key, advantage_B.float().reshape(column))
        tensordict.set(self.loss_weight_key, weight_B.reshape(column))
        return tensordict

    def _advantage(
        self,
        tensordict: TensorDictBase,
        reward_B: torch.Tensor,
        episode_B: torch.Tensor,
    ) -> torch.Tensor:
        group_B = tensordict.get(self.group_key).reshape(-1)
        num_episodes = int(episode_B.max()) + 1
        return_E = reward_B.new_zeros(num_episodes).index_add(0, episode_B, reward_B)
        group_E = group_B.new_empty(num_episodes).index_copy(0, episode_B, group_B)
        if not torch.equal(group_E[episode_B], group_B):
            raise ValueError(
                f"an episode has decisions of several {self.group_key!r}: episodes are "
                "told apart by 'episode_id', or by 'done' in the batch's order"
            )
        advantage_E = group_advantage(
            return_E, group_E, normalize_std=self.normalize_std
        )
        return advantage_E[episode_B]

    def _kl_penalty(
        self,
        tensordict: TensorDictBase,
        weight_B: torch.Tensor,
        episode_B: torch.Tensor,
    ) -> torch.Tensor:
        kl_BHA = kl_estimate(
            tensordict.get(self.log_probs_key),
            tensordict.get(self.reference_key),
            self.kl_estimator,
        )
        mask_BHA = executed_token_mask(
            tensordict.get(self.num_executed_key), *kl_BHA.shape[-2:]
        )
        kl_B = kl_BHA.masked_fill(~mask_BHA, 0.0).sum((-2, -1)).reshape(-1).double()
        penalty_B = self.kl_coef * kl_B
        if self.kl_target is not None:
            self.kl_coef = adaptive_kl_coef(
                self.kl_coef,
                float((weight_B * kl_B).sum()),
                target=self.kl_target,
                horizon=self.kl_horizon,
                num_episodes=int(episode_B.max()) + 1,
            )
        return penalty_B

    def _episodes(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Number of the episode of each decision, 0.., in the batch's order."""
        episode = tensordict.get(self.episode_key, None)
        if episode is not None:
            return episode.reshape(-1).unique(return_inverse=True)[1]
        done_B = tensordict.get(self.done_key).reshape(-1)
        if not done_B[-1]:
            raise ValueError(
                "the batch ends in the middle of an episode: give whole episodes, each "
                f"ending with {self.done_key!r}, or write an 'episode_id'"
            )
        return done_B.cumsum(0) - done_B.to(torch.int64)

    def _num_tokens(self, tensordict: TensorDictBase) -> torch.Tensor:
        executed = tensordict.get(self.num_executed_key, None)
        if executed is None:
            return torch.ones(tensordict.numel(), device=tensordict.device)
        tokens = tensordict.get(self.tokens_key, None)
        action_dim = 1 if tokens is None else tokens.shape[-1]
        return executed.reshape(-1) * action_dim
