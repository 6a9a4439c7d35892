"""Search in this process while that is quick, and by Ray workers where it is asked for or pays."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from amp_ray.cost.estimate import Result
from amp_ray.runtime.ray_address import require_ray
from amp_ray.runtime.search_crew import Work
from amp_ray.search.planner import Planner
from amp_ray.search.ranking import Ranking, rank
from amp_ray.spec.candidate import AnyCandidate

_LOGGER = logging.getLogger(__name__)

RAY_PAYS_S: Final = 15.0
"""Remaining work from which Ray is worth its start and end, 4 to 8 s."""

NUM_SAMPLES: Final = 8
"""The last so many candidates tell what the rest will take: candidates grow along the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """By whom a search is done.

    Args:
        num: How many Ray workers; None for one per CPU.
        address: Of the Ray cluster; None for the one that RAY_ADDRESS names, or else one that is
            started here.
    """

    num: int | None = None
    address: str | None = None

    @property
    def forced(self) -> bool:
        """Whether Ray was asked for."""
        return self.num is not None or self.address is not None


AUTO: Final = Workers()
"""In this process, and by Ray workers only if that turns out to take long."""


class Stopwatch:
    """Tells from the last candidates what the rest will take."""

    def __init__(self, num_candidates: int) -> None:
        """Begin.

        Args:
            num_candidates: How many there are.
        """
        self._num_left = num_candidates
        self._last_s: deque[float] = deque(maxlen=NUM_SAMPLES)

    def add(self, time_s: float) -> None:
        """Note what one more candidate took."""
        self._num_left -= 1
        self._last_s.append(time_s)

    @property
    def remaining_s(self) -> float:
        """Estimate of the rest; 0 until enough is known.

        The slowest candidate is left out: it may have compiled or filled caches for the others.
        """
        if len(self._last_s) < NUM_SAMPLES:
            return 0.0
        each_s = (sum(self._last_s) - max(self._last_s)) / (NUM_SAMPLES - 1)
        return each_s * self._num_left


def search_candidates(
    planner: Planner,
    candidates: tuple[AnyCandidate, ...],
    *,
    workers: Workers = AUTO,
    progress: Callable[[int, int], None],
) -> Ranking:
    """Plan every candidate and rank them, by whomever.

    Args:
        planner: Plans one candidate.
        candidates: All of them.
        workers: By whom; the ranking is the same for all, bit for bit.
        progress: Called with (candidates done, candidates in all).

    Raises:
        ValueError: If the profile lacks what a candidate needs.
        InputError: If Ray is asked for and not installed, or the address is none.
        AmpRayError: If the Ray cluster cannot be reached or used.
    """
    total = len(candidates)
    results = (
        [] if workers.forced else _plan_here(Work(planner=planner, candidates=candidates), progress)
    )
    done = len(results)
    if done < total:
        rest = Work(planner=planner, candidates=candidates[done:])
        results += _plan_with_ray(rest, workers, lambda more: progress(done + more, total))
    progress(total, total)
    return rank(results, relative_error=planner.relative_error)


def _plan_here(work: Work, progress: Callable[[int, int], None]) -> list[Result]:
    """Plan in this process; stop early where Ray workers would be done sooner."""
    results: list[Result] = []
    watch = Stopwatch(len(work.candidates))
    may_leave = num_cpus() > 1 and find_spec("ray") is not None
    for done, candidate in enumerate(work.candidates):
        if may_leave and watch.remaining_s > RAY_PAYS_S:
            _LOGGER.info("%.0f s of work remain: going on with Ray workers", watch.remaining_s)
            break
        progress(done, len(work.candidates))
        start_s = time.perf_counter()
        results.append(work.planner.plan(candidate))
        watch.add(time.perf_counter() - start_s)
    return results


def _plan_with_ray(work: Work, workers: Workers, num_done: Callable[[int], None]) -> list[Result]:
    """Plan with Ray workers, on a cluster that is connected to meanwhile."""
    require_ray()
    # Ray costs a quarter of a second to import and seconds to start: only where it is used.
    from amp_ray.runtime import actors  # noqa: PLC0415

    num_here = min(workers.num or num_cpus(), len(work.candidates))
    with actors.connect(workers.address, num_cpus=num_here):
        num_workers = min(workers.num or actors.num_cluster_cpus(), len(work.candidates))
        return actors.plan_candidates(work, num_workers, num_done)


def num_cpus() -> int:
    """Count the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
