from typing import Any

import pytest

from amp_ray.trials.doctor.findings import Finding
from amp_ray.trials.doctor.host_facts import Clock, HostReport
from amp_ray.trials.doctor.machine import check_machine
from amp_ray.trials.doctor.software import Wanted
from support.host_reports import healthy_report

WANTED = Wanted(python="python3")


def problems(report: HostReport) -> list[Finding]:
    return [finding for finding in check_machine(report, WANTED) if finding.level != "ok"]


@pytest.mark.parametrize(("offset_s", "side"), [(3600.0, "ahead of"), (-90.0, "behind")])
def test_a_clock_that_is_off_is_a_warning(offset_s: float, side: str) -> None:
    (warning,) = problems(healthy_report(clock=Clock(offset_s=offset_s, uncertainty_s=0.01)))
    assert (warning.level, warning.check) == ("warning", "clock")
    assert f"{abs(offset_s):.3f} s {side} this machine" in warning.found
    assert warning.command == "ssh ada@a 'sudo timedatectl set-ntp true'"


def test_what_the_question_took_is_in_the_hosts_favour() -> None:
    assert problems(healthy_report(clock=Clock(offset_s=1.4, uncertainty_s=0.5))) == []
    assert len(problems(healthy_report(clock=Clock(offset_s=1.6, uncertainty_s=0.5)))) == 1


def test_a_host_that_does_not_tell_its_time_is_a_warning() -> None:
    (warning,) = problems(healthy_report(clock=None))
    assert "not known" in warning.found


def left(**values: Any) -> HostReport:  # noqa: ANN401
    return healthy_report(changes={"left": values})


def test_folders_of_trials_that_are_over_are_removed_by_name() -> None:
    paths = ["/scratch/amp-ray-a-0123abcd", "/scratch/amp-ray-b c-0123abcd"]
    folders = [
        {"path": path, "age_s": age_s, "used": False}
        for path, age_s in zip(paths, (7200.0, 600.0), strict=True)
    ]
    (warning,) = problems(left(folders=folders))
    assert warning.found == "2 folders of earlier trials, the last from 10 min ago"
    assert warning.command is not None
    assert "amp-ray-b c" in warning.command
    assert "rm -rf --" in warning.command


def test_processes_without_their_agent_are_ended_by_number() -> None:
    processes = [{"pid": 7, "command": "7 python train.py", "used": False}]
    (warning,) = problems(left(processes=processes))
    assert warning.command == "ssh ada@a 'kill -KILL 7'"


def test_trials_at_work_are_left_alone() -> None:
    processes = [{"pid": 7, "command": "7 python train.py", "used": True}]
    folders = [
        {"path": "/scratch/amp-ray-a-0123abcd", "age_s": 1.0, "used": True},
        {"path": "/scratch/amp-ray-b-0123abcd", "age_s": 1.0, "used": False},
    ]
    (warning,) = problems(left(processes=processes, folders=folders, num_agents=1))
    assert warning.found == "1 agents of trials are at work"
    assert warning.command is None
