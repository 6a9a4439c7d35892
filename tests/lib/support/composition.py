"""Time and memory of a strategy, put together in readable Python: the oracle of the evaluator.

It takes the same tables of layers, links and memory, and adds a step up from arrays over all groups
and stages, as `cost.kernels.evaluator` does in loops.
"""

from dataclasses import dataclass, replace

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.cost.estimate import Breakdown
from amp_ray.cost.model import CostModel, SampleCosts
from amp_ray.cost.samples import Place, covers_slices, largest_share, slice_places
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.timer import slowest_replica
from amp_ray.strategies.strategy import Strategy, all_bounds

TINY_S = 1e-12


@dataclass(frozen=True, kw_only=True)
class Composed:
    """What the oracle says of a strategy."""

    breakdown: Breakdown
    peak_memory_bytes: tuple[float, ...]


def composed(cost_model: CostModel, strategy: Strategy) -> Composed:
    """Add up the step of a strategy."""
    experiment = cost_model.experiment
    stages, bounds = PlacedStages.of_strategy(strategy), all_bounds(experiment.model, strategy)
    costs = cost_model.stage_costs(stages)
    if strategy.is_sliced:
        parts = [
            _slice_seconds(cost_model, stages, bounds, place)
            for place in slice_places(strategy.token_slices)
        ]
        passes_s, sends_s = (np.stack(each, axis=-1) for each in zip(*parts, strict=True))
    else:
        passes_s, sends_s = (
            times[..., None].copy() for times in (costs.times.at(bounds), costs.messages.at(bounds))
        )
        chunks = (len(bounds) - 1) // stages.pp
        passes_s[0] += experiment.constants.host_s_per_micro_batch / chunks
    pipeline = slowest_replica(
        passes_s, sends_s, stages.pp, stages.num_micro_batches, experiment.traits
    )
    end, memory = costs.step_ends.at(bounds), costs.memory
    if strategy.is_sliced:
        memory = memory.sliced(largest_share(strategy.token_slices))
    return Composed(
        breakdown=replace(
            pipeline,
            gradient_sync_s=end.gradient_sync_s,
            optimizer_s=end.optimizer_s,
            other_s=experiment.constants.host_s_per_iteration,
        ),
        peak_memory_bytes=tuple(peak for peak, _ in memory.peaks(bounds)),
    )


def _slice_seconds(
    cost_model: CostModel, stages: PlacedStages, bounds: tuple[int, ...], place: Place
) -> tuple[FloatArray, FloatArray]:
    """Return the passes and messages of a token slice, counted times corrected by measured ones."""
    experiment, (sequences, tokens, context) = cost_model.experiment, place
    devices = [device.name for device in experiment.cluster.device_types]
    tps = {options.tp for options in stages.options}
    measured = covers_slices(experiment.profile, devices, tps)
    shares = [(sequences,) * len(share) for share in stages.shares]
    sliced = replace(stages, shares=shares)
    passes_s, sends_s = _seconds(
        cost_model.slices(tokens, context, measured=measured), sliced, bounds
    )
    if experiment.profile.is_measured and not measured:
        counted = cost_model.slices(experiment.model.shape.num_tokens, 0, measured=False)
        whole_s, _ = _seconds(cost_model, stages, bounds)
        counted_s, _ = _seconds(counted, stages, bounds)
        passes_s = passes_s * whole_s / np.maximum(counted_s, TINY_S)
    passes_s[0] += experiment.constants.host_s_per_micro_batch
    return passes_s, sends_s


def _seconds(
    samples: SampleCosts, stages: PlacedStages, bounds: tuple[int, ...]
) -> tuple[FloatArray, FloatArray]:
    topology, messages = samples.network(max(map(max, stages.shares)))
    rings = topology.rings(stages.tensor_groups)
    types = stages.types(samples.experiment.cluster)
    times = samples.time_tables.times(stages, types, rings)
    return times.at(bounds).copy(), messages.between(stages, rings).at(bounds)


def largest_difference(cost_model: CostModel, strategy: Strategy) -> float:
    """Return the largest relative difference of the evaluator's figures from the oracle's.

    Parts of the time are compared with the whole.
    """
    estimate, oracle = cost_model.estimate(strategy), composed(cost_model, strategy)
    assert estimate.breakdown is not None
    parts = estimate.breakdown.to_json(), oracle.breakdown.to_json()
    of_time = [abs(parts[0][name] - parts[1][name]) / oracle.breakdown.total_s for name in parts[0]]
    of_memory = [
        abs(one - other) / other
        for one, other in zip(estimate.peak_memory_bytes, oracle.peak_memory_bytes, strict=True)
    ]
    return max(*of_time, *of_memory)
