"""`make bench`: every figure of speed and memory, as tables with their targets.

Run alone, on an otherwise idle machine; times are process CPU seconds of one core unless they
say wall. ``python tests/benchmarks/run.py bench_study ...`` prints some parts alone.
"""

import platform
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
GUESTS = HERE.parent / "planners"
sys.path[:0] = [str(HERE), str(HERE.parent / "lib"), *map(str, sorted(GUESTS.iterdir()))]

PARTS = {
    "bench_search": "Search: experiment to ranking",
    "bench_partition": "Exact partition solver",
    "bench_placement": "Placements: devices and cuts together",
    "bench_study": "A study of 10,000 trials",
    "bench_mixed": "Stages with their own devices on mixed clusters",
    "bench_slices.long_sequences": "Token slices: long sequences on 48 stages",
    "bench_slices.searches": "Token slices: 1,000 plans within a search",
    "bench_metis": "Exact search under Metis's formulas",
}


def main() -> None:
    """Print the machine and one table per part."""
    console = Console(width=130)
    console.print(_machine())
    for name in sys.argv[1:] or PARTS:
        module, _, function = name.partition(".")
        if find_spec(module) is None:
            continue  # of a guest that was taken away
        rows = getattr(import_module(module), function or "rows")
        console.print(_table(PARTS[name], rows()))


def _machine() -> str:
    """Say what was measured on, and with what."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "cython"))
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{_cpu()}, {system}, {packages}"


def _cpu() -> str:
    """Return the processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _table(title: str, rows: Iterable[Mapping[str, object]]) -> Table:
    """Draw rows whose keys are the columns."""
    shown = list(rows)
    table = Table(title=title, title_justify="left")
    for name in shown[0]:
        table.add_column(name)
    for row in shown:
        table.add_row(*(str(value) for value in row.values()))
    return table


if __name__ == "__main__":
    main()
