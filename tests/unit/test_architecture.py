"""The rules of the architecture that no linter checks.

Import directions are import-linter's job (pyproject.toml). Here: docs/architecture.md shows what
is there, planning stays light, and modules and functions stay short.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

MAX_MODULE_LINES: Final = 300
MAX_FUNCTION_LINES: Final = 45
"""Without the docstring."""

HEAVY: Final = ("deepspeed", "paramiko", "ray", "torch")
"""Packages that planning never needs; importing one takes from 0.2 s to seconds."""

FENCE: Final = "```"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(repository: Path) -> list[Path]:
    """List the modules whose size is limited."""
    folders = ("amp_ray", "cluster", "experiments")
    return sorted(path for folder in folders for path in (repository / folder).rglob("*.py"))


# ------------------------------------------------------------------ docs/architecture.md


def picture_lines(text: str) -> list[str]:
    """Return the lines of the first fenced block that has a line for ``amp_ray/``."""
    blocks = [block.splitlines()[1:] for block in text.split(FENCE)[1::2]]
    pictures = [block for block in blocks if any(line.startswith("amp_ray/") for line in block)]
    assert pictures, "docs/architecture.md has no fenced block with a line that starts amp_ray/"
    return pictures[0]


def names_in(line: str) -> list[str]:
    """Return the paths that a line names: the first word, others after two spaces or a comma.

    >>> names_in("    device.py   one data sheet")
    ['device.py']
    >>> names_in("pyproject.toml  README.md  .ci/run")
    ['pyproject.toml', 'README.md', '.ci/run']
    >>> names_in("docs/   glossary.md, formats.md, and more")
    ['docs/', 'glossary.md', 'formats.md']
    >>> names_in("                 the picture above, continued")
    []
    """
    first, *others = re.split(r"\s{2,}|,\s+", line.strip())
    path = re.compile(r"[\w.*-]+(/[\w.*-]+)*/?")
    file_or_folder = re.compile(r"(.*/|.*\.\w+|.*/[\w*-]+)")
    names = [first] if path.fullmatch(first) else []
    return names + [
        name for name in others if path.fullmatch(name) and file_or_folder.fullmatch(name)
    ]


def paths_in_picture(text: str) -> Iterator[str]:
    """Yield the paths of the picture from the root.

    A line stands in the last folder before it that is less indented; names that follow a folder on
    its own line stand in that folder.
    """
    open_folders: list[tuple[int, str]] = [(-1, "")]
    for line in picture_lines(text):
        indent = len(line) - len(line.lstrip())
        names = names_in(line)
        if not names:
            continue
        while open_folders[-1][0] >= indent:
            open_folders.pop()
        first, *others = names
        yield open_folders[-1][1] + first
        if first.endswith("/"):
            open_folders.append((indent, open_folders[-1][1] + first))
        yield from (open_folders[-1][1] + name for name in others)


@pytest.fixture(scope="module")
def picture(repository: Path) -> list[str]:
    """Every path that docs/architecture.md draws."""
    text = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    return list(paths_in_picture(text))


def test_paths_of_nested_folders_are_joined() -> None:
    text = """
```
amp_ray/
  spec/              nouns
    device.py          one data sheet
  cli.py             the
                     commands of the tool
docs/   glossary.md
```
"""
    assert list(paths_in_picture(text)) == [
        "amp_ray/",
        "amp_ray/spec/",
        "amp_ray/spec/device.py",
        "amp_ray/cli.py",
        "docs/",
        "docs/glossary.md",
    ]


def test_picture_names_only_what_exists(repository: Path, picture: list[str]) -> None:
    assert [path for path in picture if not any(repository.glob(path.rstrip("/")))] == []


def test_picture_names_every_module(repository: Path, picture: list[str]) -> None:
    package = repository / "amp_ray"
    modules = {path.relative_to(repository).as_posix() for path in package.rglob("*.py")}
    initialisers = {path for path in modules if path.endswith("/__init__.py")}
    assert sorted(modules - initialisers - set(picture)) == []


# ----------------------------------------------------------------------- light planning


@pytest.mark.parametrize("module", ["amp_ray", "amp_ray.cli"])
def test_importing_for_a_plan_loads_no_heavy_package(module: str) -> None:
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert sorted(loaded & set(HEAVY)) == []


# --------------------------------------------------------------------------------- size


def body_lines(function: Function) -> int:
    """Count the lines from ``def`` to the end, less those of the docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def test_docstrings_do_not_count_as_lines_of_a_function() -> None:
    (function,) = ast.parse('def f(x):\n    """One.\n\n    Two.\n    """\n    return x\n').body
    assert isinstance(function, ast.FunctionDef)
    assert body_lines(function) == 2


def test_modules_stay_short(repository: Path) -> None:
    lengths = {
        path.relative_to(repository).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files(repository)
    }
    assert {path: lines for path, lines in lengths.items() if lines > MAX_MODULE_LINES} == {}


def test_functions_stay_short(repository: Path) -> None:
    lengths = {
        f"{path.relative_to(repository).as_posix()}:{node.lineno} {node.name}": body_lines(node)
        for path in python_files(repository)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Function)
    }
    assert {place: lines for place, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}
