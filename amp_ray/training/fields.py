"""Strict reading of JSON objects: errors name each wrong, missing or unknown key."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Fields:
    """Reader of one JSON object, key by key; it records which keys were read."""

    record: Mapping[str, Any]
    where: str  # name of the object in messages, e.g. ``job.strategy``.
    taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Refuse anything but an object."""
        record: object = self.record
        if not isinstance(record, Mapping):
            message = f"{self.where} must be an object, found {self.record!r}"
            raise ValueError(message)  # noqa: TRY004 - bad input is a ValueError throughout

    def any(self, key: str, default: Any = ...) -> Any:  # noqa: ANN401 - JSON is untyped
        """Return the value of a key unchecked; the key is required if there is no default."""
        self.taken.add(key)
        value = self.record.get(key, default)
        if value is ...:
            raise ValueError(f"{self.where}.{key} is missing; found the keys {sorted(self.record)}")
        return value

    def integer(self, key: str, *, minimum: int = 1, default: Any = ...) -> int:  # noqa: ANN401
        """Return a whole number of at least ``minimum``."""
        value = self.any(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            message = f"{self.where}.{key} must be a whole number >= {minimum}, found {value!r}"
            raise ValueError(message)
        return value

    def number(self, key: str, *, minimum: float = 0.0, default: Any = ...) -> float:  # noqa: ANN401
        """Return a number of at least ``minimum``."""
        value = self.any(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < minimum:
            raise ValueError(f"{self.where}.{key} must be a number >= {minimum}, found {value!r}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self.any(key, default)
        if not isinstance(value, bool):
            message = f"{self.where}.{key} must be true or false, found {value!r}"
            raise ValueError(message)  # noqa: TRY004
        return value

    def text(self, key: str, *, default: Any = ...) -> str:  # noqa: ANN401
        """Return a string."""
        value = self.any(key, default)
        if not isinstance(value, str):
            message = f"{self.where}.{key} must be a string, found {value!r}"
            raise ValueError(message)  # noqa: TRY004
        return value

    def choice(self, key: str, choices: Sequence[str], *, default: Any = ...) -> str:  # noqa: ANN401
        """Return a string, which must be one of ``choices``."""
        value = self.any(key, default)
        if value not in choices:
            message = f"{self.where}.{key} must be one of {', '.join(choices)}; found {value!r}"
            raise ValueError(message)
        return str(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers >= 0."""
        value = self.any(key)
        if not isinstance(value, list | tuple) or not all(
            isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
        ):
            message = f"{self.where}.{key} must be a list of whole numbers >= 0, found {value!r}"
            raise ValueError(message)
        return tuple(value)

    def finish(self) -> None:
        """Refuse keys that were not read."""
        unknown = sorted(set(self.record) - self.taken)
        if unknown:
            message = f"{self.where} has unknown keys {unknown}; known are {sorted(self.taken)}"
            raise ValueError(message)


def read_object(path: str) -> Any:  # noqa: ANN401 - JSON is untyped
    """Read a JSON file."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
