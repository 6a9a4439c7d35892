"""From reports of hosts to findings: every check of ``amp-ray doctor``, without touching a host."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from amp_ray.trials.doctor.devices import check_devices, check_shared_devices
from amp_ray.trials.doctor.findings import Finding
from amp_ray.trials.doctor.host_facts import HostReport
from amp_ray.trials.doctor.machine import check_machine
from amp_ray.trials.doctor.network import check_network, check_same_machine
from amp_ray.trials.doctor.software import Wanted, check_agreement, check_old_python, check_software

_PER_HOST: Final[tuple[Callable[[HostReport, Wanted], Iterable[Finding]], ...]] = (
    check_software,
    check_devices,
    check_machine,
    check_network,
)


def check_hosts(reports: Sequence[HostReport], wanted: Wanted) -> tuple[Finding, ...]:
    """Judge every host, alone and among the others; findings come host by host."""
    alone = {report.spec.name: _sound(report, wanted) for report in reports}
    known = [
        report
        for report in reports
        if report.facts is not None and not report.facts.is_old and alone[report.spec.name][1]
    ]
    across = _across(known, wanted)
    return tuple(
        finding
        for name, (findings, _) in alone.items()
        for finding in (*findings, *(each for each in across if each.host == name))
    )


def _across(reports: Sequence[HostReport], wanted: Wanted) -> list[Finding]:
    return [
        *check_agreement(reports, wanted),
        *check_same_machine(reports),
        *check_shared_devices(reports),
    ]


def _sound(report: HostReport, wanted: Wanted) -> tuple[list[Finding], bool]:
    """Judge a host by itself; tell whether what it says of itself can be read."""
    try:
        if report.facts is not None and not report.facts.is_old:
            _across([report, report], wanted)
        return [*_alone(report, wanted)], True
    except Exception as error:  # noqa: BLE001 - a host may say anything
        found = f"an answer that no probe gives: {type(error).__name__}: {error}"
        return [
            report.error(
                "agent Python",
                found,
                expected="facts about the host, as amp-ray's own probe tells them",
                advice="does something on that host print in the place of Python?",
            )
        ], False


def _alone(report: HostReport, wanted: Wanted) -> Iterator[Finding]:
    if report.failure is not None:
        yield report.failure
        return
    assert report.facts is not None, "a report without a failure has facts"
    user = report.part("identity").get("user", "an unknown user")
    login = f"logged in as {user}" if report.spec.login else "this machine"
    yield report.ok("login", login)
    if report.facts.is_old:
        yield check_old_python(report)
        return
    for check in _PER_HOST:
        yield from check(report, wanted)
