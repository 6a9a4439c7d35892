"""What the stages of a candidate need, wherever they run: room, parameters, their places."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from amp_ray.cost.model import CostModel
from amp_ray.cost.topology import FloatArray, IntArray
from amp_ray.search.cuts import even_block_bounds, latest_starts
from amp_ray.spec.candidate import Candidate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageNeeds:
    """What the stages of a candidate need, wherever they run.

    Args:
        earliest_start: Per size of a device's memory, shape ``(pp, num_layers + 1)``. The
            smallest start of each stage that fits.
        latest_start: Shape ``(num_layers + 1,)``. Last start of a stage with all it must have;
            empty where it needs nothing.
        parameters: Shape ``(num_layers + 1,)``. Prefix sums over the layers, of one rank.
        tied_counts: Whether the time of tied weights is to be told by the stages at both ends.
    """

    earliest_start: dict[float, IntArray]
    latest_start: IntArray
    parameters: FloatArray
    tied_counts: bool


def stage_needs(cost_model: CostModel, candidate: Candidate, *, tied_counts: bool) -> StageNeeds:
    """Return what the stages of a candidate need.

    Args:
        cost_model: Of the experiment.
        candidate: Degrees.
        tied_counts: Whether the time of tied weights is to be told by the stages at both ends.
    """
    model, traits = cost_model.experiment.model, cost_model.experiment.traits
    memory = cost_model.memory(candidate)
    sizes = {float(device.memory_bytes) for device in cost_model.experiment.cluster.device_types}
    starts = {size: memory.earliest_starts(np.full(candidate.pp, size)) for size in sorted(sizes)}
    if traits.partition == "even-blocks":
        bounds = even_block_bounds(model, candidate.pp)
        starts = {size: _only(bounds, start) for size, start in starts.items()}
    parameters = memory.weights.prefix.copy()
    if memory.weights.tied is not None and candidate.pp == 1:
        parameters[-1] -= memory.weights.tied.parameters
    return StageNeeds(
        earliest_start=starts,
        latest_start=latest_starts(cost_model.experiment),
        parameters=parameters,
        tied_counts=tied_counts,
    )


def _only(bounds: Sequence[int], earliest_start: IntArray) -> IntArray:
    """Let every stage end where it must."""
    ends = np.arange(earliest_start.shape[1])
    allowed = ends == np.array(bounds[1:])[:, None]
    return np.where(allowed, np.maximum(earliest_start, np.array(bounds[:-1])[:, None]), ends)
