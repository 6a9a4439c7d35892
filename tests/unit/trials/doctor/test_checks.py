from dataclasses import replace

import pytest

from amp_ray.trials.doctor.checks import check_hosts
from amp_ray.trials.doctor.findings import Finding
from amp_ray.trials.doctor.host_facts import HostFacts
from amp_ray.trials.doctor.software import Wanted
from support.host_reports import healthy_report

WANTED = Wanted(python="python3")


@pytest.mark.parametrize("device", ["cpu", "T4"])
def test_hosts_that_are_well_have_nothing_but_good_findings(device: str) -> None:
    reports = [healthy_report(name, device=device) for name in ("a", "b", "c")]
    findings = check_hosts(reports, WANTED)
    assert [str(finding) for finding in findings if finding.level != "ok"] == []
    assert {finding.host for finding in findings} == {"a", "b", "c"}


def test_findings_come_host_by_host_in_the_given_order() -> None:
    reports = [healthy_report(name) for name in ("b", "a")]
    hosts = [finding.host for finding in check_hosts(reports, WANTED)]
    assert hosts == sorted(hosts, reverse=True)


def test_every_good_finding_says_what_was_found_and_needs_no_command() -> None:
    for finding in check_hosts([healthy_report(device="T4")], WANTED):
        assert finding.found
        assert (finding.expected, finding.command, finding.advice) == ("", None, "")


def test_a_host_that_could_not_be_looked_at_has_its_failure_only() -> None:
    failure = Finding(level="error", host="a", check="reach", found="no answer")
    lost = replace(healthy_report("a"), failure=failure, facts=None)
    findings = check_hosts([lost, healthy_report("b")], WANTED)
    assert [finding for finding in findings if finding.host == "a"] == [failure]
    assert all(finding.level == "ok" for finding in findings if finding.host == "b")


def test_a_python_too_old_for_the_agent_is_all_that_is_said() -> None:
    old = HostFacts(version="3.6.9", executable="/usr/bin/python3", is_old=True)
    findings = check_hosts([replace(healthy_report("a"), facts=old)], WANTED)
    (error,) = [finding for finding in findings if finding.level == "error"]
    assert (error.check, error.found) == ("agent Python", "/usr/bin/python3 is Python 3.6.9")
    assert "3.8" in error.expected


@pytest.mark.parametrize(
    ("part", "check"), [("capacity", "cores"), ("disk", "disk"), ("left", "leftovers")]
)
def test_what_could_not_be_found_out_is_a_warning_with_the_reason(part: str, check: str) -> None:
    report = healthy_report()
    assert report.facts is not None
    parts = {**report.facts.parts, part: {"problem": "OSError: it hurts"}}
    findings = check_hosts([replace(report, facts=replace(report.facts, parts=parts))], WANTED)
    (warning,) = [finding for finding in findings if finding.level != "ok"]
    assert (warning.level, warning.check) == ("warning", check)
    assert "it hurts" in warning.found
