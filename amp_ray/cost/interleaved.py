"""Interleaved 1F1B as arrays: order of the passes, what is in flight, the simulation.

The order is that of `instructions.Schedule` with whole micro-batches.
"""

from functools import lru_cache
from itertools import pairwise

import numpy as np

from amp_ray.cost.estimate import Breakdown
from amp_ray.cost.kernels import FloatArray, IntArray, simulate_interleaved
from amp_ray.cost.schedule import slowest_of
from amp_ray.spec.traits import RuntimeTraits


@lru_cache(maxsize=256)
def pass_order(pp: int, num_micro_batches: int, virtual_stages: int) -> IntArray:
    """Return chunk and micro-batch of every pass of a stage, the same on all stages.

    Micro-batches pass in groups of ``pp`` through one chunk after the other; what does not divide
    makes groups larger.

    Returns:
        Shape ``(3, num_micro_batches * virtual_stages)``: chunk of each forward pass, chunk of each
        backward pass, and the micro-batch of both.
    """
    num_groups = max(1, num_micro_batches // pp)
    ends = np.arange(num_groups + 1) * num_micro_batches // num_groups
    chunks = np.arange(virtual_stages)
    rows = [
        (
            np.repeat(chunks, end - first),
            np.repeat(chunks[::-1], end - first),
            np.tile(np.arange(first, end), virtual_stages),
        )
        for first, end in pairwise(ends)
    ]
    order: IntArray = np.concatenate(rows, axis=1)
    order.flags.writeable = False
    return order


def num_ahead(stage: int, pp: int, num_micro_batches: int, virtual_stages: int) -> int:
    """Return the forward passes of a stage before the first that alternates with a backward pass.

    Twice as many per stage behind as it must be, so that messages of both directions have time to
    travel (Narayanan et al., arXiv:2104.04473, section 2.2).
    """
    num_groups = max(1, num_micro_batches // pp)
    group = -(-num_micro_batches // num_groups)
    ahead = 2 * (pp - 1 - stage) + (virtual_stages - 1) * group
    return min(ahead, virtual_stages * num_micro_batches)


@lru_cache(maxsize=1024)
def flights(stage: int, pp: int, num_micro_batches: int, virtual_stages: int) -> FloatArray:
    """Return the micro-batches in flight of each chunk of a stage, after each forward pass.

    Returns:
        Shape ``(num_states, virtual_stages)``; each state once, and none that another exceeds in
        every chunk need be looked at.
    """
    forward, backward, _ = pass_order(pp, num_micro_batches, virtual_stages)
    chunks = np.arange(virtual_stages)
    begun = np.cumsum(forward[:, None] == chunks, axis=0)
    ended = np.cumsum(
        np.vstack([np.zeros((1, virtual_stages)), backward[:, None] == chunks]), axis=0
    )
    ahead = num_ahead(stage, pp, num_micro_batches, virtual_stages)
    done = np.maximum(np.arange(len(forward)) - ahead, 0)
    states: FloatArray = np.unique(begun - ended[done], axis=0).astype(np.float64)
    states.flags.writeable = False
    return states


def slowest_interleaved_replica(
    passes_s: FloatArray,
    sends_s: FloatArray,
    pp: int,
    num_micro_batches: int,
    *,
    traits: RuntimeTraits,
) -> Breakdown:
    """Simulate every distinct replica of an interleaved pipeline and take the slowest one apart.

    Args:
        passes_s: Shape ``(3, num_chunks, dp)``. Forward, backward, all-reduces within both; chunks
            in the model's order.
        sends_s: Shape ``(2, num_chunks - 1, dp)``. Activation and gradient across each cut.
        pp: Number of stages.
        num_micro_batches: Per replica.
        traits: Whether a stage stands still until what it sends has crossed, and whether what two
            alternating passes send then crosses at the same time.

    Returns:
        The pipeline's part of a breakdown.
    """
    return slowest_of(
        passes_s,
        sends_s,
        lambda own_s, cuts_s: _replica(own_s, cuts_s, pp, num_micro_batches, traits=traits),
    )


def simulate_s(
    passes_s: FloatArray,
    sends_s: FloatArray,
    pp: int,
    num_micro_batches: int,
    *,
    traits: RuntimeTraits,
) -> float:
    """Simulate one iteration, pass by pass.

    Args:
        passes_s: Shape ``(2, num_chunks)``. Forward and backward of one micro-batch.
        sends_s: Shape ``(2, num_chunks - 1)``. Activation and gradient across each cut.
        pp: Number of stages.
        num_micro_batches: Per replica.
        traits: Whether a stage stands still until what it sends has crossed, and whether what two
            alternating passes send then crosses at the same time.

    Returns:
        Seconds until the last pass of any stage ends.
    """
    virtual_stages = passes_s.shape[1] // pp
    ahead = [num_ahead(stage, pp, num_micro_batches, virtual_stages) for stage in range(pp)]
    return float(
        simulate_interleaved(
            np.ascontiguousarray(passes_s),
            np.ascontiguousarray(sends_s),
            pass_order(pp, num_micro_batches, virtual_stages),
            np.array(ahead),
            traits.blocking_transfers,
            traits.duplex_transfers,
        )
    )


def _replica(
    passes_s: FloatArray,
    sends_s: FloatArray,
    pp: int,
    num_micro_batches: int,
    *,
    traits: RuntimeTraits,
) -> Breakdown:
    """Simulate one replica with its transfers and as if they took no time."""
    pipeline_s, still_s = (
        simulate_s(passes_s[:2], sends, pp, num_micro_batches, traits=traits)
        for sends in (sends_s, np.zeros_like(sends_s))
    )
    by_stage = passes_s.reshape(3, -1, pp).sum(axis=1)
    totals = by_stage[:2].sum(axis=0)
    slowest = int(np.argmax(totals))
    busy_s = num_micro_batches * float(totals[slowest])
    talking_s = num_micro_batches * float(by_stage[2, slowest])
    return Breakdown.of_pipeline(pipeline_s, still_s, busy_s, talking_s)
