"""Metis's profile files: one JSON per device type, tp and micro-batch size, in every spelling.

Times are in milliseconds, memory in MiB, parameters in bytes. All values stand for a whole model:
an input layer, equal layers in the middle, an output layer.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.errors import InputError, Mistakes, Where, shown
from amp_ray.inputs.json_text import parse_json
from amp_ray.inputs.published_profile import Key, PublishedEntry, PublishedProfile, gaps
from amp_ray.units import MIB, milliseconds_to_s

SUFFIX: Final = ".json"

_NAME: Final = re.compile(
    r"(?:DeviceType\.)?(?P<type>[A-Za-z0-9][\w.-]*?)_tp(?P<tp>[1-9][0-9]{0,5})"
    r"_bs(?P<size>[1-9][0-9]{0,8})\.json",
    flags=re.IGNORECASE,
)

_SPELLINGS: Final[Mapping[str, str]] = {"paramters": "parameters"}  # how the README spells it

_GENERATOR_SHARE: Final = 0.5
"""Making a micro-batch takes longer than this share of computing it only by a slip of the unit."""

_OPTIMIZER_SHARE: Final = 5.0
"""An optimizer step takes longer than this many micro-batches only by a slip of the unit."""

_LARGEST: Final = 1e15
"""Of a file's numbers: 30,000 years in milliseconds, a petabyte of parameters."""

_LAYER_TIMES: Final = "execution_time.layer_compute_total_ms"

_Section = tuple[str, ...]
_MODEL: Final[_Section] = ("model", "parameters")
_TIME: Final[_Section] = ("execution_time",)
_MEMORY: Final[_Section] = ("execution_memory",)


def parse_metis_profile(files: Mapping[str, str], *, folder: str) -> PublishedProfile:
    """Read a profile folder, given as text by name, into every file's own values, in SI units.

    Names are ``DeviceType.A100_tp2_bs4.json``, with or without the prefix. All files must be of the
    same number of layers.
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
    """Return device type, tp and micro-batch size of a file name."""
    match = _NAME.fullmatch(name)
    if match is None:
        message = "expected a name such as DeviceType.A100_tp1_bs1.json; move other files away"
        raise InputError(message, where=Where(file=f"{folder}/{name}"))
    return match["type"].upper(), int(match["tp"]), int(match["size"])


def _check_equal_lengths(
    entries: Mapping[Key, PublishedEntry], names: Mapping[Key, str], folder: str
) -> None:
    """Refuse files of different models; most of the files are taken to be right."""
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
    """Tell which micro-batch sizes will have to be interpolated."""
    for kind, tp, sizes in gaps(entries):
        yield (
            f"{folder}: {kind} at tp {tp} lacks micro-batch size {', '.join(map(str, sizes))}, "
            "which others have"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads one file."""

    file: str
    values: Mapping[str, Any]

    def entry(self) -> PublishedEntry:
        """Return the file's values in SI units."""
        layer_ms = self._numbers(_TIME, "layer_compute_total_ms", None)
        if not layer_ms.any():
            message = "found zeros only; expected what each layer takes"
            raise InputError(message, where=Where(file=self.file, key=_LAYER_TIMES))
        num_layers = len(layer_ms)
        memory_mib = self._numbers(_MEMORY, "layer_memory_total_mb", num_layers)
        parameter_bytes = self._numbers(_MODEL, "parameters_per_layer_bytes", num_layers)
        self._check_count(num_layers)
        whole_ms = self._number(_TIME, "forward_backward_time_ms", needed=False)
        optimizer_ms = self._number(_TIME, "optimizer_time_ms")
        generator_ms = self._number(_TIME, "batch_generator_time_ms")
        assert optimizer_ms is not None
        assert generator_ms is not None
        return PublishedEntry(
            layer_s=milliseconds_to_s(1) * layer_ms,
            layer_memory_bytes=MIB * memory_mib,
            layer_parameter_bytes=parameter_bytes,
            forward_backward_s=None if whole_ms is None else milliseconds_to_s(whole_ms),
            optimizer_s=milliseconds_to_s(optimizer_ms),
            batch_generator_s=milliseconds_to_s(generator_ms),
        )

    def notes(self, entry: PublishedEntry) -> Iterator[str]:
        """Tell what is missing or hard to believe in the file."""
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
        """Return a list of numbers, one per layer."""
        value, where = self._found(section, key)
        if value is None:
            self._refuse_missing(section, key)
        if not isinstance(value, list) or not value:
            message = f"found {shown(value)}; expected a list with one number per layer"
            raise InputError(message, where=where)
        for index, number in enumerate(value):
            self._check_number(number, where.at(f"{where.key}.{index}"))
        if num_layers is not None and len(value) != num_layers:
            message = f"found {len(value)} values; {_LAYER_TIMES} has {num_layers}"
            raise InputError(message, where=where)
        return np.array(value, dtype=np.float64)

    def _number(self, section: _Section, key: str, *, needed: bool = True) -> float | None:
        """Return a number; None where it may be missing and is."""
        value, where = self._found(section, key)
        if value is None:
            if needed:
                self._refuse_missing(section, key)
            return None
        self._check_number(value, where)
        return float(value)

    def _check_number(self, value: object, where: Where) -> None:
        """Refuse what is no number, negative or too large to be one."""
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
        if not 0 <= number <= _LARGEST:
            message = f"found {shown(value)}; expected a number from 0 to {_LARGEST:g}"
            raise InputError(message, where=where)

    def _check_count(self, num_layers: int) -> None:
        """Refuse a file whose lists are not of the model that it names."""
        model = self.values.get("model")
        stated = model.get("num_layers") if isinstance(model, dict) else None
        if stated is not None and stated != num_layers:
            message = (
                f"found {shown(stated)}; {_LAYER_TIMES} has {num_layers} layers, input "
                "and output layer included"
            )
            raise InputError(message, where=Where(file=self.file, key="model.num_layers"))

    def _found(self, section: _Section, key: str) -> tuple[Any, Where]:
        """Look for a key in its own section, and where the README and others put it."""
        places = (section, (*section, "layers"), section[:1], ("layers",), ())
        for place in places:
            inner: Any = self.values
            for part in place:
                inner = _get(inner, part)
            value = _get(inner, key)
            if value is not None:
                return value, Where(file=self.file, key=".".join((*place, key)))
        return None, Where(file=self.file, key=".".join((*section, key)))

    def _refuse_missing(self, section: _Section, key: str) -> None:
        """Say which key is missing and what stands in its section instead."""
        inner: Any = self.values
        for part in section:
            inner = _get(inner, part)
        known = ", ".join(inner) if isinstance(inner, dict) else "no such section"
        message = f"key {key!r} is missing; found {known}"
        raise InputError(message, where=Where(file=self.file, key=".".join((*section, key))))


def _get(mapping: object, key: str) -> Any:  # noqa: ANN401 - any value of a file
    """Return a value of a mapping, whatever the key's spelling; None where there is none."""
    if not isinstance(mapping, dict):
        return None
    if key in mapping:
        return mapping[key]
    for wrong, right in _SPELLINGS.items():
        if right in key and key.replace(right, wrong) in mapping:
            return mapping[key.replace(right, wrong)]
    return None
