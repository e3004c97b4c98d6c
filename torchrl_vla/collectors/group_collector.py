"""Play whole groups until enough of them have contrast."""

from collections import Counter
from contextlib import suppress

import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla.collectors.group_wave import GroupWave
from torchrl_vla.collectors.ranks import Alone, Ranks
from torchrl_vla.collectors.slots import Policy, Pool
from torchrl_vla.data.group_schedule import GroupSchedule


class GroupCollector:
    """Collect mixed groups: ``G`` episodes of one (task, initial state), one policy.

    Groups are taken in the order of the schedule. A batch is the first ``num_groups``
    mixed groups **in that order**, whichever finished first, so it does not depend on
    the number of workers or on how long episodes last; groups played beyond them are
    surplus, are counted, and come again in the next iteration under the new policy.
    Collection ends when the batch is full or ``max_sampling_factor * num_groups``
    groups have been looked at.

    Several ranks take groups from one schedule, each the next one when it is free, and
    tell each other the returns. So a slow rank plays fewer groups, all ranks know the
    same batch at the same time and stop, and the batch is that of one rank, each group
    on the rank that played it.

    Source: dynamic sampling of DAPO (arXiv:2503.14476) as in SimpleVLA-RL. TorchRL's
    collectors deliver a number of frames and leave grouping to
    ``MCAdvantage``, which waits without a budget.

    Args:
        pool: where episodes are played.
        schedule: which groups, in which order.
        num_groups: mixed groups wanted per iteration.
        group_size: ``G``, at least 2.
        num_candidates: episodes played per group, at least ``G``; ``None`` is ``G``.
        selection: which ``G`` of the candidates are kept, see
            :func:`functional.select_members`.
        dynamic_sampling: keep mixed groups only; otherwise every group.
        keep_low, keep_high: bounds of a mixed group's mean return, inclusive.
        max_sampling_factor: budget of groups per iteration, in multiples of
            ``num_groups``.
        skip_solved: pass over initial states solved by all members in their last
            ``skip_solved`` visits; 0 is off.
        seed: names the sampling noise of episodes.
        ranks: who shares the work.

    Raises:
        ValueError: for sizes that contradict each other.
    """

    def __init__(
        self,
        pool: Pool,
        schedule: GroupSchedule,
        *,
        num_groups: int,
        group_size: int = 8,
        num_candidates: int | None = None,
        selection: str = "first",
        dynamic_sampling: bool = True,
        keep_low: float = 0.1,
        keep_high: float = 0.9,
        max_sampling_factor: int = 4,
        skip_solved: int = 0,
        seed: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        num_candidates = num_candidates or group_size
        if group_size < 2 or num_candidates < group_size or num_groups < 1:
            raise ValueError(
                f"group_size is {group_size}, num_candidates {num_candidates}, "
                f"num_groups {num_groups}; needed are 2 <= group_size <= "
                "num_candidates and num_groups >= 1"
            )
        self.pool = pool
        self.schedule = schedule
        self.num_groups = num_groups
        self.group_size = group_size
        self.num_candidates = num_candidates
        self.selection = selection
        self.dynamic_sampling = dynamic_sampling
        self.keep_low = keep_low
        self.keep_high = keep_high
        self.max_groups = (
            max_sampling_factor * num_groups if dynamic_sampling else num_groups
        )
        self.skip_solved = skip_solved
        self.seed = seed
        self.ranks = ranks or Alone()
        self.position = 0
        self.iteration = 0
        self.solved_visits: Counter[tuple[int, int]] = Counter()

    def state_dict(self) -> dict:
        """The place in the schedule, the iteration and the record of solved states."""
        return {
            "position": self.position,
            "iteration": self.iteration,
            "solved_visits": [[*k, v] for k, v in sorted(self.solved_visits.items())],
        }

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]
        self.iteration = state["iteration"]
        visits = {(task, start): n for task, start, n in state["solved_visits"]}
        self.solved_visits = Counter(visits)

    @torch.no_grad()
    def collect(self, policy: Policy) -> tuple[TensorDictBase | None, dict[str, float]]:
        """Play until the batch is full or the budget spent.

        Returns:
            The decisions of the kept groups that were played on this rank, a flat batch
            ``[B]`` ordered by group, episode and decision (``None`` when there are
            none), and the counts of all ranks named in ``COUNTS`` plus
            ``success_rate`` (of all episodes of the groups looked at, kept or not).
        """
        wave = GroupWave(self)
        num_restarts = self.pool.num_restarts
        with set_exploration_type(ExplorationType.RANDOM):
            while not wave.is_over:
                self._play(policy, wave)
                if not wave.is_over:
                    wave.wait()
        self.position = wave.position
        self.iteration += 1
        wave.count["worker_restarts"] = self.pool.num_restarts - num_restarts
        return wave.batch(), wave.counts()

    def _play(self, policy: Policy, wave: GroupWave) -> None:
        """Play what there is to play on this rank, or until the wave is over."""

        def acting(observation: TensorDictBase) -> TensorDictBase:
            # Other ranks may have filled the batch since the last episode ended here.
            if self.ranks.size > 1 and wave.has_ended():
                raise _Over
            return policy(observation)

        rounds = self.pool.play(acting, wave.next_request)
        with suppress(_Over):
            for decisions in rounds:
                wave.add(decisions)
                if wave.is_over:
                    break
        rounds.close()


class _Over(Exception):
    """Raised through a pool to abandon what it plays."""
