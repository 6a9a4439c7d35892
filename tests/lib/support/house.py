"""Figures of how simple the package is to read: `make house` prints them.

A test compares them with the ceilings in tests/unit/house_figures.yaml.
"""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[3]
CEILINGS: Final = REPOSITORY / "tests" / "unit" / "house_figures.yaml"

GUESTS: Final = ("planners", "training")
"""Folders of the package that are no part of its core."""

OTHER_FORMATS: Final = ("exports",)
"""Folders that name each dimension because they write it for other programs."""

DIMENSIONS: Final = {
    "cp": r"\bcp\b",
    "virtual_stages": "virtual_stages",
    "token_slices": "token_slices",
    "sequence_parallel": "sequence_parallel",
    "zero": r"\bzero(_stage)?\b|\bZero\b",
    "recompute": r"\brecompute",
}

NO_NAME: Final = re.compile(
    r"^ +(found|own|told|given|known|said|left|each|others)(, [a-z_]+)* = ", re.MULTILINE
)

JOURNEYS: Final = {
    "file to plan": "amp_ray.plan('table.yaml')",
    "measurement to calibration": "amp_ray.calibrate('table.yaml', 'measured/table.csv')",
}
"""Calls of the public functions, in the folder of the net's files."""

_JOURNEYS: Final = """\
import json, sys, amp_ray

entered, crossings = {}, {}

def is_ours(name):  # a look-up in a cache does not count, as with those of functools
    return name.startswith("amp_ray") and name != "amp_ray.memo"

def look(frame, event, argument):
    if event != "call" or frame.f_code.co_name == "<module>":
        return
    callee = frame.f_globals.get("__name__", "")
    if not is_ours(callee):
        return
    caller = frame.f_back
    while caller is not None and not is_ours(caller.f_globals.get("__name__", "")):
        caller = caller.f_back
    entered.setdefault(callee)
    origin = caller.f_globals["__name__"] if caller is not None else ""
    if origin != callee:
        crossings.setdefault((origin, callee))

for call in map(lambda text: compile(text, "journey", "eval"), sys.argv[1:]):
    eval(call)  # so that the second one imports nothing
    entered.clear()
    crossings.clear()
    sys.setprofile(look)
    eval(call)
    sys.setprofile(None)
    print(json.dumps([list(entered), len(crossings)]))
"""


class House:
    """The package's sources."""

    @cached_property
    def texts(self) -> Mapping[Path, str]:
        """Text of every module, by its path in the package."""
        root = REPOSITORY / "amp_ray"
        return {
            path.relative_to(root): path.read_text(encoding="utf-8")
            for path in sorted(root.rglob("*.py"))
        }

    @cached_property
    def core(self) -> Mapping[Path, str]:
        """Text of every module of the core, by its path in the package."""
        return {path: text for path, text in self.texts.items() if path.parts[0] not in GUESTS}

    @cached_property
    def trees(self) -> Mapping[Path, ast.Module]:
        """Every module as a syntax tree."""
        return {path: ast.parse(text) for path, text in self.texts.items()}

    def figures(self) -> dict[str, int]:
        """Return all figures that can be counted in the sources."""
        inner = [text for path, text in self.core.items() if path.parts[0] not in OTHER_FORMATS]
        tests = (REPOSITORY / "tests").rglob("*.py")
        return {
            "lines of the core": sum(map(_num_lines, self.core.values())),
            "lines of the package": sum(map(_num_lines, self.texts.values())),
            "lines of tests": sum(_num_lines(path.read_text(encoding="utf-8")) for path in tests),
            "modules": len(self.texts),
            "modules with one importer": self._num_with_one_importer(),
            **{
                f"files that name {name}": sum(bool(re.search(word, text)) for text in inner)
                for name, word in DIMENSIONS.items()
            },
            "callers that ask which planner they have": sum(
                _asks_planner(node) for tree in self.trees.values() for node in ast.walk(tree)
            ),
            "names that are no names": sum(len(NO_NAME.findall(t)) for t in self.texts.values()),
        }

    def _num_with_one_importer(self) -> int:
        """Count the modules that are imported by only one other module."""
        importers: dict[str, set[Path]] = defaultdict(set)
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    for name in (node.module, *(f"{node.module}.{a.name}" for a in node.names)):
                        importers[name].add(path)
        modules = (path for path in self.texts if not path.name.startswith("__"))
        names = (".".join(("amp_ray", *path.with_suffix("").parts)) for path in modules)
        return sum(len(importers[name]) == 1 for name in names)


def _num_lines(text: str) -> int:
    """Count the lines of a text."""
    return text.count("\n")


def _asks_planner(node: ast.AST) -> bool:
    """Return whether code compares the name of a cost model, or checks the class of a planner."""
    if isinstance(node, ast.Compare):
        if isinstance(node.ops[0], ast.Is | ast.IsNot):
            return False  # `cost_model is None` only checks whether one is named
        return any(_last_name(side) == "cost_model" for side in (node.left, *node.comparators))
    if not isinstance(node, ast.Call) or _last_name(node.func) != "isinstance":
        return False
    return any((_last_name(part) or "").endswith("Planner") for part in ast.walk(node.args[1]))


def _last_name(node: ast.AST) -> str | None:
    """Return the last part of a name with dots."""
    return getattr(node, "id", None) or getattr(node, "attr", None)


def journeys() -> Iterator[tuple[str, list[str], int]]:
    """Yield for each journey its name, the modules that it enters, and its number of returns.

    A call from one module into another counts once, however often it happens, so the numbers of
    candidates and layers do not matter. A call into a module that was entered before is a return.
    """
    done = subprocess.run(
        [sys.executable, "-c", _JOURNEYS, *JOURNEYS.values()],
        cwd=REPOSITORY / "tests" / "net" / "files",
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    for name, line in zip(JOURNEYS, done.stdout.splitlines(), strict=True):
        entered, num_crossings = json.loads(line)
        yield name, entered, num_crossings - len(entered)


def all_figures() -> Iterator[tuple[str, int]]:
    """Yield every figure by name."""
    yield from House().figures().items()
    for name, entered, num_returns in journeys():
        yield f"{name}: modules", len(entered)
        yield f"{name}: returns", num_returns


if __name__ == "__main__":
    for figure, value in all_figures():
        print(f"{figure}: {value}")
