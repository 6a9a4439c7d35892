"""Strict readers of JSON, CSV and hostfiles as text; an error is one message with a place."""

import csv
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any, Final

from amp_ray.errors import InputError, Where, shown
from amp_ray.inputs.yaml_text import MOST_LEVELS

MOST_SECONDS: Final = 1e6  # seconds of one iteration or one layer: eleven days

_TOO_DEEP: Final = f"nested more than {MOST_LEVELS} levels deep"
_KEY_PART: Final = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_TOO_DEEP_KEY: Final = re.compile(
    rf"(?:^|[\[{{,])[ \t]*+(?:{_KEY_PART}\.[ \t]*+){{{MOST_LEVELS}}}", re.ASCII | re.MULTILINE
)
"""A dotted key of TOML, whose reading takes memory by the square of its parts."""

_BYTE_ORDER_MARK: Final = "\ufeff"
_MOST_DIGITS: Final = 300
_MOST_LINES: Final = 100_000
_DIGITS: Final = re.compile(r"[0-9]{1,9}")
"""Numbers below 10**9: more devices, layers or samples are a mistake."""


def parse_json(text: str, *, file: str, finite: bool = True) -> dict[str, Any]:
    """Read a JSON object with `parse_any_json`; refuse any other value."""
    values = parse_any_json(text, file=file, finite=finite)
    if not isinstance(values, dict):
        raise InputError(f"expected a JSON object, found {shown(values)}", where=Where(file=file))
    return values


def parse_any_json(text: str, *, file: str, finite: bool = True) -> Any:  # noqa: ANN401 - any plain type
    """Read JSON as plain values; ``file`` is its name in messages.

    A text is also refused if it is cut short, repeats a key, is nested too deeply or, with
    ``finite``, has a number that is not finite.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_once_each,
            parse_constant=_finite if finite else float,
            parse_float=_finite if finite else float,
            parse_int=_integer,
        )
        _check_levels(value)
        return value  # noqa: TRY300 - the check raises a ValueError, too
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg}"
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            message += "; the file ends here: is it cut short?"
        raise InputError(message, where=Where(file=file, line=error.lineno)) from None
    except RecursionError:
        raise InputError(f"not usable JSON: {_TOO_DEEP}", where=Where(file=file)) from None
    except ValueError as error:
        raise InputError(f"not usable JSON: {error}", where=Where(file=file)) from None


def _check_levels(value: object) -> None:
    """Refuse a value that is nested too deeply; level by level, since recursion would fail."""
    containers = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_LEVELS):
        containers = [
            child
            for container in containers
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
    if containers:
        raise ValueError(_TOO_DEEP)


def parse_toml(text: str, *, file: str) -> dict[str, Any]:
    """Read TOML as plain values; refuse what is nested too deeply, before it takes memory."""
    place = _TOO_DEEP_KEY.search(text)
    if place is not None:
        line = 1 + text.count("\n", 0, place.start())
        message = f"cannot be read as TOML: a key of more than {MOST_LEVELS} parts"
        raise InputError(message, where=Where(file=file, line=line))
    try:
        values = tomllib.loads(text)
        _check_levels(values)
        return values  # noqa: TRY300 - see above
    except (RecursionError, MemoryError):
        problem = _TOO_DEEP
    except ValueError as error:  # also an impossible number or date
        problem = str(error)
    line_number = re.search(r" \(at line ([0-9]+),", problem)
    where = Where(file=file, line=None if line_number is None else int(line_number[1]))
    raise InputError(f"cannot be read as TOML: {problem}", where=where)


def _once_each(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {shown(key)} stands there twice: keep one")
        result[key] = value
    return result


def _finite(word: str) -> float:
    """Return a number; refuse NaN, infinities and numbers too large for a float."""
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"found {shown(word)[1:-1]}; expected a finite number")
    return number


def _integer(word: str) -> int:
    if len(word) > _MOST_DIGITS:
        raise ValueError(f"found a number of {len(word)} digits; expected at most {_MOST_DIGITS}")
    return int(word)


# ------------------------------------------------------------------ rows and their cells


def read_rows(text: str, file: str) -> Iterator[tuple[Where, list[str]]]:
    """Yield the non-blank rows of a CSV text with their places, cells stripped."""
    reader = csv.reader(text.splitlines(), skipinitialspace=True, strict=True)
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):
                yield Where(file=file, line=reader.line_num), cells
    except csv.Error as error:
        message = f"not valid CSV: {error}"
        raise InputError(message, where=Where(file=file, line=reader.line_num)) from None


def content_lines(text: str, file: str) -> Iterator[tuple[Where, str]]:
    """Yield the lines of a hostfile with their places, without comments (``#``) and blank lines.

    A file with more lines than any cluster has hosts is refused.
    """
    for number, line in enumerate(text.removeprefix(_BYTE_ORDER_MARK).splitlines(), start=1):
        where = Where(file=file, line=number)
        if _BYTE_ORDER_MARK in line:
            message = "a byte order mark (U+FEFF) stands in this line: take it out"
            raise InputError(message, where=where)
        if number > _MOST_LINES:
            message = f"expected at most {_MOST_LINES:,} lines: is this the right file?"
            raise InputError(message, where=where)
        content = line.partition("#")[0].strip()
        if content:
            yield where, content


def is_count(cell: str, low: int = 1) -> bool:
    """Return whether a cell holds an integer of at least ``low``, in plain digits."""
    return _DIGITS.fullmatch(cell) is not None and int(cell) >= low


def read_count(cell: str | None, where: Where, *, low: int = 1) -> int:
    """Read an integer of at least ``low``; refuse anything else."""
    word = (cell or "").strip()
    if not is_count(word, low):
        raise InputError(f"found {shown(word)}; expected an integer of at least {low}", where=where)
    return int(word)


def read_seconds(cell: str | None) -> float | None:
    """Read seconds, from 0 to `MOST_SECONDS`; None if the cell does not hold such a number."""
    word = (cell or "").strip()
    try:
        seconds = math.nan if "_" in word else float(word)
    except ValueError:
        return None
    return seconds if 0 <= seconds <= MOST_SECONDS else None
