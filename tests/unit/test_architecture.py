"""The rules of the architecture that no linter checks.

Import directions are import-linter's job (pyproject.toml). Here: planning stays light, and
functions stay short.
"""

import ast
import json
from pathlib import Path
from typing import Final

import pytest

from support.programs import python

MAX_FUNCTION_LINES: Final = 45
"""Without the docstring."""

MAX_KERNEL_LINES: Final = 60
"""The same for modules of kernels, which declare their variables."""

HEAVY: Final = ("deepspeed", "paramiko", "ray", "torch")
"""Packages that planning never needs; importing one takes from 0.2 s to seconds."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(repository: Path) -> list[Path]:
    """List the modules whose functions are limited in size."""
    folders = ("amp_ray", "cluster", "experiments")
    return sorted(path for folder in folders for path in (repository / folder).rglob("*.py"))


# ----------------------------------------------------------------------- light planning


@pytest.mark.parametrize("module", ["amp_ray", "amp_ray.cli"])
def test_importing_for_a_plan_loads_no_heavy_package(module: str) -> None:
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = {name.partition(".")[0] for name in json.loads(python("-c", program).stdout)}
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


def test_functions_stay_short(repository: Path) -> None:
    lengths = {
        f"{path.relative_to(repository).as_posix()}:{node.lineno} {node.name}": body_lines(node)
        for path in python_files(repository)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Function)
    }
    too_long = {
        place: lines
        for place, lines in lengths.items()
        if lines > (MAX_KERNEL_LINES if "/kernels" in place else MAX_FUNCTION_LINES)
    }
    assert too_long == {}
