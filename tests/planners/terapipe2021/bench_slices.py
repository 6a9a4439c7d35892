"""Time the slice solver beside TeraPipe's search, and by length of the sequence.

Run ``python tests/benchmarks/bench_slices.py FOLDER`` for the published settings: the folder has
latencies in the form of TeraPipe's release, ``latency_model.MODEL.mp_TP.json`` and
``MODEL.communication_latency.json``. Without it, long sequences alone. Process CPU seconds of one
core; compiled before.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from amp_ray.inputs.slice_table import SliceTable, parse_slice_table
from amp_ray.partition.slices import SliceSolution, SliceTables, solve_slices
from amp_ray.planners.terapipe2021.planner import (
    MODELS,
    SETTINGS,
    PublishedSetting,
    find_slices,
    grid_of,
)
from amp_ray.search.token_slices import Granules, slice_tables

NUM_STAGES = 48
LENGTHS = ((4096, 8), (8192, 8), (16384, 8), (32768, 8), (131072, 128))  # tokens, granularity

T = TypeVar("T")
Row = dict[str, str | int | float]


def rows() -> list[Row]:
    """Time long sequences; kernels have a floor, and attention grows with the context."""
    _compile()
    return [_length_row(tokens, granularity) for tokens, granularity in LENGTHS]


def main() -> None:
    """Print the tables."""
    if len(sys.argv) > 1:
        _print(list(_published(Path(sys.argv[1]))))
    _print(rows())


def _published(folder: Path) -> Iterator[Row]:
    """Give a row for each published setting, then the geometric means."""
    _compile()
    both: list[tuple[float, float]] = []
    for setting in SETTINGS:
        table = published_table(folder, setting)
        apart, later = slice_tables(table), setting.pp - 1.0
        one = apart.merged()
        ours_s, ours = _timed(partial(solve_slices, _fresh(one), (1.0, later)))
        two_s, two = _timed(partial(solve_slices, _fresh(apart), (1.0, later)))
        theirs_s, theirs = _timed(partial(find_slices, grid_of(one), setting.pp))
        assert isinstance(ours, SliceSolution)
        assert isinstance(two, SliceSolution)
        assert theirs is not None
        assert ours.value_s == ours.lower_bound_s
        assert two.value_s == two.lower_bound_s
        both.append((theirs_s / ours_s, theirs_s / two_s))
        yield {
            "setting": f"{setting.model} {setting.batch},{setting.tp},{setting.pp}",
            "terapipe_s": round(theirs_s, 4),
            "ours_s": round(ours_s, 5),
            "apart_s": round(two_s, 5),
            "ratio": round(theirs_s / ours_s, 1),
            "ratio_apart": round(theirs_s / two_s, 1),
            "excess": f"{theirs.value_s / ours.value_s - 1:.1e}",
        }
    means = [statistics.geometric_mean(ratios) for ratios in zip(*both, strict=True)]
    yield {
        "setting": "geometric mean",
        "ratio": round(means[0], 1),
        "ratio_apart": round(means[1], 1),
    }


def published_table(folder: Path, setting: PublishedSetting) -> SliceTable:
    """Read the latencies of a setting."""
    model = MODELS[setting.model]
    points = json.loads((folder / f"latency_model.{model.name}.mp_{setting.tp}.json").read_text())
    talk = json.loads((folder / f"{model.name}.communication_latency.json").read_text())
    record = {
        "batch": setting.batch,
        "tokens": model.sequence_length,
        "granularity": 8,
        "stages": setting.pp,
        "layers": setting.layers_per_stage,
        "context": "fitted",
        "communication": {"tokens": talk["tensor_sizes"], "seconds": talk["mean"]},
        "points": points,
    }
    return parse_slice_table(json.dumps(record), file=model.name)


def _length_row(tokens: int, granularity: int) -> Row:
    """Time one sequence of a length on many stages."""
    granules = Granules(tokens=tokens, granularity=granularity)
    size, context = granules.cells
    forward_s = np.maximum(3.5e-4, 9e-7 * (size + 96) + 1.5e-11 * size * (size + context))[None, :]
    tables = SliceTables(forward_s=forward_s, backward_s=2 * forward_s)
    took_s, answer = _timed(partial(solve_slices, tables, (1.0, NUM_STAGES - 1.0)))
    assert isinstance(answer, SliceSolution)
    return {
        "tokens": tokens,
        "granularity": granularity,
        "granules": granules.count,
        "cpu_s": round(took_s, 4),
        "evaluations": answer.num_evaluations,
        "proven": str(answer.value_s == answer.lower_bound_s),
    }


def _fresh(tables: SliceTables) -> SliceTables:
    """Return tables whose derived ones are not known yet, so that their time counts."""
    return SliceTables(forward_s=tables.forward_s, backward_s=tables.backward_s)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return process CPU seconds and the result."""
    start_s = time.process_time()
    result = work()
    return time.process_time() - start_s, result


def _compile() -> None:
    """Run every kernel once."""
    times_s = np.random.default_rng(0).random((2, 10))
    tables = SliceTables(forward_s=times_s, backward_s=times_s)
    solve_slices(tables, (1.0, 3.0))
    find_slices(grid_of(tables), 4)


def _print(table: list[Row]) -> None:
    """Print rows under the names of the first one."""
    names = list(table[0])
    print("  ".join(f"{name:>20}" for name in names))
    for row in table:
        print("  ".join(f"{row.get(name, '')!s:>20}" for name in names))


if __name__ == "__main__":
    main()
