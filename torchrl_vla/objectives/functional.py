"""Group-relative policy optimisation as pure functions.

Shape legend: ``E`` episodes, ``B`` decisions, ``H`` actions of a chunk, ``A`` action
dimensions. Equations are those of SimpleVLA-RL (arXiv:2509.09674) and DAPO
(arXiv:2503.14476); recorded values of the reference program are in ``test/goldens``.
"""

from itertools import combinations

import torch
from torch import Tensor

AGGREGATIONS = ("episode", "token", "decision")
KL_ESTIMATORS = ("k1", "k2", "k3")
SELECTIONS = ("first", "uniform", "balanced")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")


def executed_token_mask(
    num_executed_B1: Tensor, chunk_size: int, action_dim: int
) -> Tensor:
    """Which action tokens were played: token ``(h, a)`` counts iff ``h < executed``.

    Args:
        num_executed_B1: int64 ``[*B, 1]``, env steps of the chunk really played, 0..H.
        chunk_size: ``H``.
        action_dim: ``A``.

    Returns:
        bool ``[*B, H, A]``.

    Example:
        >>> executed_token_mask(torch.tensor([[1]]), 2, 2).tolist()
        [[[True, True], [False, False]]]
    """
    step_H = torch.arange(chunk_size, device=num_executed_B1.device)
    mask_BH = step_H < num_executed_B1
    return mask_BH.unsqueeze(-1).expand(*mask_BH.shape, action_dim)


