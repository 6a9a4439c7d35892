"""Search an experiment's strategies, and plan again after a loss or a gain of nodes."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from amp_ray.calibration.intervals import rank_with_intervals
from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Estimate
from amp_ray.errors import InputError, Where
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import strategy_from_json
from amp_ray.inputs.strict_text import parse_json
from amp_ray.runtime.files import read_text
from amp_ray.runtime.ray.searching import AUTO, Workers, search_candidates
from amp_ray.search.planner import Candidates, Planner, PlannerChoice, choose_planner
from amp_ray.search.ranking import NEAR_FRACTION, Ranking
from amp_ray.search.replan import Moves, Replanner
from amp_ray.search.rows import SCHEMA, ranking_rows, shown_bound_s
from amp_ray.search.run import NUM_INTERVALS, fastest_within, run_search, with_remedies
from amp_ray.search.space import divided_batch, searched_dimensions
from amp_ray.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The ranking of a search, with its planner and duration."""

    cost_model: str
    planner: Planner
    ranking: Ranking
    search_s: float
    remarks: tuple[str, ...] = ()  # about the experiment, not about one strategy

    @property
    def experiment(self) -> Experiment:
        """The experiment, without the dimensions that the planner cannot choose."""
        return self.planner.experiment

    def to_json(self, *, num_rows: int | None) -> dict[str, Any]:
        """Return the object of ``plan --json``; ``num_rows`` None lists every candidate."""
        fastest, bound_s = self.ranking.fastest, self.ranking.lower_bound_s
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
            "lower_bound_s": shown_bound_s(bound_s, fastest.iteration_time_s)
            if fastest is not None
            else None,
            "fastest_s": None if fastest is None else fastest.iteration_time_s,
            "ranking": ranking_rows(self.ranking, self.experiment, self.planner, num_rows=num_rows),
            **({"remarks": list(self.remarks)} if self.remarks else {}),
        }

    def why_none(self) -> str:
        """Explain why no strategy is feasible, and which strategy comes closest."""
        return self.planner.why_none(self.ranking.results)


def plan_experiment(
    experiment: Experiment,
    choice: PlannerChoice | None = None,
    *,
    num_rows: int | None = None,
    workers: Workers = AUTO,
    progress: Callable[[int, int], None],
    leading: Callable[[Estimate], None] = lambda _estimate: None,
) -> Planned:
    """Search the candidates of an experiment, by default with the planner that it names.

    In a large uniform space, a candidate is skipped if a lower bound proves that it is not among
    the first ``num_rows`` rows; with None, no candidate is skipped.

    The ranking does not depend on ``workers``. ``progress`` gets (candidates done, total);
    ``leading`` gets each strategy that is faster than all before it.
    """
    start_s = time.perf_counter()
    workers.check()
    choice = choice or choose_planner(experiment)

    def search(planner: Planner, candidates: Candidates) -> Ranking:
        return search_candidates(
            planner,
            candidates.required,
            optional=candidates.optional,
            workers=workers,
            progress=progress,
            leading=leading,
        )

    planner, ranking = run_search(experiment, choice, search, num_rows=num_rows)
    if planner.traits.has_constants:
        num_shown = min(num_rows or NUM_INTERVALS, NUM_INTERVALS)
        ranking = rank_with_intervals(planner.experiment, ranking, num_shown)
        if num_rows is None:
            results = with_remedies(planner.experiment, ranking.results)
            ranking = replace(ranking, results=tuple(results))
    return Planned(
        cost_model=choice.name,
        planner=planner,
        ranking=ranking,
        search_s=time.perf_counter() - start_s,
    )


