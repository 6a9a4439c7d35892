"""The queue of candidates: the required ones, then optional ones that may be fast."""

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from amp_ray.cost.estimate import Estimate, Result
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.search.planner import OptionalCandidates, Planner
from amp_ray.search.ranking import NEAR_FRACTION, SHOWN_SLACK, is_risky, leader_order, speed
from amp_ray.strategies.candidate import AnyCandidate, Candidate
from amp_ray.strategies.strategy import Strategy, candidate_of

ROUGH_S: Final = 0.0
"""Limit under which no bound needs to be tight."""

FIRST_BATCHES: Final = 32
"""Batches per worker, if all are as small as the first ones, whose time is not known."""

BATCH_S: Final = 4.0
"""Time of a batch. Neighbours share tables, which each worker makes anew: batches of 0.4 s make
most tables in each of four workers."""

SHARE_OF_REST: Final = 0.5
"""The most that a batch takes of a worker's part of the rest, so that all end at the same time."""

Entry = tuple[float, Candidate]
"""Lower bound or expected time of a candidate, and the candidate."""


class CandidateQueue:
    """Candidates in the order of planning, and the results to rank.

    Optional candidates come last, ordered by their lower bounds. Planning stops when a bound
    exceeds the time of the fastest safe strategy so far. So a skipped candidate can never come
    first, and the number of workers does not matter. Where the first rows are wanted, the order
    starts from rough bounds; a bound is tightened when its candidate's turn comes. If many
    candidates remain, expected times replace the bounds. Infeasible results and duplicates of
    optional candidates are dropped.
    """

    def __init__(
        self,
        candidates: Sequence[AnyCandidate],
        optional: OptionalCandidates,
        effort: SearchEffort = EFFORT,
    ) -> None:
        """Begin with the required candidates."""
        self.candidates = tuple(candidates)
        self.results: list[Result] = []
        self._num_needed, self._optional = len(self.candidates), optional
        self._effort = effort
        self._limit, self._least_s = RowLimit(optional.num_rows, optional.limit_s), list[float]()
        # Candidates that are not in order yet: bound, whether it is tight, candidate
        self._waiting: list[tuple[float, bool, Candidate]] = []
        self._waiting_s = math.inf  # the largest bound among them
        self._num_added = 0
        self._known: set[object] = set()
        self._is_open = False
        if not self.candidates:
            self._open(self._limit.seconds)

    @property
    def num(self) -> int:
        """Number of candidates to plan, given the results so far; at most, while some wait."""
        limit_s = self._limit.seconds
        self._tighten(self._num_added + 1, limit_s)
        return self._num_needed + bisect_right(self._least_s, limit_s) + len(self._waiting)

    @property
    def may_shrink(self) -> bool:
        """Whether `num` is likely to fall soon: the first plans exclude most candidates."""
        is_early = self._num_added < self._effort.num_early or math.isinf(self._limit.seconds)
        return bool(self._optional.num_rows) and is_early

    def add(self, number: int, result: Result) -> None:
        """Record the next result; results arrive in the order of the candidates."""
        counts = number < self._num_needed
        self._num_added = number + 1
        if isinstance(result, Estimate):
            if result.feasible:
                counts = counts or result.strategy not in self._known
                self._limit.add(result)
            self._known.add(result.strategy)
        if counts:
            self.results.append(result)
        if number == self._num_needed - 1:
            self._open(self._limit.seconds)

    def run(self, plan: Callable[[AnyCandidate], Result]) -> list[Result]:
        """Plan candidates one after the other, and return the improved results."""
        number = 0
        while number < self.num:
            self.add(number, plan(self.candidates[number]))
            number += 1
        return self.improved()

    def improved(self) -> list[Result]:
        """Return all results to rank, with the fastest plans improved and faster extra plans.

        Extra plans may come from improved ones, and are improved in turn.
        """
        results = self._improved(self.results)
        feasible = [plan for plan in results if isinstance(plan, Estimate) and plan.feasible]
        least = min(map(speed, feasible), default=(math.inf, math.inf))
        least_s = min((plan.iteration_time_s for plan in feasible), default=math.inf)
        extra = [
            plan
            for plan in self._optional.extra_plans(feasible)
            if speed(plan) < least or plan.iteration_time_s < least_s
        ]
        strategies = {plan.strategy for plan in feasible}
        return [*results, *self._improved(extra, strategies)]

    def _improved(
        self, results: Sequence[Result], other: Collection[Strategy] = ()
    ) -> list[Result]:
        """Return results with the fastest plans improved, unless that gives another strategy."""
        feasible = [plan for plan in results if isinstance(plan, Estimate) and plan.feasible]
        strategies = {*other, *(plan.strategy for plan in feasible)}
        better: dict[int, list[Result]] = {}
        for plan in fastest_pipelines(feasible, self._effort.max_improved):
            faster = self._optional.improve(plan)
            if (
                isinstance(faster, Estimate)
                and faster.feasible
                and faster.strategy not in strategies
            ):
                strategies.add(faster.strategy)
                # A plan that only gets safer stays too: it may be the fastest
                stays = speed(plan)[1] < speed(faster)[1]
                better[id(plan)] = [plan, faster] if stays else [faster]
        return [row for result in results for row in better.get(id(result), [result])]

    def rest(self, results: Mapping[int, Result | ValueError]) -> range:
        """Return the indices of candidates to plan: required ones first, then optional.

        It ends at the first optional candidate that no result so far requires. So it becomes
        shorter as faster strategies come in, and workers can stop where one process would.

        Args:
            results: Results by index, in any order. The range starts at the first missing one.
        """
        first = next(number for number in count() if number not in results)
        if first < self._num_needed:
            return range(first, self._num_needed)
        limit = RowLimit(self._optional.num_rows, self._optional.limit_s)
        for result in results.values():
            if isinstance(result, Estimate) and result.feasible:
                limit.add(result)
        self._open(limit.seconds)
        self._tighten(len(self._waiting) + len(self.candidates), limit.seconds)
        return range(first, self._num_needed + bisect_right(self._least_s, limit.seconds))

    def _open(self, limit_s: float) -> None:
        """Sort the optional candidates within a limit by lower bound; later calls do nothing."""
        if self._is_open:
            return
        self._is_open = True
        if self._optional.is_lazy:
            rough = (
                (self._optional.least_s(candidate, ROUGH_S), False, candidate)
                for candidate in self._optional.candidates
            )
            self._waiting = [entry for entry in rough if entry[0] < math.inf]
            heapify(self._waiting)
            return
        bounds = (
            (self._optional.least_s(candidate, limit_s), candidate)
            for candidate in self._optional.candidates
        )
        later = sorted(entry for entry in bounds if entry[0] <= limit_s and entry[0] < math.inf)
        most, num_devices = (
            self._optional.most_devices,
            sum(candidate.num_devices for _, candidate in later),
        )
        max_devices = self._effort.max_optional_devices
        if most is not None and num_devices > most:
            later = self._of_few_devices(
                self._expected(later[: self._effort.max_expected], limit_s), most
            )
        elif most is None and num_devices > max_devices:
            later = list(self._expected(later, limit_s))
        self.candidates += tuple(candidate for _, candidate in later)
        self._least_s = [least_s for least_s, _ in later]

    def _tighten(self, number: int, limit_s: float) -> None:
        """Put waiting candidates in order, by their tight bounds.

        Args:
            number: Candidates to have in order.
            limit_s: Candidates with a larger bound are dropped: the limit never rises.
        """
        if limit_s < self._waiting_s:
            self._waiting_s = limit_s
            self._waiting = [entry for entry in self._waiting if entry[0] <= limit_s]
            heapify(self._waiting)
        ordered: list[Candidate] = []
        num_missing = number - len(self.candidates)
        while self._waiting and len(ordered) < num_missing:
            least_s, is_tight, candidate = heappop(self._waiting)
            if is_tight:
                ordered.append(candidate)
                self._least_s.append(least_s)
                continue
            least_s = max(least_s, self._optional.least_s(candidate, limit_s))
            if least_s <= limit_s and least_s < math.inf:
                heappush(self._waiting, (least_s, True, candidate))
        self.candidates += tuple(ordered)

    def _expected(self, later: Sequence[Entry], limit_s: float) -> Iterator[Entry]:
        """Yield candidates by expected time, up to a limit.

        Compute only the expected times that decide which candidate comes next.
        """
        waiting: list[Entry] = []
        for least_s, candidate in later:
            while waiting and waiting[0][0] < least_s:
                yield heappop(waiting)
            expected_s = max(least_s, self._optional.expected_s(candidate))
            if expected_s <= limit_s:
                heappush(waiting, (expected_s, candidate))
        while waiting:
            yield heappop(waiting)

    @staticmethod
    def _of_few_devices(later: Iterator[Entry], most: int) -> list[Entry]:
        """Return the first candidates that together use at most ``most`` devices."""
        entries: list[Entry] = []
        spare = most
        for entry in later:
            spare -= entry[1].num_devices
            if spare < 0:
                break
            entries.append(entry)
        return entries


