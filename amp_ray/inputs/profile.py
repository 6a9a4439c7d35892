"""Measured times of layers, which anchor the cost model, and the file format for them.

In a profile folder, ``profile.yaml`` describes the measurements; ``DEVICE.csv`` holds one row per
layer, tp and micro-batch size: ``layer,tp,micro_batch_size,forward_s[,backward_s]``; and
``DEVICE.tpN.slices.json``, if it exists, holds token slices of a block. See docs/formats.md.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field

from amp_ray.arrays import FloatArray
from amp_ray.clusters.device import Device
from amp_ray.errors import InputError, Mistakes, Where, shown
from amp_ray.inputs.operator_profile import OperatorProfile
from amp_ray.inputs.published_profile import PublishedProfile
from amp_ray.inputs.section import Count, Flag, Section, Text, validate
from amp_ray.inputs.slice_table import SlicePoints, parse_slice_table
from amp_ray.inputs.strict_text import MOST_SECONDS, read_count, read_rows, read_seconds
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.units import Precision


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Anchor:
    """Measured times of all layers at one (tp, micro-batch size)."""

    forward_s: FloatArray  # shape ``(num_layers,)``. Seconds of one micro-batch's forward pass.
    # Shape ``(num_layers,)``; None if only the forward pass was measured
    backward_s: FloatArray | None = None

    def __post_init__(self) -> None:
        for times in (self.forward_s, self.backward_s):
            if times is None:
                continue
            if not (np.isfinite(times).all() and (times >= 0).all()):
                wrong = times[~(np.isfinite(times) & (times >= 0))]
                message = f"layer times must be finite and not negative, found {wrong.tolist()}"
                raise ValueError(message)
            times.setflags(write=False)


DeviceTable = Mapping[tuple[int, int], Anchor]  # anchors of one device by (tp, micro-batch size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """A source of layer times.

    An analytic profile has no tables: every time is counted work on a data sheet. A measured
    profile has one table per device; counted work only decides how a measured time changes
    with the micro-batch.
    """

    source: str
    # Anchors by device name; empty for an analytic profile
    tables: Mapping[str, DeviceTable] = field(default_factory=dict)
    # How often the forward pass of a block was run within its measured time
    forward_runs: int = 1
    # Whether measured times include tensor-parallel all-reduces
    includes_all_reduces: bool = False
    # Whether the host waited for the device before it began to launch each measured pass
    starts_idle: bool = False
    # The profile from which the tables were made, if another planner published it. Such a
    # profile cannot be completed by measuring, so candidates that need more are dropped.
    published: PublishedProfile | None = None
    # Measured token slices of a block, by device name and tp
    slices: Mapping[tuple[str, int], SlicePoints] = field(default_factory=dict)
    # Measured operators, if the profile has them; the tables are then their sums over layers, or
    # empty if the model's layers do not match them
    operators: OperatorProfile | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the profile has measurements."""
        return bool(self.tables)

    def anchors(self, device: Device, tp: int) -> dict[int, Anchor]:
        """Return the measured times by micro-batch size; empty for an analytic profile.

        If a measured profile lacks this device or tp, it raises an ``InputError``: only the search
        knows which times it needs.
        """
        if not self.tables:
            if self.operators is not None:
                raise InputError(
                    f"{self.source} has times of operators, not of the model's layers; plan with "
                    "search.space operator"
                )
            return {}
        table = self.tables.get(device.name)
        if table is None:
            raise InputError(
                f"{self.source} has no times for device {device.name!r}, only for "
                f"{', '.join(self.tables)}"
            )
        anchors = {size: anchor for (at_tp, size), anchor in table.items() if at_tp == tp}
        if not anchors:
            tps = _tps(table)
            raise InputError(
                f"{self.source} has no times at tp {tp} for device {device.name!r}, only at tp "
                f"{', '.join(map(str, tps))}; measure it, or limit the search with search.max_tp"
            )
        return anchors

    def gap(self, devices: Iterable[Device], tp: int) -> str | None:
        """Return the tp and device that a candidate needs and a published profile lacks, as text.

        None if nothing is missing. Also None for a profile of our own, since it can be measured
        again; there, `anchors` raises.
        """
        if self.published is None and self.operators is None:
            return None
        needed = {1, tp} if self.includes_all_reduces else {tp}
        for device in devices:
            missing = sorted(needed.difference(_tps(self.tables.get(device.name, {}))))
            if missing:
                return f"tp {missing[0]} on {device.name}"
        return None


def _tps(table: DeviceTable) -> list[int]:
    return sorted({tp for tp, _ in table})


ANALYTIC = Profile(source="analytic")  # planning without any measurement


# ----------------------------------------------------------------------------- files

DESCRIPTION_FILE = "profile.yaml"
_TABLE_SUFFIX = ".csv"
SLICES_SUFFIX = ".slices.json"
_SLICES = re.compile(r"(.+)\.tp([1-9][0-9]{0,5})" + re.escape(SLICES_SUFFIX))

_COLUMNS = ("layer", "tp", "micro_batch_size", "forward_s")

_OPTIONAL = ("backward_s",)

_NUM_KEYS = 3  # columns before the times

_Key = tuple[int, int]


class ProfileDescription(Section):
    """``profile.yaml``."""

    num_layers: Count
    model: Text
    precision: Precision
    forward_runs: Annotated[int, Field(ge=1, le=2, strict=True)] = 1
    includes_all_reduces: Flag = False
    starts_idle: Flag = False
    hardware: Text
    versions: Text
    date: Text | None = None


