"""Play whole groups until enough of them have contrast."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla.collectors.slots import EpisodeRequest, Policy, Pool
from torchrl_vla.data import keys
from torchrl_vla.data.group_schedule import GroupRequest, GroupSchedule
from torchrl_vla.data.random_streams import derive_seed
from torchrl_vla.objectives.functional import is_mixed, select_members

COUNTS = (
    "worker_restarts",
    "groups_kept",
    "groups_all_success",
    "groups_all_failure",
    "groups_out_of_bounds",
    "groups_skipped_solved",
    "groups_surplus",
    "groups_unfinished",
    "episodes_played",
    "episodes_kept",
    "episodes_unfinished",
    "decisions_played",
    "env_steps_played",
)


@dataclass
class _Group:
    """A group under way: which members were started, what came back."""

    request: GroupRequest
    num_started: int = 0
    returns: dict[int, float] = field(default_factory=dict)


class GroupCollector:
    """Collect mixed groups: ``G`` episodes of one (task, initial state), one policy.

    Groups are taken in the order of the schedule. A batch is the first ``num_groups``
    mixed groups **in that order**, whichever finished first, so it does not depend on
    the number of workers or on how long episodes last; groups played beyond them are
    surplus, are counted, and come again in the next iteration under the new policy.
    Collection ends when the batch is full or ``max_sampling_factor * num_groups``
    groups have been looked at.

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
            The decisions of the kept groups, a flat batch ``[B]`` ordered by group,
            episode and decision (``None`` when no group was kept), and the counts named
            in ``COUNTS`` plus ``success_rate`` (of all episodes of the groups looked
            at, kept or not).
        """
        wave = _Wave(self)
        num_restarts = self.pool.num_restarts
        rounds = self.pool.play(policy, wave.next_request)
        with set_exploration_type(ExplorationType.RANDOM):
            for decisions in rounds:
                wave.add(decisions)
                if wave.is_full:
                    break
        rounds.close()
        self.position = wave.position
        self.iteration += 1
        wave.count["worker_restarts"] = self.pool.num_restarts - num_restarts
        return wave.batch(), wave.counts()


class _Wave:
    """One iteration's groups: started, finished, decided in the schedule's order."""

    def __init__(self, collector: GroupCollector) -> None:
        self.c = collector
        self.first = self.position = collector.position  # next group to be decided
        self.next_position = collector.position  # next group to be started
        self.budget = collector.max_groups
        self.groups: dict[int, _Group | None] = {}  # None is passed over
        self.solved_visits = collector.solved_visits.copy()
        self.of_worker: dict[int, _Group] = {}
        self.kept: dict[int, list[int]] = {}  # members kept, by group
        self.count: Counter[str] = Counter()
        self.num_success = self.num_decided = 0
        self.rows: list[TensorDictBase] = []
        self.num_forgotten = 0  # dropped groups whose rows are gone

    # -- what to play next ---------------------------------------------------------

    def next_request(self, worker: int) -> EpisodeRequest | None:
        group = self.of_worker.get(worker)
        if group is None or group.num_started == self.c.num_candidates:
            group = self._next_group()
            if group is None:
                return None
            self.of_worker[worker] = group
        member = group.num_started
        group.num_started += 1
        group_id = group.request.group_id
        return EpisodeRequest(
            episode_id=group_id * self.c.num_candidates + member,
            group_id=group_id,
            task_id=group.request.task_id,
            init_state_id=group.request.init_state_id,
            # The iteration is part of the name: a surplus group that is played again
            # under a new policy is a new sample.
            seed=derive_seed(self.c.seed, self.c.iteration, group_id, member) >> 1,
        )

    def _next_group(self) -> _Group | None:
        while self.is_wanting:
            request = self.c.schedule[self.next_position]
            self.next_position += 1
            start = (request.task_id, request.init_state_id)
            group = self.groups[request.group_id] = _Group(request)
            # Judged by what was known before this iteration: what finishes meanwhile
            # depends on the number of workers.
            if self.c.skip_solved and self.solved_visits[start] >= self.c.skip_solved:
                # Solved once more, it is passed over again; otherwise it is back.
                self.solved_visits[start] -= 1
                self.groups[request.group_id] = None
                self.budget += 1
                self._decide()
                continue
            return group
        return None

    @property
    def is_wanting(self) -> bool:
        """Whether the groups under way are likely too few to fill the batch."""
        if self.next_position - self.first >= self.budget:
            return False
        # Groups that are mixed so far, of those that finished; one is added to both, so
        # that the first guess is that every group will be kept.
        started = [group for group in self.groups.values() if group]
        finished = [group for group in started if self._is_finished(group)]
        num_mixed = sum(self._is_kept(group) for group in finished)
        share = (num_mixed + 1) / (len(finished) + 1)
        num_running = len(started) - len(finished)
        return num_mixed + num_running * share < self.c.num_groups

    # -- what came back ------------------------------------------------------------

    def add(self, decisions: TensorDictBase) -> None:
        self.rows.append(_to_be_stored(decisions))
        self.count["decisions_played"] += len(decisions)
        self.count["env_steps_played"] += int(decisions[keys.NUM_EXECUTED].sum())
        done = decisions[keys.DONE].flatten()
        finished = zip(
            decisions[keys.EPISODE_ID][done].flatten().tolist(),
            decisions["episode_return"][done].flatten().tolist(),
            strict=True,
        )
        for episode_id, episode_return in finished:
            group_id, member = divmod(episode_id, self.c.num_candidates)
            self.groups[group_id].returns[member] = episode_return
            self.count["episodes_played"] += 1
        self._decide()

    def _decide(self) -> None:
        """Decide on finished groups, in order, as far as they reach."""
        while not self.is_full and self.position in self.groups:
            group = self.groups[self.position]
            if group is not None and not self._is_finished(group):
                break
            if group is None:
                request = self.c.schedule[self.position]
                self.c.solved_visits[request.task_id, request.init_state_id] -= 1
                self.count["groups_skipped_solved"] += 1
            else:
                self._record(group)
            self.position += 1
        self._forget_dropped()

    def _record(self, group: _Group) -> None:
        returns = list(group.returns.values())
        num_success = sum(value > 0 for value in returns)
        self.num_success += num_success
        self.num_decided += len(returns)
        start = (group.request.task_id, group.request.init_state_id)
        all_solved = num_success == len(returns)
        if self.c.skip_solved and all_solved:
            self.c.solved_visits[start] += 1
        else:
            self.c.solved_visits.pop(start, None)
        if self._is_kept(group):
            self.kept[group.request.group_id] = self._members(group)
            self.count["groups_kept"] += 1
            self.count["episodes_kept"] += self.c.group_size
        elif all_solved:
            self.count["groups_all_success"] += 1
        elif num_success == 0:
            self.count["groups_all_failure"] += 1
        else:
            self.count["groups_out_of_bounds"] += 1

    def _is_finished(self, group: _Group) -> bool:
        return len(group.returns) == self.c.num_candidates

    def _members(self, group: _Group) -> list[int]:
        return select_members(
            [group.returns[m] for m in range(self.c.num_candidates)],
            self.c.group_size,
            self.c.selection,
            low=self.c.keep_low,
            high=self.c.keep_high,
        )

    def _is_kept(self, group: _Group) -> bool:
        if not self.c.dynamic_sampling:
            return True
        returns = [group.returns[m] for m in self._members(group)]
        mean = sum(returns) / len(returns)
        return is_mixed(mean, self.c.keep_low, self.c.keep_high)

    @property
    def is_full(self) -> bool:
        return len(self.kept) == self.c.num_groups

    # -- the batch -----------------------------------------------------------------

    def _forget_dropped(self) -> None:
        """Free the images of dropped groups once they are more than those wanted."""
        num_dropped = self.position - self.first - len(self.kept)
        if num_dropped - self.num_forgotten > self.c.num_groups:
            self.num_forgotten = num_dropped
            rows = torch.cat(self.rows)
            group_B = rows[keys.GROUP_ID].flatten()
            kept = torch.tensor(sorted(self.kept), dtype=torch.int64)
            live = (group_B >= self.position) | torch.isin(group_B, kept)
            self.rows = [rows[live]]

    def batch(self) -> TensorDictBase | None:
        if not self.kept:
            return None
        episodes = [
            group_id * self.c.num_candidates + member
            for group_id, members in self.kept.items()
            for member in members
        ]
        rows = torch.cat(self.rows)
        episode_B = rows[keys.EPISODE_ID].flatten()
        kept = torch.isin(episode_B, torch.tensor(episodes)).nonzero().flatten()
        # Rows were added in the order of time: a stable sort keeps it in each episode.
        return rows[kept[episode_B[kept].argsort(stable=True)]]

    def counts(self) -> dict[str, float]:
        counts = {name: self.count[name] for name in COUNTS}
        beyond = [g for p, g in self.groups.items() if p >= self.position and g]
        counts["groups_surplus"] = sum(self._is_finished(g) for g in beyond)
        counts["groups_unfinished"] = len(beyond) - counts["groups_surplus"]
        counts["episodes_unfinished"] = sum(
            g.num_started - len(g.returns) for g in beyond
        )
        counts["success_rate"] = self.num_success / max(self.num_decided, 1)
        return counts


def _to_be_stored(decisions: TensorDictBase) -> TensorDictBase:
    """What training reads: no pixels, no flags at the root, no next observation."""
    stored = decisions.exclude(
        "next", "pixels", "done", "terminated", "truncated", "success", "num_executed"
    )
    outcome = ("reward", "done", "success", "num_executed")
    return stored.set("next", decisions["next"].select(*outcome, strict=False))
