"""JSON text to plain values, strictly: one message with a place for whatever is wrong."""

import json
from collections.abc import Iterable
from typing import Any

from amp_ray.errors import InputError, Where


def parse_json(text: str, *, file: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        text: The file's text.
        file: Its name, for messages.

    Returns:
        Plain dictionaries, lists, strings and numbers.

    Raises:
        InputError: If the text is not JSON or cut short, is no object, names a key twice, or
            holds a number that is not finite.
    """
    where = Where(file=file)
    try:
        values = json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg}"
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            message += "; the file ends here: is it cut short?"
        raise InputError(message, where=Where(file=file, line=error.lineno)) from None
    except (ValueError, RecursionError) as error:
        message = f"not usable JSON: {error}"
        raise InputError(message, where=where) from None
    if not isinstance(values, dict):
        message = f"expected a JSON object, found {shown(values)}"
        raise InputError(message, where=where)
    return values


def shown(value: object) -> str:
    """Render a found value for a message, cut where it is long.

    Example:
        >>> shown("a"), shown(True), shown(None)
        ("'a'", 'true', 'null')
    """
    text = json.dumps(value) if isinstance(value, bool | None) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


_LONGEST_VALUE = 60
"""Characters of a found value that a message shows."""


def _once_each(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping; no key may stand in it twice."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            message = f"key {key!r} stands there twice: keep one"
            raise ValueError(message)
        result[key] = value
    return result


def _no_number(word: str) -> float:
    """Refuse NaN and infinities, which JSON does not have."""
    message = f"found {word}; expected a finite number"
    raise ValueError(message)
