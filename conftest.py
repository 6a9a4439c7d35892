"""What pytest leaves out, and that it says so.

What needs an extra that is not installed is not collected. The end of the output names that and the
reason of every skipped test; where the environment says ``CI=true``, either fails the run.
"""

import os
import signal
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

NEEDS: Final = {
    "amp_ray/runtime/ray/actors.py": ("ray",),
    "amp_ray/training": ("torch", "deepspeed"),
    "tests/hosts/test_ray_nodes.py": ("ray",),
    "tests/hosts/test_ray_up.py": ("ray",),
    "tests/integration/docs": ("material",),
    "tests/integration/profiling": ("torch", "deepspeed"),
    "tests/integration/ray": ("ray",),
    "tests/integration/training": ("torch", "deepspeed"),
    "tests/unit/cluster": ("botocore", "ray"),
    "tests/unit/runtime/ray/test_trial_worker.py": ("ray",),
}
"""Folders whose modules import packages of an extra when they are imported."""

MISSING: Final = {
    folder: lacking
    for folder, packages in NEEDS.items()
    if (lacking := [package for package in packages if find_spec(package) is None])
}

MAY_BE_ABSENT_IN_CI: Final = "Metis's profiles"
"""How the one reason begins that fails no run: the licence of these files keeps them out of it."""

GUESTS: Final = Path(__file__).parent / "amp_ray" / "planners"
"""Folders that may be taken away, each with its tests."""

GUESTS_OF: Final = {
    "tests/property/test_hostile_input.py": ("aceso2024", "metis2024", "operators"),
}
"""Files outside their tests that import them."""

REPORT_VARIABLE: Final = "AMP_RAY_LEFT_OUT"
"""Names a file to which a run adds what it left out, for `make test` to print at its end."""

# The benchmarks are programs to run by hand (`make bench`), not tests. This list must stay in one
# place: pytest reads that of the nearest conftest.py alone.
collect_ignore = [
    *("tests/benchmarks", *MISSING),
    *(file for file, names in GUESTS_OF.items() if not all((GUESTS / n).exists() for n in names)),
]


# Compiled; under pytest's import of files they would take the place of what is compiled.
collect_ignore_glob = ["*/kernels.py", "*/kernels/*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Heed signals, also where the tests run in a background that ignores them, as by ``nohup``.

    And keep pytest-randomly from importing torch and DeepSpeed, which offers it a seeder: seconds
    in every process, and no test draws from their generators without a seed of its own.
    """
    if randomly := config.pluginmanager.get_plugin("randomly"):
        randomly.entrypoint_reseeds = []
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of a guest whose folder has been taken away."""
    gone = [
        item
        for item in items
        if any(not (GUESTS / mark.args[0]).exists() for mark in item.iter_markers("guest"))
    ]
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in gone]


def fails_in_ci(told: list[str]) -> bool:
    """Tell whether this is CI and something was left out that belongs there."""
    unexpected = [line for line in told if f": {MAY_BE_ABSENT_IN_CI}" not in line]
    return os.environ.get("CI") == "true" and bool(unexpected)


def left_out(config: pytest.Config) -> list[str]:
    """Say what was not collected, and how many tests were skipped for each reason."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    return [
        *(
            f"not collected: {folder} (not installed: {', '.join(packages)}; "
            "install it with: make venv)"
            for folder, packages in MISSING.items()
        ),
        *(f"{count} skipped: {reason}" for reason, count in sorted(reasons.items())),
    ]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI, fail a run that left something out; pass on what it was."""
    config = session.config
    if hasattr(config, "workerinput"):
        return
    told = left_out(config)
    passes = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    if session.exitstatus in passes and fails_in_ci(told):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if name := os.environ.get(REPORT_VARIABLE):
        with Path(name).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in told)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name what was left out, at the end of the output."""
    told = left_out(config)
    if told:
        terminalreporter.section("left out" + (": an error in CI" if fails_in_ci(told) else ""))
        for line in told:
            terminalreporter.line(line)