def parse_profile(
    files: Mapping[str, str],
    *,
    folder: str,
    num_layers: int,
    precision: Precision,
    sequence_length: int | None = None,
) -> Profile:
    """Read a profile folder, given as the text of every file by name.

    A profile is refused if its number of layers, precision or length of sliced sequences differs
    from the experiment's.
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
    slices: dict[tuple[str, int], SlicePoints] = {}
    for name, text in sorted(files.items()):
        if name.endswith(SLICES_SUFFIX):
            with mistakes.collect():
                slices |= _slices(name, text, folder, tables, sequence_length)
    mistakes.check()
    if not tables:
        message = f"no table in it: expected files such as T4{_TABLE_SUFFIX}, one per device"
        raise InputError(message, where=Where(file=folder))
    return Profile(
        source=f"profile {folder}",
        tables=tables,
        forward_runs=description.forward_runs,
        includes_all_reduces=description.includes_all_reduces,
        starts_idle=description.starts_idle,
        slices=slices,
    )


def _slices(
    name: str,
    text: str,
    folder: str,
    tables: Mapping[str, DeviceTable],
    sequence_length: int | None,
) -> dict[tuple[str, int], SlicePoints]:
    """Read the slices of one device and tp, for which whole layers must have been measured too."""
    where = Where(file=f"{folder}/{name}")
    match = _SLICES.fullmatch(name)
    if match is None:
        message = f"expected a name such as T4.tp2{SLICES_SUFFIX}, of a device and a tp"
        raise InputError(message, where=where)
    device, tp = match[1], int(match[2])
    table = parse_slice_table(text, file=where.file or name)
    if sequence_length is not None and table.tokens != sequence_length:
        message = f"slices of {table.tokens} tokens; the model's sequences have {sequence_length}"
        raise InputError(message, where=where.at("tokens"))
    whole = [anchor for (at_tp, _), anchor in tables.get(device, {}).items() if at_tp == tp]
    if not whole or any(anchor.backward_s is None for anchor in whole):
        message = (
            f"slices at tp {tp}, but {device}{_TABLE_SUFFIX} has no forward and backward passes of "
            f"whole sequences at it; measure both with amp-ray profile --token-slices"
        )
        raise InputError(message, where=where)
    if not (table.points.places[:, 2] == 0).any():
        message = "no slice without context could run; remove the file to plan with counted times"
        raise InputError(message, where=where.at("points"))
    return {(device, tp): table.points}


def _description(
    text: str, folder: str, *, num_layers: int, precision: Precision
) -> ProfileDescription:
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


def parse_device_table(text: str, *, num_layers: int, file: str) -> DeviceTable:
    """Read one device's CSV, which must have every layer once at every (tp, micro-batch size)."""
    rows = read_rows(text, file)
    where, header = next(rows, (Where(file=file, line=1), []))
    if tuple(header) not in {_COLUMNS, _COLUMNS + _OPTIONAL}:
        expected = f"{','.join(_COLUMNS)}[,{_OPTIONAL[0]}]"
        raise InputError(f"expected the header {expected}, found {','.join(header)!r}", where=where)
    tables: dict[_Key, FloatArray] = {}
    mistakes = Mistakes()
    for place, row in rows:
        with mistakes.collect():
            layer, key, times = _read_row(row, header, place)
            if layer >= num_layers:
                message = f"found {layer}; the model has layers 0..{num_layers - 1}"
                raise InputError(message, where=place.at("layer"))
            table = tables.setdefault(key, np.full((len(times), num_layers), np.nan))
            if not np.isnan(table[0, layer]):
                message = (
                    f"layer {layer} at tp {key[0]}, micro_batch_size {key[1]} stands here a second "
                    "time"
                )
                raise InputError(message, where=place)
            table[:, layer] = times
    mistakes.check()
    _check_complete(tables, file)
    return {
        key: Anchor(forward_s=table[0], backward_s=table[1] if len(table) > 1 else None)
        for key, table in sorted(tables.items())
    }


def _read_row(row: list[str], header: list[str], where: Where) -> tuple[int, _Key, list[float]]:
    if len(row) != len(header):
        message = f"expected {len(header)} columns ({', '.join(header)}), found {len(row)}"
        raise InputError(message, where=where)
    layer, tp, size = (
        read_count(cell, where.at(name), low=low)
        for cell, name, low in zip(row[:_NUM_KEYS], _COLUMNS, (0, 1, 1), strict=False)
    )
    times = [
        _seconds(cell, where.at(name))
        for cell, name in zip(row[_NUM_KEYS:], header[_NUM_KEYS:], strict=True)
    ]
    return layer, (tp, size), times


def _seconds(cell: str, where: Where) -> float:
    seconds = read_seconds(cell)
    if seconds is None:
        message = f"found {shown(cell)}; expected seconds, a number from 0 to {MOST_SECONDS:,.0f}"
        raise InputError(message, where=where)
    return seconds


def _check_complete(tables: Mapping[_Key, FloatArray], file: str) -> None:
    """Refuse a table without rows, without some layer, or without a time."""
    if not tables:
        raise InputError("the file has a header and no rows", where=Where(file=file))
    for (tp, size), table in tables.items():
        missing = np.flatnonzero(np.isnan(table[0]))
        if len(missing):
            message = (
                f"tp {tp}, micro_batch_size {size}: no row for layer "
                f"{', '.join(map(str, missing))} of 0..{table.shape[1] - 1}"
            )
            raise InputError(message, where=Where(file=file))
        if not table.any():
            message = f"tp {tp}, micro_batch_size {size}: found zeros only; expected seconds"
            raise InputError(message, where=Where(file=file))
