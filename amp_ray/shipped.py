"""Tables that ship with the package: YAML files beside the modules that read them."""

from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from typing import Annotated, Any, ClassVar, Final, Self

import yaml
from pydantic import BaseModel, BeforeValidator

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast


def read_shipped(file: str) -> Any:  # noqa: ANN401 - any plain type
    """Return the values of a file, by its path in the package."""
    text = resources.files("amp_ray").joinpath(file).read_text("utf-8")
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - it is a safe one


def with_inherited(
    records: Mapping[str, Mapping[str, Any]], merged: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return records, each with the fields of the record that its ``like`` names.

    Args:
        records: Records by name.
        merged: Fields that are mappings, to which a record adds keys.
    """

    def fields_of(name: str) -> dict[str, Any]:
        fields = {key: value for key, value in records[name].items() if key != "like"}
        inherited = fields_of(records[name]["like"]) if "like" in records[name] else {}
        more = {key: inherited.get(key, {}) | fields.get(key, {}) for key in merged}
        return inherited | fields | more

    return {name: fields_of(name) for name in records}


Words = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda text: text.split() if isinstance(text, str) else text),
]
"""Words of a text, divided by white space."""


class Table(BaseModel, extra="forbid", frozen=True):
    """The table of a file; its fields are all that the file has."""

    file: ClassVar[str]

    @classmethod
    def shipped(cls) -> Self:
        """Return the table, which is read at the first call."""
        table: Self = _table_of(cls)
        return table


@cache
def _table_of(kind: type[Table]) -> Any:  # noqa: ANN401 - an instance of this type
    return kind.model_validate(read_shipped(kind.file))
