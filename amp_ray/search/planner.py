"""Plan one candidate: costs to arrays, arrays to cuts, cuts to an estimate.

This is the function that every worker maps; a search is nothing but that map and a ranking.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from amp_ray.cost.estimate import Infeasible, Reason, Result
from amp_ray.cost.model import CandidateCosts, CostModel
from amp_ray.cost.topology import FloatArray, IntArray
from amp_ray.partition import (
    InfeasiblePartition,
    InfeasibleReason,
    PartitionProblem,
    PartitionSolution,
    StageTables,
    chain_problem,
    even_bounds,
    solve,
)
from amp_ray.search.ranking import Ranking, rank
from amp_ray.search.space import uniform_candidates
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.model import Model
from amp_ray.spec.strategy import Candidate, Strategy
from amp_ray.spec.strategy_file import Given


class Planner(Protocol):
    """Plans and scores the strategies of one experiment."""

    @property
    def relative_error(self) -> float:
        """Share by which two predictions must differ to be told apart."""
        ...

    def plan(self, candidate: Candidate) -> Result:
        """Give a candidate its cuts and estimate it."""
        ...

    def score(self, strategy: Strategy) -> Result:
        """Estimate a complete strategy."""
        ...


def search(
    experiment: Experiment, planner: Planner, *, progress: Callable[[int, int], None]
) -> Ranking:
    """Plan every candidate of an experiment and rank them.

    Args:
        experiment: What is given.
        planner: Plans one candidate.
        progress: Called with (candidates done, candidates in all).

    Raises:
        ValueError: If the limits leave no candidate, or the profile lacks what a candidate needs.
    """
    candidates = uniform_candidates(experiment)
    results = []
    for done, candidate in enumerate(candidates):
        progress(done, len(candidates))
        results.append(planner.plan(candidate))
    progress(len(candidates), len(candidates))
    return rank(results, relative_error=planner.relative_error)


def evaluate(planner: Planner, given: Given) -> Result:
    """Estimate a strategy that a user named; cuts that are left out are the planner's."""
    if given.strategy is not None:
        return planner.score(given.strategy)
    assert given.candidate is not None
    return planner.plan(given.candidate)


@dataclass(frozen=True, kw_only=True, eq=False)
class AmpRayPlanner:
    """Our planner: exact cuts for the closed form, judged by event simulation.

    Args:
        experiment: What is given.
    """

    experiment: Experiment

    @cached_property
    def cost_model(self) -> CostModel:
        """The cost model, with its tables."""
        return CostModel(experiment=self.experiment)

    @property
    def relative_error(self) -> float:
        """The time estimate's own error."""
        return self.experiment.constants.time_error

    def plan(self, candidate: Candidate) -> Result:
        """Cut a candidate exactly and estimate it.

        Where no cut fits the memory, the best one without the limit is estimated, so that the
        result tells by how much it fails.
        """
        refused = self._refuse(candidate)
        if refused is not None:
            return Infeasible(candidate=candidate, reason=refused)
        costs = self.cost_model.costs(candidate)
        if self.experiment.traits.partition == "even-blocks":
            bounds = even_block_bounds(self.experiment.model, candidate.pp)
        else:
            bounds = best_bounds(costs, self.cost_model)
        return self.cost_model.estimate_cut(costs, Strategy.uniform(candidate, bounds))

    def score(self, strategy: Strategy) -> Result:
        """Estimate a complete strategy."""
        return self.cost_model.estimate(strategy)

    def _refuse(self, candidate: Candidate) -> Reason | None:
        """Tell why no strategy can be made of a candidate."""
        model, traits = self.experiment.model, self.experiment.traits
        heads = model.shape.num_heads
        if traits.shards_heads and heads % candidate.tp:
            detail = f"tp {candidate.tp}, num_heads {heads}"
            return Reason(kind="tp does not divide the attention heads", detail=detail)
        if candidate.pp > model.num_layers:
            detail = f"pp {candidate.pp}, {model.num_layers} layers"
            return Reason(kind="more stages than layers", detail=detail)
        blocks = len(model.indices("block"))
        if traits.partition == "even-blocks" and blocks % candidate.pp:
            detail = f"pp {candidate.pp}, {blocks} blocks"
            return Reason(kind="pp does not divide the blocks", detail=detail)
        return None


def best_bounds(costs: CandidateCosts, cost_model: CostModel) -> tuple[int, ...]:
    """Return the cuts of a candidate that are best by the closed form and fit the memory.

    Args:
        costs: The candidate's times and memory.
        cost_model: Tells what the runtime does.

    Returns:
        Bounds; the best without memory limits where nothing fits.
    """
    for limited in (True, False):
        solution = solve(partition_problem(costs, cost_model, limited=limited))
        if isinstance(solution, PartitionSolution):
            return solution.bounds
        assert isinstance(solution, InfeasiblePartition)
        assert solution.reason is InfeasibleReason.MEMORY
    message = "without memory limits every chain with enough layers has a partition"
    raise AssertionError(message)


def partition_problem(
    costs: CandidateCosts, cost_model: CostModel, *, limited: bool
) -> PartitionProblem:
    """Pose the partition problem of a candidate.

    A stage takes the time of its slowest replica. Where transfers block, both ends of a stage
    add theirs to its beat.

    Args:
        costs: The candidate's times and memory.
        cost_model: Tells what the runtime does.
        limited: Whether stages must fit their devices.
    """
    traits, pp = cost_model.experiment.traits, costs.candidate.pp
    time_prefix_s, time_row = costs.kinds.stage_rows()
    cut_time_s, cut_row = costs.cuts.rows(duplex=traits.duplex_transfers)
    tables = StageTables(time_prefix_s=time_prefix_s, cut_time_s=cut_time_s)
    beat_row = memory_row = None
    if traits.blocking_transfers and pp > 1:
        start_s, end_s, beat_row = _beats(cut_time_s, cut_row)
        tables = replace(tables, beat_start_s=start_s, beat_end_s=end_s)
    if limited:
        limits = np.array([float(device.memory_bytes) for device in costs.smallest])
        starts = costs.memory.earliest_starts(limits)
        tables, memory_row = replace(tables, earliest_start=starts), np.arange(pp)
    return chain_problem(
        tables,
        costs.candidate.num_micro_batches,
        time_row=time_row,
        cut_row=cut_row,
        beat_row=beat_row,
        memory_row=memory_row,
    )


def _beats(cut_time_s: FloatArray, cut_row: IntArray) -> tuple[FloatArray, FloatArray, IntArray]:
    """Return beat tables and the row of each stage: the cut before it and the cut after it."""
    nothing = len(cut_time_s)
    padded = np.vstack([cut_time_s, np.zeros_like(cut_time_s[:1])])
    before = np.concatenate(([nothing], cut_row))
    after = np.concatenate((cut_row, [nothing]))
    pairs, row = np.unique(np.stack([before, after], axis=1), axis=0, return_inverse=True)
    return padded[pairs[:, 0]], padded[pairs[:, 1]], row.reshape(-1)


def even_block_bounds(model: Model, pp: int) -> tuple[int, ...]:
    """Return bounds with equal shares of the blocks; the ends hold what stands before and after.

    Args:
        model: Its blocks stand in a row.
        pp: Number of stages; divides the number of blocks, or the first stages get one more.
    """
    blocks = model.indices("block")
    inner = (blocks[0] + bound for bound in even_bounds(len(blocks), pp)[1:-1])
    return (0, *inner, model.num_layers)
