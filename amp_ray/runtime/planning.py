"""Search or score in this process, and lead what was asked wrongly to its place in a file."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from amp_ray.baselines.aceso2024.planner import Aceso2024Planner
from amp_ray.baselines.amp2022.planner import Amp2022Planner
from amp_ray.baselines.metis2024.planner import Metis2024Planner
from amp_ray.calibration.intervals import log_shifts, tie_errors, with_intervals
from amp_ray.cost.estimate import Estimate, Infeasible, Result
from amp_ray.cost.model import CostModel
from amp_ray.cost.operators import NOT_SEARCHED
from amp_ray.errors import InputError, placed
from amp_ray.formats.metis_export import published_profile
from amp_ray.runtime.ray.searching import ALONE, AUTO, Workers, search_candidates
from amp_ray.search.objective import on_cluster, sub_clusters
from amp_ray.search.others import optional_of as others_of
from amp_ray.search.planner import AmpRayPlanner, Planner, evaluate
from amp_ray.search.ranking import Ranking, leader_order, named, rank, why_none, with_more_ties
from amp_ray.search.rows import SCHEMA, ranking_rows
from amp_ray.search.space import (
    candidates_of,
    group_candidates,
    other_batches,
    searched_dimensions,
    uniform_candidates,
)
from amp_ray.search.wanted import NO_CANDIDATES, OptionalCandidates
from amp_ray.spec import recompute
from amp_ray.spec.candidate import AnyCandidate
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import candidate_of
from amp_ray.spec.strategy_file import Given

OURS: Final = "amp-ray"  # our own cost model
NUM_INTERVALS: Final = 20  # rows that tell how far their time may be off
AMP_2022: Final = "amp-2022"  # places in the order of the nodes: its space is the uniform one
ACESO_2024: Final = "aceso-2024"  # the planner whose stages are cut between operators
METIS_2024: Final = "metis-2024"  # stages have device groups of their own: heterogeneous
# Candidates of the uniform space of which each is planned, whatever number of rows is wanted
MOST_PLANNED: Final = 300


def make_metis_planner(experiment: Experiment) -> Metis2024Planner:
    """Return the planner of an experiment by Metis's formulas."""
    return Metis2024Planner(experiment=experiment, published=published_profile(experiment))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The result of a search."""

    experiment: Experiment
    cost_model: str
    ranking: Ranking
    search_s: float

    def to_json(self, *, num_rows: int | None) -> dict[str, Any]:
        """Return the object of ``plan --json``; None lists every candidate."""
        return {
            "schema": SCHEMA,
            "experiment": self.experiment.name,
            "cost_model": self.cost_model,
            "objective": self.ranking.objective,
            "searched": list(searched_dimensions(self.experiment)),
            "num_candidates": len(self.ranking.results) + self.ranking.num_left_out,
            "num_feasible": self.ranking.num_feasible,
            "num_left_out": self.ranking.num_left_out,
            "search_s": self.search_s,
            "lower_bound_s": self.ranking.lower_bound_s,
            "ranking": ranking_rows(self.ranking, self.experiment, self.ours, num_rows=num_rows),
        }

    @property
    def ours(self) -> CostModel | None:
        """Return the cost model that made the estimates, if it is ours."""
        return our_model(self.experiment, self.cost_model)


def our_model(experiment: Experiment, cost_model: str) -> CostModel | None:
    """Return our cost model, if that is the name of it."""
    return CostModel(experiment=experiment) if cost_model == OURS else None


def why_infeasible(experiment: Experiment, cost_model: str, results: Sequence[Result]) -> str:
    """Say why none of the results of a search is feasible, and what comes closest to it."""
    ours = make_planner(experiment, cost_model)
    if not isinstance(ours, AmpRayPlanner):
        return why_none(results)
    return why_none(results, ours.roomiest()) + _fits_with_recompute(experiment)


def _fits_with_recompute(experiment: Experiment) -> str:
    """Name a strategy that would fit if stages chose what they compute again; empty without one."""
    if experiment.recompute == recompute.AUTO:
        return ""
    chosen = AmpRayPlanner(experiment=replace(experiment, recompute=recompute.AUTO))
    fits = [estimate for estimate in chosen.roomiest() if estimate.feasible]
    if not fits:
        return ""
    best = min(fits, key=leader_order)
    kind = best.strategy.stages[0].options.recompute
    return f"; with 'recompute: auto' some fit, such as {named(best.strategy)}, recompute {kind}"


def make_planner(experiment: Experiment, cost_model: str) -> Planner:
    """Return the planner behind a ``--cost-model`` name."""
    with placed(experiment.where(), ValueError if cost_model == AMP_2022 else InputError):
        if cost_model == AMP_2022:
            return Amp2022Planner(experiment=experiment)
        if cost_model == METIS_2024:
            return make_metis_planner(experiment)
        if cost_model == ACESO_2024:
            return Aceso2024Planner(experiment=experiment)
        return AmpRayPlanner(experiment=experiment)


def planned_candidates(experiment: Experiment, cost_model: str) -> tuple[AnyCandidate, ...]:
    """Return what a cost model's planner looks at."""
    if cost_model == AMP_2022:
        return uniform_candidates(experiment)
    if cost_model == METIS_2024:
        return group_candidates(experiment)
    if cost_model == ACESO_2024:
        return Aceso2024Planner(experiment=experiment).candidates()
    return candidates_of(experiment)


