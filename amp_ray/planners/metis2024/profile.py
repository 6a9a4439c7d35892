"""Conversion of Metis's profiles: its layers to the model's, and total times to two passes.

There is one JSON file per device type, tp and micro-batch size, in several spellings. Times are in
milliseconds, memory in MiB, parameters in bytes. All values are those of a whole model: one input
layer, equal layers in the middle and one output layer.

An `amp_ray` model has embedding, blocks, final norm and head. The values of Metis's input layer go
to the layers before the blocks, those of the output layer to the layers behind the blocks, in
proportion to counted work. The time of both passes beyond the sum of the layers is the time of the
output embedding and the loss, so it goes to the last layers too.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.clusters.device import Device
from amp_ray.errors import InputError, Mistakes, Where, shown
from amp_ray.inputs.profile import Anchor, DeviceTable, Profile
from amp_ray.inputs.published_profile import (
    Key,
    PublishedEntry,
    PublishedProfile,
    gaps,
    layer_groups,
)
from amp_ray.inputs.strict_text import parse_json
from amp_ray.models.model import Layer, Model
from amp_ray.units import MIB, milliseconds_to_s

FORWARD_SHARE: Final = 1 / 3  # a backward pass has two products per forward product

FLOPS_PER_ELEMENT: Final = 200.0
"""Operations that an accelerator computes in the time of moving one element of two bytes; from 30
(P100) to 400 (T4, H100). Used only to compare the layers at the ends of a chain."""

_ENDS: Final = 2  # input and output layer


def read_metis_profile(
    files: Mapping[str, str],
    *,
    folder: str,
    model: Model,
    devices: Iterable[Device],
    profiled: None = None,
) -> Profile:
    """Read a folder of Metis's profile files, given as text by name; return a table per device.

    Its times include tensor-parallel all-reduces. A profile is refused if it has another number of
    layers or lacks one of the device types. A folder has one model, so none is ``profiled``.
    """
    assert profiled is None, "refused where the experiment is checked"
    published = parse_metis_profile(files, folder=folder)
    groups = _groups(model, published.num_layers, folder)
    tables: dict[str, DeviceTable] = {}
    for device in devices:
        kind = profiled_type(published, device, folder=folder)
        tables[device.name] = _table(published, kind, model, groups)
    return Profile(
        source=published.source,
        tables=tables,
        includes_all_reduces=True,
        published=published,
    )


def profiled_type(published: PublishedProfile, device: Device, *, folder: str) -> str:
    """Return the measured type of a device; refuse a device that the profile lacks."""
    kind = published.type_of(device)
    if kind is None:
        message = f"no profile of {device.name!r} in it, only of {', '.join(published.types)}"
        raise InputError(message, where=Where(file=folder))
    return kind


def _groups(model: Model, num_layers: int, folder: str) -> tuple[range, ...]:
    """Map a published chain to a model's layers, or raise with the reason why it does not fit."""
    groups = layer_groups(model, num_layers)
    if groups is not None:
        return groups
    num_blocks = len(model.indices("block"))
    message = (
        f"found {num_layers} layers: an input layer, {num_layers - _ENDS} in the middle and an "
        f"output layer; the model has {num_blocks} blocks, so {num_blocks + _ENDS} are expected. "
        "model.num_layers counts blocks only"
    )
    raise InputError(message, where=Where(file=folder))


def _table(
    published: PublishedProfile, kind: str, model: Model, groups: Sequence[range]
) -> DeviceTable:
    """Return the anchors of one device type."""
    table = {}
    for (of, tp, size), entry in sorted(published.entries.items()):
        if of != kind:
            continue
        alone = published.entries.get((kind, 1, size), entry)
        alone_tp = 1 if (kind, 1, size) in published.entries else tp
        table[tp, size] = _anchor(
            _spread(entry, model, groups),
            _spread(alone, model, groups) * alone_tp / tp,
            model.layers,
        )
    return table


def _spread(entry: PublishedEntry, model: Model, groups: Sequence[range]) -> FloatArray:
    """Return seconds of both passes of every layer of the model, shape ``(model.num_layers,)``.

    ``groups`` are the layers of the model for each measured layer.
    """
    measured_s = entry.layer_s.copy()
    measured_s[-1] += max(0.0, entry.rest_s or 0.0)
    seconds = np.zeros(model.num_layers)
    for time_s, group in zip(measured_s, groups, strict=True):
        weights = np.array([_counted_work(model.layers[index]) for index in group])
        if not weights.any():
            weights = np.ones(len(group))
        seconds[group] = time_s * weights / weights.sum()
    return seconds


def _counted_work(layer: Layer) -> float:
    """Return a layer's work in both passes, in elements that could be moved in the same time."""
    moved = sum(op.forward_elements + op.backward_elements for op in layer.elementwise)
    return moved + sum(gemm.flops for gemm in layer.gemms) / FORWARD_SHARE / FLOPS_PER_ELEMENT


