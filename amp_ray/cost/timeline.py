"""When every stage does what in one iteration, as predicted: the lists that the executor runs."""

from collections.abc import Iterator

import numpy as np

from amp_ray.cost.instructions import Instruction, Schedule, Timed
from amp_ray.cost.model import CostModel
from amp_ray.cost.schedule import time_instructions
from amp_ray.cost.slices import slice_places
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.topology import FloatArray
from amp_ray.spec.strategy import Strategy

Timeline = tuple[tuple[Timed, ...], ...]
"""Per stage, instructions with begin and end in seconds since the iteration began."""


def predicted_timeline(cost_model: CostModel, strategy: Strategy) -> Timeline:
    """Time the instructions of every stage, for the part of the samples that takes longest.

    Gradient synchronisation and optimizer step begin when the last stage has done its passes, and
    the host's work of an iteration counts with the step, so that the timeline ends when the
    estimate does. Where chunks are interleaved and messages stop a stage, those that it sends are
    part of its passes.

    Raises:
        ValueError: If layers of the strategy count operators, or it does not fit the experiment.
    """
    if strategy.has_operators:
        message = "a plan of operators has no timeline: its stages are priced operator by operator"
        raise ValueError(message)
    cost_model, strategy = cost_model.of_ranks(strategy)
    traits = cost_model.experiment.traits
    passes_s, sends_s = _seconds(cost_model, strategy)
    num_slices = (passes_s.shape[3],) * strategy.num_micro_batches
    plain = strategy.virtual_stages == 1 and passes_s.shape[3] == 1
    schedule = Schedule(
        pp=strategy.pp,
        num_slices=num_slices,
        virtual_stages=strategy.virtual_stages,
        blocking=traits.blocking_transfers and plain,
    )
    orders = [
        tuple(each for each in order if each.kind not in {"REDUCE_GRAD", "STEP"})
        for order in schedule.lists()
    ]
    waits = traits.blocking_transfers and strategy.virtual_stages > 1

    def timed(part: int) -> Timeline:
        own_s, cut_s = passes_s[:, :, part], sends_s[:, :, part]

        def seconds(each: Instruction) -> float:
            piece, backward = each.token_slice or 0, each.kind in {"B", "SEND_B"}
            if each.peer is not None:
                crossing_s = float(cut_s[int(backward), min(each.stage, each.peer), piece])
                return 0.0 if waits else crossing_s
            cut = each.stage - 1 if backward else each.stage
            sent = waits and 0 <= cut < cut_s.shape[1]
            sending_s = float(cut_s[int(backward), cut, piece]) if sent else 0.0
            return float(own_s[int(backward), each.stage, piece]) + sending_s

        return time_instructions(
            orders, seconds, blocking=schedule.blocking, duplex=traits.duplex_transfers
        )

    rows = [np.moveaxis(each, 2, 0).reshape(each.shape[2], -1) for each in (passes_s, sends_s)]
    parts = {row.tobytes(): part for part, row in enumerate(np.concatenate(rows, axis=1))}
    slowest = max(map(timed, parts.values()), key=_end_s)
    return _with_step(cost_model, strategy, slowest)


def _seconds(cost_model: CostModel, strategy: Strategy) -> tuple[FloatArray, FloatArray]:
    """Return passes, shape ``(2, num_chunks, num_parts, num_slices)``, and messages across cuts."""
    stages = PlacedStages.of_strategy(strategy)
    if strategy.token_slices:
        found = [
            cost_model.slice_seconds(stages, strategy.bounds, place)
            for place in slice_places(strategy.token_slices)
        ]
        passes_s, sends_s = (np.stack(each, axis=-1) for each in zip(*found, strict=True))
    else:
        whole_s, sent_s = cost_model.seconds(stages, strategy.chunk_bounds or strategy.bounds)
        host_s = cost_model.experiment.constants.host_s_per_micro_batch
        whole_s[0] += host_s / strategy.virtual_stages
        passes_s, sends_s = whole_s[..., None], sent_s[..., None]
    return passes_s[:2], sends_s


def _with_step(cost_model: CostModel, strategy: Strategy, timeline: Timeline) -> Timeline:
    """Add gradient synchronisation and step to every stage, after the last pass of all."""
    parts = cost_model.estimate(strategy).breakdown
    assert parts is not None
    end_s = _end_s(timeline)
    synced_s = end_s + parts.gradient_sync_s
    done_s = synced_s + parts.optimizer_s + parts.other_s
    return tuple(
        (
            *order,
            Timed(Instruction(kind="REDUCE_GRAD", stage=stage), end_s, synced_s),
            Timed(Instruction(kind="STEP", stage=stage), synced_s, done_s),
        )
        for stage, order in enumerate(timeline)
    )


def _end_s(timeline: Timeline) -> float:
    """Return when the last instruction ends."""
    return max(_ends_s(timeline))


def _ends_s(timeline: Timeline) -> Iterator[float]:
    """Give the end of every stage's list."""
    return (order[-1].end_s for order in timeline if order)