def plan_experiment(
    experiment: Experiment,
    cost_model: str,
    *,
    num_rows: int | None = None,
    workers: Workers = AUTO,
    progress: Callable[[int, int], None],
    leading: Callable[[Estimate], None] = lambda _estimate: None,
) -> Planned:
    """Search the candidates of an experiment.

    Of a large uniform space those are left out that are proven not to be among so many first rows.
    By default none is.

    The ranking does not depend on ``workers``; ``progress`` gets (candidates done, all
    candidates), ``leading`` each strategy that is faster than all before it.

    Within ``batch_tolerance``, batches that the devices divide better are planned for, too.
    Where money counts, parts of the cluster are planned for as well: fewer nodes may be cheaper.
    """
    start_s = time.perf_counter()
    workers.check()
    _check_money(experiment, cost_model)
    planner = make_planner(experiment, cost_model)
    with placed(experiment.where("search"), ValueError):
        candidates = planned_candidates(experiment, cost_model)
    optional = optional_of(planner)
    with placed(experiment.where("profile")):
        search = partial(search_candidates, planner, workers=workers, progress=progress)
        if num_rows is not None and _may_leave_out(experiment, optional, candidates):
            ranking = _first_rows(partial(search, leading=leading), experiment, optional, num_rows)
        else:
            ranking = search(candidates, optional=optional, leading=leading)
    if experiment.limits.batch_tolerance and not experiment.limits.launchable:
        ranking = _with_other_batches(experiment, cost_model, ranking)
    if counts_money(experiment):
        ranking = _with_parts(experiment, cost_model, ranking)
    # What is bounded there is the predicted time itself.
    if cost_model in {METIS_2024, ACESO_2024} or experiment.space == "operator":
        ranking = replace(ranking, lower_bound_s=_least_bound_s(ranking))
    return Planned(
        experiment=experiment,
        cost_model=cost_model,
        ranking=_with_intervals(experiment, ranking) if cost_model == OURS else ranking,
        search_s=time.perf_counter() - start_s,
    )


def _may_leave_out(
    experiment: Experiment, optional: OptionalCandidates, candidates: Sequence[AnyCandidate]
) -> bool:
    """Tell whether so much is known of candidates beforehand that not each has to be planned."""
    limits = experiment.limits
    return (
        experiment.space == "uniform"
        and len(candidates) > MOST_PLANNED
        and optional is not NO_CANDIDATES
        and not optional.candidates
        and not (limits.token_slices or limits.tp_across_nodes or limits.batch_tolerance)
        and not counts_money(experiment)
    )


def _first_rows(
    search: Callable[..., Ranking],
    experiment: Experiment,
    optional: OptionalCandidates,
    num_rows: int,
) -> Ranking:
    """Return a ranking of which so many first rows are those of all candidates.

    Where nothing can run, all are planned, to say why.
    """
    num = max(num_rows, NUM_INTERVALS)
    optional = replace(optional, candidates=uniform_candidates(experiment))
    first = search((), optional=replace(optional, num_rows=num))
    if not first.num_feasible:
        return search(optional.candidates)
    # Others that happened to be planned before these depend on who planned them.
    able = [each for each in first.results if isinstance(each, Estimate) and each.feasible]
    times_s = sorted(each.iteration_time_s for each in able)
    limit_s = max(times_s[0] * (1 + first.relative_error), *times_s[:num][-1:])
    kept = tuple(each for each in able if each.iteration_time_s <= limit_s)
    left_out = len(optional.candidates) - len(kept)
    return replace(first, results=kept, num_feasible=len(kept), num_left_out=left_out)


def _with_intervals(experiment: Experiment, ranking: Ranking) -> Ranking:
    """Let the first rows tell how far their time may be off, and count those as ties it may swap.

    Others would take longer than the search: each needs an estimate per uncertain constant.
    """
    able = [each for each in ranking.results[: ranking.num_feasible] if isinstance(each, Estimate)]
    if not able:
        return ranking
    fastest = min(able, key=leader_order)
    others = [each for each in able if each is not fastest]
    first = sorted([fastest, *others[: NUM_INTERVALS - 1]], key=leader_order)
    shifts = log_shifts(experiment, first)
    bounded = with_intervals(experiment, first, shifts)
    ranking = replace(ranking, results=_exchanged(ranking.results, first, bounded))
    if experiment.objective != "time" or experiment.limits.batch_tolerance:
        return ranking
    errors = tie_errors(experiment, shifts).tolist()
    return with_more_ties(ranking, list(zip(bounded, errors, strict=True)))


