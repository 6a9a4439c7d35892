"""The project's own profile format: a folder with a description and one CSV per device.

``profile.yaml`` describes what was measured; ``DEVICE.csv`` holds one row per layer, tp and
micro-batch size: ``layer,tp,micro_batch_size,forward_s[,backward_s]``; see docs/formats.md.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from amp_ray.errors import InputError, Mistakes, Where
from amp_ray.spec.profile import DeviceTable, Profile
from amp_ray.spec.section import Count, Flag, Section, Text, validate
from amp_ray.spec.table_file import parse_device_table
from amp_ray.spec.yaml_text import parse_yaml
from amp_ray.units import Precision

DESCRIPTION_FILE = "profile.yaml"
_TABLE_SUFFIX = ".csv"


class ProfileDescription(Section):
    """``profile.yaml``."""

    num_layers: Count
    model: Text
    precision: Precision
    forward_runs: Annotated[int, Field(ge=1, le=2, strict=True)] = 1
    includes_all_reduces: Flag = False
    hardware: Text
    versions: Text
    date: Text | None = None


def parse_profile(
    files: Mapping[str, str], *, folder: str, num_layers: int, precision: Precision
) -> Profile:
    """Read a profile folder, given as the text of every file by name.

    Raises:
        InputError: If the description or a table is missing or wrong, or speaks of another
            number of layers or another precision.
    """
    if DESCRIPTION_FILE not in files:
        message = f"no {DESCRIPTION_FILE} in it; found {', '.join(files) or 'an empty folder'}"
        raise InputError(message, where=Where(file=folder))
    mistakes = Mistakes()
    with mistakes.collect():
        text = files[DESCRIPTION_FILE]
        description = _description(text, folder, num_layers=num_layers, precision=precision)
    tables: dict[str, DeviceTable] = {}
    for name, text in sorted(files.items()):
        if name.endswith(_TABLE_SUFFIX):
            with mistakes.collect():
                table = parse_device_table(text, num_layers=num_layers, file=f"{folder}/{name}")
                tables[name.removesuffix(_TABLE_SUFFIX)] = table
    mistakes.check()
    if not tables:
        message = f"no table in it: expected files such as T4{_TABLE_SUFFIX}, one per device"
        raise InputError(message, where=Where(file=folder))
    return Profile(
        source=f"profile {folder}",
        tables=tables,
        forward_runs=description.forward_runs,
        includes_all_reduces=description.includes_all_reduces,
    )


def _description(
    text: str, folder: str, *, num_layers: int, precision: Precision
) -> ProfileDescription:
    """Read ``profile.yaml`` of a model that is to be planned."""
    document = parse_yaml(text, file=f"{folder}/{DESCRIPTION_FILE}")
    description = validate(ProfileDescription, document)
    if description.num_layers != num_layers:
        message = (
            f"found {description.num_layers}; the model has {num_layers} layers, and a profile "
            "must be of the same list of layers (see model.layer_list)"
        )
        raise InputError(message, where=document.where("num_layers"))
    if description.precision != precision:
        message = f"measured in {description.precision}; the experiment has precision {precision}"
        raise InputError(message, where=document.where("precision"))
    return description
