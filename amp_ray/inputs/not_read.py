"""Keys of another program's file that may change a plan and that nothing here reads.

Every reader of foreign files reads a key, refuses it, or returns a `NotRead` that names it.
Commands write it to stderr (`amp_ray.cli.exits.tell`), and rows have it as a warning. A key that no
plan depends on, such as a path of data, is not mentioned.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from amp_ray.errors import printable, shown

_LONGEST_NAME: Final = 80
_MOST: Final = 10**9  # largest count; larger ones are mistakes
_OFF: Final[tuple[object, ...]] = (False, None, "", 0, [], "auto", "none", "no", "NO")


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRead:
    """Keys of one file that are not read.

    Example:
        >>> print(NotRead(file="run.sh", names=("--tp-comm-overlap", "--optimizer")))
        not read: --tp-comm-overlap, --optimizer (run.sh: not modelled)
    """

    file: str
    names: tuple[str, ...]  # as the file writes them, without values, which may be secret
    why: str = "not modelled"

    def __str__(self) -> str:
        text = ", ".join(name[:_LONGEST_NAME] for name in self.names)
        return printable(f"not read: {text} ({self.file}: {self.why})").replace("\n", "\\n")


def section_of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the keys of a section of a configuration; empty if it is missing."""
    section = values.get(name)
    if section is not None and not isinstance(section, Mapping):
        message = f"{name}: found {shown(section)}; expected keys with values"
        raise ValueError(message)
    return section or {}


def count_of(values: Mapping[str, Any], key: str, default: int, *, low: int = 1) -> int:
    """Return a key's integer of at least ``low``; refuse any other value."""
    value = values.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _MOST:
        message = f"{key}: found {shown(value)}; expected a count: write the number into the file"
        raise ValueError(message)
    return value


def value_at(values: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - any plain type
    """Return the value of a dotted key; None if it is missing.

    Example:
        >>> value_at({"a": {"b": 1}}, "a.b")
        1
    """
    first, _, rest = key.partition(".")
    value = values.get(first)
    return value if not rest else value_at(value, rest) if isinstance(value, Mapping) else None


def unlike(values: Mapping[str, Any], assumed: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Yield dotted keys with their values where these are none of those that are assumed.

    Example:
        >>> list(unlike({"a": {"b": False}, "c": "auto"}, {"a.b": ["true"], "c": ["1"]}))
        ['a.b false']
    """
    for key, usual in assumed.items():
        value = value_at(values, key)
        if value not in (None, "auto") and str(value).lower() not in usual:
            yield f"{key} {str(value).lower()}"


def switched_on(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield the dotted keys of a configuration, without those that are off and their sections.

    Example:
        >>> list(switched_on({"a": {"enabled": False, "b": 1}, "c": {"d": 2, "e": None}}))
        ['c.d']
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            if value.get("enabled", True) is not False and value.get("device", 1) not in _OFF:
                yield from switched_on(value, f"{before}{key}.")
        elif value not in _OFF:
            yield f"{before}{key}"


def not_read(
    names: Iterable[str],
    file: str,
    *,
    known: Collection[str] = (),
    shown_as: str = "{}",
    why: str = "not modelled",
) -> tuple[NotRead, ...]:
    """Return what to say about the names of a file: nothing, or one `NotRead`.

    Args:
        names: The file's keys or flags; repeated ones count once.
        file: Its name.
        known: Patterns (`fnmatch`) of the names that are read, and of those that no plan depends
            on. Names that match none are named.
        shown_as: Form of a name in the message, such as ``--{}``.
        why: Reason why they are not read.

    Example:
        >>> not_read(["lr", "tp"], "run.sh", known=("tp", "lr*"))
        ()
    """
    unread = tuple(
        shown_as.format(name)
        for name in dict.fromkeys(names)
        if not any(fnmatchcase(name, pattern) for pattern in known)
    )
    return (NotRead(file=file, names=unread, why=why),) if unread else ()
