from typing import Any

import pytest

from amp_ray.runtime.hosts.agent import log
from amp_ray.trials.doctor.findings import Finding
from amp_ray.trials.doctor.machine import LOG_BYTES, check_machine
from amp_ray.trials.doctor.software import Wanted
from amp_ray.units import GIB, MIB
from support.host_reports import healthy_report

WANTED = Wanted(python="python3")


def problems(part: str, device: str = "cpu", **values: Any) -> list[Finding]:  # noqa: ANN401
    report = healthy_report(device=device, changes={part: values})
    return [finding for finding in check_machine(report, WANTED) if finding.level != "ok"]


def test_the_room_for_a_log_is_what_the_agent_keeps_of_one() -> None:
    assert log.HEAD_BYTES + log.KEPT_BYTES + 2 * log.HALF_BYTES == LOG_BYTES


def test_fewer_cores_than_ranks_are_a_warning() -> None:
    (warning, busy) = problems("capacity", num_cores=1)
    assert (warning.level, warning.check, warning.found) == ("warning", "cores", "1 cores")
    assert busy.check == "load"


def test_a_quota_counts_as_cores() -> None:
    (warning,) = problems("capacity", quota_cores=0.5)
    assert warning.found == "0.5 cores"


def test_a_busy_host_is_a_warning() -> None:
    (warning,) = problems("capacity", load=7.6)
    assert (warning.check, warning.found) == ("load", "load 7.6 on 8 cores")
    assert "ps -eo" in str(warning.command)


@pytest.mark.parametrize("load", [0.9, 6.9])
def test_a_load_that_leaves_a_core_per_rank_is_none(load: float) -> None:
    assert problems("capacity", load=load) == []


def test_little_memory_is_a_warning_for_cpu_devices_only() -> None:
    (warning,) = problems("capacity", memory_bytes=2 * GIB)
    assert (warning.found, warning.expected) == ("2.0 GiB free", "2 x 4.0 GiB")
    assert "memory_gib: 1.00" in warning.advice
    assert problems("capacity", device="T4", memory_bytes=2 * GIB) == []


def test_a_full_disk_is_an_error() -> None:
    (error,) = problems("disk", free_bytes=0, problem="No space left on device")
    assert (error.level, error.found) == ("error", "/scratch: No space left on device, 0 MiB free")
    assert "du -xh" in str(error.command)


def test_a_folder_that_cannot_be_written_to_is_an_error() -> None:
    (error,) = problems("disk", problem="Permission denied")
    assert error.command == "ssh ada@a 'sudo chmod 1777 -- /scratch'"


def test_a_disk_with_little_room_for_logs_is_a_warning() -> None:
    (warning,) = problems("disk", free_bytes=40 * MIB)
    assert (warning.level, warning.expected) == (
        "warning",
        "a folder to write to, with 48 MiB free for logs",
    )


def test_our_own_leftovers_go_first_from_a_full_disk() -> None:
    folders = [
        {"path": "/scratch/amp-ray-t-0123abcd", "age_s": 9, "used": False},
        {"path": "/scratch/amp-ray-u-0123abcd", "age_s": 9, "used": True},
    ]
    report = healthy_report(changes={"disk": {"free_bytes": 0}, "left": {"folders": folders}})
    (error,) = [finding for finding in check_machine(report, WANTED) if finding.check == "disk"]
    assert error.command == "ssh ada@a 'rm -rf -- /scratch/amp-ray-t-0123abcd'"


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
    found = problems("shared_memory", device=device, free_bytes=free)
    assert [finding.level for finding in found] == ([] if level == "ok" else [level])
    for finding in found:
        assert "remount,size=" in str(finding.command)


def test_few_open_files_are_a_warning() -> None:
    (warning,) = problems("capacity", open_files=256)
    assert (warning.check, warning.found) == ("limits", "256 open files")
    assert "nofile" in str(warning.command)


def test_locked_memory_matters_with_infiniband_only() -> None:
    assert problems("capacity", locked_bytes=8 * MIB) == []
    (warning,) = problems("capacity", locked_bytes=8 * MIB, infiniband=["mlx5_0"])
    assert (warning.found, warning.expected) == (
        "8 MiB of locked memory",
        "unlimited for InfiniBand",
    )
    assert problems("capacity", locked_bytes=None, infiniband=["mlx5_0"]) == []
