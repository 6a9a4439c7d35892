"""The outputs that the tutorials show, made anew by the commands above them.

``make screens`` runs the commands of the pages that need no trials, in a new folder each, and
writes their outputs into the page. The seconds of a search stay: they differ with every run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

PAGES: Final = ("llama-3-8b", "mixed-cluster", "plan-to-run")
"""Tutorials without trials, whose outputs follow from the code alone."""

LIMIT_S: Final = 900
"""Time limit of one command, long enough for a busy machine."""

_BLOCK: Final = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<body>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_SEARCH: Final = re.compile(r"(candidates? in )[0-9.]+( s,)")


def refreshed(text: str, folder: Path) -> str:
    """Return a page with the outputs of its commands in a folder, which gets the page's files.

    Raises:
        subprocess.CalledProcessError: If a command ends with an error.
    """

    def block(match: re.Match[str]) -> str:
        body = match["body"]
        if match["title"]:
            folder.joinpath(match["title"]).write_text(body, encoding="utf-8")
        if match["language"] != "console":
            return match[0]
        lines = body.splitlines()
        made = "".join(
            f"{line}\n{output(line.removeprefix('$ '), folder)}"
            for line in lines
            if line.startswith("$ ")
        )
        times = (shown[0] for shown in _SEARCH.finditer(body))
        made = _SEARCH.sub(lambda new: next(times, new[0]), made)
        return match[0].replace(body, made)

    return _BLOCK.sub(block, text)


def output(command: str, folder: Path) -> str:
    """Return what a command prints on 100 columns, without blanks at the ends of lines."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(  # noqa: S603 - the commands of our own pages
        ["bash", "-c", command],  # noqa: S607 - as a reader's shell runs it
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def main() -> None:
    """Write the outputs of all pages; print the pages that change."""
    for page in PAGES:
        path = Path(__file__).parent / "tutorials" / f"{page}.md"
        text = path.read_text(encoding="utf-8")
        with TemporaryDirectory() as folder:
            new = refreshed(text, Path(folder))
        if new != text:
            path.write_text(new, encoding="utf-8")
            sys.stdout.write(f"docs/tutorials/{page}.md\n")


if __name__ == "__main__":
    main()
