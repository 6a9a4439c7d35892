"""The tutorials are run as they stand: their files are written, their commands executed."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

LIMIT_S: Final = 900
"""Time limit of one command, long enough for a busy machine."""

BLOCK: Final = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)

PAGES: Final = ("llama-3-8b", "mixed-cluster", "plan-to-run", "four-hosts")


def steps(block: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a block, each with the output lines that the page shows."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)
    return found


def begins(line: str) -> list[str]:
    """Return the first words of a line, with all numbers replaced by the same one."""
    return re.sub(r"\d[\d.,]*", "#", line).split()[:3]


def stays(shown: list[str]) -> list[str]:
    """Return the lines that neither a better cost model nor another machine changes.

    These are the first line, heads of tables, sentences and scripts. Lines with figures and rows of
    tables may change with the ranking, so they are not checked.
    """
    moves = re.compile(r"\s|[^\d]*\d|\W*$|stopped")
    return [line for place, line in enumerate(shown) if not place or not moves.match(line)]


def lacking(shown: list[str], output: str) -> list[str]:
    """Return the shown lines that the output lacks."""
    found = [begins(line) for line in output.splitlines()]
    return [line for line in stays(shown) if begins(line) not in found]


def test_what_a_page_shows_is_looked_for_in_the_output() -> None:
    output = "a: 12 candidates in 3.1 s\n 1  2  8  4.5 GiB\nwhat it is\n"
    assert lacking(["a: 99 candidates in 70 s", " 1 2 3", "what it is"], output) == []
    assert lacking(["a: 9 candidates", "how it is"], output) == ["how it is"]
    assert lacking(["a: no candidates in 70 s"], output) == ["a: no candidates in 70 s"]


@pytest.mark.parametrize("page", PAGES)
def test_the_tutorial_runs_and_shows_what_comes(
    repository: Path, tmp_path: Path, page: str
) -> None:
    text = (repository / "docs" / "tutorials" / f"{page}.md").read_text(encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1"}
    num_run = 0
    for language, title, body in BLOCK.findall(text):
        if title:
            (tmp_path / title).write_text(body, encoding="utf-8")
        for line, shown in steps(body) if language == "console" else ():
            done = subprocess.run(
                ["bash", "-c", line],  # noqa: S607 - as a reader's shell runs it
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_S,
            )
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            missing = lacking(shown, done.stdout + done.stderr)
            assert missing == [], f"{line}\n{done.stdout}{done.stderr}"
            num_run += 1
    assert num_run >= 3


def test_every_tutorial_is_run(repository: Path) -> None:
    pages = {path.stem for path in (repository / "docs" / "tutorials").glob("*.md")}
    assert pages == set(PAGES)
