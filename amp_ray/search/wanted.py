"""Which candidates are planned: some in any case, others only if they may be among the fastest."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from amp_ray.cost.estimate import Estimate, Result
from amp_ray.search.ranking import is_risky, leader_order, speed
from amp_ray.spec.candidate import AnyCandidate, Candidate

MOST_DEVICES: Final = 1_000
"""Devices of all optional candidates together, up to which each candidate is planned that is not
proven to be slower; of more, only those that are expected to be fast."""

MOST_GRID_DEVICES: Final = 256
"""The same of grids beside plans whose stages have their own devices."""

MOST_EXPECTED: Final = 200
"""Candidates of which it is looked at what is expected of them, where few are planned: those with
the lowest bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalCandidates:
    """Candidates that need not be planned where others are faster."""

    candidates: tuple[Candidate, ...]
    # What no strategy of a candidate undercuts, infinite where there is none; above the limit that
    # is given it need not be the best bound that is known
    least_s: Callable[[Candidate, float], float]
    # What strategies of a candidate are expected to take at least, unproven
    expected_s: Callable[[Candidate], float]
    # Of those that are planned, where others are likely to be faster than all
    most_devices: int | None = None
    # So many of the fastest are wanted, and what ties with the fastest, all of them proven; 0 where
    # nothing but the fastest counts
    num_rows: int = 0
    # Makes the fastest strategies faster in the end; what it returns is no slower
    improve: Callable[[Estimate], Result] = lambda estimate: estimate
    # Strategies of no candidate, ranked where they are faster than those of all
    others: Callable[[], list[Estimate]] = list


NO_CANDIDATES: Final = OptionalCandidates(
    candidates=(), least_s=lambda _, limit_s: limit_s, expected_s=lambda _: math.inf
)

MOST_IMPROVED: Final = 4
"""The fastest strategies, which are worth to be improved beyond what was found for each."""


class Wanted:
    """The candidates in the order in which they are planned, and the results that count.

    Optional candidates come last, by what they take at least. They are planned until that is more
    than the fastest safe strategy so far takes, or where none is safe, than what ties with the
    fastest; so none that is left out would come first, and it does not matter who plans them. Where
    that leaves many, what is expected counts for what is proven. Of the results those count that
    can run and are no strategy that was found before.
    """

    def __init__(
        self,
        candidates: Sequence[AnyCandidate],
        optional: OptionalCandidates,
        relative_error: float,
    ) -> None:
        """Begin with what is planned in any case.

        Args:
            candidates: That are planned in any case.
            optional: The others.
            relative_error: Two predictions closer than this share are a tie.
        """
        self.candidates = tuple(candidates)
        self.results: list[Result] = []
        self._num_needed, self._optional = len(self.candidates), optional
        self._relative_error = relative_error
        self._limit_s, self._least_s = math.inf, list[float]()
        self._able: list[Estimate] = []
        self._known: set[object] = set()
        self._is_open = False
        if not self.candidates:
            self._open(math.inf)

    @property
    def num(self) -> int:
        """How many of the candidates are to be planned, by what is known."""
        return self._num_needed + bisect_right(self._least_s, self._limit_s)

    def add(self, number: int, result: Result) -> None:
        """Note the next result; they come in the order of the candidates.

        Args:
            number: Of its candidate.
            result: Of the planner.
        """
        counts = number < self._num_needed
        if isinstance(result, Estimate):
            if result.feasible:
                counts = counts or result.strategy not in self._known
                self._able.append(result)
                self._limit_s = self._matters_s(self._able)
            self._known.add(result.strategy)
        if counts:
            self.results.append(result)
        if number == self._num_needed - 1:
            self._open(self._limit_s)

    def improved(self) -> list[Result]:
        """Return the results that count and others that are faster, the fastest improved."""
        found = [each for each in self.results if isinstance(each, Estimate) and each.feasible]
        least = min(map(speed, found), default=(True, math.inf))
        others = [each for each in self._optional.others() if speed(each) < least]
        results, found = [*self.results, *others], [*found, *others]
        fastest = sorted(found, key=leader_order)[:MOST_IMPROVED]
        known = {each.strategy for each in found}
        better: dict[int, Result] = {}
        for each in fastest:
            own = self._optional.improve(each)
            if isinstance(own, Estimate) and own.feasible and own.strategy not in known:
                known.add(own.strategy)
                better[id(each)] = own
        return [better.get(id(each), each) for each in results]

    def rest(self, found: Mapping[int, Result | ValueError]) -> range:
        """Return candidates without a result: those planned in any case, or else others.

        Args:
            found: Results by number, of the first candidates.
        """
        first = len(found)
        if first < self._num_needed:
            return range(first, self._num_needed)
        limit_s = self._matters_s(
            [own for own in found.values() if isinstance(own, Estimate) and own.feasible]
        )
        self._open(limit_s)
        return range(first, self._num_needed + bisect_right(self._least_s, limit_s))

    def _open(self, limit_s: float) -> None:
        """Put the optional candidates in order, once.

        Args:
            limit_s: What must not be exceeded, by all that is planned in any case.
        """
        if self._is_open:
            return
        self._is_open = True
        bounds = (
            (self._optional.least_s(candidate, limit_s), candidate)
            for candidate in self._optional.candidates
        )
        later = [entry for entry in bounds if entry[0] <= limit_s and entry[0] < math.inf]
        most = self._optional.most_devices
        if most is not None:
            later = sorted(later)[:MOST_EXPECTED]
        is_many = (
            not self._optional.num_rows and sum(own.num_devices for _, own in later) > MOST_DEVICES
        )
        if most is not None or is_many:
            expected = ((max(least, self._optional.expected_s(own)), own) for least, own in later)
            later = [entry for entry in expected if entry[0] <= limit_s]
        later.sort()
        if most is not None:
            devices = accumulate(own.num_devices for _, own in later)
            later = [entry for entry, sum_ in zip(later, devices, strict=True) if sum_ <= most]
        self.candidates += tuple(candidate for _, candidate in later)
        self._least_s = [least_s for least_s, _ in later]

    def _matters_s(self, able: Sequence[Estimate]) -> float:
        """Return what a strategy must not exceed to be wanted beside others that can run."""
        slack, num_rows = 1 + self._relative_error, self._optional.num_rows
        if not num_rows:
            limits_s = (own.iteration_time_s * (slack if is_risky(own) else 1.0) for own in able)
            return min(limits_s, default=math.inf)
        if len(able) < num_rows:
            return math.inf
        times_s = sorted(own.iteration_time_s for own in able)
        return max(times_s[0] * slack, times_s[num_rows - 1])
