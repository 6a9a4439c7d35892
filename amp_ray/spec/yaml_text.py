"""YAML text to plain values that remember their lines."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from amp_ray.errors import InputError, Where

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed YAML mapping.

    Args:
        file: Name of the file, for messages.
        values: Plain dictionaries, lists, strings, numbers.
        lines: Line of every key and list entry, by its path.
    """

    file: str
    values: Mapping[str, Any]
    lines: Mapping[Path, int]

    def where(self, path: Path) -> Where:
        """Return the place of ``path``, or of its nearest parent that stands in the file."""
        line = next(
            (self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None
        )
        return Where(file=self.file, line=line, key=".".join(map(str, path)) or None)


def parse_yaml(text: str, *, file: str) -> Document:
    """Read a YAML mapping.

    Raises:
        InputError: If the text is not YAML, empty, not a mapping, or names a key twice.
    """
    loader = yaml.CSafeLoader(text)
    lines: dict[Path, int] = {}
    try:
        root = loader.get_single_node()
        values = None if root is None else _construct(loader, root, (), lines, file)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"not valid YAML: {error.problem or error.context}; is the file cut short?"
        where = Where(file=file, line=None if mark is None else mark.line + 1)
        raise InputError(message, where=where) from None
    except yaml.YAMLError as error:
        message = f"not valid YAML: {error}"
        raise InputError(message, where=Where(file=file)) from None
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        found = "an empty file" if values is None else f"a {type(values).__name__}"
        message = f"expected a mapping of keys such as 'name:' and 'model:', found {found}"
        raise InputError(message, where=Where(file=file))
    return Document(file=file, values=values, lines=lines)


def _construct(
    loader: yaml.CSafeLoader, node: yaml.Node, path: Path, lines: dict[Path, int], file: str
) -> Any:  # noqa: ANN401 - YAML values are of any plain type
    """Turn a node into plain values and note the line of everything below it."""
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            line = key_node.start_mark.line + 1
            if key in result:
                message = f"key {key!r} stands here and on line {lines[(*path, key)]}: keep one"
                raise InputError(message, where=Where(file=file, line=line))
            lines[(*path, key)] = line
            result[key] = _construct(loader, value_node, (*path, key), lines, file)
        return result
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            lines[(*path, index)] = child.start_mark.line + 1
        return [
            _construct(loader, child, (*path, index), lines, file)
            for index, child in enumerate(node.value)
        ]
    return loader.construct_object(node, deep=True)
