"""Mappings of a file with a fixed set of keys, and messages that give the place of a mistake."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from amp_ray.errors import LONGEST_VALUE, InputError, Mistakes, shown
from amp_ray.inputs.yaml_text import Document, Path
from amp_ray.redaction import redact_at

Flag = Annotated[bool, Field(strict=True)]
Index = Annotated[int, Field(ge=0, lt=10**9, strict=True)]
Count = Annotated[int, Field(ge=1, lt=10**9, strict=True)]
Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False, strict=True)]
Text = Annotated[str, Field(min_length=1, strict=True)]
Number = Annotated[float, Field(strict=True)]

_LONGEST_NAME: Final = 100


def _printable(title: str) -> str:
    """Return a text if it can be shown; raise otherwise."""
    if not title.isprintable():
        raise ValueError("no control character")
    if len(title) > _LONGEST_NAME:
        raise ValueError(f"at most {_LONGEST_NAME} characters")
    return title


def _plain(name: str) -> str:
    """Return a name if it can be shown and used in a file name; raise otherwise."""
    if not name.isprintable() or name[0] == "." or not {"/", "\\"}.isdisjoint(name):
        raise ValueError("a plain name: no '/', no '\\', no '.' in front, no control character")
    return _printable(name)


Title = Annotated[Text, AfterValidator(_printable)]
Name = Annotated[Text, AfterValidator(_plain)]

_EXPECTED: Final[Mapping[str, str]] = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "finite_number": "a finite number",
    "float_type": "a number",
    "float_parsing": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "a mapping of keys",
    "string_too_short": "text, not an empty one",
    "string_type": "text (quote it if it is one)",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
    "tuple_type": "a list",
}
"""Text after "expected" in a message, by pydantic's error type; others keep pydantic's text."""

_UNKNOWN: Final = ("extra_forbidden", "unexpected_keyword_argument")
"""Pydantic's error types for an unknown key: of a mapping, of a dataclass."""


def by_type(kind: Any, tag: str, otherwise: str) -> Discriminator:  # noqa: ANN401 - a type or union
    """Choose one of two tagged types by the value, so that a mistake gives one message, not two."""
    return Discriminator(lambda value: tag if isinstance(value, kind) else otherwise)


STRICT: Final = ConfigDict(extra="forbid", hide_input_in_errors=True)
"""Configuration of pydantic dataclasses that are both a section of a file and a core value."""


class Section(BaseModel):
    """A mapping with a fixed set of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def is_section(kind: type) -> bool:
    """Return whether a type is a `Section` or a pydantic dataclass."""
    return issubclass(kind, Section) or is_pydantic_dataclass(kind)


def keys_of(section: type) -> Mapping[str, FieldInfo]:
    """Return the keys of a section."""
    if issubclass(section, BaseModel):
        return section.model_fields
    fields: Mapping[str, FieldInfo] = section.__pydantic_fields__  # type: ignore[attr-defined]
    return fields


@dataclass(frozen=True, slots=True)
class Within:
    """Refuses a figure outside of plausible hardware, most often due to a wrong unit."""

    low: float
    high: float
    unit: str
    or_zero: bool = False

    def __call__(self, value: float) -> float:
        """Return the figure; raise ``ValueError`` if it is outside or not a number."""
        if self.low <= value <= self.high or (self.or_zero and value == 0):
            return value
        message = f"{'0 or ' if self.or_zero else ''}{self.low:,g} to {self.high:,.0f} {self.unit}"
        raise ValueError(message)


Seconds = Annotated[Number, AfterValidator(Within(1e-3, 1e8, "seconds"))]

_S = TypeVar("_S", bound=Section)


def validate(section: type[_S], document: Document, *at: str) -> _S:
    """Check the keys, types and ranges of the mapping at ``at`` in a document, or of all of it.

    The ``InputError`` has one line per mistake: place, value, and the expected value.
    """
    values: Any = document.values
    for key in at:
        values = values[key]
    try:
        return section.model_validate(values)
    except ValidationError as error:
        mistakes = Mistakes()
        for _, mistake in _mistakes(section, document, at, error):
            mistakes.add(mistake)
        mistakes.check()
        raise


def validate_parts(
    section: type[_S], document: Document
) -> tuple[_S, Mapping[str, tuple[InputError, ...]]]:
    """Check a document; return it with its mistakes, by top-level key.

    Reading a key with a mistake from the result raises that mistake.
    """
    try:
        return section.model_validate(document.values), {}
    except ValidationError as error:
        wrong: dict[str, tuple[InputError, ...]] = {}
        for path, mistake in _mistakes(section, document, (), error):
            wrong[str(path[0])] = (*wrong.get(str(path[0]), ()), mistake)
    parts = {
        key: TypeAdapter(field.rebuild_annotation()).validate_python(document.values[key])
        for key, field in section.model_fields.items()
        if key in document.values and key not in wrong
    }
    return cast("_S", _Parts(section.model_construct(**parts), wrong)), wrong


class _Parts:
    """A section with some wrong keys; reading a wrong key raises its mistake."""

    def __init__(self, section: Section, wrong: Mapping[str, tuple[InputError, ...]]) -> None:
        self._section, self._wrong = section, wrong

    def __getattr__(self, key: str) -> Any:  # noqa: ANN401 - the section tells the types
        if key in self._wrong:
            raise self._wrong[key][0]
        return getattr(self._section, key)


def _mistakes(
    section: type[Section], document: Document, at: Path, error: ValidationError
) -> list[tuple[Path, InputError]]:
    """Turn pydantic's errors into messages: unknown keys first, then in the file's order.

    A required key that is misspelt gets one message, for the unknown key, with the path of the
    required one.
    """
    values: Any = document.values
    for key in at:
        values = values[key]
    findings: dict[Path, list[ErrorDetails]] = {}
    for finding in error.errors(include_url=False):
        findings.setdefault(_path(values, finding), []).append(finding)
    unknown = [path for path, [first, *_] in findings.items() if first["type"] in _UNKNOWN]
    meant = {path: (*path[:-1], _meant(section, path) or path[-1]) for path in unknown}
    mistakes = []
    for path, of_path in findings.items():
        if of_path[0]["type"] != "missing" or path not in meant.values():
            where = document.where(*at, *path)
            mistake = InputError(_message(section, path, of_path), where=where)
            mistakes.append((path not in meant, where.line or math.inf, path, mistake))
    mistakes.sort(key=lambda entry: entry[:2])
    return [(meant.get(path, path), mistake) for *_, path, mistake in mistakes]


def _path(values: Any, finding: ErrorDetails) -> Path:  # noqa: ANN401 - plain values of a file
    """Return pydantic's location as keys only, without the names of union types."""
    path: list[str | int] = []
    for position, part in enumerate(finding["loc"]):
        is_last = position == len(finding["loc"]) - 1
        is_key = (isinstance(values, Mapping) and part in values) or (
            isinstance(values, list) and isinstance(part, int) and part < len(values)
        )
        if is_key:
            values = values[part]
            path.append(part)
        elif is_last and finding["type"] in {"missing", *_UNKNOWN}:
            path.append(part)
    return tuple(path)


