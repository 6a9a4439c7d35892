"""YAML files with the line of every key, and changes of single keys (``--set``)."""

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from amp_ray.errors import InputError, Where, placed
from amp_ray.plain_yaml import Path, read_yaml
from amp_ray.redaction import redact_at, redact_values


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLines:
    """Lines of the keys of a file, for messages."""

    file: str
    # Line of every key and list entry, by its path
    lines: Mapping[Path, int] = field(default_factory=dict)
    # What was set from outside, as ``key=value``, by the path of the key
    changes: Mapping[Path, str] = field(default_factory=dict)

    def where(self, *path: str | int) -> Where:
        """Return the place of ``path``, or of its nearest parent in the file."""
        key = ".".join(map(str, path)) or None
        parents = [path[:n] for n in range(len(path), 0, -1)]
        change = next((self.changes[parent] for parent in parents if parent in self.changes), None)
        if change is not None:
            return Where(file=f"--set {change}", key=key)
        line = next((self.lines[parent] for parent in parents if parent in self.lines), None)
        return Where(file=self.file, line=line, key=key)

    def refuse(self, reason: str | None, *path: str | int) -> None:
        """Raise a mistake at ``path``, if there is one."""
        if reason is not None:
            raise InputError(reason, where=self.where(*path))

    def at(self, *path: str | int) -> AbstractContextManager[None]:
        """Add the place of ``path`` to every ``ValueError`` without a line."""
        return placed(self.where(*path), ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(SourceLines):
    """A parsed mapping."""

    # Plain dictionaries, lists, strings, numbers
    values: Mapping[str, Any] = field(default_factory=dict)


def parse_yaml(text: str, *, file: str) -> Document:
    """Read a YAML mapping; refuse repeated keys, and files that are too large."""
    values, lines = read_yaml(text, file=file)
    if not isinstance(values, dict):
        kind = "an empty file" if values is None else f"a {type(values).__name__}"
        message = f"expected a mapping of keys such as 'name:' and 'model:', found {kind}"
        raise InputError(message, where=Where(file=file))
    return Document(file=file, values=values, lines=lines)


def parse_value(text: str, *, file: str) -> Any:  # noqa: ANN401 - any plain type
    """Read one YAML value, such as ``auto``, ``8`` or ``[1, 2]``; ``file`` is for messages."""
    return read_yaml(text, file=file)[0]


def with_changes(document: Document, changes: Iterable[str]) -> Document:
    """Set keys of a document: ``search.space=placement``, ``cluster.nodes.0.count=8``.

    Missing mappings on the way are created; a list has to have the entry.

    Raises:
        InputError: If a change has no ``=``, its value is not YAML, or its key leads through a
            list or a plain value that does not have it.
    """
    for change in changes:
        key, equals, text = change.partition("=")
        file = f"--set {shown_change(change)}"
        path = tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))
        if not equals or "" in path:
            message = "expected KEY=VALUE, such as search.space=placement"
            raise InputError(message, where=Where(file=file))
        values = _with(document.values, path, parse_value(text, file=file), Where(file=file))
        changed = {**document.changes, path: _kept_change(change, path, values)}
        document = replace(document, values=values, changes=changed)
    return document


def shown_change(change: str) -> str:
    """Return a change as a message may quote it, without a secret."""
    key, equals, text = change.partition("=")
    return f"{key}{equals}{redact_at(key.split('.'), text)}"


def _kept_change(change: str, path: Path, values: Mapping[str, Any]) -> str:
    """Return a change that was made without what is secret where it stands now."""
    key = str(path[0])
    value: Any = {key: values[key]}
    shown: Any = redact_values(value)
    for part in path:
        value, shown = value[part], shown[part]
    return change if value == shown else f"{change.partition('=')[0]}={json.dumps(shown)}"


def _with(inside: Any, path: Path, value: Any, where: Where) -> Any:  # noqa: ANN401 - plain values
    """Return a mapping or list with a new value at a path below it."""
    if not path:
        return value
    first, *rest = path
    if isinstance(inside, list):
        if not isinstance(first, int) or first >= len(inside):
            message = f"found {first!r} for a list of {len(inside)}; its entries count from 0"
            raise InputError(message, where=where)
        changed = _with(inside[first], tuple(rest), value, where)
        return [*inside[:first], changed, *inside[first + 1 :]]
    if not isinstance(inside, Mapping | None):
        raise InputError(f"{first!r} leads into a plain value, which has no keys", where=where)
    mapping = inside or {}
    return {**mapping, str(first): _with(mapping.get(str(first)), tuple(rest), value, where)}