class RowLimit:
    """Largest time at which a strategy can still come first or among the wanted rows.

    If rows are wanted, strategies near the fastest always count: the plainest of them come first.
    """

    def __init__(self, num_rows: int, limit_s: float = math.inf) -> None:
        """Begin without strategies; the arguments are as in `OptionalCandidates`."""
        self._num_rows, self._limit_s = num_rows, limit_s
        self._fastest_s: list[float] = []

    def add(self, able: Estimate) -> None:
        """Count a feasible strategy, unless it is risky: those come last."""
        if not is_risky(able):
            insort(self._fastest_s, able.iteration_time_s)
            del self._fastest_s[max(1, self._num_rows) :]

    @property
    def seconds(self) -> float:
        """The limit; that of the candidates while there are fewer safe strategies than rows."""
        if len(self._fastest_s) < max(1, self._num_rows):
            return self._limit_s
        if not self._num_rows:
            return min(self._fastest_s[0], self._limit_s)
        near_s = self._fastest_s[0] * (1 + NEAR_FRACTION)
        return max(near_s, self._fastest_s[-1] * (1 + SHOWN_SLACK))


def fastest_pipelines(plans: Sequence[Estimate], most: int) -> list[Estimate]:
    """Return the ``most`` fastest grids, one per candidate, and the ``most`` fastest other plans.

    Plans with a single stage are left out. The limit applies to grids and other plans separately.
    """
    pipelines = sorted((plan for plan in plans if plan.strategy.pp > 1), key=leader_order)
    grids: dict[Candidate, Estimate] = {}
    unequal = []
    for plan in pipelines:
        if plan.strategy.is_uniform and plan.strategy.options and not plan.strategy.is_sliced:
            grids.setdefault(candidate_of(plan.strategy), plan)
        else:
            unequal.append(plan)
    return [*grids.values()][:most] + unequal[:most]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A planner and all candidates, sent to each worker once."""

    planner: Planner
    candidates: tuple[AnyCandidate, ...]  # all of them; batches name them by number

    def plan(self, numbers: range) -> list[Result | ValueError]:
        """Plan candidates by number; stop after the first `ValueError`, which is the last item."""
        results: list[Result | ValueError] = []
        for number in numbers:
            try:
                results.append(self.planner.plan(self.candidates[number]))
            except ValueError as error:
                results.append(error)
                break
        return results


class Batches:
    """Candidates in batches: small ones until a time is known, then `BATCH_S` long, small at last.

    The first batch is empty: its answer shows that a worker has started.
    """

    def __init__(self, numbers: range, num_workers: int) -> None:
        """Begin with the candidates ``numbers`` for so many workers."""
        self._num_workers = num_workers
        self._most = math.ceil(len(numbers) / (num_workers * FIRST_BATCHES))
        self._waiting, self._rest = deque([numbers[:0]]), numbers

    def next(self, stop: int) -> range | None:
        """Return the next batch of candidates before ``stop``, or None."""
        while self._waiting:
            batch = self._waiting.popleft()
            if batch.start < stop:
                return batch
        rest = range(self._rest.start, min(self._rest.stop, stop))
        if not rest:
            return None
        size = math.ceil(SHARE_OF_REST * len(rest) / self._num_workers)
        batch = rest[: max(1, min(size, self._most))]
        self._rest = range(batch.stop, self._rest.stop)
        return batch

    def repeat(self, batch: range) -> None:
        """Give a batch out again."""
        self._waiting.appendleft(batch)

    def end_at(self, number: int) -> None:
        """Give out no batch from a candidate on."""
        self._waiting = deque(batch for batch in self._waiting if batch.start < number)
        self._rest = range(self._rest.start, min(self._rest.stop, number))

    def took(self, batch: range, seconds: float) -> None:
        """Choose the size of the next batches by the time of a batch."""
        if batch:
            self._most = max(1, int(BATCH_S * len(batch) / max(seconds, 1e-9)))
