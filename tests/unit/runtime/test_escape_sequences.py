"""Escape sequences that a host sends are shown, and never reach a terminal."""

import io
import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from amp_ray.errors import HostError, InputError
from amp_ray.report.doctor import diagnosis_view
from amp_ray.report.study import PlainView
from amp_ray.runtime.doctor import Diagnosis
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.doctor.checks import check_hosts
from amp_ray.trials.doctor.findings import Finding, HostReport
from amp_ray.trials.doctor.software import Needs
from amp_ray.trials.launch import WarmUp
from amp_ray.trials.outcome import Unreachable, outcome_to_json
from support.host_reports import gpu, healthy_report
from support.scripted_host import (
    DONE,
    EXIT,
    SETTINGS,
    Message,
    Script,
    ScriptedHost,
    instead,
    launch_on,
    run_on,
    well_behaved,
)

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\u2066\ud800"


def is_clean(text: str) -> bool:
    """Tell whether a terminal shows every letter."""
    return all(letter.isprintable() or letter in "\n\t" for letter in text)


FAILED = {"event": "failed", "type": EVIL, "message": EVIL, "cause": EVIL, "traceback": [EVIL]}


@pytest.mark.parametrize(
    "script",
    [
        instead("job", {**EXIT, "code": 1, "tail": [EVIL, f"Error: {EVIL}"]}, DONE),
        instead("job", {"kind": "said", "rank": 0, "data": FAILED}, DONE),
        instead("job", {"kind": "trouble", "what": "start", "rank": None, "text": EVIL}, DONE),
        instead("prepare", {"kind": "trouble", "what": "network", "rank": None, "text": EVIL}),
        instead("job", {**DONE, "reason": "deadline"}),
        instead("job", {"kind": "lost", "text": EVIL}),
    ],
)
def test_what_a_rank_or_an_agent_says_is_shown_in_outcomes_reports_and_files(
    tmp_path: Path, script: Script
) -> None:
    host = ScriptedHost("a", script)
    outcome = run_on(tmp_path, host)
    record = outcome_to_json(outcome)
    texts = [record["reason"], *(record.get("lines") or ())]
    assert all(map(is_clean, texts)), texts
    for path in (tmp_path / "t").glob("*.*"):
        assert is_clean(path.read_text(encoding="utf-8")), path
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None)
    PlainView(console).note(f"{record['reason']}{EVIL}")
    assert isinstance(console.file, io.StringIO)
    assert is_clean(console.file.getvalue())


def test_a_login_that_prints_escapes_and_ends_is_shown(tmp_path: Path) -> None:
    def script(_message: Message) -> Iterable[Message | bytes]:
        host.close_channel()
        return [EVIL.encode("utf-8", "replace"), b"\x1b[31mno python"]

    host = ScriptedHost("a", script)
    outcome = run_on(tmp_path, host)
    assert isinstance(outcome, Unreachable)
    assert is_clean(outcome.reason)


def test_a_warm_process_and_a_hello_with_escapes_are_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") == "warm":
            yield {"kind": "hello", "hostname": EVIL, "isolation": EVIL, "python": EVIL}
            yield {"kind": "warm-died", "text": EVIL}
            yield {"kind": "warm", "problem": EVIL, "import_s": 0.0}
        yield from well_behaved(message)

    hosts, warm_up = [ScriptedHost("a", script)], WarmUp(python="python", modules=())
    with (
        caplog.at_level(logging.WARNING),
        Launcher(hosts, SETTINGS, warm_up=warm_up) as launcher,
    ):
        launcher.run(launch_on("a"), tmp_path / "t")
    assert "started once more" in caplog.text
    assert "ranks start afresh" in caplog.text
    assert all(is_clean(record.getMessage()) for record in caplog.records)


def evil(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Add escapes to every text of a probe's answer."""
    if isinstance(value, dict):
        return {key: evil(each) for key, each in value.items()}
    if isinstance(value, list):
        return [evil(each) for each in value]
    return f"{value}{EVIL}" if isinstance(value, str) else value


def parts_of(report: HostReport) -> dict[str, Any]:
    return {name: part for name, part in (report.answer or {}).items() if isinstance(part, dict)}


def reports() -> Iterable[HostReport]:
    for device in ("cpu", "T4"):
        changes = {
            "gpus": {"gpus": [gpu(0), gpu(1)], "problem": None}
            if device == "T4"
            else {"gpus": [], "problem": "x"},
        }
        report = healthy_report("a", device=device, changes=changes)
        answer = dict(report.answer or {})
        yield replace(report, answer=evil(answer))
        broken = {part: evil({"problem": "OSError: "}) for part in parts_of(report)}
        yield replace(report, answer={**answer, **broken})
        yield replace(report, unreached=((report.spec, EVIL),))


def test_facts_with_escapes_are_shown_in_findings_json_and_the_table() -> None:
    for report in reports():
        findings = check_hosts(
            [report, replace(report, spec=replace(report.spec, name="b"))], NEEDS
        )
        assert all(is_clean(str(finding)) for finding in findings)
        diagnosis = Diagnosis(experiment="x", hosts=("a", "b"), findings=findings, elapsed_s=1.0)
        console = Console(file=io.StringIO(), force_terminal=True, color_system=None)
        console.print(diagnosis_view(diagnosis, show_all=True))
        assert isinstance(console.file, io.StringIO)
        assert is_clean(console.file.getvalue())
        assert is_clean(json.dumps(diagnosis.to_json(), ensure_ascii=False))


NEEDS = Needs(python="python3")
NONSENSE: list[Any] = [None, "x", -1, 10**400, float("inf"), [], {}, [[1]], {"problem": 3}]


@pytest.mark.parametrize("value", NONSENSE)
def test_facts_of_any_form_end_in_findings(value: Any) -> None:  # noqa: ANN401 - JSON
    """One fact after the other, and one part after the other, is something else."""
    report = healthy_report("a", device="T4")
    for part, facts in parts_of(report).items():
        for changed in (value, *({**facts, key: value} for key in facts)):
            odd = replace(report, answer={**(report.answer or {}), part: changed})
            findings = check_hosts([odd, healthy_report("b")], NEEDS)
            assert {finding.host for finding in findings} == {"a", "b"}


def test_messages_of_errors_are_shown() -> None:
    assert str(HostError(f"a: {EVIL}")).endswith("gnp.exe\\u2066\\ud800")
    assert is_clean(str(InputError(f"two\nlines {EVIL}")))
    assert "two\nlines" in str(InputError("two\nlines"))
    assert is_clean(str(Finding(level="error", host="a", check="c", found=EVIL, command=EVIL)))
