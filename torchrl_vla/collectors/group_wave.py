"""One iteration's groups, from the schedule to a batch."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase

from torchrl_vla.collectors.slots import EpisodeRequest
from torchrl_vla.data import keys
from torchrl_vla.data.group_schedule import GroupRequest
from torchrl_vla.data.random_streams import derive_seed
from torchrl_vla.objectives.functional import is_mixed, select_members

if TYPE_CHECKING:
    from torchrl_vla.collectors.group_collector import GroupCollector

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
# Each rank counts its own; the others are of groups that were decided on, which all
# ranks know.
PLAYED = (
    "worker_restarts",
    "groups_surplus",
    "groups_unfinished",
    "episodes_played",
    "episodes_unfinished",
    "decisions_played",
    "env_steps_played",
)


@dataclass
class _Group:
    """A group that is played here: which members were started, what came back."""

    request: GroupRequest
    num_started: int = 0
    returns: dict[int, float] = field(default_factory=dict)


class GroupWave:
    """One iteration's groups: started, finished, decided in the schedule's order.

    Which groups are played here depends on who is free when; everything that is decided
    depends on the schedule and the returns alone, and is the same on all ranks.

    Args:
        collector: whose options and place in the schedule are taken.
    """

    def __init__(self, collector: "GroupCollector") -> None:
        self.c = collector
        self.board = collector.ranks.board()
        self.first = self.position = collector.position  # next group to be decided
        self.mine: dict[int, _Group] = {}
        self.outcomes: dict[int, list[float]] = {}  # returns of finished groups
        self.num_mixed = 0  # of them
        self.next_walked = collector.position  # below it is known who is passed over
        self.passed_over: set[int] = set()
        self.solved_visits = collector.solved_visits.copy()
        self.of_worker: dict[int, _Group] = {}
        self.kept: dict[int, list[int]] = {}  # members kept, by group
        self.count: Counter[str] = Counter()
        self.num_success = self.num_returns = self.num_decided = 0
        self.rows: list[TensorDictBase] = []
        self.num_forgotten = 0  # dropped groups whose rows are gone

    @property
    def is_full(self) -> bool:
        return len(self.kept) == self.c.num_groups

    @property
    def is_over(self) -> bool:
        return self.is_full or self.num_decided == self.c.max_groups

    def has_ended(self) -> bool:
        """Whether it is over by what all ranks know now."""
        self._read()
        return self.is_over

    def wait(self) -> None:
        """Other ranks are still playing: wait until a group of theirs is finished."""
        self.board.wait()
        self._read()

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
        while self._is_wanting():
            position = self.first + self.board.take()
            # Between the question and the answer other ranks may have taken the rest.
            if self._num_played_below(position) >= self.c.max_groups:
                return None
            self._walk(position + 1)
            if position not in self.passed_over:
                group = _Group(self.c.schedule[position])
                self.mine[position] = group
                return group
            self._decide()
        return None

    def _walk(self, end: int) -> None:
        """Find out which groups below ``end`` are passed over as solved."""
        while self.next_walked < end:
            request = self.c.schedule[self.next_walked]
            start = (request.task_id, request.init_state_id)
            # Judged by what was known before this iteration: what finishes meanwhile
            # depends on the number of workers.
            if self.c.skip_solved and self.solved_visits[start] >= self.c.skip_solved:
                # Solved once more, it is passed over again; otherwise it is back.
                self.solved_visits[start] -= 1
                self.passed_over.add(self.next_walked)
            self.next_walked += 1

    def _num_played_below(self, position: int) -> int:
        """Groups of this iteration below ``position`` that are not passed over."""
        self._walk(position)
        num_passed = sum(p < position for p in self.passed_over)
        return position - self.first - num_passed

    def _is_wanting(self) -> bool:
        """Whether the groups under way are likely too few to fill the batch."""
        if self.has_ended():
            return False
        num_started = self._num_played_below(self.first + self.board.num_taken())
        if num_started >= self.c.max_groups:
            return False
        # Groups that are mixed so far, of those that finished; one is added to both, so
        # that the first guess is that every group will be kept.
        num_finished = len(self.outcomes)
        share = (self.num_mixed + 1) / (num_finished + 1)
        num_wanted = (self.c.num_groups - self.num_mixed) / share
        # A rank leaves the others their part, however many slots it has.
        num_here = sum(not self._is_finished(group) for group in self.mine.values())
        num_running = num_started - num_finished
        return max(num_running, num_here * self.c.ranks.size) < num_wanted

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
            position, member = divmod(episode_id, self.c.num_candidates)
            group = self.mine[position]
            group.returns[member] = episode_return
            self.count["episodes_played"] += 1
            if self._is_finished(group):
                returns = [group.returns[m] for m in range(self.c.num_candidates)]
                self.board.post((position, returns))
        self._read()

    def _read(self) -> None:
        for position, returns in self.board.read():
            self.outcomes[position] = returns
            self.num_mixed += self._is_kept(returns)
        self._decide()

    def _decide(self) -> None:
        """Decide on finished groups, in order, as far as they reach."""
        while not self.is_over:
            self._walk(self.position + 1)
            request = self.c.schedule[self.position]
            if self.position in self.passed_over:
                self.c.solved_visits[request.task_id, request.init_state_id] -= 1
                self.count["groups_skipped_solved"] += 1
            elif self.position in self.outcomes:
                self._record(request, self.outcomes[self.position])
            else:
                break
            self.position += 1
        self._forget_dropped()

    def _record(self, request: GroupRequest, returns: list[float]) -> None:
        num_success = sum(value > 0 for value in returns)
        self.num_success += num_success
        self.num_returns += len(returns)
        self.num_decided += 1
        start = (request.task_id, request.init_state_id)
        all_solved = num_success == len(returns)
        if self.c.skip_solved and all_solved:
            self.c.solved_visits[start] += 1
        else:
            self.c.solved_visits.pop(start, None)
        if self._is_kept(returns):
            self.kept[request.group_id] = self._members(returns)
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

    def _members(self, returns: list[float]) -> list[int]:
        return select_members(
            returns,
            self.c.group_size,
            self.c.selection,
            low=self.c.keep_low,
            high=self.c.keep_high,
        )

    def _is_kept(self, returns: list[float]) -> bool:
        if not self.c.dynamic_sampling:
            return True
        kept = [returns[m] for m in self._members(returns)]
        return is_mixed(sum(kept) / len(kept), self.c.keep_low, self.c.keep_high)

    # -- the batch -----------------------------------------------------------------

    def _forget_dropped(self) -> None:
        """Free the images of dropped groups once they are more than those wanted."""
        num_dropped = self.position - self.first - len(self.kept)
        if self.rows and num_dropped - self.num_forgotten > self.c.num_groups:
            self.num_forgotten = num_dropped
            rows = torch.cat(self.rows)
            group_B = rows[keys.GROUP_ID].flatten()
            kept = torch.tensor(sorted(self.kept), dtype=torch.int64)
            live = (group_B >= self.position) | torch.isin(group_B, kept)
            # Never an empty one: tensordict cannot mask texts that are not there.
            self.rows = [rows[live]] if live.any() else []

    def batch(self) -> TensorDictBase | None:
        episodes = [
            group_id * self.c.num_candidates + member
            for group_id, members in self.kept.items()
            if group_id in self.mine
            for member in members
        ]
        if not episodes:
            return None
        rows = torch.cat(self.rows)
        episode_B = rows[keys.EPISODE_ID].flatten()
        kept = torch.isin(episode_B, torch.tensor(episodes)).nonzero().flatten()
        # Rows were added in the order of time: a stable sort keeps it in each episode.
        return rows[kept[episode_B[kept].argsort(stable=True)]]

    def counts(self) -> dict[str, float]:
        beyond = [g for p, g in self.mine.items() if p >= self.position]
        num_surplus = sum(self._is_finished(g) for g in beyond)
        self.count["groups_surplus"] = num_surplus
        self.count["groups_unfinished"] = len(beyond) - num_surplus
        self.count["episodes_unfinished"] = sum(
            g.num_started - len(g.returns) for g in beyond
        )
        everywhere = self.c.ranks.gather({name: self.count[name] for name in PLAYED})
        self.board.close()  # all ranks have read what they need
        counts: dict[str, float] = {name: self.count[name] for name in COUNTS}
        counts |= {name: sum(rank[name] for rank in everywhere) for name in PLAYED}
        counts["success_rate"] = self.num_success / max(self.num_returns, 1)
        return counts


def _to_be_stored(decisions: TensorDictBase) -> TensorDictBase:
    """What training reads: no pixels, no flags at the root, no next observation."""
    stored = decisions.exclude(
        "next", "pixels", "done", "terminated", "truncated", "success", "num_executed"
    )
    outcome = ("reward", "done", "success", "num_executed")
    return stored.set("next", decisions["next"].select(*outcome, strict=False))
