"""Time the exact solver: problem arrays in, proven partition out.

One core. Rows of stages: integer and float layer times, 1 and 3 device types, with and without cuts
and memory limits, 1 to 1000 micro-batches; checking the input counts. Device graphs: every state
offers a group of each device type and size, in one or two variants.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np

from amp_ray.partition.exact import solve
from amp_ray.partition.problem import PartitionProblem, PartitionSolution, chain_problem
from amp_ray.partition.tables import OptionTable, StageTables

CHAINS = ((30, 16, 1.0), (1000, 64, 50.0), (4000, 128, 300.0))  # layers, stages, target in ms
MICRO_BATCHES = (1, 2, 8, 64, 1000)
SLOWDOWNS = (1.0, 1.7, 0.6)  # of the device types
GROUP_SIZES = (1, 2, 4, 8, 16, 32)
DEVICE_GRAPHS = (  # devices of each type, layers
    ((32, 32), 100),
    ((16, 16, 16), 100),
    ((4, 4, 4, 4), 10),
    ((8, 8, 8, 8), 34),
)
REPEATS = 2  # the fastest counts

Row = dict[str, str | int | float]


def rows() -> list[Row]:
    """Time everything.

    Returns:
        One row per size: what, problems, median and worst milliseconds, target, most evaluations.
    """
    chains = [
        _row(f"{layers} layers, {stages} stages", _chains(layers, stages), target_ms)
        for layers, stages, target_ms in CHAINS
    ]
    graphs = [
        _row(f"{layers} layers, {'+'.join(map(str, devices))} devices", _graphs(devices, layers))
        for devices, layers in DEVICE_GRAPHS
    ]
    return [*chains, *graphs]


def _row(
    what: str, problems: Iterator[Callable[[], PartitionProblem]], target_ms: float | str = ""
) -> Row:
    """Time problems of one size."""
    times_ms, evaluations = zip(*(_timed(make) for make in problems), strict=True)
    return {
        "what": what,
        "problems": len(times_ms),
        "median_ms": round(statistics.median(times_ms), 2),
        "worst_ms": round(max(times_ms), 2),
        "target_ms": target_ms,
        "most_evaluations": max(evaluations),
    }


def _timed(make: Callable[[], PartitionProblem]) -> tuple[float, int]:
    """Time posing and solving one problem; give milliseconds and evaluations."""
    times_s, num_evaluations = [], 0
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        solution = solve(make())
        times_s.append(time.perf_counter() - start_s)
        if isinstance(solution, PartitionSolution):
            assert solution.lower_bound_s == solution.value_s
            num_evaluations = solution.num_evaluations
    return min(times_s) * 1e3, num_evaluations


def _chains(num_layers: int, num_stages: int) -> Iterator[Callable[[], PartitionProblem]]:
    """Draw stages in a row."""
    layers = ("integers", "floats", "clusters", "equal")
    for kind, num_types, cuts, memory in product(layers, (1, 3), (0, 1), (0, 1)):
        rng = np.random.default_rng(num_layers)
        layer_time_s = _layer_times(rng, kind, num_layers)
        prefix_s = np.array([_prefix(layer_time_s * factor) for factor in SLOWDOWNS[:num_types]])
        earliest_start = _memory_limits(rng, num_layers, num_stages)
        cut_time_s = rng.random((3, num_layers + 1)) * layer_time_s.mean()
        build = partial(
            _chain,
            {"time_prefix_s": prefix_s, "cut_time_s": cut_time_s, "earliest_start": earliest_start},
            time_row=rng.integers(0, num_types, num_stages),
            cut_row=rng.integers(0, 3, num_stages - 1) if cuts else None,
            memory_row=np.arange(num_stages) if memory else None,
        )
        for num_micro_batches in MICRO_BATCHES:
            yield partial(build, num_micro_batches)


def _chain(
    tables: dict[str, np.ndarray],
    num_micro_batches: int,
    *,
    time_row: np.ndarray,
    **rows: np.ndarray | None,
) -> PartitionProblem:
    """Build a chain from arrays, so that checking them is timed, too."""
    return chain_problem(StageTables(**tables), num_micro_batches, time_row=time_row, **rows)


def _graphs(devices: tuple[int, ...], num_layers: int) -> Iterator[Callable[[], PartitionProblem]]:
    """Draw graphs whose states count the devices of each type that are taken."""
    for variants in (1, 2):
        rng = np.random.default_rng(num_layers)
        tables, options = _device_graph(rng, devices, num_layers, variants)
        for num_micro_batches in MICRO_BATCHES:
            yield partial(
                PartitionProblem,
                tables=tables,
                options=options,
                num_micro_batches=num_micro_batches,
            )


def _device_graph(
    rng: np.random.Generator, devices: tuple[int, ...], num_layers: int, variants: int
) -> tuple[StageTables, OptionTable]:
    """Offer every state a group of each size and type, in variants such as tp and dp."""
    shape = tuple(count + 1 for count in devices)
    layer_time_s = rng.random(num_layers)
    prefix_s, edges = [], []
    groups = product(range(len(devices)), GROUP_SIZES, range(variants))
    for row, (kind, size, variant) in enumerate(groups):
        speed = size ** (0.95 - 0.05 * variant) * (1 + kind)
        prefix_s.append(_prefix(layer_time_s * (1 + 0.05 * rng.random(num_layers)) / speed))
        for state, counts in enumerate(np.ndindex(shape)):
            if counts[kind] + size <= devices[kind]:
                taken = [*counts[:kind], counts[kind] + size, *counts[kind + 1 :]]
                edges.append((state, int(np.ravel_multi_index(taken, shape)), row, 0.001 * size))
    from_state, to_state, time_row, fixed_s = zip(*edges, strict=True)
    tables = StageTables(
        time_prefix_s=np.array(prefix_s), cut_time_s=rng.random((4, num_layers + 1)) * 0.1
    )
    options = OptionTable(
        from_state=np.array(from_state),
        to_state=np.array(to_state),
        time_row=np.array(time_row),
        cut_row=np.array(time_row) % 4,
        fixed_s=np.array(fixed_s),
    )
    return tables, options


def _layer_times(rng: np.random.Generator, kind: str, num_layers: int) -> np.ndarray:
    """Draw layer times."""
    if kind == "integers":
        return rng.integers(0, 20, num_layers).astype(float)
    if kind == "clusters":
        return rng.choice([0.5, 1.0, 3.0], num_layers) + 0.01 * rng.random(num_layers)
    return rng.random(num_layers) if kind == "floats" else np.ones(num_layers)


def _memory_limits(rng: np.random.Generator, num_layers: int, num_stages: int) -> np.ndarray:
    """Let every stage hold somewhat more than its share, and later stages more."""
    prefix = _prefix(rng.random(num_layers))
    share = prefix[-1] / num_stages
    room = share * (1.2 + np.arange(num_stages) / num_stages)
    starts = np.array([np.searchsorted(prefix, prefix - stage_room) for stage_room in room])
    earliest: np.ndarray = np.minimum(starts, np.arange(num_layers + 1))
    return earliest


def _prefix(values: np.ndarray) -> np.ndarray:
    """Give prefix sums, from 0 on."""
    return np.concatenate(([0.0], np.cumsum(values)))
