from typing import Any

import pytest

from amp_ray.trials.doctor.devices import check_devices, resembles, visible_gpus
from amp_ray.trials.doctor.findings import Finding, HostReport
from amp_ray.units import GIB, MIB
from support.host_reports import gpu, healthy_report


def report(**gpus: Any) -> HostReport:  # noqa: ANN401
    """Report a host with two slots of T4."""
    return healthy_report(device="T4", changes={"gpus": gpus})


def problems(of: HostReport) -> list[Finding]:
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


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_wrong_with_gpus_is_one_finding(name: str) -> None:
    facts, expected = PROBLEMS[name]
    (finding,) = problems(report(**facts))
    assert (finding.level, finding.check, finding.found, finding.expected) == expected


def test_findings_say_what_to_change_or_to_end() -> None:
    (few,) = problems(report(gpus=[gpu(0)]))
    assert "slots=1" in few.advice
    (small,) = problems(report(gpus=pair(memory_bytes=8 * GIB)))
    assert "memory_gib: 8.00" in small.advice
    (busy,) = problems(report(gpus=pair(), processes=[process()]))
    assert busy.command == "ssh ada@a 'kill 77'"
    (nameless,) = problems(report(gpus=pair(), processes=[NO_NUMBER]))
    assert nameless.command is None


def test_memory_that_the_driver_does_not_tell_is_no_problem() -> None:
    assert problems(report(gpus=[gpu(i, memory_bytes=None, used_bytes=None) for i in (0, 1)])) == []


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
