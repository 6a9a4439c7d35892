from dataclasses import replace
from typing import Any

import pytest

from amp_ray.runtime.hosts.agent import job
from amp_ray.trials.doctor.checks import LOG_BYTES, check_hosts
from amp_ray.trials.doctor.findings import Finding, HostReport
from amp_ray.trials.doctor.software import Needs
from amp_ray.units import MIB
from support.host_reports import ADDRESS, healthy_report

NEEDS = Needs(python="python3")


def problems(report: HostReport) -> list[Finding]:
    return [finding for finding in check_hosts([report], NEEDS) if finding.level != "ok"]


def problems_with(part: str, device: str = "cpu", **values: Any) -> list[Finding]:  # noqa: ANN401
    return problems(healthy_report(device=device, changes={part: values}))


@pytest.mark.parametrize("device", ["cpu", "T4"])
def test_hosts_that_are_well_have_nothing_but_good_findings(device: str) -> None:
    reports = [healthy_report(name, device=device) for name in ("a", "b", "c")]
    findings = check_hosts(reports, NEEDS)
    assert [str(finding) for finding in findings if finding.level != "ok"] == []
    assert {finding.host for finding in findings} == {"a", "b", "c"}


def test_findings_come_host_by_host_in_the_given_order() -> None:
    reports = [healthy_report(name) for name in ("b", "a")]
    hosts = [finding.host for finding in check_hosts(reports, NEEDS)]
    assert hosts == sorted(hosts, reverse=True)


def test_every_good_finding_says_what_was_found_and_needs_no_command() -> None:
    for finding in check_hosts([healthy_report(device="T4")], NEEDS):
        assert finding.found
        assert (finding.expected, finding.command, finding.advice) == ("", None, "")


def test_a_host_that_could_not_be_looked_at_has_its_failure_only() -> None:
    failure = Finding(level="error", host="a", check="reach", found="no answer")
    lost = replace(healthy_report("a"), failure=failure, answer=None)
    findings = check_hosts([lost, healthy_report("b")], NEEDS)
    assert [finding for finding in findings if finding.host == "a"] == [failure]
    assert all(finding.level == "ok" for finding in findings if finding.host == "b")


def test_a_python_too_old_for_the_agent_is_all_that_is_said() -> None:
    old = {"kind": "old", "version": "3.6.9", "executable": "/usr/bin/python3"}
    (error,) = problems(replace(healthy_report("a"), answer=old))
    assert (error.check, error.found) == ("agent Python", "/usr/bin/python3 is Python 3.6.9")
    assert "3.8" in error.expected


def test_a_disk_that_could_not_be_looked_at_is_a_warning_with_the_reason() -> None:
    report = healthy_report()
    answer = {**(report.answer or {}), "disk": {"problem": "OSError: it hurts"}}
    (warning,) = problems(replace(report, answer=answer))
    assert (warning.level, warning.check) == ("warning", "disk")
    assert warning.found == "not known: OSError: it hurts"


def test_the_room_for_a_log_is_what_the_agent_keeps_of_one() -> None:
    assert job.HEAD_BYTES + job.KEPT_BYTES + 2 * job.HALF_BYTES == LOG_BYTES


def test_a_full_disk_is_an_error() -> None:
    (error,) = problems_with("disk", free_bytes=0, problem="No space left on device")
    assert (error.level, error.found) == ("error", "/scratch: No space left on device, 0 MiB free")
    assert "du -xh" in str(error.command)


def test_a_folder_that_cannot_be_written_to_is_an_error() -> None:
    (error,) = problems_with("disk", problem="Permission denied")
    assert error.command == "ssh ada@a 'sudo chmod 1777 -- /scratch'"


def test_a_disk_with_little_room_for_logs_is_a_warning() -> None:
    (warning,) = problems_with("disk", free_bytes=40 * MIB)
    expected = "a folder to write to, with 48 MiB free for logs"
    assert (warning.level, warning.expected) == ("warning", expected)


@pytest.mark.parametrize(
    ("device", "free", "level"),
    [
        ("cpu", 200 * MIB, "ok"),
        ("cpu", 64 * MIB, "warning"),
        ("T4", 200 * MIB, "warning"),
        ("T4", 0, "error"),
        ("T4", None, "error"),
    ],
)
def test_shared_memory_has_to_do_for_the_ranks(device: str, free: int | None, level: str) -> None:
    findings = problems_with("shared_memory", device=device, free_bytes=free)
    assert [finding.level for finding in findings] == ([] if level == "ok" else [level])
    for finding in findings:
        assert "remount,size=" in str(finding.command)


def test_no_interface_with_the_address_is_an_error() -> None:
    text = "none of ['a'] is an address of this host, which has ['127.0.0.1']"
    (error,) = problems_with("address", problem=text)
    assert (error.level, error.check, error.found) == ("error", "address", text)
    assert error.command == "ssh ada@a 'ip -brief address'"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_loopback_address_is_an_error_among_several_hosts(address: str) -> None:
    change = {"address": {"address": address, "interface": "lo"}}
    errors = problems(healthy_report(changes=change))
    assert [error.check for error in errors] == ["address"]
    assert problems(healthy_report(changes=change, num_peers=0)) == []


def test_no_free_port_is_an_error() -> None:
    text = "no free port between 20000 and 32000"
    change: dict[str, Any] = {"address": {"port": None, "problem": text}}
    (error,) = problems(healthy_report(changes=change))
    assert (error.level, error.check, error.found) == ("error", "port", text)


def test_peers_that_cannot_be_reached_are_told_by_reason() -> None:
    peers = [healthy_report(name).spec for name in ("b", "c", "d")]
    reasons = ["timed out", "Connection refused", "timed out"]
    report = healthy_report(unreached=tuple(zip(peers, reasons, strict=True)), num_peers=4)
    refused, late = problems(report)
    assert refused.found == "no connection to c: Connection refused"
    assert late.found == "no connection to b, d: timed out"
    allow = f"'sudo iptables -I INPUT -s {ADDRESS} -j ACCEPT'"
    assert late.command == f"ssh ada@b {allow} && ssh ada@d {allow}"
