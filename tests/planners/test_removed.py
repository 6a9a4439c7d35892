"""Guests are taken away one by one: whatever does not name them works as ever."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from amp_ray import guests
from support.programs import python

NEEDS: Final = {
    "amp2022": ("amp2022",),
    "metis2024": ("metis2024",),
    "aceso2024": ("aceso2024",),
    "operators": ("operators", "aceso2024"),  # Aceso's formulas stand on the space of operators
}
"""Folders that leave together, by the one that has to."""

IMPORT: Final = (
    "import metis --hostfile metis/hostfile --clusterfile metis/clusterfile.json --gbs 8 "
    "--num-layers 6 --hidden-size 256 --sequence-length 128 --vocab-size 1024 -o {out}/m.yaml"
)

COMMANDS: Final = {
    "plan table.yaml --json": (),
    "score gpt2.yaml --json --strategies strategies.csv": (),
    "export table.yaml --to csv": (),
    "plan metis.yaml --json search.space=uniform": ("metis2024",),
    "plan amp.yaml --json --cost-model amp-2022": ("amp2022",),
    "plan metis.yaml --json --cost-model metis-2024": ("metis2024",),
    "export table.yaml --to metis -o {out}/metis": ("metis2024",),
    IMPORT: ("metis2024",),
    "plan aceso.yaml --json": ("aceso2024", "operators"),
    "plan few.yaml --json search.space=operator": ("operators",),
    "plan aceso.yaml --json --cost-model aceso-2024": ("aceso2024", "operators"),
    "export aceso.yaml --to aceso search.idle_devices=false": ("aceso2024", "operators"),
    "score aceso.yaml --json --strategies aceso-plan.json": ("aceso2024", "operators"),
}
"""Commands in the folder of the net's files, and the guests that each needs."""

PROGRAM: Final = """\
import contextlib, io, json, sys

removed, lines = map(json.loads, sys.argv[1:])

class Removed:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"amp_ray.planners.{folder}" for folder in removed)):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Removed())
from amp_ray.cli import main

ended = []
for words in lines:
    sys.argv = ["amp-ray", *words]
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            ended.append((end.code or 0, err.getvalue()))
print(json.dumps(ended))
"""
"""Runs commands as if some folders were not there; a copy of the package would compile anew."""


def run(removed: tuple[str, ...], out: Path, repository: Path) -> list[list[Any]]:
    """Run all commands without some guests; return exit codes and messages."""
    lines = [command.format(out=out).split() for command in COMMANDS]
    words = [
        [
            word
            for part in line
            for word in (["--set", part] if part.startswith("search.") else [part])
        ]
        for line in lines
    ]
    files = repository / "tests" / "net" / "files"
    done = python("-c", PROGRAM, json.dumps(removed), json.dumps(words), cwd=files)
    ended: list[list[Any]] = json.loads(done.stdout)
    return ended


@pytest.mark.parametrize("guest", NEEDS)
def test_nobody_else_misses_a_guest(guest: str, tmp_path: Path, repository: Path) -> None:
    ended = run(NEEDS[guest], tmp_path, repository)
    for (command, needed), (code, message) in zip(COMMANDS.items(), ended, strict=True):
        if set(needed) & set(NEEDS[guest]):
            assert code == 2, (command, message)
            assert "which is not part of this installation" in message
        else:
            assert code == 0, (command, message)


def test_the_tables_name_every_guest_that_can_be_asked_for(repository: Path) -> None:
    tables = (
        guests.PLANNERS,
        guests.SPACES,
        guests.STRATEGY_EXPORTS,
        guests.EXPERIMENT_EXPORTS,
        guests.IMPORTS,
        guests.PROFILES,
        guests.STRATEGY_FILES,
    )
    for table in tables:
        for place in table.values():
            assert guests.load(place, "a test") is not None
    named = {place.split(".")[2] for table in tables for place in table.values()}
    folders = {path.parent.name for path in repository.glob("amp_ray/planners/*/__init__.py")}
    assert folders == named
    for folder in folders:
        text = (repository / "amp_ray/planners" / folder / "README.md").read_text(encoding="utf-8")
        assert len(text.splitlines()) == 5
