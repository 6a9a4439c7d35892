from typing import Any

import pytest

from amp_ray.trials.doctor.devices import (
    check_devices,
    check_shared_devices,
    resembles,
    visible_gpus,
)
from amp_ray.trials.doctor.findings import Finding
from amp_ray.trials.doctor.host_facts import HostReport
from amp_ray.trials.doctor.software import Wanted
from amp_ray.units import GIB, MIB
from support.host_reports import gpu, healthy_report

WANTED = Wanted(python="python3")


def report(device: str = "T4", num_slots: int = 2, **gpus: Any) -> HostReport:  # noqa: ANN401
    return healthy_report(device=device, num_slots=num_slots, changes={"gpus": gpus})


def problems(of: HostReport) -> list[Finding]:
    return [finding for finding in check_devices(of, WANTED) if finding.level != "ok"]


def test_cpu_devices_are_not_looked_for() -> None:
    assert [*check_devices(healthy_report(device="cpu"), WANTED)] == []


def test_no_driver_is_an_error() -> None:
    (error,) = problems(report(problem="nvidia-smi is not there"))
    assert (error.level, error.check, error.expected) == ("error", "devices", "2 x T4")


def test_fewer_gpus_than_slots_are_an_error() -> None:
    (error,) = problems(report(gpus=[gpu(0)]))
    assert (error.level, error.found, error.expected) == ("error", "1 GPUs", "2 x T4")
    assert "slots=1" in error.advice


def test_more_gpus_than_slots_are_a_warning() -> None:
    (warning,) = problems(report(gpus=[gpu(index) for index in range(3)]))
    assert (warning.level, warning.found) == ("warning", "3 GPUs")


def test_no_gpu_at_all_is_one_error() -> None:
    (error,) = problems(report(gpus=[]))
    assert error.found == "0 GPUs"


def test_a_login_that_sees_a_few_gpus_only_counts_those() -> None:
    gpus = [gpu(index) for index in range(4)]
    assert [entry["index"] for entry in visible_gpus({"gpus": gpus, "visible": "3,1"})] == [3, 1]
    assert [entry["index"] for entry in visible_gpus({"gpus": gpus, "visible": "GPU-2"})] == [2]
    assert len(visible_gpus({"gpus": gpus, "visible": ""})) == 4
    assert len(visible_gpus({"gpus": gpus, "visible": None})) == 4
    (error,) = problems(report(gpus=gpus, visible="7"))
    assert error.found == "0 GPUs"


@pytest.mark.parametrize(
    ("planned", "found"),
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
def test_names_of_boards_resemble_the_catalogue(planned: str, found: str) -> None:
    assert resembles(planned, found)


@pytest.mark.parametrize(
    ("planned", "found"),
    [
        ("A10", "NVIDIA A100-SXM4-40GB"),
        ("A40", "NVIDIA RTX A4000"),
        ("L4", "NVIDIA L40S"),
        ("H200", "NVIDIA GH200 480GB"),
        ("T4", "NVIDIA T400 4GB"),
        ("V100-16", "Tesla T4"),
    ],
)
def test_other_boards_do_not_resemble_it(planned: str, found: str) -> None:
    assert not resembles(planned, found)


def test_another_board_is_a_warning() -> None:
    (warning,) = problems(
        report(gpus=[gpu(index, name="Tesla V100-SXM2-16GB") for index in (0, 1)])
    )
    assert (warning.level, warning.check) == ("warning", "device type")
    assert warning.expected == "T4 in every slot"


def test_two_kinds_of_boards_are_a_warning() -> None:
    gpus = [gpu(0), gpu(1, name="Tesla T4 rev. 2")]
    (warning,) = problems(report(gpus=gpus))
    assert warning.found == "Tesla T4, Tesla T4 rev. 2"


def test_less_memory_than_planned_is_an_error() -> None:
    gpus = [gpu(0), gpu(1, memory_bytes=8 * GIB)]
    (error,) = problems(report(gpus=gpus))
    assert (error.level, error.found, error.expected) == ("error", "8.0 GiB", "14.8 GiB")
    assert "memory_gib: 8.00" in error.advice


def test_much_more_memory_than_planned_is_a_warning() -> None:
    gpus = [gpu(index, memory_bytes=32 * GIB) for index in (0, 1)]
    (warning,) = problems(report(gpus=gpus))
    assert (warning.level, warning.check) == ("warning", "device memory")


def test_memory_that_the_driver_does_not_tell_is_no_problem() -> None:
    assert problems(report(gpus=[gpu(i, memory_bytes=None, used_bytes=None) for i in (0, 1)])) == []


def process(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    facts = {"uuid": "GPU-1", "pid": 77, "name": "python", "memory_bytes": 3 * GIB, "ours": False}
    return {**facts, **changes}


def test_a_process_on_a_gpu_of_ours_is_an_error_with_its_pid() -> None:
    (error,) = problems(report(gpus=[gpu(0), gpu(1)], processes=[process()]))
    assert (error.level, error.found) == ("error", "python (pid 77, 3.0 GiB)")
    assert error.command == "ssh ada@a 'kill 77'"


def test_a_trial_of_ours_on_a_gpu_is_told_from_strangers() -> None:
    (error,) = problems(report(gpus=[gpu(0), gpu(1)], processes=[process(ours=True)]))
    assert "a trial of ours" in error.found


def test_a_process_that_computes_nothing_is_a_warning() -> None:
    processes = [process(memory_bytes=4 * MIB, name="Xorg")]
    (warning,) = problems(report(gpus=[gpu(0), gpu(1)], processes=processes))
    assert warning.level == "warning"


def test_a_process_without_a_number_has_no_command() -> None:
    processes = [process(pid=0, memory_bytes=None)]
    (error,) = problems(report(gpus=[gpu(0), gpu(1)], processes=processes))
    assert (error.level, error.command) == ("error", None)


def test_a_process_on_a_gpu_without_a_slot_does_not_matter() -> None:
    gpus = [gpu(index) for index in range(3)]
    (warning,) = problems(report(gpus=gpus, processes=[process(uuid="GPU-2")]))
    assert warning.check == "devices"


def test_memory_in_use_by_nobody_is_a_warning() -> None:
    gpus = [gpu(0), gpu(1, used_bytes=4 * GIB)]
    (warning,) = problems(report(gpus=gpus))
    assert warning.found == "GPU 1: 4.0 GiB in use, by no process that is listed"


def test_a_gpu_that_two_hosts_have_is_an_error_of_the_second() -> None:
    reports = [healthy_report(name, device="T4") for name in ("a", "b")]
    assert [*check_shared_devices(reports)] == []
    shared = {"gpus": {"gpus": [gpu(0), gpu(1)]}}
    reports = [healthy_report(name, device="T4", changes=shared) for name in ("a", "b")]
    (error,) = check_shared_devices(reports)
    assert (error.host, error.found) == ("b", "has GPUs that a has too")
