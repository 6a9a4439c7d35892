"""Parse JSON text strictly into plain values; an error is one message with a place."""

import json
import math
from collections.abc import Iterable
from typing import Any

from amp_ray.errors import InputError, Where, shown


def parse_json(text: str, *, file: str) -> dict[str, Any]:
    """Read a JSON object with `parse_any_json`; refuse any other value."""
    values = parse_any_json(text, file=file)
    if not isinstance(values, dict):
        raise InputError(f"expected a JSON object, found {shown(values)}", where=Where(file=file))
    return values


def parse_any_json(text: str, *, file: str) -> Any:  # noqa: ANN401 - any plain type
    """Read JSON as plain values; ``file`` is its name in messages.

    A text that is cut short, names a key twice, is nested too deeply or holds a number that is not
    finite is refused as well.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_once_each,
            parse_constant=_finite,
            parse_float=_finite,
            parse_int=_integer,
        )
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg}"
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            message += "; the file ends here: is it cut short?"
        raise InputError(message, where=Where(file=file, line=error.lineno)) from None
    except RecursionError:
        raise InputError("not usable JSON: nested too deeply", where=Where(file=file)) from None
    except ValueError as error:
        raise InputError(f"not usable JSON: {error}", where=Where(file=file)) from None


_MOST_DIGITS = 300


def _once_each(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping; no key may stand in it twice."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {shown(key)} stands there twice: keep one")
        result[key] = value
    return result


def _finite(word: str) -> float:
    """Refuse NaN and infinities, which JSON does not have, and numbers too large for a float."""
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"found {shown(word)[1:-1]}; expected a finite number")
    return number


def _integer(word: str) -> int:
    """Refuse an integer that is too large for a float."""
    if len(word) > _MOST_DIGITS:
        raise ValueError(f"found a number of {len(word)} digits; expected at most {_MOST_DIGITS}")
    return int(word)