def _exchanged(
    results: Sequence[Result], old: Sequence[Estimate], new: Sequence[Estimate]
) -> tuple[Result, ...]:
    """Return results with some of them exchanged, each in its place."""
    by_id = dict(zip(map(id, old), new, strict=True))
    return tuple(by_id.get(id(result), result) for result in results)


def score_intervals(
    experiment: Experiment, cost_model: str, results: Sequence[Result]
) -> tuple[Result, ...]:
    """Return scores of which the first that can run tell how far their time may be off."""
    if cost_model != OURS:
        return tuple(results)
    able = [each for each in results if isinstance(each, Estimate) and each.feasible]
    first = able[:NUM_INTERVALS]
    return _exchanged(results, first, with_intervals(experiment, first))


def optional_of(planner: Planner) -> OptionalCandidates:
    """Return what our planner looks at only where it may be fast, and how it makes plans faster."""
    return others_of(planner) if isinstance(planner, AmpRayPlanner) else NO_CANDIDATES


def counts_money(experiment: Experiment) -> bool:
    """Tell whether what a strategy costs matters."""
    most = experiment.limits.max_cost_per_iteration
    return experiment.objective != "time" or most is not None


def _check_money(experiment: Experiment, cost_model: str) -> None:
    """Refuse to look for cheap strategies where nothing tells what they cost."""
    if not counts_money(experiment):
        return
    if experiment.limits.batch_tolerance:
        message = (
            "search.batch_tolerance compares times per sample; leave it out where money counts"
        )
        raise InputError(message, where=experiment.where("search", "batch_tolerance"))
    key = "search.max_cost_per_iteration"
    what = key if experiment.objective == "time" else f"objective {experiment.objective!r}"
    if cost_model in {AMP_2022, METIS_2024, ACESO_2024}:
        message = f"{what} needs a cost model that knows prices; {cost_model} knows none"
        raise InputError(message, where=experiment.where())
    if experiment.cuts_operators:
        message = f"{what} is not for stages cut between operators, whose price is not known"
        raise InputError(message, where=experiment.where("search", "space"))
    missing = [node for node in experiment.cluster.nodes if node.price_per_device_hour is None]
    if missing:
        message = f"{what} needs price_per_device_hour of every node; {missing[0].name!r} has none"
        raise InputError(message, where=experiment.where("cluster", "nodes"))


def _with_other_batches(experiment: Experiment, cost_model: str, whole: Ranking) -> Ranking:
    """Rank the strategies of the batch asked for together with those of batches near it."""
    results = list(whole.results)
    for batch in other_batches(experiment):
        other = replace(experiment, global_batch_size=batch)
        said = f"global_batch_size {batch} instead of {experiment.global_batch_size}"
        with suppress(ValueError):  # the profile may lack what its micro-batches need
            planner = make_planner(other, cost_model)
            found = search_candidates(
                planner,
                planned_candidates(other, cost_model),
                optional=optional_of(planner),
                workers=ALONE,
            )
            results += [
                replace(own, warnings=(*own.warnings, said))
                for own in found.results
                if isinstance(own, Estimate)
            ]
    return rank(results, relative_error=whole.relative_error, per_sample=True)


def _with_parts(experiment: Experiment, cost_model: str, whole: Ranking) -> Ranking:
    """Rank the strategies of the whole cluster together with those of its parts."""
    results = {result.strategy: result for result in whole.results if isinstance(result, Estimate)}
    for part in sub_clusters(experiment.cluster):
        smaller = replace(experiment, cluster=part, objective="time")
        with suppress(ValueError):  # no tp, dp or micro-batch size may fit so few devices
            candidates = planned_candidates(smaller, cost_model)
            planner = make_planner(smaller, cost_model)
            for result in search_candidates(planner, candidates, workers=ALONE).results:
                placed_result = on_cluster(result, part, experiment.cluster)
                if isinstance(placed_result, Estimate):
                    results.setdefault(placed_result.strategy, placed_result)
    rest = [result for result in whole.results if not isinstance(result, Estimate)]
    return rank(
        (*results.values(), *rest),
        relative_error=whole.relative_error,
        objective=experiment.objective,
    )


def _least_bound_s(ranking: Ranking) -> float | None:
    """Return the bound of a whole space, where each of its candidates has been searched whole."""
    failed = (result.reason.kind for result in ranking.results if isinstance(result, Infeasible))
    if NOT_SEARCHED in failed:
        return None
    found = ranking.results[: ranking.num_feasible]
    bounds_s = [result.lower_bound_s for result in found if isinstance(result, Estimate)]
    return min((bound_s for bound_s in bounds_s if bound_s is not None), default=None)


def score_given(planner: Planner, given: Sequence[Given]) -> list[Result]:
    """Estimate the strategies that a user names, in their order."""
    results = []
    for entry in given:
        if entry.strategy is not None and isinstance(planner, Amp2022Planner):
            with placed(entry.where, ValueError):
                candidate_of(entry.strategy)
        with placed(entry.where):
            results.append(evaluate(planner, entry))
    return results
