from dataclasses import replace
from typing import Any

import pytest

from amp_ray.clusters.device import find_device, resembles
from amp_ray.runtime.hosts.agent import job
from amp_ray.trials.doctor.checks import (
    LOG_BYTES,
    check_devices,
    check_hosts,
    visible_gpus,
)
from amp_ray.trials.doctor.findings import Finding, HostReport
from amp_ray.trials.doctor.software import Needs
from amp_ray.units import GIB, MIB
from support.host_reports import ADDRESS, gpu, healthy_report

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


# ------------------------------------------------------------------------------ GPUs


def report(**gpus: Any) -> HostReport:  # noqa: ANN401
    """Report a host with two slots of T4."""
    return healthy_report(device="T4", changes={"gpus": gpus})


def device_problems(of: HostReport) -> list[Finding]:
    return [finding for finding in check_devices(of) if finding.level != "ok"]


def pair(**second: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return two GPUs, the second with changes."""
    return [gpu(0), gpu(1, **second)]


def process(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"uuid": "GPU-1", "pid": 77, "name": "python", "memory_bytes": 3 * GIB, **changes}


def test_cpu_devices_are_not_looked_for() -> None:
    assert [*check_devices(healthy_report(device="cpu"))] == []


BOTH_V100 = [gpu(index, name="Tesla V100-SXM2-16GB") for index in (0, 1)]
NO_NUMBER = process(pid=0, memory_bytes=None)
PROBLEMS: dict[str, tuple[dict[str, Any], tuple[str, str, str, str]]] = {
    "no driver": (
        {"problem": "nvidia-smi is not there"},
        ("error", "devices", "nvidia-smi is not there", "2 x T4"),
    ),
    "too few": ({"gpus": [gpu(0)]}, ("error", "devices", "1 GPUs", "2 x T4")),
    "too many": (
        {"gpus": [gpu(index) for index in range(3)]},
        ("warning", "devices", "3 GPUs", "2 x T4"),
    ),
    "none": ({"gpus": []}, ("error", "devices", "0 GPUs", "2 x T4")),
    "none that this login sees": (
        {"gpus": pair(), "visible": "7"},
        ("error", "devices", "0 GPUs", "2 x T4"),
    ),
    "another board": (
        {"gpus": BOTH_V100},
        ("warning", "device type", "Tesla V100-SXM2-16GB", "T4 in every slot"),
    ),
    "two kinds": (
        {"gpus": pair(name="Tesla T4 rev. 2")},
        ("warning", "device type", "Tesla T4, Tesla T4 rev. 2", "T4 in every slot"),
    ),
    "less memory than planned": (
        {"gpus": pair(memory_bytes=8 * GIB)},
        ("error", "device memory", "8.0 GiB", "14.8 GiB"),
    ),
    "less power than planned": (
        {"gpus": pair(power_limit_w=60.0)},
        ("warning", "device power", "at most 60 W", "70 W"),
    ),
    "a process": (
        {"gpus": pair(), "processes": [process()]},
        ("error", "device use", "python (pid 77, 3.0 GiB)", "nothing else on the GPUs of trials"),
    ),
    "a process that computes nothing": (
        {"gpus": pair(), "processes": [process(memory_bytes=4 * MIB, name="Xorg")]},
        ("warning", "device use", "Xorg (pid 77, 0.0 GiB)", "nothing else on the GPUs of trials"),
    ),
    "a process without a number": (
        {"gpus": pair(), "processes": [NO_NUMBER]},
        ("error", "device use", "python (pid 0)", "nothing else on the GPUs of trials"),
    ),
    "a process on a GPU without a slot": (
        {"gpus": [gpu(index) for index in range(3)], "processes": [process(uuid="GPU-2")]},
        ("warning", "devices", "3 GPUs", "2 x T4"),
    ),
    "memory in use by nobody": (
        {"gpus": pair(used_bytes=4 * GIB)},
        (
            "warning",
            "device use",
            "GPU 1: 4.0 GiB in use, by no process that is listed",
            "free GPUs",
        ),
    ),
}


V100 = {"name": "Tesla V100-SXM2-16GB", "memory_bytes": 16 * GIB, "power_limit_w": 300.0}


def test_each_kind_of_boards_is_looked_for_in_its_slots() -> None:
    there = report(num_slots=3, gpus=[gpu(0), gpu(1), gpu(2, **V100)])
    devices = (*there.spec.devices[:2], find_device("V100-16"))
    planned = replace(there, spec=replace(there.spec, devices=devices))
    assert not device_problems(planned)
    swapped = replace(there, spec=replace(there.spec, devices=devices[::-1]))
    first, second = (each for each in device_problems(swapped) if each.check == "device type")
    assert (first.found, first.expected) == ("Tesla T4", "V100-16 in slots 0")
    assert second.expected == "T4 in slots 1, 2"


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_wrong_with_gpus_is_one_finding(name: str) -> None:
    facts, expected = PROBLEMS[name]
    (finding,) = device_problems(report(**facts))
    assert (finding.level, finding.check, finding.found, finding.expected) == expected


def test_findings_say_what_to_change_or_to_end() -> None:
    (few,) = device_problems(report(gpus=[gpu(0)]))
    assert "slots=1" in few.advice
    (small,) = device_problems(report(gpus=pair(memory_bytes=8 * GIB)))
    assert "memory_gib: 8.00" in small.advice
    (busy,) = device_problems(report(gpus=pair(), processes=[process()]))
    assert busy.command == "ssh ada@a 'kill 77'"
    (nameless,) = device_problems(report(gpus=pair(), processes=[NO_NUMBER]))
    assert nameless.command is None


def test_memory_that_the_driver_does_not_tell_is_no_problem() -> None:
    assert (
        device_problems(report(gpus=[gpu(i, memory_bytes=None, used_bytes=None) for i in (0, 1)]))
        == []
    )


@pytest.mark.parametrize(
    ("planned_w", "limit_w", "advice"),
    [
        *((None, 70.0, None), (None, 69.8, None), (None, 80.0, None), (60.0, 60.0, None)),
        *((None, None, None), (None, 60.0, "power_w: 60"), (60.0, 70.0, "power_w: 70")),
    ],
)
def test_the_limit_of_power_is_compared_with_the_planned_one(
    planned_w: float | None, limit_w: float | None, advice: str | None
) -> None:
    """Without `power_w` a board may draw what its data sheet says, or more."""
    there = report(gpus=pair(power_limit_w=limit_w))
    device = replace(there.spec.devices[0], power_limit_w=planned_w)
    findings = device_problems(replace(there, spec=replace(there.spec, devices=(device,) * 2)))
    assert len(findings) == (advice is not None)
    assert all(advice in each.advice and each.host == "a" for each in findings if advice)


def test_a_login_that_sees_a_few_gpus_only_counts_those() -> None:
    gpus = [gpu(index) for index in range(4)]
    assert [entry["index"] for entry in visible_gpus({"gpus": gpus, "visible": "3,1"})] == [3, 1]
    assert [entry["index"] for entry in visible_gpus({"gpus": gpus, "visible": "GPU-2"})] == [2]
    assert len(visible_gpus({"gpus": gpus, "visible": ""})) == 4
    assert len(visible_gpus({"gpus": gpus, "visible": None})) == 4


@pytest.mark.parametrize(
    ("planned", "driver_name"),
    [
        ("T4", "Tesla T4"),
        ("V100-16", "Tesla V100-SXM2-16GB"),
        ("P100-16", "Tesla P100-PCIE-16GB"),
        ("A100-80", "NVIDIA A100 80GB PCIe"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("GH200", "NVIDIA GH200 480GB"),
        ("L40S", "NVIDIA L40S"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_names_of_boards_resemble_the_catalogue(planned: str, driver_name: str) -> None:
    assert resembles(planned, driver_name)


@pytest.mark.parametrize(
    ("planned", "driver_name"),
    [
        ("A10", "NVIDIA A100-SXM4-40GB"),
        ("A40", "NVIDIA RTX A4000"),
        ("L4", "NVIDIA L40S"),
        ("H200", "NVIDIA GH200 480GB"),
        ("T4", "NVIDIA T400 4GB"),
        ("V100-16", "Tesla T4"),
    ],
)
def test_other_boards_do_not_resemble_it(planned: str, driver_name: str) -> None:
    assert not resembles(planned, driver_name)
