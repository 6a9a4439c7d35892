"""Search an experiment with any planner, or score the strategies of a user."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from amp_ray.cost.estimate import Estimate, Infeasible, Result
from amp_ray.cost.verdict import NOT_SEARCHED
from amp_ray.errors import InputError, placed
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import Entry
from amp_ray.search.candidate_queue import CandidateQueue, RowLimit
from amp_ray.search.planner import Candidates, Planner, PlannerChoice, Within
from amp_ray.search.ranking import Ranking, is_risky, leader_order, plainest_first, rank
from amp_ray.search.remedies import Remedies
from amp_ray.search.variants import plans_of_variants

NUM_INTERVALS: Final = 20
"""Most rows that get an interval for their time: it costs a multiple of the search."""

NUM_REMEDIES: Final = 3
"""Most rows that do not fit for which changes are looked for: each takes some ten estimates."""

IDLE_SHARES: Final = (7 / 8, 1 / 2, 0.0)
"""Least shares of the devices that grids use which are planned together, the largest first."""

Search = Callable[[Planner, Candidates], Ranking]
"""Function that plans candidates and ranks the results, in this process or on workers."""


def run_search(
    experiment: Experiment, choice: PlannerChoice, search: Search, *, num_rows: int | None = None
) -> tuple[Planner, Ranking]:
    """Search the candidates of an experiment, and rank them with plans of its variants.

    ``num_rows`` first rows matter; None ranks all candidates.

    Raises:
        InputError: If the planner does not support the experiment.
    """
    _check_money(experiment, choice)
    planner = choice.make(experiment)
    with placed(experiment.where("search"), ValueError):
        candidates = planner.candidates(num_rows)
    _check_prices(experiment)
    with placed(experiment.where("profile")):
        ranking = search(planner, candidates)
        if candidates.optional.num_rows:
            ranking = _first_rows(planner, candidates, search, ranking)
        ranking = _with_idle(planner, candidates, search, ranking)
    ranking = _with_variants(experiment, choice, ranking)
    if candidates.are_whole_space:
        ranking = replace(ranking, lower_bound_s=_least_bound_s(ranking))
    has_experts = experiment.model.shape.num_experts > 1
    return planner, plainest_first(ranking, has_experts=has_experts)


def _first_rows(
    planner: Planner, candidates: Candidates, search: Search, first: Ranking
) -> Ranking:
    """Return a ranking whose first rows equal those of a search over all candidates.

    If nothing is feasible, plan all candidates to explain why.
    """
    optional = candidates.optional
    if not first.num_feasible:
        return search(planner, Candidates(required=optional.candidates))
    # Drop further results: which of them exist depends on the order of the workers.
    kept = [result for result in first.results if isinstance(result, Estimate) and result.feasible]
    limit = RowLimit(optional.num_rows)
    for plan in kept:
        limit.add(plan)
    if math.isfinite(limit.seconds):
        kept = [
            plan for plan in kept if plan.iteration_time_s <= limit.seconds and not is_risky(plan)
        ]
    return replace(
        first,
        results=tuple(kept),
        num_feasible=len(kept),
        num_tied=min(first.num_tied, len(kept)),
        num_left_out=len(optional.candidates) - len(kept),
    )


def _with_idle(
    planner: Planner, candidates: Candidates, search: Search, ranking: Ranking
) -> Ranking:
    """Add the strategies that leave devices idle and are faster than all that use every device.

    If none uses every device, the first rows of those with fewer are added. Grids on nearly all
    devices come first: their times exclude most of the others.
    """
    if candidates.within is None:
        return ranking
    for least, most in _windows(planner.experiment.cluster.num_devices - 1):
        fastest = ranking.fastest
        limit_s = math.inf if fastest is None or is_risky(fastest) else fastest.iteration_time_s
        optional = candidates.within(least, most, limit_s)
        if math.isinf(limit_s):
            optional = replace(optional, num_rows=NUM_INTERVALS)
        if optional.candidates:
            added = search(planner, Candidates(optional=optional))
            ranking = _joined(ranking, added, limit_s)
    return ranking if ranking.results else _widest(planner, candidates.within, search)


def _widest(planner: Planner, within: Within, search: Search) -> Ranking:
    """Plan the grids with the most devices, to explain why none with idle devices is feasible."""
    for least, most in _windows(planner.experiment.cluster.num_devices - 1):
        grids = within(least, most, math.inf).candidates
        widest = max((grid.num_devices for grid in grids), default=0)
        if grids:
            required = tuple(grid for grid in grids if grid.num_devices == widest)
            return search(planner, Candidates(required=required))
    experiment = planner.experiment
    raise ValueError(
        f"no candidate for {experiment.cluster.num_devices} devices or fewer and global_batch_size "
        f"{experiment.global_batch_size}: no degrees that runtime {experiment.traits.name} and the "
        "limits allow divide model, nodes and batch; change the batch or the limits"
    )


def _windows(most: int) -> Iterator[tuple[int, int]]:
    """Yield the least and the largest number of devices of the grids to plan together."""
    for share in IDLE_SHARES:
        least = math.floor(share * most) + 1
        yield least, most
        most = least - 1


def fastest_within(planner: Planner, limit_s: float = math.inf) -> Estimate | None:
    """Return the fastest safe strategy that takes at most ``limit_s``; None if there is none.

    Without a limit it is one that can run, not always the fastest. The search is that of
    `run_search`, but nothing is explained if it finds none.

    Raises:
        ValueError: If the limits exclude every candidate, or the profile lacks a measurement.
    """
    candidates = planner.candidates(1)
    if candidates.within is None:
        queue = CandidateQueue(candidates.required, candidates.optional)
        plans = _feasible(queue.run(planner.plan), limit_s)
        return min(plans, key=leader_order, default=None)
    best, is_any = None, math.isinf(limit_s)
    for least, most in _windows(planner.experiment.cluster.num_devices):
        queue = CandidateQueue((), candidates.within(least, most, limit_s))
        plans = _feasible(queue.run(planner.plan), limit_s)
        best = min(plans, key=leader_order, default=best)
        if is_any and best is not None:
            break
        limit_s = limit_s if best is None else min(limit_s, best.iteration_time_s)
    return best


def _feasible(results: Sequence[Result], limit_s: float) -> list[Estimate]:
    """Return the safe estimates that do not exceed a limit."""
    estimates = (result for result in results if isinstance(result, Estimate) and result.feasible)
    return [one for one in estimates if one.iteration_time_s <= limit_s and not is_risky(one)]


def _joined(ranking: Ranking, added: Ranking, limit_s: float) -> Ranking:
    """Return a ranking with the safe strategies of another that do not exceed a limit.

    If there is no limit and none is safe, the others take part.
    """
    faster = added.leading if math.isinf(limit_s) else _feasible(added.results, limit_s)
    if not faster:
        return ranking
    joined = rank((*ranking.results, *faster), relative_error=ranking.relative_error)
    return replace(joined, num_left_out=ranking.num_left_out)


def _with_variants(experiment: Experiment, choice: PlannerChoice, whole: Ranking) -> Ranking:
    """Rank the strategies of an experiment together with those of its variants, if it has any."""
    if not experiment.varies_batch and not experiment.counts_money:
        return whole
    plans = {result.strategy: result for result in whole.results if isinstance(result, Estimate)}
    for plan in plans_of_variants(experiment, choice.make):
        plans.setdefault(plan.strategy, plan)
    rest = [result for result in whole.results if isinstance(result, Infeasible)]
    return rank(
        (*plans.values(), *rest),
        relative_error=whole.relative_error,
        objective=experiment.objective,
        per_sample=experiment.varies_batch,
    )


def _check_money(experiment: Experiment, choice: PlannerChoice) -> None:
    """Raise if cost is minimised with a planner that knows no prices."""
    if not experiment.counts_money:
        return
    if experiment.limits.batch_tolerance:
        message = (
            "search.batch_tolerance compares times per sample; leave it out where money counts"
        )
        raise InputError(message, where=experiment.where("search", "batch_tolerance"))
    if not choice.traits.knows_prices:
        message = (
            f"{experiment.money_key} needs a cost model that knows prices; {choice.name} knows none"
        )
        raise InputError(message, where=experiment.where())


def _check_prices(experiment: Experiment) -> None:
    """Raise if cost is minimised and a node has no price."""
    if not experiment.counts_money:
        return
    missing = [node for node in experiment.cluster.nodes if node.price_per_device_hour is None]
    if missing:
        message = (
            f"{experiment.money_key} needs price_per_device_hour of every node; "
            f"{missing[0].name!r} has none"
        )
        raise InputError(message, where=experiment.where("cluster", "nodes"))


def _least_bound_s(ranking: Ranking) -> float | None:
    failed = (result.reason.kind for result in ranking.results if isinstance(result, Infeasible))
    if NOT_SEARCHED in failed:
        return None
    feasible = ranking.results[: ranking.num_feasible]
    rows_s = [result.lower_bound_s for result in feasible if isinstance(result, Estimate)]
    bounds_s = [bound_s for bound_s in rows_s if bound_s is not None]
    return min(bounds_s, default=None) if len(bounds_s) == len(rows_s) else None


def with_remedies(experiment: Experiment, results: Sequence[Result]) -> list[Result]:
    """Return results of our cost model; the first that do not fit have their remedies."""
    remedies, added, num_added = Remedies(experiment=experiment), list(results), 0
    for index, result in enumerate(results):
        if isinstance(result, Estimate) and not result.feasible and num_added < NUM_REMEDIES:
            added[index] = remedies.add(result)
            num_added += 1
    return added


def score_given(planner: Planner, entries: Sequence[Entry]) -> list[Result]:
    """Estimate the strategies of a user, in their order; without cuts, the planner cuts them."""
    results = []
    for entry in entries:
        with placed(entry.where):
            if entry.strategy is not None:
                results.append(planner.score(entry.strategy))
            else:
                assert entry.candidate is not None
                results.append(planner.plan(entry.candidate))
    return results
