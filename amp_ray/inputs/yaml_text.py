"""Read YAML files with the line of every key, and change single keys (``--set``).

Unquoted words are read as in YAML 1.2 (and JSON): ``1e-5`` is a number, ``yes`` is text and ``010``
is ten. YAML 1.1 would change such values silently.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import yaml

from amp_ray.errors import InputError, Where, placed, shown
from amp_ray.redaction import NOT_KEPT, is_secret, redact_at, redact_values

Path = tuple[str | int, ...]

_PLAIN: Final[tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...]] = (
    (re.compile(r"~|null|Null|NULL|"), lambda _: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda word: word.lower() == "true"),
    (re.compile(r"[-+]?[0-9]{1,300}"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+"), float),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)"), float),
    (
        re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
        lambda word: float(word.replace(".", "")),
    ),
)
"""Meaning of an unquoted word; all others are text, including integers too large for a float."""

_TAGS: Final = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "map", "seq"))
"""Tags of values without an explicit tag."""

_MOST_CHARACTERS: Final = 2**20
_MOST_VALUES: Final = 100_000
"""Most values of a file, counting aliases as often as they repeat; 10,000 nodes have 80,000."""

MOST_LEVELS: Final = 50
"""Most levels of values within values, and parts of a dotted key, in any format."""


def read_yaml(text: str, *, file: str) -> tuple[Any, dict[Path, int]]:
    """Read a YAML value, and the line of every key and list entry in it, by path.

    Repeated keys and texts that are too large are refused; ``file`` is the name in messages.
    """
    if len(text) > _MOST_CHARACTERS:
        message = f"found {len(text):,} characters; expected at most {_MOST_CHARACTERS:,}"
        raise InputError(message, where=Where(file=file))
    reader = _Reader(file=file)
    with _one_message(text, file):
        root = yaml.compose(text, Loader=_Loader)
        if root is None:
            return None, {}
        reader.count(root, {})
        return reader.value(root, ()), reader.lines


@contextmanager
def _one_message(text: str, file: str) -> Iterator[None]:
    """Turn an error of the YAML library into one line with its place."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"not valid YAML: {error.problem or error.context}"
        if mark is not None and mark.index >= len(text.rstrip()):
            message += "; the file ends here: is it cut short?"
        where = Where(file=file, line=None if mark is None else mark.line + 1)
        raise InputError(message, where=where) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not valid YAML: character {chr(int(error.character))!r}"
        raise InputError(message, where=Where(file=file, line=line)) from None


