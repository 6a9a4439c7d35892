"""Search in this process, or in Ray tasks if they are requested or the search would take long."""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Final

from amp_ray.cost.estimate import Estimate, Result
from amp_ray.errors import InputError
from amp_ray.runtime.ray.address import RayUnavailableError, check_form, require_ray
from amp_ray.search.candidate_queue import CandidateQueue, Work
from amp_ray.search.planner import NO_CANDIDATES, OptionalCandidates, Planner
from amp_ray.search.ranking import Ranking, rank
from amp_ray.strategies.candidate import AnyCandidate

_LOGGER = logging.getLogger(__name__)
RAY_S: Final = 10.0  # start and end of Ray on two cores of an AMD EPYC (docs/tuning.md)
ESTIMATED: Final = 2.0  # estimates of the work left, over what was left (docs/tuning.md)
NUM_SAMPLES: Final = 8  # estimate from so many last candidates, since later ones take longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers of a search."""

    num: int | None = None  # Ray workers; 0 for this process, None for one per CPU
    address: str | None = None  # None for RAY_ADDRESS, or else a local cluster

    @property
    def forced(self) -> bool:
        """Whether the user has requested Ray."""
        return bool(self.num) or self.address is not None

    def check(self) -> None:
        """Raise an error early if the requested Ray is not available."""
        if self.num is not None and self.num < 0:
            raise InputError(f"workers must be at least 0, found {self.num}")
        if self.num == 0 and self.address is not None:
            raise InputError(f"0 workers use no Ray, but its address is {self.address!r}")
        if self.forced:
            require_ray("a search with --workers or --address")
        if self.address is not None:
            check_form(self.address)


AUTO: Final = Workers()  # in this process; with Ray workers only if it takes long
ALONE: Final = Workers(num=0)  # always in this process


class Stopwatch:
    """Estimates the remaining time from the last candidates."""

    def __init__(self) -> None:
        self._last_s: deque[float] = deque(maxlen=NUM_SAMPLES)

    def add(self, time_s: float) -> None:
        """Add the time of a candidate."""
        self._last_s.append(time_s)

    def remaining_s(self, num_left: int) -> float:
        """Estimate the time of ``num_left`` candidates.

        The slowest sample does not count, since it may include compilation.
        """
        if len(self._last_s) < NUM_SAMPLES:
            return 0.0
        each_s = (sum(self._last_s) - max(self._last_s)) / (NUM_SAMPLES - 1)
        return each_s * num_left


def search_candidates(
    planner: Planner,
    candidates: tuple[AnyCandidate, ...],
    *,
    optional: OptionalCandidates = NO_CANDIDATES,
    workers: Workers = AUTO,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    leading: Callable[[Estimate], None] = lambda _estimate: None,
) -> Ranking:
    """Plan all candidates and rank them; `CandidateQueue` decides which optional ones to plan.

    If Ray is lost, or is unavailable and no address was requested, warn and go on in this process.

    The ranking is bit for bit the same for all ``workers``. ``progress`` gets (done, total);
    ``leading`` gets each strategy that is faster than all before it.
    """
    wanted = CandidateQueue(candidates, optional)
    watch = Stopwatch()
    may_leave = not workers.forced and workers.num != 0 and num_cpus() > 1
    may_leave = may_leave and find_spec("ray") is not None
    results: dict[int, Result | ValueError] = {}
    if workers.forced:
        _plan_with_ray(planner, wanted, workers, results, progress)
    number, least_s = 0, math.inf
    while number < (num := wanted.num):
        if may_leave and not wanted.may_shrink and _ray_pays(watch, wanted, results):
            may_leave = False
            _plan_with_ray(planner, wanted, workers, results, progress)
        if number not in results:
            progress(len(results), max(num, len(results)))
            start_s = time.process_time()  # other processes slow down Ray's workers, too
            results[number] = planner.plan(wanted.candidates[number])
            watch.add(time.process_time() - start_s)
        result = results[number]
        if isinstance(result, ValueError):
            raise result
        wanted.add(number, result)
        if isinstance(result, Estimate) and result.feasible and result.iteration_time_s < least_s:
            least_s = result.iteration_time_s
            leading(result)
        number += 1
    progress(len(results), len(results))
    return rank(wanted.improved(), relative_error=planner.relative_error)


def _ray_pays(
    watch: Stopwatch, wanted: CandidateQueue, results: Mapping[int, Result | ValueError]
) -> bool:
    """Return whether workers on all CPUs would save more time than Ray's start and end take."""
    least_s = ESTIMATED * RAY_S * num_cpus() / (num_cpus() - 1)
    if watch.remaining_s(wanted.num - len(results)) <= least_s:
        return False
    # `num` counts candidates whose bounds are not tight yet; most of them will not be planned
    remaining_s = watch.remaining_s(len(wanted.rest(results)))
    if remaining_s <= least_s:
        return False
    _LOGGER.info("%.0f s of work remain: going on with Ray workers", remaining_s)
    return True


def _plan_with_ray(
    planner: Planner,
    wanted: CandidateQueue,
    workers: Workers,
    results: dict[int, Result | ValueError],
    progress: Callable[[int, int], None],
) -> None:
    """Add the results of Ray workers to ``results``; if Ray is lost, some are missing."""
    workers.check()
    # Import Ray only where it is used: it takes a quarter of a second, and seconds to start
    from amp_ray.runtime.ray import actors  # noqa: PLC0415

    before = len(results)
    num_here = min(workers.num or num_cpus(), max(len(wanted.rest(results)), 1))
    try:
        with actors.connect(workers.address, num_cpus=num_here):
            while rest := wanted.rest(results):
                work = Work(planner=planner, candidates=wanted.candidates)
                num_workers = min(workers.num or actors.num_cluster_cpus(), len(rest))
                stop = partial(_stop, wanted, results)
                for batch, answer in actors.plan_batches(work, rest, num_workers, stop):
                    results.update(zip(batch, answer, strict=False))  # an answer ends at an error
                    progress(len(results), max(wanted.num, len(results)))
                if any(isinstance(answer, ValueError) for answer in results.values()):
                    return
    except RayUnavailableError as error:
        if workers.address is not None and len(results) == before:
            raise
        _LOGGER.warning("%s. The search goes on in this process", error)


def _stop(wanted: CandidateQueue, results: Mapping[int, Result | ValueError]) -> int:
    """Return the index at which the candidates to plan end, as far as the results tell."""
    return wanted.rest(results).stop


def num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
