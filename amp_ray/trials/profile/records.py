"""Records of a profile: the measurements so far, and the points still missing."""

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args, get_type_hints

from amp_ray.errors import InputError, Where
from amp_ray.inputs.strict_text import MOST_SECONDS
from amp_ray.models.model import Model
from amp_ray.trials.outcome import MOST_BYTES
from amp_ray.trials.profile.points import LayerPoint, LinkPoint

SCHEMA: Final = 1

Record = Mapping[str, Any]
Rule = Callable[[object], bool]
"""Predicate that returns whether a value is valid for its key."""

_LEAST: Final = 1e-9  # minimum of link times in seconds, and of memory rates in bytes per second

_LAYER_KEYS: Final = ("forward_s", "backward_s", "forward_launch_s", "backward_launch_s")
STEP_KEYS: Final = ("host_s_per_micro_batch", "host_s_per_iteration", "memory_bytes_per_s")
_OTHER_KEYS: Final = ("all_reduce_s", "spread_s", "repeats", "kept_bytes", "temporary_bytes")
_SLICE_KEYS: Final = ("forward_s", "backward_s", *_OTHER_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlace:
    """The links of a measurement."""

    scope: str  # ``intra`` within a host, ``rack`` between two of a rack, else ``inter``
    devices: str  # device type of the host, or of both hosts


@dataclass(slots=True)
class ProfileRecords:
    """All measurements of a profile; a later one replaces an earlier one of the same point."""

    # Times and bytes by device and point
    layers: dict[tuple[str, LayerPoint], Record] = field(default_factory=dict)
    # Seconds by place and point
    links: dict[tuple[LinkPlace, LinkPoint], float] = field(default_factory=dict)
    steps: dict[str, Record] = field(default_factory=dict)  # overhead outside layers, by device
    # Times and bytes of slices of blocks, by device and point
    slices: dict[tuple[str, LayerPoint], Record] = field(default_factory=dict)
    # Device and point of each measurement that ran out of memory
    too_large: list[tuple[str, LayerPoint]] = field(default_factory=list)
    # Hardware name that the host reported, by device
    hardware: dict[str, str] = field(default_factory=dict)
    # Software versions of the measurement, by device
    versions: dict[str, str] = field(default_factory=dict)
    # Date of the last measurement, by device
    dates: dict[str, str] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Add one record; it replaces an earlier record of the same point."""
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
        """Smallest micro-batch size of whole sequences that does not fit, by device and tp."""
        limits: dict[tuple[str, int], int] = {}
        for device, point in self.too_large:
            if not point.tokens:
                key, size = (device, point.tp), point.micro_batch_size
                limits[key] = min(size, limits.get(key, size))
        return limits

    def missing_layers(self, device: str, points: Iterable[LayerPoint]) -> tuple[LayerPoint, ...]:
        """Return the points without a measurement that are not known to be too large."""
        too_large = [point for name, point in self.too_large if name == device]
        return tuple(
            point
            for point in points
            if (device, point) not in self.layers
            and (device, point) not in self.slices
            and not any(map(point.is_as_large_as, too_large))
        )

    def missing_links(self, place: LinkPlace, points: Iterable[LinkPoint]) -> tuple[LinkPoint, ...]:
        """Return the points without a measurement on these links."""
        return tuple(point for point in points if (place, point) not in self.links)

    def complete(self, device: str, layers: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Return the pairs of tp and micro-batch size at which all layers were measured."""
        wanted = set(layers)
        measured: dict[tuple[int, int], set[int]] = {}
        for name, point in self.layers:
            if name == device:
                key = point.tp, point.micro_batch_size
                measured.setdefault(key, set()).add(point.layer)
        return tuple(sorted(key for key, layers in measured.items() if wanted <= layers))


def heading(model: Model, precision: str) -> Record:
    """Return the first record of a file: the model and precision of all other records."""
    return {
        "record": "profile",
        "schema": SCHEMA,
        "model": model.shape.figures(),
        "num_layers": model.num_layers,
        "precision": precision,
    }


def record_of_event(event: Mapping[str, Any], *, place: LinkPlace, date: str) -> Record | None:
    """Turn an event of a rank into a record; None for kinds of events that are not recorded.

    Events come from hosts and are validated, so that every record can be read again.

    Args:
        event: See ``amp_ray/training/profiling/__init__.py``.
        place: Links between the ranks of the run.
        date: Today's date.

    Raises:
        ValueError: If a value is missing or impossible.
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


def _check(name: str, values: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    for key, allows in rules.items():
        if not allows(values.get(key)):
            raise ValueError(f"{name} has {key} {reprlib.repr(values.get(key))}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _whole(least: int) -> Rule:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(least: float, most: float) -> Rule:
    return lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    )


_IS_TIME: Final = _number(0, MOST_SECONDS)  # times that a table of a profile may contain

_SIZES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("tp", "micro_batch_size"), _whole(1)),
    **dict.fromkeys(("tokens", "context"), _whole(0)),
}
_POINT: Final[Mapping[str, Rule]] = {"layer": _whole(0), **_SIZES}
POINT_KEYS: Final = tuple(_POINT)  # keys that identify a point

_MEASURED: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("forward_s", "backward_s", "all_reduce_s", "spread_s"), _IS_TIME),
    **dict.fromkeys(("repeats", "kept_bytes", "temporary_bytes"), _number(0, MOST_BYTES)),
}
_FIGURES: Final[Mapping[str, Mapping[str, Rule]]] = {
    "begin": _POINT,
    "layer": {**_POINT, **_MEASURED, **dict.fromkeys(_LAYER_KEYS, _IS_TIME)},
    "slice": {**_POINT, **_MEASURED},
    "link": {
        "what": lambda value: value in get_args(get_type_hints(LinkPoint)["what"]),
        "num_ranks": _whole(2),
        "bytes": _whole(1),
        "seconds": _number(_LEAST, MOST_SECONDS),
    },
    "step": {
        **dict.fromkeys(STEP_KEYS, _IS_TIME),
        "memory_bytes_per_s": _number(_LEAST, MOST_BYTES),
    },
    "oom": _SIZES,
    "hardware": dict.fromkeys(("hardware", "versions"), _is_text),
}
"""Required keys by kind of event, with the rule for each value."""


def parse_records(text: str, *, file: str, expected: Record) -> ProfileRecords:
    """Read the records of earlier runs.

    ``text`` has one JSON object per line; the last line may be incomplete after an interrupted run.

    Raises:
        InputError: If the records are for another model or precision, or invalid.
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
    """Refuse a record that `record_of_event` would not return."""
    kind = record["record"]
    rules: dict[str, Rule] = {**_FIGURES.get(kind, {})}
    rules |= {"layer": _whole(0)} if "layer" in record else {}
    if rules:
        rules["devices"] = _is_text
    if kind == "hardware":
        rules["date"] = _is_text
    if kind == "link":
        rules["scope"] = lambda value: value in {"intra", "rack", "inter"}
    _check(f"record {kind!r}", {"tokens": 0, "context": 0, **record}, rules)


def _check_heading(record: Record, expected: Record, where: Where) -> None:
    """Refuse records for another model or precision."""
    # Round trip through JSON turns tuples into lists, as in the record.
    expected_json = json.loads(json.dumps(expected))
    wrong = [key for key in expected_json if record.get(key) != expected_json[key]]
    if wrong:
        recorded = {key: record.get(key) for key in wrong}
        required = {key: expected_json[key] for key in wrong}
        message = (
            f"this folder holds a profile of something else: {recorded}, but the experiment has "
            f"{required}; name another folder"
        )
        raise InputError(message, where=where)


def _point(record: Record) -> LayerPoint:
    return LayerPoint(
        micro_batch_size=record["micro_batch_size"],
        tp=record["tp"],
        layer=record["layer"],
        tokens=record.get("tokens", 0),
        context=record.get("context", 0),
    )
