"""The findings of the doctor as a table, with the commands that fix them."""

from collections.abc import Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from amp_ray.report.console import TEXT, WORD, Row, table
from amp_ray.runtime.doctor import Diagnosis
from amp_ray.trials.doctor.findings import Finding, Level, only
from amp_ray.units import counted

_STYLES: Final[dict[Level, str]] = {"ok": "green", "warning": "yellow", "error": "bold red"}
_PROBLEMS: Final[tuple[Level, ...]] = ("error", "warning")


def diagnosis_view(diagnosis: Diagnosis, *, show_all: bool = False) -> RenderableType:
    """Draw a row per host and check, then the commands that fix problems.

    Checks without a problem share a row, unless all are asked for.
    """
    return Group(_table(diagnosis, show_all=show_all), *_mending(diagnosis), _summary(diagnosis))


def _table(diagnosis: Diagnosis, *, show_all: bool) -> Table:
    """Draw the findings; checks of a host without a problem share a row."""
    rows: list[Row] = []
    for host in diagnosis.hosts:
        findings = [finding for finding in diagnosis.findings if finding.host == host]
        cells = [_cells(row) for row in findings if show_all or row.level != "ok"]
        good = len(only(findings, "ok"))
        if good and not show_all:
            cells.append([counted(good, "check"), Text("ok", style=_STYLES["ok"]), "", ""])
        rows += [Row([host if row is cells[0] else "", *row]) for row in cells]
    num_hosts = counted(len(diagnosis.hosts), "host")
    return table(
        [("host", WORD), ("check", WORD), ("", WORD), ("found", TEXT), ("expected", TEXT)],
        rows,
        title=f"{diagnosis.experiment}: {num_hosts} in {diagnosis.elapsed_s:.1f} s",
    )


def _cells(finding: Finding) -> list[str | Text]:
    level = Text(finding.level, style=_STYLES[finding.level])
    return [finding.check, level, finding.found, finding.expected]


def _mending(diagnosis: Diagnosis) -> Iterator[Text]:
    """Yield the fix of each problem, errors first; a command is alone on its line."""
    for level in _PROBLEMS:
        for finding in only(diagnosis.findings, level):
            if not finding.advice and finding.command is None:
                continue
            head = Text.assemble(
                (f"{level}: ", _STYLES[level]), f"{finding.host}: {finding.check}: {finding.advice}"
            )
            head.rstrip()
            yield head
            if finding.command is not None:
                # Not wrapped, so that it can be pasted.
                yield Text(f"  {finding.command}", no_wrap=True, overflow="ignore")


def _summary(diagnosis: Diagnosis) -> Text:
    counts = {level: len(only(diagnosis.findings, level)) for level in _PROBLEMS}
    parts = [
        f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count
    ]
    if counts["error"]:
        return Text(", ".join(parts), style=_STYLES["error"])
    return Text("; ".join(["trials can start", *parts]), style=_STYLES["ok"])
