"""Checks of a host's state: its clock, and what earlier trials may have left."""

from collections.abc import Iterator
from typing import Final

from amp_ray.trials.doctor.findings import Finding
from amp_ray.trials.doctor.host_facts import HostReport
from amp_ray.trials.doctor.machine import unknown
from amp_ray.trials.doctor.software import Wanted

MAX_OFFSET_S: Final = 1.0
"""Beyond it logs of different hosts cannot be read together. Outcomes and times do not depend on
it: each host measures with its own monotonic clock."""

_MINUTE_S: Final = 60.0


def check_state(report: HostReport, _wanted: Wanted) -> Iterator[Finding]:
    """Check the clock and what lies about."""
    yield _check_clock(report)
    yield from _check_leftovers(report)


def _check_clock(report: HostReport) -> Finding:
    """Compare clocks; what the question itself took is in the host's favour."""
    clock = report.clock
    if clock is None:
        return unknown(report, "clock", "the host did not tell its time")
    side = "ahead of" if clock.offset_s > 0 else "behind"
    found = f"{abs(clock.offset_s):.3f} s {side} this machine (+-{clock.uncertainty_s:.3f} s)"
    if abs(clock.offset_s) - clock.uncertainty_s <= MAX_OFFSET_S:
        return report.ok("clock", found)
    return report.finding(
        "warning",
        "clock",
        found,
        expected=f"within {MAX_OFFSET_S:g} s",
        command=report.command(["timedatectl", "set-ntp", "true"], as_root=True),
        advice="times in logs cannot be compared; outcomes do not depend on it. If this machine's "
        "own clock is wrong, every host is reported",
    )


def _check_leftovers(report: HostReport) -> Iterator[Finding]:
    """Tell trials that run now from what is left of others."""
    facts = report.part("left")
    if "folders" not in facts:
        yield unknown(report, "leftovers", facts["problem"])
        return
    folders = [entry for entry in facts["folders"] if not entry["used"]]
    processes = [entry for entry in facts["processes"] if not entry["used"]]
    if facts["num_agents"]:
        # An agent's folder is empty of processes before its ranks start and while it tidies up.
        yield report.finding(
            "warning",
            "leftovers",
            f"{facts['num_agents']} agents of trials are at work",
            expected="no other trials",
            advice="another study or profile runs here; wait for it, or what is measured is both",
        )
    elif folders:
        paths = [entry["path"] for entry in folders]
        age_s = min(entry["age_s"] for entry in folders)
        yield report.finding(
            "warning",
            "leftovers",
            f"{len(paths)} folders of earlier trials, the last from {_age(age_s)} ago",
            expected="none",
            command=report.command(["rm", "-rf", "--", *paths]),
            advice="their agents are gone; they only take room",
        )
    if processes:
        pids = [str(entry["pid"]) for entry in processes]
        yield report.finding(
            "warning",
            "leftovers",
            "; ".join(entry["command"] for entry in processes),
            expected="no process of earlier trials",
            command=report.command(["kill", "-KILL", *pids]),
            advice="their agent is gone",
        )
    if not (folders or processes or facts["num_agents"]):
        yield report.ok("leftovers", "none")


def _age(seconds: float) -> str:
    """Write an age for people.

    Example:
        >>> _age(5), _age(7200)
        ('5 s', '120 min')
    """
    return f"{seconds:.0f} s" if seconds < _MINUTE_S else f"{seconds / _MINUTE_S:.0f} min"