def _anchor(both_s: FloatArray, compute_s: FloatArray, layers: Sequence[Layer]) -> Anchor:
    """Divide measured times of both passes, shape ``(num_layers,)``, into forward and backward.

    The time above ``compute_s`` (the same work without tensor parallelism, divided by tp) counts as
    all-reduces, divided between the passes by the layer's number of them; the rest is computation.
    """
    forward_s = np.empty_like(both_s)
    for index, layer in enumerate(layers):
        forward, backward = (
            sum(layer.all_reduce_elements(direction)) for direction in ("forward", "backward")
        )
        talks = forward + backward > 0
        computed_s = min(both_s[index], compute_s[index]) if talks else both_s[index]
        talk_s = both_s[index] - computed_s
        share = forward / (forward + backward) if talks else 0.0
        forward_s[index] = FORWARD_SHARE * computed_s + share * talk_s
    return Anchor(forward_s=forward_s, backward_s=both_s - forward_s)


SUFFIX: Final = ".json"

_NAME: Final = re.compile(
    r"(?:DeviceType\.)?(?P<type>[A-Za-z0-9][\w.-]*?)_tp(?P<tp>[1-9][0-9]{0,5})"
    r"_bs(?P<size>[1-9][0-9]{0,8})\.json",
    flags=re.IGNORECASE,
)

_MISSPELT: Final = "paramters"  # how the README spells parameters

_GENERATOR_SHARE: Final = 0.5
"""A larger share of the model's time for making a micro-batch means a wrong unit."""

_OPTIMIZER_SHARE: Final = 5.0
"""An optimizer step longer than this many micro-batches means a wrong unit."""

_LARGEST: Final = 1e15
"""Largest number of a file: 30,000 years in milliseconds, a petabyte of parameters."""

_LAYER_TIMES: Final = "execution_time.layer_compute_total_ms"

_Section = tuple[str, ...]
_MODEL: Final[_Section] = ("model", "parameters")
_TIME: Final[_Section] = ("execution_time",)
_MEMORY: Final[_Section] = ("execution_memory",)


def parse_metis_profile(files: Mapping[str, str], *, folder: str) -> PublishedProfile:
    """Read a profile folder, given as text by name; return the values of every file in SI units.

    File names are ``DeviceType.A100_tp2_bs4.json``, with or without the prefix. All files must have
    the same number of layers.
    """
    if not files:
        message = "no profile in it: expected files such as DeviceType.A100_tp1_bs1.json"
        raise InputError(message, where=Where(file=folder))
    names: dict[Key, str] = {}
    for name in sorted(files):
        key = _key(name, folder)
        if key in names:
            message = f"the same device type, tp and micro-batch size as {names[key]}: keep one"
            raise InputError(message, where=Where(file=f"{folder}/{name}"))
        names[key] = name
    entries: dict[Key, PublishedEntry] = {}
    notes: list[str] = []
    mistakes = Mistakes()
    for key, name in sorted(names.items()):
        file = f"{folder}/{name}"
        with mistakes.collect():
            reader = _Reader(file=file, values=parse_json(files[name], file=file))
            entries[key] = reader.entry()
            notes += reader.notes(entries[key])
    mistakes.check()
    _check_equal_lengths(entries, names, folder)
    return PublishedProfile(
        source=f"Metis's profile {folder}",
        entries=entries,
        notes=(*notes, *_gap_notes(entries, folder)),
    )


def _key(name: str, folder: str) -> Key:
    match = _NAME.fullmatch(name)
    if match is None:
        message = "expected a name such as DeviceType.A100_tp1_bs1.json; move other files away"
        raise InputError(message, where=Where(file=f"{folder}/{name}"))
    return match["type"].upper(), int(match["tp"]), int(match["size"])


def _check_equal_lengths(
    entries: Mapping[Key, PublishedEntry], names: Mapping[Key, str], folder: str
) -> None:
    """Refuse files of different lengths; the most frequent length is taken to be right."""
    lengths = [entry.num_layers for entry in entries.values()]
    usual = max(sorted(set(lengths)), key=lengths.count)
    usual_name = next(names[key] for key, entry in entries.items() if entry.num_layers == usual)
    for key, entry in entries.items():
        if entry.num_layers != usual:
            message = (
                f"found {entry.num_layers} layers; {usual_name} has {usual}, and a profile is of "
                "one model"
            )
            where = Where(file=f"{folder}/{names[key]}", key=_LAYER_TIMES)
            raise InputError(message, where=where)


