import shlex

import pytest

from amp_ray.trials.doctor.findings import Finding, Level, only, shell_command
from support.host_reports import healthy_report

HOSTILE = ["rm", "--", "a b", "it's", "$(touch hurt)", "; touch hurt", ""]


def test_a_command_survives_this_shell_and_the_remote_one() -> None:
    line = shell_command(("ssh", "a"), HOSTILE)
    words = shlex.split(line)
    assert words[:2] == ["ssh", "a"]
    assert shlex.split(words[2]) == HOSTILE


def test_a_command_for_this_machine_is_quoted_once() -> None:
    assert shlex.split(shell_command((), HOSTILE)) == HOSTILE


def test_sudo_stands_where_the_command_runs() -> None:
    assert shell_command(("ssh", "a"), ["kill", "7"], as_root=True) == "ssh a 'sudo kill 7'"


def test_a_finding_as_a_line_leaves_out_what_is_not_known() -> None:
    finding = Finding(level="ok", host="a", check="cores", found="8 cores")
    assert str(finding) == "a: cores: 8 cores"
    full = Finding(
        level="error",
        host="a",
        check="disk",
        found="0 MiB",
        expected="1 MiB",
        command="rm x",
        advice="or y",
    )
    assert str(full) == "a: disk: 0 MiB; expected 1 MiB; or y; run: rm x"


def test_json_has_every_field() -> None:
    finding = Finding(level="ok", host="a", check="cores", found="8 cores")
    record = finding.to_json()
    assert [*record] == ["level", "host", "check", "found", "expected", "command", "advice"]
    assert Finding(**record) == finding


def test_only_keeps_the_order_of_one_level() -> None:
    levels: list[Level] = ["ok", "error", "ok"]
    findings = [
        Finding(level=level, host=host, check="x", found="y")
        for level, host in zip(levels, "abc", strict=True)
    ]
    assert [finding.host for finding in only(findings, "ok")] == ["a", "c"]


def test_a_part_that_was_not_sent_has_a_problem() -> None:
    assert healthy_report().part("none") == {"problem": "the probe did not say"}


@pytest.mark.parametrize(("uid", "command"), [(0, "kill 7"), (1000, "sudo kill 7")])
def test_root_needs_no_sudo(uid: int, command: str) -> None:
    report = healthy_report(changes={"identity": {"uid": uid}})
    assert report.command(["kill", "7"], as_root=True) == f"ssh ada@a '{command}'"


def test_only_the_device_cpu_is_no_gpu() -> None:
    assert not healthy_report(device="cpu").spec.has_gpu
    assert healthy_report(device="T4").spec.has_gpu
