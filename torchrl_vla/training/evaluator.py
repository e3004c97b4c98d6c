"""Greedy success rate over a fixed list of starts, each exactly once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla.collectors.ranks import Alone, Ranks
from torchrl_vla.collectors.slots import EpisodeRequest, Policy, Pool
from torchrl_vla.data import keys
from torchrl_vla.training.metrics import wilson_interval
from torchrl_vla.training.report import versions


@dataclass
class EvaluationResult:
    """Outcome of an evaluation.

    Attributes:
        success: whether each (task, initial state) pair succeeded.
        num_env_steps: env steps that each pair took.
        videos: frames uint8 ``[T, Y, X, 3]`` of recorded pairs, one per decision.
        protocol: what must be equal for two results to be comparable.
    """

    success: dict[tuple[int, int], bool]
    num_env_steps: dict[tuple[int, int], int]
    videos: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def success_rate(self) -> float:
        return sum(self.success.values()) / len(self.success)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson 95 % interval of the success rate."""
        return wilson_interval(sum(self.success.values()), len(self.success))

    def summary(self) -> dict[str, Any]:
        """Rate and interval, overall and per task, with the protocol."""
        num = Counter(task for task, _ in self.success)
        good = Counter(task for (task, _), success in self.success.items() if success)
        tasks = {
            str(task): {
                "success_rate": good[task] / num[task],
                "interval": wilson_interval(good[task], num[task]),
                "num_episodes": num[task],
            }
            for task in sorted(num)
        }
        return {
            "success_rate": self.success_rate,
            "interval": self.interval,
            "num_episodes": len(self.success),
            "tasks": tasks,
            "protocol": self.protocol,
        }


class Evaluator:
    """Play every (task, initial state) pair exactly once, greedily.

    No pair is dropped or repeated, and the result does not depend on which worker plays
    what or who finishes first. Tokens are the most likely ones.

    Args:
        pool: where episodes are played.
        pairs: (task, initial state) pairs, each once.
        protocol: goes into the result, besides decoding, pairs and versions: suite,
            step limit, settle steps, seeds, ...
        ranks: that share the pairs; each takes the next one when it is free.

    Raises:
        ValueError: for no pairs, or a pair that is there twice.
    """

    def __init__(
        self,
        pool: Pool,
        pairs: Sequence[tuple[int, int]],
        protocol: dict[str, Any] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if not pairs or len(set(pairs)) != len(pairs):
            raise ValueError(f"{len(pairs)} pairs: give at least one, each once")
        self.pool = pool
        self.pairs = list(pairs)
        self.ranks = ranks or Alone()
        starts: dict[int, list[int]] = {}
        for task, start in pairs:
            starts.setdefault(task, []).append(start)
        self.protocol = {
            "decoding": "greedy",
            **(protocol or {}),
            "pairs": {str(task): _ranges(starts[task]) for task in sorted(starts)},
            "versions": versions(),
        }

    @torch.no_grad()
    def evaluate(self, policy: Policy, num_videos: int = 0) -> EvaluationResult:
        """Play all pairs; record ``num_videos`` of them, the tasks in turn."""
        board = self.ranks.board()
        result = EvaluationResult({}, Counter(), {}, self.protocol)
        frames: dict[int, list[np.ndarray]] = {
            number: [] for number in self._in_turn()[:num_videos]
        }
        num_taken = 0
        # A rank leaves the others their part, however many slots it has.
        num_most = -(-len(self.pairs) // self.ranks.size)

        def next_request(worker: int) -> EpisodeRequest | None:
            nonlocal num_taken
            if num_taken - len(result.success) >= num_most:
                return None
            if (number := board.take()) >= len(self.pairs):
                return None
            num_taken += 1
            return EpisodeRequest(number, number, *self.pairs[number], seed=0)

        with set_exploration_type(ExplorationType.DETERMINISTIC):
            for decisions in self.pool.play(policy, next_request):
                self._record(decisions, result, frames)
        mine = (result.success, result.num_env_steps, frames)
        for success, num_env_steps, images in self.ranks.gather(mine):
            result.success |= success
            result.num_env_steps |= num_env_steps
            frames |= {number: shown for number, shown in images.items() if shown}
        board.close()
        if missing := set(self.pairs) - set(result.success):
            raise RuntimeError(f"the simulator gave no outcome for {sorted(missing)}")
        for number, images in frames.items():
            if images:
                result.videos[self.pairs[number]] = np.stack(images)
        return result

    def _in_turn(self) -> list[int]:
        """Numbers of the pairs: the first of every task, then every second, ..."""
        seen: Counter[int] = Counter()
        visits = []
        for task, _ in self.pairs:
            visits.append(seen[task])
            seen[task] += 1
        return sorted(range(len(self.pairs)), key=visits.__getitem__)

    def _record(self, decisions: TensorDictBase, result, frames) -> None:
        numbers = decisions[keys.EPISODE_ID].flatten().tolist()
        executed = decisions[keys.NUM_EXECUTED].flatten().tolist()
        done = decisions[keys.DONE].flatten().tolist()
        success = decisions[keys.SUCCESS].flatten().tolist()
        for row, number in enumerate(numbers):
            pair = self.pairs[number]
            result.num_env_steps[pair] += executed[row]
            if done[row]:
                result.success[pair] = success[row]
            if number in frames:
                frames[number].append(_frame(decisions[row]))
                if done[row]:
                    frames[number].append(_frame(decisions[row]["next"]))


def _frame(observation: TensorDictBase) -> np.ndarray:
    pixels = observation.get("pixels", None)
    if pixels is None:
        pixels = observation[keys.IMAGE].permute(1, 2, 0)
    return pixels.cpu().numpy()


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in short: ``[0, 1, 2, 5]`` is ``"0-2,5"``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