def _gap_notes(entries: Mapping[Key, PublishedEntry], folder: str) -> Iterator[str]:
    """Yield a note for each micro-batch size that needs interpolation."""
    for kind, tp, sizes in gaps(entries):
        yield (
            f"{folder}: {kind} at tp {tp} lacks micro-batch size {', '.join(map(str, sizes))}, "
            "which others have"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    file: str
    values: Mapping[str, Any]

    def entry(self) -> PublishedEntry:
        layer_ms = self._numbers(_TIME, "layer_compute_total_ms", None)
        if not layer_ms.any():
            message = "found zeros only; expected what each layer takes"
            raise InputError(message, where=Where(file=self.file, key=_LAYER_TIMES))
        num_layers = len(layer_ms)
        memory_mib = self._numbers(_MEMORY, "layer_memory_total_mb", num_layers)
        parameter_bytes = self._numbers(_MODEL, "parameters_per_layer_bytes", num_layers)
        self._check_count(num_layers)
        whole_ms, where = self._looked_up(_TIME, "forward_backward_time_ms")
        if whole_ms is not None:
            self._check_number(whole_ms, where)
        return PublishedEntry(
            layer_s=milliseconds_to_s(1) * layer_ms,
            layer_memory_bytes=MIB * memory_mib,
            layer_parameter_bytes=parameter_bytes,
            forward_backward_s=None if whole_ms is None else milliseconds_to_s(whole_ms),
            optimizer_s=milliseconds_to_s(self._number(_TIME, "optimizer_time_ms")),
            batch_generator_s=milliseconds_to_s(self._number(_TIME, "batch_generator_time_ms")),
        )

    def notes(self, entry: PublishedEntry) -> Iterator[str]:
        """Yield a note for each missing or implausible value of the file."""
        rest_s, compute_s = entry.rest_s, float(entry.layer_s.sum())
        if rest_s is None:
            yield (
                f"{self.file}: no forward_backward_time_ms, so what output embedding and loss take "
                "is not known"
            )
        elif rest_s < 0:
            yield (
                f"{self.file}: forward_backward_time_ms is less than its layers together; the "
                "layers count"
            )
        for key, seconds, share in (
            ("batch_generator_time_ms", entry.batch_generator_s, _GENERATOR_SHARE),
            ("optimizer_time_ms", entry.optimizer_s, _OPTIMIZER_SHARE),
        ):
            if seconds > share * compute_s:
                yield (
                    f"{self.file}: {key} is {seconds / compute_s:.1f} times what all layers take: "
                    "is it in microseconds?"
                )

    def _numbers(self, section: _Section, key: str, num_layers: int | None) -> FloatArray:
        value, where = self._needed(section, key)
        if not isinstance(value, list) or not value:
            message = f"found {shown(value)}; expected a list with one number per layer"
            raise InputError(message, where=where)
        for index, number in enumerate(value):
            self._check_number(number, where.at(f"{where.key}.{index}"))
        if num_layers is not None and len(value) != num_layers:
            message = f"found {len(value)} values; {_LAYER_TIMES} has {num_layers}"
            raise InputError(message, where=where)
        return np.array(value, dtype=np.float64)

    def _number(self, section: _Section, key: str) -> float:
        value, where = self._needed(section, key)
        self._check_number(value, where)
        return float(value)

    def _check_number(self, value: object, where: Where) -> None:
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
        if not 0 <= number <= _LARGEST:
            message = f"found {shown(value)}; expected a number from 0 to {_LARGEST:g}"
            raise InputError(message, where=where)

    def _check_count(self, num_layers: int) -> None:
        """Refuse a file whose lists have another length than its model's layers."""
        model = self.values.get("model")
        stated = model.get("num_layers") if isinstance(model, dict) else None
        if stated is not None and stated != num_layers:
            message = (
                f"found {shown(stated)}; {_LAYER_TIMES} has {num_layers} layers, input "
                "and output layer included"
            )
            raise InputError(message, where=Where(file=self.file, key="model.num_layers"))

    def _looked_up(self, section: _Section, key: str) -> tuple[Any, Where]:
        """Look for a key in its own section, then where the README and other files put it."""
        places = (section, (*section, "layers"), section[:1], ("layers",), ())
        for place in places:
            inner: Any = self.values
            for part in place:
                inner = _get(inner, part)
            value = _get(inner, key)
            if value is not None:
                return value, Where(file=self.file, key=".".join((*place, key)))
        return None, Where(file=self.file, key=".".join((*section, key)))

    def _needed(self, section: _Section, key: str) -> tuple[Any, Where]:
        """Look for a key; if it is missing, raise with the keys that its section has instead."""
        value, where = self._looked_up(section, key)
        if value is None:
            inner: Any = self.values
            for part in section:
                inner = _get(inner, part)
            keys = ", ".join(inner) if isinstance(inner, dict) else "no such section"
            raise InputError(f"key {key!r} is missing; found {keys}", where=where)
        return value, where


def _get(mapping: object, key: str) -> Any:  # noqa: ANN401 - any value of a file
    """Return a value of a mapping for any spelling of the key; None if it is missing."""
    if not isinstance(mapping, dict):
        return None
    return mapping.get(key, mapping.get(key.replace("parameters", _MISSPELT)))
