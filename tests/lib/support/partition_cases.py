"""Random partition problems, small enough for the oracles, with all difficulties that we know."""

from dataclasses import dataclass

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.partition.problem import PartitionProblem
from amp_ray.partition.tables import NO_ROW, OptionTable, StageTables

EXACT_KINDS = ("integers", "equal", "steps")  # kinds of times with exact sums, many of them equal
KINDS = (*EXACT_KINDS, "floats")
MICRO_BATCHES = (1, 1, 2, 3, 4, 8, 64, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSize:
    """Maximum sizes of a random problem.

    Attributes:
        num_layers: At least 1.
        num_states: At least 2.
        num_options: At least 1.
        num_rows: Number of rows of each table; at least 1.
    """

    num_layers: int = 7
    num_states: int = 5
    num_options: int = 8
    num_rows: int = 3


SMALL = CaseSize()  # brute force takes milliseconds


def random_problem(rng: np.random.Generator, kind: str, size: CaseSize = SMALL) -> PartitionProblem:
    """Draw a problem of unequal devices, cuts, bottleneck times and memory, with repeated options.

    Args:
        rng: Source of randomness.
        kind: Kind of times, one of `KINDS`.
        size: Maximum sizes.

    Returns:
        A problem, which need not be feasible.
    """
    tables = _random_tables(rng, kind, size)
    options = _random_options(rng, kind, size) if _happens(rng, 0.6) else _row_of_stages(rng, size)
    later_states = np.arange(1, options.num_states)
    num_finals = int(rng.integers(0, later_states.size + 1))
    return PartitionProblem(
        tables=tables,
        options=options,
        num_micro_batches=int(rng.choice(MICRO_BATCHES)),
        final_states=tuple(rng.choice(later_states, num_finals, replace=False).tolist()),
    )


def _happens(rng: np.random.Generator, fraction: float) -> bool:
    """Return True with probability ``fraction``."""
    return rng.random() < fraction


def _random_times(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> FloatArray:
    """Draw times of a kind, including zeros."""
    if kind == "integers":
        return rng.integers(0, 6, shape).astype(np.float64)
    if kind == "equal":
        return np.full(shape, float(rng.integers(0, 3)))
    if kind == "steps":
        return rng.choice([0.0, 0.25, 4.0], shape)
    return np.where(rng.integers(0, 3, shape) > 0, rng.random(shape), 0.0)


def _random_tables(rng: np.random.Generator, kind: str, size: CaseSize) -> StageTables:
    """Draw tables; in some problems, bottleneck times and memory limits are not monotone."""
    num_rows, num_layers = size.num_rows, int(rng.integers(1, size.num_layers + 1))
    layer_time_s = _random_times(rng, kind, (num_rows, num_layers))
    shape = (num_rows, num_layers + 1)
    bottleneck_start_s, bottleneck_end_s = (
        _random_times(rng, kind, shape),
        _random_times(rng, kind, shape),
    )
    if _happens(rng, 0.3):
        bottleneck_start_s[:], bottleneck_end_s[:] = bottleneck_start_s[:, :1], 0.0
    return StageTables(
        time_prefix_s=np.pad(np.cumsum(layer_time_s, axis=1), ((0, 0), (1, 0))),
        cut_time_s=_random_times(rng, kind, shape),
        bottleneck_start_s=bottleneck_start_s,
        bottleneck_end_s=bottleneck_end_s,
        earliest_start=_random_limits(rng, shape),
        latest_start=_random_latest_starts(rng, num_layers),
    )


def _random_limits(rng: np.random.Generator, shape: tuple[int, int]) -> IntArray:
    """Draw the earliest start of a stage for each end: any, or by a maximum number of layers."""
    ends = np.arange(shape[1])
    anywhere = rng.integers(0, ends + 1, shape)
    most_layers = rng.integers(1, shape[1] + 1, (shape[0], 1))
    by_number = rng.integers(0, 2, (shape[0], 1), np.bool_)
    return np.where(by_number, np.maximum(ends - most_layers, 0), anywhere)


def _random_latest_starts(rng: np.random.Generator, num_layers: int) -> IntArray:
    """Draw the latest start of a stage for each end: it must include one of the needed layers.

    In most problems, all layers are needed ones, so that any stage with a layer is allowed.
    """
    needed = rng.random(num_layers) < (1.0 if _happens(rng, 0.6) else 0.7)
    last_needed = np.where(needed, np.arange(num_layers), -1)
    return np.concatenate(([-1], np.maximum.accumulate(last_needed)))


def _random_options(rng: np.random.Generator, kind: str, size: CaseSize) -> OptionTable:
    """Draw options between any states; some options occur twice."""
    num_states = int(rng.integers(2, size.num_states + 1))
    num_options = int(rng.integers(1, size.num_options + 1))
    from_state = rng.integers(0, num_states - 1, num_options)
    chosen = rng.integers(0, num_options, num_options) if _happens(rng, 0.3) else slice(None)
    return OptionTable(
        from_state=from_state[chosen],
        to_state=rng.integers(from_state + 1, num_states)[chosen],
        time_row=rng.integers(0, size.num_rows, num_options)[chosen],
        cut_row=_random_rows(rng, size, num_options)[chosen],
        bottleneck_row=_random_rows(rng, size, num_options)[chosen],
        memory_row=_random_rows(rng, size, num_options)[chosen],
        overhead_s=_random_times(rng, kind, (num_options,))[chosen],
        fixed_s=_random_times(rng, kind, (num_options,))[chosen],
    )


def _row_of_stages(rng: np.random.Generator, size: CaseSize) -> OptionTable:
    """Draw options that form a chain of states, one per stage, as in the uniform planner."""
    num_stages = int(rng.integers(1, size.num_states))
    return OptionTable(
        time_row=rng.integers(0, size.num_rows, num_stages),
        cut_row=_random_rows(rng, size, num_stages),
        bottleneck_row=_random_rows(rng, size, num_stages),
        memory_row=_random_rows(rng, size, num_stages),
    )


def _random_rows(rng: np.random.Generator, size: CaseSize, num_options: int) -> IntArray:
    """Draw each option's row in a table, or none; in some problems no option has a row."""
    if _happens(rng, 0.4):
        return np.full(num_options, NO_ROW)
    return rng.integers(NO_ROW, size.num_rows, num_options)
