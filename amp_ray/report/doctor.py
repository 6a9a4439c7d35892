"""The findings of the doctor as a table, with the commands that mend them."""

from collections.abc import Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from amp_ray.runtime.doctor.diagnosis import Diagnosis
from amp_ray.trials.doctor.findings import Finding, Level, only
from amp_ray.units import counted

_STYLES: Final[dict[Level, str]] = {"ok": "green", "warning": "yellow", "error": "bold red"}
_PROBLEMS: Final[tuple[Level, ...]] = ("error", "warning")


def diagnosis_view(diagnosis: Diagnosis, *, show_all: bool = False) -> RenderableType:
    """Draw a row per host and check, then every command that mends something.

    Checks without a problem share a row, unless all are asked for.
    """
    return Group(_table(diagnosis, show_all=show_all), *_mending(diagnosis), _summary(diagnosis))


def _table(diagnosis: Diagnosis, *, show_all: bool) -> Table:
    """Draw what was found; checks of a host without a problem share a row."""
    num_hosts = counted(len(diagnosis.hosts), "host")
    title = f"{diagnosis.experiment}: {num_hosts} in {diagnosis.elapsed_s:.1f} s"
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    table.add_column("host", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("expected", overflow="fold")
    for host in diagnosis.hosts:
        own = [finding for finding in diagnosis.findings if finding.host == host]
        good = only(own, "ok")
        name = host
        for finding in own:
            if show_all or finding.level != "ok":
                table.add_row(name, *_cells(finding))
                name = ""
        if good and not show_all:
            table.add_row(
                name, counted(len(good), "check"), Text("ok", style=_STYLES["ok"]), "", ""
            )
    return table


def _cells(finding: Finding) -> list[str | Text]:
    """Return check, level, found, expected."""
    level = Text(finding.level, style=_STYLES[finding.level])
    return [finding.check, level, Text(finding.found), Text(finding.expected)]


def _mending(diagnosis: Diagnosis) -> Iterator[Text]:
    """Yield what mends each problem, errors first; a command stands alone on its line."""
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
    """Sum it up in one line."""
    counts = {level: len(only(diagnosis.findings, level)) for level in _PROBLEMS}
    parts = [
        f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count
    ]
    if counts["error"]:
        return Text(", ".join(parts), style=_STYLES["error"])
    return Text("; ".join(["trials can start", *parts]), style=_STYLES["ok"])