NOT_PLANNED: Final = ("training", "lora", "peft", "packing", "rl")
"""Keys at the top of a file that ask for more than is planned."""

ONLY_PRE_TRAINING: Final = (
    "all weights of a model are trained, on sequences of one length; no LoRA, packing or RL"
)


def _message(section: type[Section], path: Path, findings: Sequence[ErrorDetails]) -> str:
    """Return what is wrong with a key; each type that its value may have has a finding."""
    finding = findings[0]
    if finding["type"] in _UNKNOWN:
        if path[0] in NOT_PLANNED:
            return f"{_shown(path[0])} is not planned: {ONLY_PRE_TRAINING}"
        meant = _meant(section, path)
        keys = ", ".join(_known_keys(section, path[:-1]))
        hint = f"known here: {keys}" if meant is None else f"did you mean {meant!r}?"
        return f"unknown key {_shown(path[-1])}; {hint}"
    if finding["type"] == "missing":
        if isinstance(path[-1], int):
            return f"entry {path[-1]} is missing"
        return f"key {path[-1]!r} is missing"
    expected = " or ".join(dict.fromkeys(map(_expected, findings)))
    value = redact_at(path, finding["input"])
    if isinstance(value, str) and value[:1].isdigit() and finding["type"] == "float_type":
        expected += " alone (the key's name tells the unit)"
    return f"found {_shown(value)}; expected {expected}"


def _expected(finding: ErrorDetails) -> str:
    if finding["type"] in _EXPECTED:
        return _EXPECTED[finding["type"]].format_map(finding.get("ctx", {}))
    return finding["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _shown(value: object) -> str:
    """Return a value as the file writes it, shortened if it is long."""
    if value is None:
        return "nothing"
    if isinstance(value, str) and value.isdecimal() and len(value) > LONGEST_VALUE:
        return f"a number of {len(value)} digits"
    return shown(value)


def _meant(section: type[Section], path: Path) -> str | None:
    """Return the known key that is most similar to an unknown one; None if none is similar."""
    keys = _known_keys(section, path[:-1])
    close = difflib.get_close_matches(str(path[-1])[:LONGEST_VALUE], keys, n=1)
    return close[0] if close else None


def _known_keys(section: type, path: Path) -> list[str]:
    for part in path:
        if isinstance(part, str):
            section = _section_type(keys_of(section)[part].annotation) or section
    return list(keys_of(section))


def _section_type(annotation: Any) -> type | None:  # noqa: ANN401 - any type expression
    """Find the section within an annotation such as ``list[NodeSection]``."""
    if isinstance(annotation, type) and is_section(annotation):
        return annotation
    sections = (_section_type(argument) for argument in get_args(annotation))
    return next((section for section in sections if section is not None), None)
