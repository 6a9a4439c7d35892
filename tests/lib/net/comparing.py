"""Compares two answers: floats to twelve digits, everything else exactly."""

import json
import math
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final

RELATIVE: Final = 1e-12

SUMMED: Final = ("breakdown_s", "difference_s")
"""Mappings whose values are parts of a sum. A part may be the difference of larger figures, so all
parts are compared to twelve digits of the largest part."""

_WIDTH: Final = 150  # maximum characters of a line of a recorded answer, if it can be split
_FLOAT: Final = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+")
_MISSING: Final = "nothing"


def differences(old: Any, new: Any, path: str = "", scale: float = 0.0) -> Iterator[str]:  # noqa: ANN401
    """Yield each difference of two JSON values: its path, the old and the new value.

    Args:
        old: Recorded value.
        new: Present value.
        path: Path of both in the answer.
        scale: Largest part of the same sum, which limits the precision of the difference.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            inner = _scale(old[key]) if key in SUMMED and key in old else scale
            yield from differences(
                old.get(key, _MISSING), new.get(key, _MISSING), f"{path}.{key}", inner
            )
    elif isinstance(old, list) and isinstance(new, list):
        for number, (first, second) in enumerate(zip_longest(old, new, fillvalue=_MISSING)):
            yield from differences(first, second, f"{path}[{number}]", scale)
    elif not _same(old, new, scale):
        yield f"{path.removeprefix('.')}: {_shown(old)} is now {_shown(new)}"


def _scale(parts: Any) -> float:  # noqa: ANN401
    """Return the largest of the parts of a sum."""
    values = parts.values() if isinstance(parts, dict) else ()
    return max((abs(value) for value in values if isinstance(value, float)), default=0.0)


def _same(old: Any, new: Any, scale: float) -> bool:  # noqa: ANN401
    """Return whether two values that are neither lists nor mappings are the same."""
    if type(old) is not type(new):
        return False
    if isinstance(old, float):
        return math.isclose(old, new, rel_tol=RELATIVE, abs_tol=RELATIVE * scale)
    return bool(old == new) or (isinstance(old, str) and _same_text(old, new))


def _same_text(old: str, new: str) -> bool:
    """Return whether two texts are the same, except for the last digits of their numbers."""
    return _FLOAT.split(old) == _FLOAT.split(new) and all(
        math.isclose(float(first), float(second), rel_tol=RELATIVE)
        for first, second in zip(_FLOAT.findall(old), _FLOAT.findall(new), strict=True)
    )


def _shown(value: Any) -> str:  # noqa: ANN401
    """Return a value as text, cut if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."


def layout(value: Any, indent: int = 0) -> str:  # noqa: ANN401
    """Return a value as JSON; a part that is short stands on one line."""
    line = json.dumps(value, ensure_ascii=False)
    if indent + len(line) <= _WIDTH or not isinstance(value, list | dict):
        return line
    inner = indent + 1
    if isinstance(value, list):
        parts = [layout(part, inner) for part in value]
    else:
        parts = [f"{json.dumps(key)}: {layout(part, inner)}" for key, part in value.items()]
    between = ",\n" + " " * inner
    first, last = "[]" if isinstance(value, list) else "{}"
    return f"{first}\n{' ' * inner}{between.join(parts)}\n{' ' * indent}{last}"
