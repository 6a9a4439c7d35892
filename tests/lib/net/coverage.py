"""Checks that every value that the package lists occurs in a case."""

import re
from collections.abc import Iterator, Sequence
from contextlib import chdir
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import yaml

from net.running import run
from net.table import FILES, Case, Listed, Words

_LIST: Final = re.compile(r"(?:expected(?: one of)?|known:|not one of|Choose from:)(.*)", re.DOTALL)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COMMAND: Final = re.compile(r"^  ([a-z]+)  ", re.MULTILINE)
_BETWEEN: Final = ("or", "to")


def listed_values(listed: Listed) -> tuple[str, ...]:
    """Return the valid values that the package names when it refuses an invalid one.

    Raises:
        ValueError: If the package names no values.
    """
    with chdir(FILES):
        ended = run(listed.ask)
    match = _LIST.search(ended.err)
    names = _NAME.findall(match.group(1)) if match else _COMMAND.findall(ended.out)
    if not names:
        raise ValueError(f"{listed.name}: {' '.join(listed.ask)} lists nothing: {ended.err}")
    return tuple(name for name in names if name not in _BETWEEN)


def missing(listed: Listed, cases: Sequence[Case]) -> tuple[str, ...]:
    """Return the listed values that no case has; ``left_out`` has values that no case needs."""
    covered = {value for case in cases for words in case.steps for value in _values(listed, words)}
    return tuple(
        value
        for value in listed_values(listed)
        if value not in covered and value not in listed.left_out
    )


def _values(listed: Listed, words: Words) -> Iterator[str]:
    """Yield the values that one command gives to an option or a key of an experiment file."""
    pairs = list(pairwise(words))
    if listed.key == "command":
        yield words[0]
        return
    if listed.key.startswith("-"):
        chosen = [value for option, value in pairs if option == listed.key]
        yield from chosen or [str(listed.default)]
        return
    settings = [value.partition("=") for option, value in pairs if option == "--set"]
    chosen = [value for key, _, value in settings if key == listed.key]
    for values in chosen:
        yield from values.split(",")
    if not chosen:
        files = (FILES / word for word in words if word.endswith(".yaml"))
        for file in filter(Path.exists, files):
            yield str(_of_file(file, listed.key) or listed.default)


@cache
def _of_file(file: Path, key: str) -> Any:  # noqa: ANN401 - any YAML value
    """Return the value of a key in an experiment file; None if the file does not set it."""
    value = yaml.safe_load(file.read_text(encoding="utf-8"))
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