class _Loader(yaml.BaseLoader):
    """A loader that refuses values nested too deeply, and too many values."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0
        self._num_values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401 - a node or a number
        self._level += 1
        self._num_values += 1
        problem = None
        if self._level > MOST_LEVELS:
            problem = f"nested more than {MOST_LEVELS} levels deep"
        if self._num_values > _MOST_VALUES:
            problem = f"more than {_MOST_VALUES:,} values"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node: yaml.Node | None = super().compose_node(parent, index)
        self._level -= 1
        return node


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Turns nodes into plain values, and records the line of everything in them."""

    file: str
    lines: dict[Path, int] = field(default_factory=dict)  # filled while reading

    def count(self, node: yaml.Node, counts: dict[int, int]) -> int:
        """Count a node's values, repeated aliases included; refuse too many values, and cycles.

        ``counts`` has the count of each node by its identity, 0 while the node is being counted.
        """
        if isinstance(node, yaml.ScalarNode):
            return 1
        number = counts.get(id(node))
        if number == 0:
            raise InputError("a value cannot stand within itself", where=self._where(node))
        if number is None:
            counts[id(node)] = 0
            pairs = node.value if isinstance(node, yaml.MappingNode) else zip(node.value)
            number = 1 + sum(self.count(child, counts) for pair in pairs for child in pair)
            if number > _MOST_VALUES:
                message = f"stands for {number:,} values by its aliases; at most {_MOST_VALUES:,}"
                raise InputError(message, where=self._where(node))
            counts[id(node)] = number
        return number

    def value(self, node: yaml.Node, path: Path) -> Any:  # noqa: ANN401 - any plain type
        """Return the plain value of a node; refuse an explicit tag."""
        if node.tag not in _TAGS:
            message = f"found the tag {node.tag!r}; write the value alone"
            raise InputError(message, where=self._where(node))
        if isinstance(node, yaml.ScalarNode):
            return _meaning(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        return [self._entry(child, (*path, index)) for index, child in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                message = "expected a word as the key, found a list or a mapping"
                raise InputError(message, where=self._where(key_node))
            key = key_node.value
            if key in result:
                message = (
                    f"key {key!r} stands here and on line {self.lines[(*path, key)]}: keep one"
                )
                raise InputError(message, where=self._where(key_node))
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            result[key] = self.value(value_node, (*path, key))
        return result

    def _entry(self, node: yaml.Node, path: Path) -> Any:  # noqa: ANN401 - see value
        self.lines[path] = node.start_mark.line + 1
        return self.value(node, path)

    def _where(self, node: yaml.Node) -> Where:
        return Where(file=self.file, line=node.start_mark.line + 1)


def _meaning(node: yaml.ScalarNode) -> Any:  # noqa: ANN401 - any plain type
    """Return the value of a scalar; a quoted scalar is text."""
    word: str = node.value
    if node.style is not None:
        return word
    read = next((read for pattern, read in _PLAIN if pattern.fullmatch(word)), str)
    return read(word)


# ------------------------------------------------------- documents and changes of keys


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLines:
    """Lines of the keys of a file, to give places in messages."""

    file: str
    # Line of every key and list entry, by its path
    lines: Mapping[Path, int] = field(default_factory=dict)
    # Changes from the command line, as ``key=value``, by the path of the key
    changes: Mapping[Path, str] = field(default_factory=dict)

    def where(self, *path: str | int) -> Where:
        """Return the place of ``path``, or of its nearest parent that the file has."""
        key = ".".join(map(str, path)) or None
        parents = [path[:n] for n in range(len(path), 0, -1)]
        change = next((self.changes[parent] for parent in parents if parent in self.changes), None)
        if change is not None:
            return Where(file=f"--set {change}", key=key)
        line = next((self.lines[parent] for parent in parents if parent in self.lines), None)
        return Where(file=self.file, line=line, key=key)

    def refuse(self, reason: str | None, *path: str | int) -> None:
        """Raise an `InputError` at ``path`` if there is a reason."""
        if reason is not None:
            raise InputError(reason, where=self.where(*path))

    def at(self, *path: str | int) -> AbstractContextManager[None]:
        """Add the place of ``path`` to every ``ValueError`` that has no line."""
        return placed(self.where(*path), ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(SourceLines):
    """A parsed mapping with the lines of its keys."""

    # Plain dictionaries, lists, strings, numbers
    values: Mapping[str, Any] = field(default_factory=dict)


def parse_yaml(text: str, *, file: str) -> Document:
    """Read a YAML mapping; refuse repeated keys and files that are too large."""
    values, lines = read_yaml(text, file=file)
    if not isinstance(values, dict):
        kinds = {type(None): "an empty file", list: "a list", str: "text"}
        kind = kinds.get(type(values), "a single value")
        message = f"expected a mapping of keys such as 'name:' and 'model:', found {kind}"
        raise InputError(message, where=Where(file=file))
    return Document(file=file, values=values, lines=lines)


def parse_value(text: str, *, file: str) -> Any:  # noqa: ANN401 - any plain type
    """Read one YAML value, such as ``auto``, ``8`` or ``[1, 2]``; messages name ``file``."""
    return read_yaml(text, file=file)[0]


def with_changes(document: Document, changes: Iterable[str]) -> Document:
    """Set keys of a document: ``search.space=placement``, ``cluster.nodes.0.count=8``.

    Missing mappings on the path are created; a list must already have the entry.

    Raises:
        InputError: If a change has no ``=``, its value is not YAML, or its path goes through a list
            or plain value that does not have the next key.
    """
    for change in changes:
        key, equals, text = change.partition("=")
        where = Where(file=f"--set {shown_change(change)}")
        parts = key.strip().split(".")
        if not equals or "" in parts:
            message = "expected KEY=VALUE, such as search.space=placement"
            raise InputError(message, where=where)
        if len(parts) > MOST_LEVELS:
            raise InputError(f"a key of more than {MOST_LEVELS} parts", where=where)
        path = _path_of(parts, document.values, where)
        values = _with(document.values, path, parse_value(text, file=where.file))
        changed = {**document.changes, path: _kept_change(change, path, values)}
        document = replace(document, values=values, changes=changed)
    return document


def shown_change(change: str) -> str:
    """Return a change for use in a message, without the secrets in its value or its values."""
    key, equals, text = change.partition("=")
    path = key.split(".")[:MOST_LEVELS]
    for written in (text, f"[{text}]"):  # a sweep lists values
        try:
            value = parse_value(written, file="")
        except InputError:
            continue
        kept = redact_at(path, value)
        if kept == value:
            return change
        return f"{key}={kept if isinstance(kept, str) else json.dumps(kept)}"
    return f"{key}{equals}{NOT_KEPT if is_secret(text) else redact_at(path, text)}"


def _kept_change(change: str, path: Path, values: Mapping[str, Any]) -> str:
    """Return a change that was applied, without the secrets of the values at its path."""
    key = str(path[0])
    value: Any = {key: values[key]}
    kept: Any = redact_values(value)
    for part in path:
        value, kept = value[part], kept[part]
    return change if value == kept else f"{change.partition('=')[0]}={json.dumps(kept)}"


def _path_of(parts: Sequence[str], inside: Any, where: Where) -> Path:  # noqa: ANN401 - plain values
    """Return a dotted key as a path: its parts are places in lists, and keys of mappings."""
    path: list[str | int] = []
    for part in parts:
        if isinstance(inside, list):
            if part not in map(str, range(len(inside))):
                entries = f"a list of {len(inside)}; its entries count from 0"
                raise InputError(f"found {shown(part)} for {entries}", where=where)
            path.append(int(part))
            inside = inside[int(part)]
        elif isinstance(inside, Mapping | None):
            path.append(part)
            inside = (inside or {}).get(part)
        else:
            message = f"{shown(part)} leads into a plain value, which has no keys"
            raise InputError(message, where=where)
    return tuple(path)


def _with(inside: Any, path: Path, value: Any) -> Any:  # noqa: ANN401 - plain values
    if not path:
        return value
    first, *rest = path
    if isinstance(first, int):
        changed = _with(inside[first], tuple(rest), value)
        return [*inside[:first], changed, *inside[first + 1 :]]
    mapping = inside or {}
    return {**mapping, first: _with(mapping.get(first), tuple(rest), value)}
