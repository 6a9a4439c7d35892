"""Cut stages on fixed devices: turn costs into a partition problem, its solution into bounds."""

import math
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.model import StageCosts
from amp_ray.cost.stages import PlacedStages
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.model import Model
from amp_ray.partition.exact import best_chain
from amp_ray.partition.layout import laid_out_chain
from amp_ray.partition.problem import PartitionProblem, chain_problem, even_bounds
from amp_ray.partition.tables import StageTables
from amp_ray.runtimes.cut_rules import weighed_bounds
from amp_ray.runtimes.traits import RuntimeTraits

NO_LIMIT: Final[IntArray] = np.empty(0, np.int64)

_MOST_SCALES: Final = 24
"""Memory scales that are tried to find how much memory a candidate needs."""


def best_bounds(
    experiment: Experiment, costs: StageCosts, *, memory_scale: float = 1.0
) -> tuple[int, ...]:
    """Return the best cuts by the closed form that fit the memory.

    Every device's memory is multiplied by ``memory_scale``. If nothing fits, return the bounds that
    enough memory would have.
    """
    ruled = ruled_bounds(experiment, costs.stages.pp)
    if ruled is not None:
        return ruled
    if costs.stages.pp == 1:
        return 0, experiment.model.num_layers
    latest = latest_starts(experiment, costs.stages)
    rows = _stage_rows(costs, experiment.traits)
    starts = costs.memory.earliest_starts(memory_scale)
    num_micro_batches = costs.stages.num_micro_batches * costs.stages.virtual_stages
    anywhere = np.zeros_like(starts)
    for limits in ((starts, latest), (anywhere, latest), (anywhere, NO_LIMIT)):
        bounds = best_chain(laid_out_chain(*rows, *limits), num_micro_batches)
        if bounds is not None:
            return bounds
    raise AssertionError("without limits every chain with enough layers has a partition")


def roomiest_bounds(
    experiment: Experiment, costs: StageCosts, *, within: float = math.inf
) -> tuple[int, ...] | None:
    """Return the cuts that minimise the largest ratio of a stage's memory to its device's memory.

    ``within`` limits this ratio.

    Returns:
        Bounds with the smallest ratio, up to rounding; None if no cuts are within the limit, or
        none have parameters in every stage that needs them.
    """
    ruled = ruled_bounds(experiment, costs.stages.pp)
    if ruled is not None:
        return ruled
    latest_start = latest_starts(experiment, costs.stages)
    close = costs.memory.earliest_starts(within) if within < math.inf else None
    if close is not None and fitting_bounds(close, latest_start) is None:
        return None
    low, high, best = 0.0, math.inf, None
    scale = 1.0
    for _ in range(_MOST_SCALES):
        bounds = fitting_bounds(costs.memory.earliest_starts(scale), latest_start)
        if bounds is None:
            low = scale
        else:
            high, best = scale, bounds
        scale = 2 * scale if high == math.inf else (low + high) / 2
    return best


def may_fit(experiment: Experiment, earliest_start: IntArray) -> bool:
    """Return whether some cuts fit the memory, given the smallest starts by stage and end."""
    if experiment.traits.partition != "exact":
        return True
    return fitting_bounds(earliest_start, latest_starts(experiment)) is not None


def fitting_bounds(earliest_start: IntArray, latest_start: IntArray) -> tuple[int, ...] | None:
    """Return cuts with which every stage fits, or None.

    Args:
        earliest_start: Shape ``(pp, num_layers + 1)``. Smallest start that fits, by stage and end.
        latest_start: From `latest_starts`; empty if stages need no parameters.
    """
    num_layers = earliest_start.shape[1] - 1
    ends = np.arange(num_layers + 1)
    latest = np.minimum(ends - 1, latest_start) if len(latest_start) else ends - 1
    end_latest = latest + 1
    # Reachable boundaries before each boundary
    counts = np.ones(num_layers + 2, dtype=np.int64)
    counts[0] = 0
    reached = []
    for earliest in earliest_start:
        reached.append(counts)
        can_end = counts[end_latest] > counts[earliest]
        counts = np.zeros(num_layers + 2, dtype=np.int64)
        np.cumsum(can_end, out=counts[1:])
        if not counts[-1]:
            return None
    if counts[num_layers + 1] == counts[num_layers]:
        return None
    bounds = [num_layers]
    for earliest, counts in zip(earliest_start[::-1], reversed(reached), strict=True):
        first = counts[earliest[bounds[-1]]]
        bounds.append(int(np.searchsorted(counts, first, side="right")) - 1)
    return tuple(reversed(bounds))