def batch_remarks(planned: Planned, choice: PlannerChoice) -> tuple[str, ...]:
    """Name a batch that the devices divide, if it is faster per token."""
    experiment, fastest = planned.experiment, planned.ranking.fastest
    batch, other = experiment.global_batch_size, divided_batch(experiment)
    is_by_time = not (experiment.counts_money or experiment.varies_batch)
    if other is None or fastest is None or not is_by_time:
        return ()
    limit_s = fastest.iteration_time_s * other / batch / (1 + NEAR_FRACTION)
    with suppress(ValueError):  # the profile may lack a measurement
        planner = choice.make(replace(experiment, global_batch_size=other))
        better = fastest_within(planner, limit_s)
        if better is not None:
            gain = fastest.iteration_time_s * other / batch / better.iteration_time_s - 1
            remark = (
                f"{experiment.cluster.num_devices} devices do not divide the batch of {batch:,}: "
                f"with {other:,} training is {100 * gain:.0f} % faster per token "
                f"(--set global_batch_size={other})"
            )
            return (remark,)
    return ()


_MOST_SLOTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned(Planned):
    """A plan after a change of nodes; its ties are ordered by the bytes of state to move."""

    replanner: Replanner  # computes the moves of a strategy

    def moves(self) -> Moves | None:
        """Return the moves of the best strategy; None if no strategy is feasible."""
        best = self.ranking.best
        return None if best is None else self.replanner.moves(best.strategy)

    def to_json(self, *, num_rows: int | None) -> dict[str, Any]:
        """Return the object of ``plan --json``, with ``moves`` in every feasible row."""
        record = Planned.to_json(self, num_rows=num_rows)
        for row, result in zip(record["ranking"], self.ranking.results, strict=False):
            if isinstance(result, Estimate) and result.feasible:
                row["moves"] = self.replanner.moves(result.strategy).to_json()
        return record


def replan(planned: Planned, path: Path, cluster: Cluster) -> Replanned:
    """Compare a new plan with the earlier strategy in a file.

    The file is the output of ``plan --json`` or ``tune --json``, or has the strategy alone.
    ``cluster`` has all hosts of the experiment file, including lost ones.
    """
    experiment = planned.experiment
    before, old_cluster = _load_strategy(path, cluster)
    num_layers, expected = before.bounds[-1], experiment.model.num_layers
    if num_layers != expected:
        message = f"a strategy for {num_layers} layers; the model has {expected}"
        raise InputError(message, where=Where(file=str(path)))
    replanner = Replanner(experiment=experiment, before=before, old_cluster=old_cluster)

    def score(strategy: Strategy) -> Estimate:
        estimate = planned.planner.score(strategy)
        assert isinstance(estimate, Estimate)
        return estimate

    return Replanned(
        cost_model=planned.cost_model,
        planner=planned.planner,
        ranking=replanner.ranking(planned.ranking, score),
        search_s=planned.search_s,
        replanner=replanner,
    )


def _load_strategy(path: Path, cluster: Cluster) -> tuple[Strategy, Cluster]:
    file = str(path)
    record = parse_json(read_text(path), file=file)
    if isinstance(record, dict):
        rows = record.get("ranking")
        for chosen in (record.get("best"), rows[0] if isinstance(rows, list) and rows else None):
            record = chosen if isinstance(chosen, dict) else record
        record = record.get("strategy", record)
    if not isinstance(record, dict):
        message = "expected what plan --json or tune --json writes, or a strategy"
        raise InputError(message, where=Where(file=file))
    old_cluster = _with_hosts(cluster, record.get("placement"))
    return strategy_from_json(record, old_cluster, file=file), old_cluster


def _with_hosts(cluster: Cluster, placement: object) -> Cluster:
    """Add hosts of an earlier placement that the experiment file no longer has."""
    names, slots = {*cluster.host_names}, dict[str, int]()
    for entry in placement if isinstance(placement, list) else []:
        match entry:
            case [str(host), int(slot)] if host not in names and 0 <= slot < _MOST_SLOTS:
                slots[host] = max(slots.get(host, 0), slot + 1)
    first = cluster.hosts[0]
    lost = [replace(first, name=host, num_slots=count) for host, count in slots.items()]
    return replace(cluster, nodes=(*cluster.nodes, *lost))
