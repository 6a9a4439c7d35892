"""What has been measured so far: records in the order they came, and what is still missing."""

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args, get_type_hints

from amp_ray.errors import InputError, Where
from amp_ray.inputs.csv_text import MOST_SECONDS
from amp_ray.models.model import Model
from amp_ray.trials.outcome import MOST_BYTES
from amp_ray.trials.profile.grid import LayerPoint, LinkPoint

SCHEMA: Final = 1

Record = Mapping[str, Any]
Known = Callable[[object], bool]
"""Tells whether a value is one that its key can have."""

_LEAST: Final = 1e-9  # no link takes fewer seconds, and no memory moves fewer bytes in one

_LAYER_KEYS: Final = ("forward_s", "backward_s", "forward_launch_s", "backward_launch_s")
STEP_KEYS: Final = ("host_s_per_micro_batch", "host_s_per_iteration", "memory_bytes_per_s")
_OTHER_KEYS: Final = ("all_reduce_s", "spread_s", "repeats", "kept_bytes", "temporary_bytes")
_SLICE_KEYS: Final = ("forward_s", "backward_s", *_OTHER_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlace:
    """Which links were measured."""

    scope: str  # ``intra`` within a host, ``inter`` between two
    devices: str  # device type of the host, or of both


@dataclass(slots=True)
class ProfileRecords:
    """Everything measured, the latest of each."""

    # Times and bytes by device and point
    layers: dict[tuple[str, LayerPoint], Record] = field(default_factory=dict)
    # Seconds by place and point
    links: dict[tuple[LinkPlace, LinkPoint], float] = field(default_factory=dict)
    steps: dict[str, Record] = field(default_factory=dict)  # what surrounds the layers, by device
    # Times and bytes of slices of blocks, likewise
    slices: dict[tuple[str, LayerPoint], Record] = field(default_factory=dict)
    # Points that do not fit, with their device
    too_large: list[tuple[str, LayerPoint]] = field(default_factory=list)
    # What a device turned out to be, by device
    hardware: dict[str, str] = field(default_factory=dict)
    # Software it was measured with, by device
    versions: dict[str, str] = field(default_factory=dict)
    # When something of it was measured last, by device
    dates: dict[str, str] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Take one record; of two about the same thing the later counts."""
        kind, devices = record["record"], record.get("devices", "")
        if kind == "layer":
            point = _point(record)
            self.layers[devices, point] = {key: record[key] for key in (*_LAYER_KEYS, *_OTHER_KEYS)}
        elif kind == "link":
            place = LinkPlace(scope=record["scope"], devices=devices)
            message = LinkPoint(
                what=record["what"], num_ranks=record["num_ranks"], num_bytes=record["bytes"]
            )
            self.links[place, message] = record["seconds"]
        elif kind == "step":
            self.steps[devices] = {key: record[key] for key in STEP_KEYS}
        elif kind == "slice":
            self.slices[devices, _point(record)] = {key: record[key] for key in _SLICE_KEYS}
        elif kind == "oom":
            self.too_large.append((devices, _point({"layer": 0, **record})))
        elif kind == "hardware":
            self.hardware[devices] = record["hardware"]
            self.versions[devices] = record["versions"]
            self.dates[devices] = record["date"]

    @property
    def limits(self) -> dict[tuple[str, int], int]:
        """The smallest micro-batch size of whole sequences that does not fit, by device and tp."""
        found: dict[tuple[str, int], int] = {}
        for device, point in self.too_large:
            if not point.tokens:
                key, size = (device, point.tp), point.micro_batch_size
                found[key] = min(size, found.get(key, size))
        return found

    def missing_layers(self, device: str, points: Iterable[LayerPoint]) -> tuple[LayerPoint, ...]:
        """Return the points that were neither measured nor found too large."""
        too_large = [point for name, point in self.too_large if name == device]
        return tuple(
            point
            for point in points
            if (device, point) not in self.layers
            and (device, point) not in self.slices
            and not any(map(point.is_as_large_as, too_large))
        )

    def missing_links(self, place: LinkPlace, points: Iterable[LinkPoint]) -> tuple[LinkPoint, ...]:
        """Return the messages that were not measured."""
        return tuple(point for point in points if (place, point) not in self.links)

    def complete(self, device: str, layers: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Return each tp and micro-batch size at which all layers were measured on a device."""
        wanted = set(layers)
        found: dict[tuple[int, int], set[int]] = {}
        for name, point in self.layers:
            if name == device:
                key = point.tp, point.micro_batch_size
                found.setdefault(key, set()).add(point.layer)
        return tuple(sorted(key for key, measured in found.items() if wanted <= measured))


def heading(model: Model, precision: str) -> Record:
    """Return the first record: what all others are about."""
    return {
        "record": "profile",
        "schema": SCHEMA,
        "model": model.shape.figures(),
        "num_layers": model.num_layers,
        "precision": precision,
    }


def record_of_event(event: Mapping[str, Any], *, place: LinkPlace, date: str) -> Record | None:
    """Turn what a rank said into a record; None for what is not kept.

    A host may say anything: nothing is kept that could not be read again.

    Args:
        event: Of ``amp_ray.training.profiling``.
        place: Where its ranks are.
        date: Of today.

    Raises:
        ValueError: If a figure is missing, or none that anything can have taken.
    """
    kind = str(event.get("event"))
    event = {"tokens": 0, "context": 0, **event}
    if kind not in _FIGURES:
        return None
    _check(f"event {kind!r}", event, _FIGURES[kind])
    if kind == "begin":
        return None
    head = {"record": kind, "devices": place.devices}
    body = {key: event[key] for key in _FIGURES[kind]}
    if kind == "link":
        body["scope"] = place.scope
    if kind == "hardware":
        body["date"] = date
    return {**head, **body}


def _check(name: str, values: Mapping[str, Any], known: Mapping[str, Known]) -> None:
    for key, is_known in known.items():
        if not is_known(values.get(key)):
            raise ValueError(f"{name} has {key} {reprlib.repr(values.get(key))}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    """Tell whether a value is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_size(value: object) -> bool:
    """Tell whether a value is a whole number from 1 on."""
    return _is_count(value) and value != 0


def _is_figure(value: object) -> bool:
    """Tell whether a value is seconds, bytes or a rate that anything can have."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_BYTES
    )


def _is_time(value: object) -> bool:
    """Tell whether a value is seconds that a table of a profile can have."""
    return _is_figure(value) and value <= MOST_SECONDS  # type: ignore[operator]


def _is_positive(value: object) -> bool:
    """Tell whether a value is one that others are divided by."""
    return _is_figure(value) and value >= _LEAST  # type: ignore[operator]


_SIZES: Final[Mapping[str, Known]] = {
    **dict.fromkeys(("tp", "micro_batch_size"), _is_size),
    **dict.fromkeys(("tokens", "context"), _is_count),
}
_POINT: Final[Mapping[str, Known]] = {"layer": _is_count, **_SIZES}
POINT_KEYS: Final = tuple(_POINT)  # what tells one point from another

_MEASURED: Final[Mapping[str, Known]] = {
    **dict.fromkeys(("forward_s", "backward_s", "all_reduce_s", "spread_s"), _is_time),
    **dict.fromkeys(("repeats", "kept_bytes", "temporary_bytes"), _is_figure),
}
_FIGURES: Final[Mapping[str, Mapping[str, Known]]] = {
    "begin": _POINT,
    "layer": {**_POINT, **_MEASURED, **dict.fromkeys(_LAYER_KEYS, _is_time)},
    "slice": {**_POINT, **_MEASURED},
    "link": {
        "what": lambda value: value in get_args(get_type_hints(LinkPoint)["what"]),
        "num_ranks": lambda value: _is_size(value) and value != 1,
        "bytes": _is_size,
        "seconds": lambda value: _is_time(value) and _is_positive(value),
    },
    "step": {**dict.fromkeys(STEP_KEYS, _is_time), "memory_bytes_per_s": _is_positive},
    "oom": _SIZES,
    "hardware": dict.fromkeys(("hardware", "versions"), _is_text),
}
"""By what a rank says: what has to be there, and what it has to be."""


def parse_records(text: str, *, file: str, expected: Record) -> ProfileRecords:
    """Read what earlier runs have left.

    ``text`` has one JSON object per line; the last may be torn, if a run was cut off.

    Raises:
        InputError: If the records are of another model or precision, or cannot be read.
    """
    records = ProfileRecords()
    lines = text.splitlines()
    if not lines:
        return records
    for number, line in enumerate(lines, start=1):
        where = Where(file=file, line=number)
        try:
            record = json.loads(line)
            if number == 1:
                _check_heading(record, expected, where)
            _check_record(record)
            records.add(record)
        except json.JSONDecodeError as error:
            if number == len(lines) and number > 1:
                break
            message = f"not JSON: {error.msg}; remove the file to measure everything anew"
            raise InputError(message, where=where) from None
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            message = f"not a record of this version ({error!r}); remove the file to measure anew"
            raise InputError(message, where=where) from None
    return records


def _check_record(record: Record) -> None:
    """Refuse a record that `record_of_event` does not make."""
    kind = record["record"]
    known: dict[str, Known] = {**_FIGURES.get(kind, {})}
    known |= {"layer": _is_count} if "layer" in record else {}
    if known:
        known["devices"] = _is_text
    if kind == "hardware":
        known["date"] = _is_text
    if kind == "link":
        known["scope"] = lambda value: value in {"intra", "inter"}
    _check(f"record {kind!r}", {"tokens": 0, "context": 0, **record}, known)


def _check_heading(record: Record, expected: Record, where: Where) -> None:
    """Refuse records of another profile."""
    # Through JSON, as tuples come back as lists.
    wanted = json.loads(json.dumps(expected))
    wrong = [key for key in wanted if record.get(key) != wanted[key]]
    if wrong:
        found = {key: record.get(key) for key in wrong}
        asked = {key: wanted[key] for key in wrong}
        message = (
            f"this folder holds a profile of something else: {found}, but the experiment has "
            f"{asked}; name another folder"
        )
        raise InputError(message, where=where)


def _point(record: Record) -> LayerPoint:
    """Return the layer, tp and size that a record is about."""
    return LayerPoint(
        micro_batch_size=record["micro_batch_size"],
        tp=record["tp"],
        layer=record["layer"],
        tokens=record.get("tokens", 0),
        context=record.get("context", 0),
    )
