"""The table of cases: tests/net/cases.yaml."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).resolve().parents[2] / "net"
FILES: Final = FOLDER / "files"
ANSWERS: Final = FOLDER / "answers"

_SETTING: Final = re.compile(r"[a-z][a-z0-9_.]*=")

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Commands that run one after the other in a new folder with a copy of `FILES`.

    Args:
        name: Group, base and variation of the case, separated by slashes.
        steps: The words of each command, without ``amp-ray``.
    """

    name: str
    steps: tuple[Words, ...]

    @property
    def answer(self) -> Path:
        """The file that holds the recorded answer."""
        return ANSWERS / f"{self.name}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Values that the package lists where it refuses a word; every one must occur in a case.

    Args:
        name: Name of the kind of values, for messages.
        ask: The words of a command with an invalid value.
        key: The option, or key of experiment files, that takes the values.
        default: The value if a file does not set the key.
        left_out: Values that no case can have, each with the reason.
    """

    name: str
    ask: Words
    key: str
    default: str | None
    left_out: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The whole file.

    Args:
        cases: In the order of the file.
        fast: Names of the cases that run with the tests.
        listed: Values that the cases must cover.
    """

    cases: tuple[Case, ...]
    fast: tuple[str, ...]
    listed: tuple[Listed, ...]


def read_table() -> Table:
    """Read the table of cases.

    Raises:
        ValueError: If two cases have the same name, or a fast case does not exist.
    """
    document = yaml.safe_load((FOLDER / "cases.yaml").read_text(encoding="utf-8"))
    cases = tuple(case for group in document["cases"] for case in _cases(group))
    names = [case.name for case in cases]
    fast = tuple(document["fast"])
    if unknown := set(fast).difference(names):
        raise ValueError(f"cases.yaml: no such case: {', '.join(sorted(unknown))}")
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"cases.yaml: two cases have one name: {', '.join(repeated)}")
    return Table(cases=cases, fast=fast, listed=tuple(map(_listed, document["listed"])))


def words_of(text: str) -> Words:
    """Split a command as a shell does; ``key=value`` is short for ``--set key=value``."""
    words = shlex.split(text)
    return tuple(
        part for word in words for part in (("--set", word) if _SETTING.match(word) else (word,))
    )


def _cases(group: Mapping[str, Any]) -> Iterator[Case]:
    """Make the cases of a group: each of its bases with each of its variations."""
    commands = [group["run"]] if isinstance(group["run"], str) else group["run"]
    for bases, variations in group["of"].items():
        for base in bases.split():
            for variation, words in variations.items():
                each = words if isinstance(words, list) else [words or ""] * len(commands)
                steps = tuple(
                    words_of(command.format(base=base, variation=variation, words=more))
                    for command, more in zip(commands, each, strict=True)
                )
                yield Case(name=f"{group['name']}/{base}/{variation}", steps=steps)


def _listed(row: Mapping[str, Any]) -> Listed:
    """Read one row of the values that must be covered."""
    return Listed(
        name=row["name"],
        ask=words_of(row["ask"]),
        key=row["key"],
        default=row.get("default"),
        left_out=row.get("left_out", {}),
    )
