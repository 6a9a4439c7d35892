import tomllib
from pathlib import Path
from typing import Any

import pytest

from amp_ray.trials.doctor.findings import Finding, HostReport
from amp_ray.trials.doctor.software import (
    MIN_TORCH,
    TESTED_DEEPSPEED,
    TRAINING_PYTHON,
    Needs,
    check_agreement,
    check_software,
    versions_of,
)
from support.host_reports import healthy_report

NEEDS = Needs(python="python3")
OWN_PROGRAM = Needs(python="python3", own_program=True)


def report(name: str = "a", device: str = "cpu", **software: Any) -> HostReport:  # noqa: ANN401
    return healthy_report(name, device=device, changes={"software": software})


def problems(of: HostReport, needs: Needs = NEEDS) -> list[Finding]:
    return [finding for finding in check_software(of, needs) if finding.level != "ok"]


def test_versions_are_those_that_the_package_names(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    training = project["optional-dependencies"]["training"]
    assert sorted(training) == [
        f"deepspeed=={TESTED_DEEPSPEED}",
        f"torch>={'.'.join(map(str, MIN_TORCH))}",
    ]
    assert project["requires-python"] == f">={'.'.join(map(str, TRAINING_PYTHON))}"


def test_an_interpreter_that_does_not_start_is_an_error() -> None:
    (error,) = problems(report(problem="No such file or directory"))
    assert (error.check, error.found) == ("Python", "python3: No such file or directory")
    assert "trials.ssh.python" in error.advice
    named = Needs(python="/p", python_key="trials.python")
    assert "trials.python" in problems(report(problem="no"), named)[0].advice


@pytest.mark.parametrize(("version", "level"), [("3.10.4", "error"), ("3.11.0", "ok")])
def test_our_training_program_needs_a_new_python(version: str, level: str) -> None:
    findings = {f.check: f for f in check_software(report(version=version), NEEDS)}
    assert findings["Python"].level == level


def test_an_own_program_may_have_an_older_python() -> None:
    findings = {f.check: f for f in check_software(report(version="3.10.4"), OWN_PROGRAM)}
    assert findings["Python"].level == "ok"


def test_a_python_too_old_to_say_what_it_has_says_its_version() -> None:
    (error,) = problems(report(kind="old", version="3.6.9", torch=None))
    assert (error.check, error.expected) == ("Python", "Python 3.11 or newer")


@pytest.mark.parametrize("name", ["torch", "deepspeed"])
def test_a_missing_package_is_an_error_with_pip(name: str) -> None:
    (error,) = problems(healthy_report(changes={"software": {name: None}}))
    assert (error.level, error.check, error.found) == ("error", name, f"no {name}")
    assert str(error.command).startswith("ssh ada@a '/usr/bin/python3 -m pip install ")
    assert name in str(error.command)


def test_an_own_program_may_need_no_torch() -> None:
    assert {
        (f.level, f.check) for f in problems(report(torch=None, deepspeed=None), OWN_PROGRAM)
    } == {
        ("warning", "torch"),
        ("warning", "deepspeed"),
    }


def test_an_old_torch_is_an_error() -> None:
    (error,) = problems(report(torch="2.5.1"))
    assert (error.found, error.expected) == ("torch 2.5.1", "torch 2.6 or newer")


def test_a_torch_without_cuda_is_an_error_where_gpus_are_planned() -> None:
    (error,) = problems(report(device="T4", torch="2.13.0+cpu", cuda=None))
    assert error.expected == "torch built with CUDA, for T4"
    assert "--force-reinstall" in str(error.command)
    assert problems(report(device="cpu", torch="2.13.0+cpu", cuda=None)) == []


def test_another_deepspeed_is_a_warning() -> None:
    (warning,) = problems(report(deepspeed="0.18.0"))
    assert (warning.level, warning.expected) == ("warning", f"deepspeed {TESTED_DEEPSPEED}")
    assert problems(report(deepspeed="0.18.0"), OWN_PROGRAM) == []


def agreement(*reports: HostReport, needs: Needs = NEEDS) -> list[Finding]:
    by_host = check_agreement(reports, [*map(versions_of, reports)], needs)
    return [finding for findings in by_host for finding in findings]


def test_the_host_that_differs_is_told_to_have_what_most_have() -> None:
    reports = [report("a"), report("b", torch="2.12.0+cpu"), report("c")]
    (error,) = agreement(*reports)
    assert (error.host, error.level, error.check) == ("b", "error", "torch alike")
    assert error.expected == "2.13.0, as on 2 of 3 hosts"
    assert error.command == "ssh ada@b '/usr/bin/python3 -m pip install torch==2.13.0'"


def test_of_two_hosts_the_second_is_told_to_follow_the_first() -> None:
    (error,) = agreement(report("a", deepspeed="0.19.8"), report("b", deepspeed="0.19.7"))
    assert (error.host, error.check) == ("b", "deepspeed alike")


def test_a_build_of_torch_with_a_suffix_comes_from_its_own_index() -> None:
    (error,) = agreement(report("a", torch="2.13.0+cpu"), report("b", torch="2.13.0"))
    assert "--index-url" in error.advice


def test_nccl_has_to_agree_between_gpus_only() -> None:
    (error,) = agreement(report("a", device="T4"), report("b", device="T4", nccl="2.21.5"))
    assert (error.check, error.host) == ("NCCL alike", "b")
    assert "nvidia-nccl-cu12==2.27.3" in str(error.command)
    assert agreement(report("a", nccl="2.27.3"), report("b", nccl="2.21.5")) == []


def test_another_minor_version_of_python_is_a_warning_another_patch_is_not() -> None:
    (warning,) = agreement(report("a"), report("b", version="3.12.1"))
    assert (warning.level, warning.found, warning.command) == ("warning", "Python 3.12", None)
    assert agreement(report("a"), report("b", version="3.11.9")) == []


def test_what_a_host_lacks_is_not_a_difference() -> None:
    assert agreement(report("a"), report("b", torch=None), report("c", problem="no python")) == []


def test_an_own_program_is_only_warned_of_differences() -> None:
    (warning,) = agreement(report("a"), report("b", torch="2.6.0"), needs=OWN_PROGRAM)
    assert warning.level == "warning"
