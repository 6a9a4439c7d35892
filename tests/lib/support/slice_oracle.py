"""Oracle of token slices: tries all of them, and simulates the pipeline event by event."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from amp_ray.partition.slices import Slices, SliceTables, packed_index

KINDS = ("smooth", "noisy", "clustered")


def random_tables(
    rng: np.random.Generator, kind: str, num_sequences: int, num_granules: int
) -> SliceTables:
    """Draw latencies: by a formula, with noise of 30 %, or with steps like those of kernels."""
    cells = range(1, num_granules + 1)
    end = np.array([stop for stop in cells for _ in range(stop)])
    size = np.array([own for stop in cells for own in range(1, stop + 1)])
    many = np.arange(1, num_sequences + 1)[:, None]
    start, per_token, per_pair = rng.uniform(0.05, 0.5), rng.uniform(0.1, 0.4), rng.uniform(0, 0.02)
    forward_s = start + many * size * per_token + many * size * end * per_pair
    backward_s = forward_s * rng.uniform(1.0, 3.0)
    if kind == "noisy":
        forward_s, backward_s = (
            times_s * rng.uniform(0.7, 1.3, times_s.shape) for times_s in (forward_s, backward_s)
        )
    if kind == "clustered":
        forward_s, backward_s = np.ceil(forward_s * 2) / 2, np.ceil(backward_s)
        forward_s = forward_s * rng.uniform(0.999, 1.001, forward_s.shape)
    return SliceTables(forward_s=forward_s, backward_s=backward_s)


def without_memory(rng: np.random.Generator, tables: SliceTables) -> SliceTables:
    """Forbid slices at random, large ones more often, as if they did not fit in memory."""
    shape = tables.forward_s.shape
    rank = (
        np.argsort(np.argsort(tables.forward_s, axis=None)).reshape(shape) / tables.forward_s.size
    )
    forbidden = rng.random(shape) < rng.uniform(0.0, 0.8) * rank
    return SliceTables(
        forward_s=np.where(forbidden, np.inf, tables.forward_s), backward_s=tables.backward_s
    )


def compositions(number: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as an ordered sum of positive numbers."""
    if number == 0:
        yield ()
    for first in range(1, number + 1):
        for rest in compositions(number - first):
            yield (first, *rest)


def least_s(tables: SliceTables, factors: Sequence[float]) -> float:
    """Return the shortest forward and backward pass over all slices; infinite if none fits.

    All cuts of one batch slice are computed at once.
    """
    num_stages = len(factors)
    sizes = list(compositions(tables.num_granules))
    done = {0: [np.zeros((1, 2, num_stages))]}
    for total in range(1, tables.num_sequences + 1):
        done[total] = []
        for sequences in range(1, total + 1):
            for before, cut in product(done[total - sequences], sizes):
                after = _pass_on(before, tables, sequences, cut, factors)
                if after is not None:
                    done[total].append(after)
        if done[total]:
            done[total] = [np.concatenate(done[total])]
    ends_s = [each[:, 0, -1] + each[:, 1, -1] for each in done[tables.num_sequences]]
    return float(min((own.min() for own in ends_s), default=np.inf))


def _pass_on(
    before: np.ndarray,
    tables: SliceTables,
    sequences: int,
    cut: tuple[int, ...],
    factors: Sequence[float],
) -> np.ndarray | None:
    """Return the times after one more batch slice in all stages, shape ``(cuts, 2, stages)``."""
    end, state = 0, before
    for size in cut:
        end += size
        cell = sequences - 1, packed_index(end, size)
        took_s = np.array([tables.forward_s[cell], tables.backward_s[cell]])
        if not np.isfinite(took_s).all():
            return None
        arrived_s, after = np.zeros(state.shape[:2]), np.empty_like(state)
        for stage, factor in enumerate(factors):
            arrived_s = np.maximum(arrived_s, state[:, :, stage]) + took_s * factor
            after[:, :, stage] = arrived_s
        state = after
    return state


def played_s(forward_s: np.ndarray, backward_s: np.ndarray, factors: Sequence[float]) -> float:
    """Simulate a pipeline event by event: all slices forward, then all backward in reverse.

    A stage begins a slice when the stage is free and its neighbour has finished the slice.
    """
    num_stages, num_slices = len(factors), len(forward_s)
    free_s = [0.0] * num_stages
    for times_s, ways in (
        (forward_s, [(range(num_slices), range(num_stages))]),
        (backward_s, [(range(num_slices - 1, -1, -1), range(num_stages - 1, -1, -1))]),
    ):
        begin_s = max(free_s)  # no backward pass begins before the last forward pass has ended
        free_s = [begin_s] * num_stages
        for slices, stages in ways:
            for each in slices:
                arrived_s = begin_s
                for stage in stages:
                    arrived_s = max(arrived_s, free_s[stage]) + times_s[each] * factors[stage]
                    free_s[stage] = arrived_s
    return max(free_s)


def is_partition(slices: Slices, tables: SliceTables) -> bool:
    """Return whether batch slices add up to the batch, and token slices to each sequence."""
    whole = all(sum(sizes) == tables.num_granules for _, sizes in slices)
    return whole and sum(sequences for sequences, _ in slices) == tables.num_sequences
