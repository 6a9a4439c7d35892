"""The tutorials are run as they stand: their files are written, their commands executed."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

LIMIT_S: Final = 900
"""Of one command, for machines that do something else as well."""

BLOCK: Final = re.compile(
    r'^(<!-- measured.*\n)?```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
)
"""Code; of outputs that were measured, and so differ, the first line is compared."""

PAGES: Final = ("llama-3-8b", "mixed-cluster", "plan-to-run", "four-hosts")


def steps(block: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a block, each with the lines that the page shows of its output."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)
    return found


def stable(line: str) -> str:
    """Return what of a line neither a better cost model nor another machine changes.

    Numbers in a row count as one, so that a table may have other cuts; widths do not count.
    """
    line = re.sub(r"[-+=<*]*\d[\d.,]*%?", "#", line)
    return re.sub(r"#(?:[\s/]*#)+", "#", re.sub(r"[\s─]+", " ", line)).strip()


def lacking(shown: list[str], output: str) -> list[str]:
    """Return the shown lines that the output has not in this order; ``...`` is for any."""
    rest, missing = [stable(line) for line in output.splitlines()], []
    for line in shown:
        want = stable(line)
        if want in {"", "..."}:
            continue
        if want in rest:
            rest = rest[rest.index(want) + 1 :]
        else:
            missing.append(line)
    return missing


def test_what_a_page_shows_is_looked_for_in_order() -> None:
    output = "a: 12 candidates in 3.1 s\n 1  2  8  4.5 GiB\ndone\n"
    assert lacking(["a: 99 candidates in 70 s", "...", "done"], output) == []
    assert lacking(["done", "a: 1 candidates in 2 s"], output) == ["a: 1 candidates in 2 s"]
    assert lacking(["1 2 GB"], output) == ["1 2 GB"]


@pytest.mark.parametrize("page", PAGES)
def test_the_tutorial_runs_and_shows_what_comes(
    repository: Path, tmp_path: Path, page: str
) -> None:
    text = (repository / "docs" / "tutorials" / f"{page}.md").read_text(encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1"}
    num_run = 0
    for measured, language, title, body in BLOCK.findall(text):
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
            stays = shown[:1] if measured else shown
            assert lacking(stays, done.stdout + done.stderr) == [], f"{line}\n{done.stdout}"
            num_run += 1
    assert num_run >= 3


def test_every_tutorial_is_run(repository: Path) -> None:
    pages = {path.stem for path in (repository / "docs" / "tutorials").glob("*.md")}
    assert pages == set(PAGES)
