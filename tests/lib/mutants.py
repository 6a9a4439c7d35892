"""`make mutants`: change one line of the package at a time, as root, and see whether a test fails.

A mutant that no test notices shows a line that no test checks, or a change without any effect. The
mutants are drawn at random; with the same seed, the same lines of the same sources are changed.
"""

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]

AREAS: Final = {
    "cost": ("cost", "unit/cost property/test_cost_model.py", "golden unit/search property"),
    "partition": ("partition", "unit/partition", "property unit/search planners golden"),
    "search": ("search", "unit/search", "property golden planners unit/cli"),
    "tuner": ("tuner", "unit/tuner", "property/test_tuner.py property/test_study.py unit/cli"),
    "journal": ("runtime/study", "unit/runtime/study", "property unit/cli golden unit/report"),
    "agent": (
        "runtime/hosts/agent",
        "unit/runtime/hosts property/test_hostile_agent.py",
        "unit/runtime/launch integration/runtime hosts/test_trial_failures.py hosts/test_wire.py",
    ),
}
"""Folder of the package; for each, the tests to run first, and those to run if the first pass."""

_MOST_S: Final = 1500.0  # limit of one run of tests; a mutant that never ends counts as noticed
_SWAPPED: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_SWAPPED_NAMES: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One changed expression of one module."""

    area: str
    path: Path  # path of the module in the repository
    line: int
    before: str
    after: str
    text: str  # text of the whole changed module

    def __str__(self) -> str:
        """Describe the change and its place."""
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


def _mutated(node: ast.AST) -> ast.AST | None:
    """Return a node with another meaning, if there is a rule for its kind."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]) if type(operator) in _SWAPPED:
            changed.ops = [_SWAPPED[type(operator)]()]  # type: ignore[list-item]
        case ast.BinOp(left=left, op=op) if type(op) in _SWAPPED and not _is_text(left):
            changed.op = _SWAPPED[type(op)]()  # type: ignore[assignment]
        case ast.BoolOp(op=op):
            changed.op = _SWAPPED[type(op)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            changed.value = not value
        case ast.Constant(value=int(value)):
            changed.value = value + 1
        case ast.Call(func=ast.Name(id=name)) if name in _SWAPPED_NAMES:
            changed.func = ast.Name(id=_SWAPPED_NAMES[name], ctx=ast.Load())
        case ast.IfExp(body=body, orelse=orelse):
            changed.body, changed.orelse = orelse, body
        case _:
            return None
    return changed


def _is_text(node: ast.AST) -> bool:
    """Return whether an operand is text, where changing `+` or `%` would show nothing."""
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes to change: not decorators, annotations or messages of errors."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in {"decorator_list", "annotation", "returns", "exc", "msg", "type_params"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _expressions(child)


def mutants_of(area: str, path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    for node in list(_expressions(tree)):
        changed = _mutated(node)
        if changed is None:
            continue
        fields, kind = dict(vars(node)), type(node)
        after = ast.unparse(changed)
        before, line = ast.unparse(node), getattr(node, "lineno", 0)
        node.__class__ = type(changed)
        vars(node).clear()
        vars(node).update(vars(changed))
        text = ast.unparse(ast.fix_missing_locations(tree))
        node.__class__ = kind
        vars(node).clear()
        vars(node).update(fields)
        yield Mutant(area=area, path=path, line=line, before=before, after=after, text=text)


def draw(num: int, seed: int, areas: Sequence[str]) -> list[Mutant]:
    """Draw the same number of mutants of each area."""
    generator = random.Random(seed)
    drawn = []
    for area in areas:
        paths = sorted((REPOSITORY / "amp_ray" / AREAS[area][0]).rglob("*.py"))
        relative = [path.relative_to(REPOSITORY) for path in paths]
        every = [mutant for path in relative for mutant in mutants_of(area, path)]
        drawn += generator.sample(every, min(num // len(areas), len(every)))
    return drawn


def _notices(folder: Path, tests: str) -> bool:
    """Return whether any of the tests fails in a copy of the repository."""
    paths = [path for test in tests.split() if (path := folder / "tests" / test).exists()]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    # In a PID namespace: a mutant may send signals to any process that it sees
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*alone, sys.executable, "-m", "pytest", "-qx", "-p", "no:randomly"]
    for step in ([sys.executable, "-m", "amp_ray.compiled"], [*command, *map(str, paths)]):
        try:
            ended = subprocess.run(
                step,
                cwd=folder,
                env=environment,
                capture_output=True,
                timeout=_MOST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True
        if ended.returncode:
            return True
    return False


def _survives(folders: SimpleQueue[Path], mutant: Mutant) -> bool:
    """Return whether no test notices a mutant."""
    folder = folders.get()
    path = folder / mutant.path
    before = path.read_text(encoding="utf-8")
    try:
        path.write_text(mutant.text, encoding="utf-8")
        survives = not any(_notices(folder, tests) for tests in AREAS[mutant.area][1:])
    finally:
        path.write_text(before, encoding="utf-8")
        folders.put(folder)
    print("SURVIVES" if survives else "noticed ", mutant.area, mutant, flush=True)
    return survives


def _copied(folder: Path) -> Path:
    """Copy the repository's files, without environments and caches."""
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(REPOSITORY, folder, ignore=ignored)
    return folder


def main() -> int:
    """Draw mutants, run the tests on each, and count those that survive."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--num", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=5, help="survivors that are no failure")
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested side by side")
    parser.add_argument("--areas", nargs="+", default=list(AREAS), choices=AREAS)
    options = parser.parse_args()
    mutants = draw(options.num, options.seed, options.areas)
    with tempfile.TemporaryDirectory(prefix="mutants.") as base:
        copies = [_copied(Path(base) / str(number)) for number in range(options.jobs)]
        folders: SimpleQueue[Path] = SimpleQueue()
        for folder in copies:
            folders.put(folder)
        tests = {tests for area in options.areas for tests in AREAS[area][1:]}
        if failing := [part for part in tests if _notices(copies[0], part)]:
            parser.error(f"these tests fail without any change: {failing}")
        with ThreadPoolExecutor(options.jobs) as pool:
            num = sum(pool.map(partial(_survives, folders), mutants))
    print(f"{num} of {len(mutants)} mutants survive; seed {options.seed}")
    return int(num > options.most)


if __name__ == "__main__":
    sys.exit(main())