def partition_problem(
    costs: StageCosts, traits: RuntimeTraits, latest_start: IntArray, memory_scale: float = 1.0
) -> PartitionProblem:
    """Build the partition problem of a candidate.

    A stage takes the time of its slowest replica. If transfers block, the messages at both ends of
    a stage count towards its bottleneck. With ``v`` chunks per stage, all but the slowest stage
    fill and drain ``v`` times faster, so the best cuts are those for ``v`` times as many
    micro-batches. Every device's memory is multiplied by ``memory_scale``; ``latest_start`` is from
    `latest_starts`.
    """
    times, cuts, bottlenecks = _stage_rows(costs, traits)
    (time_prefix_s, time_row), (cut_time_s, cut_row) = times, cuts
    start_s, end_s, bottleneck_row = bottlenecks
    tables = StageTables(
        time_prefix_s=time_prefix_s,
        cut_time_s=cut_time_s,
        bottleneck_start_s=start_s,
        bottleneck_end_s=end_s,
        earliest_start=costs.memory.earliest_starts(memory_scale),
        latest_start=latest_start,
    )
    return chain_problem(
        tables,
        costs.stages.num_micro_batches * costs.stages.virtual_stages,
        time_row=time_row,
        cut_row=cut_row,
        bottleneck_row=bottleneck_row,
        memory_row=np.arange(costs.stages.pp),
    )


def _stage_rows(
    costs: StageCosts, traits: RuntimeTraits
) -> tuple[
    tuple[FloatArray, IntArray],
    tuple[FloatArray, IntArray],
    tuple[FloatArray, FloatArray, IntArray | None],
]:
    """Return times, cuts and bottlenecks of stages in a row, as for `laid_out_chain`."""
    cut_time_s, cut_row = costs.messages.rows()
    cut_row = cut_row[: costs.stages.pp - 1]  # the last row is the cut behind the last stage
    bottlenecks = _bottlenecks(cut_time_s, cut_row, blocking=traits.blocking_transfers)
    return costs.times.rows(), (cut_time_s, cut_row), bottlenecks


def latest_starts(experiment: Experiment, stages: PlacedStages | None = None) -> IntArray:
    """Return, for each end, the latest start with which a stage still has parameters.

    With ``stages``, each of their chunks needs a block; by default a stage is one chunk.

    Returns:
        Shape ``(num_layers + 1,)``. Per boundary the last layer before it that has parameters, -1
        if there is none; empty if stages need no parameters.
    """
    if stages is not None and stages.virtual_stages > 1:
        counts = np.array(experiment.model.block_counts)
        latest = np.searchsorted(counts, counts - stages.virtual_stages, side="right") - 1
        of_stages = latest_starts(experiment)
        return np.minimum(of_stages, latest) if len(of_stages) else latest
    if not experiment.traits.fails_without_parameters:
        return NO_LIMIT
    layers, positions = experiment.model.distinct_layers
    has = np.array([layer.num_parameters > 0 for layer in layers])[np.array(positions)]
    last = np.maximum.accumulate(np.where(has, np.arange(len(has)), -1))
    return np.concatenate(([-1], last))


def _bottlenecks(
    cut_time_s: FloatArray, cut_row: IntArray, *, blocking: bool
) -> tuple[FloatArray, FloatArray, IntArray | None]:
    """Return the times of the cuts before and after a stage, and each stage's row in them.

    Tables are empty if transfers do not block: they then add nothing to a bottleneck.
    """
    if not blocking or not len(cut_row):
        return np.empty(0), np.empty(0), None
    nothing = len(cut_time_s)
    padded = np.vstack([cut_time_s, np.zeros_like(cut_time_s[:1])])
    # The outer columns stand for no cut. The solver is fastest if they repeat their neighbours.
    padded[:, [0, -1]] = padded[:, [1, -2]]
    before = np.concatenate(([nothing], cut_row))
    after = np.concatenate((cut_row, [nothing]))
    index: dict[tuple[int, int], int] = {}
    row = [
        index.setdefault(pair, len(index))
        for pair in zip(before.tolist(), after.tolist(), strict=True)
    ]
    pairs = np.array(list(index))
    return padded[pairs[:, 0]], padded[pairs[:, 1]], np.array(row)


def ruled_bounds(experiment: Experiment, pp: int) -> tuple[int, ...] | None:
    """Return the cuts that the runtime's own rule gives; None if it has none, or leaves a stage."""
    rule = experiment.traits.partition
    if rule == "exact":
        return None
    return (even_block_bounds if rule == "even-blocks" else weighed_bounds)(experiment.model, pp)


def even_block_bounds(model: Model, pp: int) -> tuple[int, ...]:
    """Return bounds with equal shares of the blocks; the first and last stage take the rest.

    Args:
        model: Its blocks are consecutive layers.
        pp: Number of stages; if it does not divide the blocks, the first stages get one more.
    """
    blocks = model.indices("block")
    inner = (blocks[0] + bound for bound in even_bounds(len(blocks), pp)[1:-1])
    return (0, *inner, model.num_layers)
