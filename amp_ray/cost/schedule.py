"""Pipeline schedules as arrays: the order of the passes, and what is in flight after each."""

from functools import lru_cache

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.instructions import Schedule


def schedule_of(
    pp: int, num_micro_batches: int, virtual_stages: int = 1, num_slices: int = 1
) -> Schedule:
    """Return the schedule of micro-batches that all have the same number of token slices."""
    slices = (num_slices,) * num_micro_batches
    return Schedule(pp=pp, num_slices=slices, virtual_stages=virtual_stages)


@lru_cache(maxsize=256)
def num_ahead(
    pp: int, num_micro_batches: int, virtual_stages: int, num_slices: int = 1
) -> IntArray:
    """Return the forward passes of each stage before its first backward pass, shape ``(pp,)``.

    The one right before it, with which it alternates, does not count.
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


@lru_cache(maxsize=1024)
def chunks_in_flight(
    stage: int, pp: int, num_micro_batches: int, virtual_stages: int
) -> FloatArray:
    """Return the micro-batches in flight of each chunk of a stage, after each forward pass.

    Returns:
        Shape ``(num_states, virtual_stages)``; each state once, and none that another exceeds in
        every chunk need be looked at.
    """
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