def group_advantage(
    return_E: Tensor, group_E: Tensor, *, normalize_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Advantage of an episode over its own group.

    ``A_i = (R_i - mean(R)) / (std(R) + eps)`` with the unbiased (n - 1) deviation, or
    ``R_i - mean(R)`` without normalisation. A group of one has mean 0 and deviation 1,
    as in the reference. With ``G = 8`` and one success: +2.47487 and -0.35355.

    Source: SimpleVLA-RL, equation 7. TorchRL's ``MCAdvantage`` normalises likewise
    (``trajectory_return="sum"``) but queues whole trajectories inside the transform.

    Args:
        return_E: returns, floating ``[E]``.
        group_E: int64 ``[E]``, equal for members of a group.
        normalize_std: divide by the deviation.
        eps: added to the deviation.

    Returns:
        ``[E]``, dtype of ``return_E``.

    Example:
        >>> group_advantage(torch.tensor([1.0, 0.0]), torch.tensor([7, 7]))
        tensor([ 0.7071, -0.7071])
    """
    _, index_E, size_N = group_E.unique(return_inverse=True, return_counts=True)

    def total(values_E: Tensor) -> Tensor:
        zeros_N = values_E.new_zeros(size_N.shape)
        return zeros_N.index_add(0, index_E, values_E)

    single_N = size_N == 1
    mean_N = (total(return_E) / size_N).masked_fill(single_N, 0.0)
    centered_E = return_E - mean_N[index_E]
    if not normalize_std:
        return centered_E
    variance_N = total(centered_E**2) / (size_N - 1).clamp(min=1)
    std_N = variance_N.sqrt().masked_fill(single_N, 1.0)
    return centered_E / (std_N[index_E] + eps)


def is_mixed(mean_return: float, low: float = 0.1, high: float = 0.9) -> bool:
    """Dynamic sampling: keep a group iff ``low <= mean return <= high``, inclusive.

    Source: DAPO (arXiv:2503.14476), equation 11, with the bounds of SimpleVLA-RL.
    TorchRL's ``MCAdvantage(keep_return_bounds=...)`` excludes the bounds.

    Example:
        >>> is_mixed(0.125), is_mixed(0.0), is_mixed(0.1)
        (True, False, True)
    """
    # Means of 0/1 returns are ratios such as 1/10: allow for their rounding.
    slack = 1e-9
    return low - slack <= mean_return <= high + slack


def select_members(
    returns: list[float],
    group_size: int,
    selection: str = "first",
    *,
    low: float = 0.1,
    high: float = 0.9,
) -> list[int]:
    """Choose ``group_size`` of the candidates that were played for a group.

    ``first`` takes the first ones. ``uniform`` takes evenly spaced ones of the
    candidates ordered by return. ``balanced`` takes the combination whose mean return
    is closest to the middle of the bounds: it selects **by outcome**, so the group mean
    no longer estimates the success rate and the baseline is biased. Never the default.

    Args:
        returns: return of each candidate, in the order they were started.
        group_size: how many to keep, at most ``len(returns)``.
        selection: ``first``, ``uniform`` or ``balanced``.
        low: lower bound of a mixed group's mean return.
        high: upper bound.

    Returns:
        Indices into ``returns``, ascending.

    Raises:
        ValueError: for an unknown selection or too few candidates.

    Example:
        >>> select_members([0.0, 0.0, 0.0, 1.0], 2, "balanced")
        [0, 3]
    """
    _check_choice("selection", selection, SELECTIONS)
    if len(returns) < group_size:
        raise ValueError(
            f"{len(returns)} candidates were given for a group of {group_size}"
        )
    if selection == "first" or len(returns) == group_size:
        return list(range(group_size))
    order = sorted(range(len(returns)), key=returns.__getitem__)
    if selection == "uniform":
        last = len(order) - 1
        spaced = [round(i * last / max(group_size - 1, 1)) for i in range(group_size)]
        return sorted(order[i] for i in spaced)
    # The mean depends on how many are taken from each end of the order only.
    middle = (low + high) / 2
    splits = range(group_size + 1)
    candidates = [
        order[:k] + order[len(order) - (group_size - k) :] for k in reversed(splits)
    ]
    if len(set(returns)) > 2:
        candidates = [list(c) for c in combinations(range(len(returns)), group_size)]
    best = min(
        candidates,
        key=lambda c: (
            abs(sum(returns[i] for i in c) / group_size - middle),
            sorted(c),
        ),
    )
    return sorted(best)


def loss_weights(
    num_tokens_B: Tensor, episode_B: Tensor, aggregation: str = "episode"
) -> Tensor:
    """Weight of every token of a decision, so that the loss is a plain weighted sum.

    ``episode``: mean over the tokens of an episode, then over episodes (the reference,
    equation 8). ``token``: mean over all tokens (DAPO). ``decision``: mean over
    decisions (TorchRL's recipe). Weights times tokens sum to 1 over the rows given, so
    loss and gradient do not depend on how these rows are cut into micro-batches or
    spread over ranks. Rows without tokens weigh 0; no tokens at all gives 0, not NaN.

    Args:
        num_tokens_B: tokens that count in each decision, ``[B]``.
        episode_B: int64 ``[B]``, equal for decisions of an episode.
        aggregation: ``episode``, ``token`` or ``decision``.

    Returns:
        float32 ``[B]``.

    Example:
        >>> loss_weights(torch.tensor([2, 2, 4]), torch.tensor([0, 0, 1])).tolist()
        [0.125, 0.125, 0.125]
        >>> loss_weights(torch.tensor([2, 4]), torch.tensor([0, 1])).tolist()
        [0.25, 0.125]
    """
    _check_choice("aggregation", aggregation, AGGREGATIONS)
    tokens_B = num_tokens_B.to(torch.float64)
    if aggregation == "token":
        weight_B = torch.ones_like(tokens_B)
    elif aggregation == "decision":
        weight_B = 1 / tokens_B
    else:
        _, index_B = episode_B.unique(return_inverse=True)
        tokens_E = tokens_B.new_zeros(int(index_B.max()) + 1 if len(index_B) else 0)
        weight_B = 1 / tokens_E.index_add(0, index_B, tokens_B)[index_B]
    weight_B = weight_B.masked_fill(tokens_B == 0, 0.0)
    return normalize_weights(weight_B, tokens_B).to(torch.float32)


def normalize_weights(weight_B: Tensor, num_tokens_B: Tensor) -> Tensor:
    """Scale weights so that ``sum_b weight_b * tokens_b = 1`` (or leave all zeros)."""
    total = (weight_B * num_tokens_B).sum()
    return weight_B / total.where(total > 0, torch.ones_like(total))


def clipped_policy_loss(
    log_ratio: Tensor, advantage: Tensor, clip_low: float = 0.2, clip_high: float = 0.28
) -> Tensor:
    """Clip-higher surrogate per token.

    ``l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)`` with
    ``r = exp(log_ratio)``.

    Source: DAPO (arXiv:2503.14476), equation 10. ``torchrl.objectives.ClipPPOLoss``
    computes the same from a summed log-prob; here each token has its own ratio.

    Args:
        log_ratio: log-prob minus behaviour log-prob, any shape.
        advantage: broadcasts against ``log_ratio``.

    Returns:
        The loss of every token, shape of ``log_ratio``.

    Example:
        >>> clipped_policy_loss(torch.log(torch.tensor([2.0])), torch.tensor([1.0]))
        tensor([-1.2800])
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def kl_estimate(
    log_prob: Tensor, reference_log_prob: Tensor, estimator: str = "k1"
) -> Tensor:
    """Sample estimate of ``KL(policy || reference)`` per token.

    With ``d = log_prob - reference_log_prob``: ``k1 = d``, ``k2 = d**2 / 2``,
    ``k3 = exp(-d) - 1 + d``. Source: Schulman, "Approximating KL divergence" (2020).
    The reference program calls them ``kl``, ``mse`` and ``low_var_kl``.

    Example:
        >>> kl_estimate(torch.tensor([1.0]), torch.tensor([0.0]), "k2")
        tensor([0.5000])
    """
    _check_choice("estimator", estimator, KL_ESTIMATORS)
    difference = log_prob - reference_log_prob
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    return torch.expm1(-difference) + difference


def adaptive_kl_coef(
    coef: float, kl: float, *, target: float, horizon: int, num_episodes: int
) -> float:
    """One step of the proportional controller of the KL coefficient.

    ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_episodes / horizon)``.
    Source: Ziegler et al. (arXiv:1909.08593), equation 3.

    Example:
        >>> round(adaptive_kl_coef(0.1, 12.0, target=6, horizon=10000,
        ...                        num_episodes=256), 6)
        0.100512
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_episodes / horizon)
