"""What pytest collects: not what needs an extra that is not installed, and it says so."""

import signal
from importlib.util import find_spec
from typing import Final

NEEDS: Final = {
    "amp_ray/runtime/actors.py": ("ray",),
    "amp_ray/training": ("torch", "deepspeed"),
    "tests/hosts/test_ray_nodes.py": ("ray",),
    "tests/hosts/test_ray_up.py": ("ray",),
    "tests/integration/profiling": ("torch", "deepspeed"),
    "tests/integration/ray": ("ray",),
    "tests/integration/training": ("torch", "deepspeed"),
    "tests/unit/cluster": ("botocore", "ray"),
}
"""Folders whose modules import packages of an extra when they are imported."""

MISSING: Final = {
    folder: lacking
    for folder, packages in NEEDS.items()
    if (lacking := [package for package in packages if find_spec(package) is None])
}

# The benchmarks are programs to run by hand (`make bench`), not tests. This list must stay in one
# place: pytest reads that of the nearest conftest.py alone.
collect_ignore = ["tests/benchmarks", *MISSING]


def pytest_configure() -> None:
    """Heed signals, also where the tests run in a background that ignores them, as by ``nohup``."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_report_header() -> list[str]:
    """Name what is left out, at the top of the output."""
    return [
        f"NOT COLLECTED: {folder} (not installed: {', '.join(packages)}; "
        "install it with: make venv)"
        for folder, packages in MISSING.items()
    ]
