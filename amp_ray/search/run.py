"""Search an experiment with any planner, or score the strategies of a user."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from amp_ray.cost.estimate import Estimate, Infeasible, Result
from amp_ray.cost.verdict import NOT_SEARCHED
from amp_ray.errors import InputError, placed
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import Entry
from amp_ray.search.candidate_queue import RowLimit
from amp_ray.search.planner import Candidates, Planner, PlannerChoice
from amp_ray.search.ranking import Ranking, is_risky, plainest_first, rank
from amp_ray.search.remedies import Remedies
from amp_ray.search.variants import plans_of_variants

NUM_INTERVALS: Final = 20
"""Most rows that get an interval for their time: it costs a multiple of the search."""

NUM_REMEDIES: Final = 3
"""Most rows that do not fit for which changes are looked for: each takes some ten estimates."""

Search = Callable[[Planner, Candidates], Ranking]
"""Function that plans candidates and ranks the results, in this process or on workers."""


def run_search(
    experiment: Experiment, choice: PlannerChoice, search: Search, *, num_rows: int | None = None
) -> tuple[Planner, Ranking]:
    """Search the candidates of an experiment, and rank them with plans of its variants.

    Args:
        experiment: The experiment to plan.
        choice: Makes the planners of the experiment and its variants.
        search: Plans and ranks the candidates.
        num_rows: Number of first rows that matter; None for a ranking of all candidates.

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
    """Return the least lower bound; None if a row has none, or a search did not end."""
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
