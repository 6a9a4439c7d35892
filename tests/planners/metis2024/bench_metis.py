"""Time the exact search under Metis's formulas: files in memory to the proven plan.

Process CPU of one core, warm, the fastest of some runs. Its profiles may not be copied into this
project, so the rows need them beside the checkout; without them one case of our own is timed.
"""

import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from amp_ray.planners.metis2024.plan import MetisSetting
from amp_ray.planners.metis2024.search import MetisSearch, MetisSolution
from support.metis_cases import CASES, LIMITS, MetisCase, best_of, metis_setting, read_case

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "data" / "metis"
REPEATS = 3


def rows() -> Iterator[dict[str, str]]:
    """Measure every case; one table row each."""
    if not FOLDER.is_dir():
        own = MetisCase(
            name="own small case (published profiles are not here)",
            nodes=(),
            profile="",
            listed_first=("A100", 1, 1),
            num_layers=4,
            target_s=0.05,
        )
        yield _row(own, metis_setting())
        return
    for case in CASES:
        yield _row(case, read_case(FOLDER, case))


def _row(case: MetisCase, setting: MetisSetting) -> dict[str, str]:
    """Time one case."""
    best, time_s = min((_timed(setting) for _ in range(REPEATS)), key=itemgetter(1))
    assert best is not None
    proven = best.lower_bound_s >= best.cost.total_s * (1 - 1e-9)
    return {
        "case": f"{case.name}, {case.num_layers} layers",
        "cpu_s": f"{time_s:.3f}",
        "target_s": f"{case.target_s:g}",
        "metis_s": "-" if case.metis_s is None else f"{case.metis_s:g}",
        "plan_ms": f"{1e3 * best.cost.total_s:.1f}",
        "target_ms": "-" if case.target_ms is None else f"{case.target_ms:g}",
        "proven": "yes" if proven else "no",
    }


def _timed(setting: MetisSetting) -> tuple[MetisSolution | None, float]:
    """Search every number of micro-batches once."""
    start_s = time.process_time()
    best = best_of(MetisSearch(setting=setting, limits=LIMITS))
    return best, time.process_time() - start_s
