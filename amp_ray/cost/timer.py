"""Time of the passes and messages of one iteration, by the schedule of the pipeline.

Schedules are arrays here: the order of the passes, and the micro-batches in flight after each.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.estimate import Breakdown
from amp_ray.cost.instructions import Schedule
from amp_ray.cost.kernels.stages import time_1f1b, time_chunks
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.strategies.strategy import Strategy


def schedule_of(
    pp: int, num_micro_batches: int, virtual_stages: int = 1, num_slices: int = 1
) -> Schedule:
    """Return the schedule of micro-batches that all have the same number of token slices."""
    slices = (num_slices,) * num_micro_batches
    return Schedule(pp=pp, num_slices=slices, virtual_stages=virtual_stages)


def strategy_schedule(strategy: Strategy, num_slices: int, traits: RuntimeTraits) -> Schedule:
    """Return the schedule of a strategy, whose transfers may block if it is the plain 1F1B."""
    shape = strategy.pp, strategy.num_micro_batches, strategy.virtual_stages, num_slices
    plain = not strategy.is_interleaved and num_slices == 1
    return replace(schedule_of(*shape), blocking=traits.blocking_transfers and plain)


@lru_cache(maxsize=256)
def num_ahead(
    pp: int, num_micro_batches: int, virtual_stages: int, num_slices: int = 1
) -> IntArray:
    """Return the forward passes of each stage before its first backward pass, shape ``(pp,)``.

    The forward pass right before the backward pass, with which it alternates, does not count.
    """
    schedule = schedule_of(pp, num_micro_batches, virtual_stages, num_slices)
    ahead: IntArray = np.array([schedule.num_ahead(stage) for stage in range(pp)])
    ahead.flags.writeable = False
    return ahead


@lru_cache(maxsize=256)
def pass_order(
    pp: int, num_micro_batches: int, virtual_stages: int, num_slices: int = 1
) -> IntArray:
    """Return the order of the passes of a stage, the same on all stages.

    Returns:
        Shape ``(4, num_passes)``: chunk of each forward pass and of each backward pass, and the
        unit of both, ``micro_batch * num_slices + token_slice``.
    """
    schedule = schedule_of(pp, num_micro_batches, virtual_stages, num_slices)
    columns = [np.array(schedule.columns(backward=backward)) for backward in (False, True)]
    chunks = [column[0] for column in columns]
    units = [column[1] * num_slices + column[2] for column in columns]
    order: IntArray = np.array([*chunks, *units], dtype=np.int64)
    order.flags.writeable = False
    return order


@lru_cache(maxsize=4096)
def in_flight(
    pp: int, num_micro_batches: int, virtual_stages: int = 1, slice_share: float = 1.0
) -> FloatArray:
    """Return the micro-batches whose activations each stage holds at once, shape ``(pp,)``.

    Under 1F1B a stage runs ahead by one forward pass for every stage behind it. With ``v`` chunks
    per stage it runs ``2 (pp - 1 - stage) + (v - 1) pp`` chunks ahead, each of ``1 / v`` of its
    layers (`chunks_in_flight` has them chunk by chunk).

    Args:
        pp: Number of stages.
        num_micro_batches: Per replica.
        virtual_stages: ``v``.
        slice_share: Size of the largest token slice as a share of its micro-batch. A stage holds
            all slices of one micro-batch, and one more slice for every stage behind it.

    References:
        Narayanan et al., arXiv:2104.04473, section 2.2; Korthikanti et al., arXiv:2205.05198.

    Example:
        >>> in_flight(4, 16).tolist(), in_flight(4, 2).tolist(), in_flight(4, 16, 2).tolist()
        ([4.0, 3.0, 2.0, 1.0], [2.0, 2.0, 2.0, 1.0], [5.5, 4.5, 3.5, 2.5])
    """
    flying: FloatArray
    if virtual_stages == 1:
        flying = np.minimum(1 + np.arange(pp)[::-1] * slice_share, num_micro_batches)
    else:
        ahead = num_ahead(pp, num_micro_batches, virtual_stages)
        flying = np.minimum(ahead + 1, virtual_stages * num_micro_batches) / virtual_stages
    flying.flags.writeable = False
    return flying


GROUPS_WITH_ALL_STATES: Final = 4
"""A stage is at most two groups ahead; from then on its states repeat with every equal group."""


def chunks_in_flight(
    stage: int, pp: int, num_micro_batches: int, virtual_stages: int
) -> FloatArray:
    """Return the micro-batches in flight of each chunk of a stage, after each forward pass.

    Returns:
        Shape ``(num_states, virtual_stages)``; each distinct state once.
    """
    if num_micro_batches % pp == 0:
        num_micro_batches = min(num_micro_batches, GROUPS_WITH_ALL_STATES * pp)
    return _states(stage, pp, num_micro_batches, virtual_stages)


@lru_cache(maxsize=1024)
def _states(stage: int, pp: int, num_micro_batches: int, virtual_stages: int) -> FloatArray:
    forward, backward, *_ = pass_order(pp, num_micro_batches, virtual_stages)
    ahead = num_ahead(pp, num_micro_batches, virtual_stages)[stage]
    chunks = np.arange(virtual_stages)
    begun = np.cumsum(forward[:, None] == chunks, axis=0)
    ended = np.cumsum(
        np.vstack([np.zeros((1, virtual_stages)), backward[:, None] == chunks]), axis=0
    )
    done = np.maximum(np.arange(len(forward)) - ahead, 0)
    states: FloatArray = np.unique(begun - ended[done], axis=0).astype(np.float64)
    states.flags.writeable = False
    return states


def pipeline_s(
    passes_s: FloatArray,
    sends_s: FloatArray,
    pp: int,
    num_micro_batches: int,
    traits: RuntimeTraits,
) -> float:
    """Time the pipeline of one replica, pass by pass.

    Args:
        passes_s: Shape ``(2, num_chunks, num_slices)``. Forward and backward of one micro-batch;
            chunks in the model's order, token slices in theirs.
        sends_s: Shape ``(2, num_chunks - 1, num_slices)``. Activation and gradient across each cut.
        pp: Number of stages.
        num_micro_batches: Per replica.
        traits: Whether transfers block the stages (DeepSpeed waits for every send and receive), and
            whether an activation and a gradient then cross at the same time. Token slices need
            transfers that do not block.

    Returns:
        Seconds until the last pass of any stage ends.
    """
    passes, sends = np.ascontiguousarray(passes_s), np.ascontiguousarray(sends_s)
    num_chunks, num_slices = passes.shape[1:]
    modes = traits.blocking_transfers and num_slices == 1, traits.duplex_transfers
    if num_chunks == pp and num_slices == 1:
        return float(time_1f1b(passes[..., 0], sends[..., 0], num_micro_batches, *modes))
    shape = pp, num_micro_batches, num_chunks // pp, num_slices
    order, ahead = pass_order(*shape), num_ahead(*shape)
    return float(time_chunks(passes, sends, order, ahead, *modes))


def longest_pipeline_s(
    passes_s: FloatArray,
    sends_s: FloatArray,
    pp: int,
    num_micro_batches: int,
    traits: RuntimeTraits,
) -> float:
    """Time the pipelines of all replicas and return the longest; arguments as `slowest_replica`."""
    return max(
        pipeline_s(passes_s[:2, :, replica], sends_s[:, :, replica], pp, num_micro_batches, traits)
        for replica in distinct_replicas(passes_s, sends_s)
    )


def slowest_replica(
    passes_s: FloatArray,
    sends_s: FloatArray,
    pp: int,
    num_micro_batches: int,
    traits: RuntimeTraits,
) -> Breakdown:
    """Time every distinct replica, and divide the time of the slowest one into parts.

    Shapes are ``(3, num_chunks, dp, num_slices)`` of ``passes_s`` (forward, backward, and the
    all-reduces within both), ``(2, num_chunks - 1, dp, num_slices)`` of ``sends_s`` (activation and
    gradient across each cut); times are in seconds. ``num_micro_batches`` are those of a replica.

    Returns:
        The pipeline's part of a breakdown.
    """

    def taken_s(replica: int) -> float:
        times = passes_s[:2, :, replica], sends_s[:, :, replica]
        return pipeline_s(*times, pp, num_micro_batches, traits)

    slowest = max(distinct_replicas(passes_s, sends_s), key=taken_s)
    times = passes_s[:, :, slowest], sends_s[:, :, slowest]
    return _breakdown(*times, pp, num_micro_batches, traits)


def distinct_replicas(passes_s: FloatArray, sends_s: FloatArray) -> list[int]:
    """Return the index of one replica of each kind; arguments as `slowest_replica`."""
    num_replicas = passes_s.shape[2]
    if num_replicas == 1:
        return [0]
    rows = [times.transpose(2, 0, 1, 3).reshape(num_replicas, -1) for times in (passes_s, sends_s)]
    columns = np.concatenate(rows, axis=1)
    if (columns == columns[0]).all():  # the usual case, at once
        return [num_replicas - 1]
    return list({row.tobytes(): replica for replica, row in enumerate(columns)}.values())


def _breakdown(
    passes_s: FloatArray,
    sends_s: FloatArray,
    pp: int,
    num_micro_batches: int,
    traits: RuntimeTraits,
) -> Breakdown:
    """Divide the time of one replica into parts: time it with and without transfers."""
    whole_s, still_s = (
        pipeline_s(passes_s[:2], sends, pp, num_micro_batches, traits)
        for sends in (sends_s, np.zeros_like(sends_s))
    )
    by_stage = passes_s.sum(axis=2).reshape(3, -1, pp).sum(axis=1)
    totals = by_stage[:2].sum(axis=0)
    slowest = int(np.argmax(totals))
    busy_s = num_micro_batches * float(totals[slowest])
    talking_s = num_micro_batches * float(by_stage[2, slowest])
    return Breakdown(
        compute_s=busy_s - talking_s,
        tensor_parallel_s=talking_s,
        bubble_s=max(0.0, still_s - busy_s),
        pipeline_p2p_s=max(0.0, whole_s - still_s),
    )
