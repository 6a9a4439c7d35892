"""YAML text to plain values that remember their lines.

Plain words are read as YAML 1.2 does (and JSON): ``1e-5`` is a number, ``yes`` is text and
``010`` is ten, so that nothing turns silently into what its author did not mean.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from amp_ray.errors import InputError, Where, placed

Path = tuple[str | int, ...]

_PLAIN: Final[tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...]] = (
    (re.compile(r"~|null|Null|NULL|"), lambda _: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda word: word.lower() == "true"),
    (re.compile(r"[-+]?[0-9]{1,18}"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+"), float),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)"), float),
    (
        re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
        lambda word: float(word.replace(".", "")),
    ),
)
"""What an unquoted word means; anything else is text."""

_TAGS: Final = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "map", "seq"))
"""Tags of the values without an explicit one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed YAML mapping.

    Args:
        file: Name of the file, for messages.
        values: Plain dictionaries, lists, strings, numbers.
        lines: Line of every key and list entry, by its path.
    """

    file: str
    values: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[Path, int] = field(default_factory=dict)

    def where(self, *path: str | int) -> Where:
        """Return the place of ``path``, or of its nearest parent that stands in the file."""
        line = next(
            (self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None
        )
        return Where(file=self.file, line=line, key=".".join(map(str, path)) or None)

    def at(self, *path: str | int) -> AbstractContextManager[None]:
        """Lead every ``ValueError`` without a line to ``path``; for checks of what stands there."""
        return placed(self.where(*path), ValueError)


def parse_yaml(text: str, *, file: str) -> Document:
    """Read a YAML mapping.

    Args:
        text: The file's text.
        file: Its name, for messages.

    Raises:
        InputError: If the text is not YAML, empty, not a mapping, or names a key twice.
    """
    reader = _Reader(file=file)
    with _one_message(text, file):
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        values = None if root is None else reader.value(root, ())
    if not isinstance(values, dict):
        found = "an empty file" if values is None else f"a {type(values).__name__}"
        message = f"expected a mapping of keys such as 'name:' and 'model:', found {found}"
        raise InputError(message, where=Where(file=file))
    return Document(file=file, values=values, lines=reader.lines)


@contextmanager
def _one_message(text: str, file: str) -> Iterator[None]:
    """Turn what the YAML library reports into one line with a place."""
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
    except RecursionError:
        message = "not usable: nested too deeply"
        raise InputError(message, where=Where(file=file)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Turns nodes into plain values and notes the line of everything below them.

    Args:
        file: Name of the file, for messages.
        lines: Filled while reading.
        open_nodes: Identities of the nodes that are being read, to find one within itself.
    """

    file: str
    lines: dict[Path, int] = field(default_factory=dict)
    open_nodes: set[int] = field(default_factory=set)

    def value(self, node: yaml.Node, path: Path) -> Any:  # noqa: ANN401 - any plain type
        """Return the plain value of a node.

        Raises:
            InputError: If it has a tag, or stands within itself by an alias.
        """
        if node.tag not in _TAGS:
            message = f"found the tag {node.tag!r}; write the value alone"
            raise InputError(message, where=self._where(node))
        if isinstance(node, yaml.ScalarNode):
            return _meaning(node)
        if id(node) in self.open_nodes:
            message = "a value cannot stand within itself"
            raise InputError(message, where=self._where(node))
        self.open_nodes.add(id(node))
        if isinstance(node, yaml.MappingNode):
            result: Any = self._mapping(node, path)
        else:
            result = [self._entry(child, (*path, index)) for index, child in enumerate(node.value)]
        self.open_nodes.remove(id(node))
        return result

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        """Return a mapping; no key may stand in it twice."""
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
        """Return one entry of a list."""
        self.lines[path] = node.start_mark.line + 1
        return self.value(node, path)

    def _where(self, node: yaml.Node) -> Where:
        """Return the place of a node."""
        return Where(file=self.file, line=node.start_mark.line + 1)


def _meaning(node: yaml.ScalarNode) -> Any:  # noqa: ANN401 - any plain type
    """Return what a word means; a quoted one is text."""
    word: str = node.value
    if node.style is not None:
        return word
    read = next((read for pattern, read in _PLAIN if pattern.fullmatch(word)), str)
    return read(word)
