import io

from rich.console import Console

from amp_ray.report.views import diagnosis_view
from amp_ray.runtime.doctor import Diagnosis
from amp_ray.trials.doctor.findings import Finding

LONG = "ssh a " + "x" * 200
FINDINGS = (
    Finding(level="ok", host="a", check="cores", found="8 cores"),
    Finding(level="ok", host="a", check="port", found="[20001] is free"),
    Finding(level="warning", host="a", check="clock", found="9 s ahead", expected="within 1 s"),
    Finding(
        level="warning", host="a", check="limits", found="256", command="ulimit", advice="later"
    ),
    Finding(level="error", host="b", check="reach", found="[red]no answer", command=LONG),
)


def draw(*findings: Finding, show_all: bool = False) -> str:
    hosts = tuple(dict.fromkeys(finding.host for finding in findings))
    diagnosis = Diagnosis(experiment="x", hosts=hosts, findings=findings, elapsed_s=1.25)
    console = Console(width=100, file=io.StringIO())
    console.print(diagnosis_view(diagnosis, show_all=show_all), crop=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_problems_have_rows_and_good_checks_are_counted() -> None:
    text = draw(*FINDINGS)
    assert "x: 2 hosts in 1.2 s" in text
    assert "2 checks" in text
    assert "8 cores" not in text
    for word in ("9 s ahead", "within 1 s", "no answer"):
        assert word in text


def test_all_checks_are_shown_when_asked_for() -> None:
    text = draw(*FINDINGS, show_all=True)
    assert "8 cores" in text
    assert "[20001] is free" in text
    assert "checks" not in text


def test_what_a_host_says_is_no_markup() -> None:
    assert "[red]no answer" in draw(*FINDINGS)


def test_commands_are_whole_whatever_the_width_errors_first() -> None:
    lines = draw(*FINDINGS).splitlines()
    assert lines.index(f"  {LONG}") < lines.index("  ulimit")
    assert "warning: a: limits: later" in lines


def test_a_problem_that_nothing_mends_is_in_the_table_only() -> None:
    assert draw(*FINDINGS).count("clock") == 1


def test_the_last_line_sums_up() -> None:
    assert draw(*FINDINGS).splitlines()[-1] == "1 error, 2 warnings"
    assert draw(*FINDINGS[:4]).splitlines()[-1] == "trials can start; 2 warnings"
    assert draw(*FINDINGS[:3]).splitlines()[-1] == "trials can start; 1 warning"
    assert draw(*FINDINGS[:2]).splitlines()[-1] == "trials can start"
