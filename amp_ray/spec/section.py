"""Mappings of a file with known keys, and messages that lead to the place of a mistake."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from amp_ray.errors import InputError
from amp_ray.spec.yaml_text import Document, Path

Flag = Annotated[bool, Field(strict=True)]
Index = Annotated[int, Field(ge=0, lt=10**9, strict=True)]
Count = Annotated[int, Field(ge=1, lt=10**9, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Text = Annotated[str, Field(min_length=1, strict=True)]

_EXPECTED: Final[Mapping[str, str]] = {
    "bool_type": "true or false",
    "dict_type": "a mapping of keys",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "a mapping of keys",
    "string_too_short": "text, not an empty one",
    "string_type": "text (quote it if it is one)",
    "tuple_type": "a list",
}
"""What is expected, by pydantic's type of error; its own words for all others."""

_LONGEST_VALUE: Final = 60
"""Characters of a found value that a message shows."""


_UNKNOWN = "extra_forbidden"
"""Pydantic's word for a key that a mapping does not have."""


class Section(BaseModel):
    """A mapping whose keys are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


_S = TypeVar("_S", bound=Section)


def validate(section: type[_S], document: Document) -> _S:
    """Check a document's keys, types and ranges.

    Args:
        section: The type of the whole document.
        document: What stands in the file.

    Raises:
        InputError: For the first finding in the file's order, with its line, key, what was
            found and what is expected; further findings are counted.
    """
    try:
        return section.model_validate(document.values)
    except ValidationError as error:
        raise _input_error(section, document, error.errors(include_url=False)) from None


def _input_error(
    section: type[Section], document: Document, findings: list[ErrorDetails]
) -> InputError:
    """Make one message from pydantic's findings: the first one in the file's order.

    On one line an unknown key comes first: a misspelt one is missing under its right name too.
    """
    located = sorted(
        (
            (document.where(*path).line or 0, finding["type"] != _UNKNOWN, index, path, finding)
            for index, finding in enumerate(findings)
            for path in [_path(document.values, finding)]
        ),
        key=lambda entry: entry[:3],
    )
    *_, path, finding = located[0]
    more = len({entry[3] for entry in located}) - 1
    suffix = "" if more == 0 else f" ({more} more problem{'s' if more > 1 else ''} after this one)"
    return InputError(_message(section, path, finding) + suffix, where=document.where(*path))


def _path(values: Any, finding: ErrorDetails) -> Path:  # noqa: ANN401 - plain values of a file
    """Drop from pydantic's location what names a type of a union instead of a key."""
    path: list[str | int] = []
    for position, part in enumerate(finding["loc"]):
        is_last = position == len(finding["loc"]) - 1
        known = (isinstance(values, Mapping) and part in values) or (
            isinstance(values, list) and isinstance(part, int) and part < len(values)
        )
        if known:
            values = values[part]
            path.append(part)
        elif is_last and finding["type"] in {"missing", _UNKNOWN}:
            path.append(part)
    return tuple(path)


def _message(section: type[Section], path: Path, finding: ErrorDetails) -> str:
    """Say what was found and what is expected."""
    if finding["type"] == _UNKNOWN:
        known = _known_keys(section, path[:-1])
        close = difflib.get_close_matches(str(path[-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"unknown key {path[-1]!r}; {hint}"
    if finding["type"] == "missing":
        if isinstance(path[-1], int):
            return f"entry {path[-1]} is missing"
        return f"key {path[-1]!r} is missing"
    own_words = finding["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    expected = _EXPECTED.get(finding["type"], own_words)
    found = finding["input"]
    if isinstance(found, str) and found[:1].isdigit() and finding["type"] == "float_type":
        expected += " alone (the key's name tells the unit)"
    return f"found {_shown(found)}; expected {expected}"


def _shown(value: object) -> str:
    """Render a found value as it stands in the file, cut where it is long."""
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _known_keys(section: type[Section], path: Path) -> list[str]:
    """Return the keys of the section that stands at ``path`` below ``section``."""
    for part in path:
        if isinstance(part, str):
            section = _section_type(section.model_fields[part].annotation) or section
    return list(section.model_fields)


def _section_type(annotation: Any) -> type[Section] | None:  # noqa: ANN401 - any type expression
    """Find the section within an annotation such as ``list[NodeSection]``."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = (_section_type(argument) for argument in get_args(annotation))
    return next((section for section in found if section is not None), None)
