"""Layer times from a trace of the PyTorch profiler, made in the user's own training run.

A trace is the Chrome JSON that ``torch.profiler.profile().export_chrome_trace`` writes. In it, a
``record_function`` range around each layer names the layer. The forward pass of a layer is what its
range starts, the backward pass what autograd computes for the operations in the range: the profiler
links each of them to its forward operation (``fwdbwd`` events).

On a GPU a pass lasts from the start of its first kernel to the end of its last one; a launch on the
host and its kernel have the same ``correlation``. Without kernels in the trace, the times are those
of the host's operations.
"""

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.errors import InputError, Where, shown
from amp_ray.inputs.not_read import NotRead, not_read
from amp_ray.inputs.profile import DESCRIPTION_FILE, Anchor
from amp_ray.inputs.strict_text import MOST_SECONDS, parse_json
from amp_ray.units import Precision

MOST_CHARACTERS: Final = 2**28
"""Most characters of a trace: two million events, for which reading needs 3 GB and 20 s."""

RANGES: Final = "layer {}"
"""Name of a layer's range; ``{}`` is its place in the model's list of layers."""

_RANGE_KINDS: Final = ("user_annotation", "python_function")
_KERNEL_KINDS: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_KINDS: Final = ("cuda_runtime", "cuda_driver")
_OPERATION: Final = "cpu_op"
_LINK: Final = "fwdbwd"
_BACKWARD: Final = "autograd::engine::evaluate_function"
_SCHEMA: Final = 1
_KEYS: Final = (
    *("traceEvents", "deviceProperties", "schemaVersion", "distributedInfo", "traceName"),
    *("trace_id", "displayTimeUnit", "baseTimeNanoseconds", "host_name", "*_version"),
    *("record_shapes", "with_*", "profile_memory"),
)
"""Keys of a trace that are read, or on which no plan depends (``output_json.cpp`` of Kineto)."""
_KINDS: Final = (
    *("gpu_user_annotation", "ac2g", "async_cpu_to_gpu", "async_gpu", "external_correlation"),
    *("overhead", "cuda_sync", "cuda_event", "cpu_instant_event", "fwdbwd", "Trace", "None"),
    *("collective_comm", "cuda_profiler_range", "gpu_pm_counter"),
)
"""Kinds of events beside those that are read, on which no time of a layer depends
(``ActivityType.cpp`` of Kineto)."""
_MOST_KINDS: Final = 50
_MICRO: Final = 1e-6
_MOST_MICROSECONDS: Final = 1e18  # of a clock
_MOST_NAMED: Final = 5
_MOST_DEVICE_LETTERS: Final = 100

Thread = tuple[object, object]
Point = tuple[Thread, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Layer times of one trace."""

    anchor: Anchor  # medians over the passes in the trace
    num_passes: int  # forward passes of the layer that has fewest
    devices: tuple[str, ...]  # names of the GPUs; empty without GPU
    has_kernels: bool
    not_read: tuple[NotRead, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    """Intervals of one thread in the order of their starts; none contains another."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    names: list[int] = field(default_factory=list)  # what each interval belongs to

    def at(self, time: float) -> int | None:
        """Return what the interval around a time belongs to."""
        index = bisect_right(self.starts, time) - 1
        return self.names[index] if index >= 0 and time < self.ends[index] else None


@dataclass(slots=True, kw_only=True)
class _Events:
    """The events of a trace that tell of layers; times in microseconds."""

    # Layer, thread, start and end of each range around a layer
    ranges: list[tuple[int, Thread, float, float]] = field(default_factory=list)
    # Thread, start and end of each operation of autograd
    backward: list[tuple[Thread, float, float]] = field(default_factory=list)
    launches: dict[int, Point] = field(default_factory=dict)  # by correlation
    # Correlation, start and end of each kernel
    kernels: list[tuple[int, float, float]] = field(default_factory=list)
    forward_ends: dict[object, Point] = field(default_factory=dict)  # of links, by their number
    backward_ends: dict[object, Point] = field(default_factory=dict)
    other_ranges: dict[str, None] = field(default_factory=dict)  # names of ranges of no layer
    gpus: set[int] = field(default_factory=set)  # numbers of those that ran kernels
    other_kinds: dict[str, None] = field(default_factory=dict)  # of events that are not read


def read_trace(text: str, *, file: str, num_layers: int, ranges: str = RANGES) -> Trace:
    """Read a trace.

    ``ranges`` is the name of a layer's range, with ``{}`` for its place in the model's list of
    ``num_layers`` layers.

    Raises:
        InputError: If the trace is cut short, has values of a wrong type, or lacks the ranges, the
            kernels or the backward pass of a layer.
    """
    if ranges.count("{}") != 1:
        raise InputError(f"--ranges: found {shown(ranges)}; expected one {{}}, such as {RANGES!r}")
    document = parse_json(text, file=file)
    values = document.get("traceEvents")
    where = Where(file=file, key="traceEvents")
    if not isinstance(values, list):
        raise InputError("expected the list of events of torch.profiler's trace", where=where)
    events = _collect(values, file, ranges)
    if len(events.gpus) > 1:
        message = f"kernels of {len(events.gpus)} GPUs; expected a trace of one rank with one GPU"
        raise InputError(message, where=where)
    _check_ranges(events, where, num_layers, ranges)
    forward_s, backward_s = _passes(events, where)
    layers = [layer for layer, *_ in events.ranges]
    anchor = Anchor(
        forward_s=_medians(forward_s, layers, num_layers, where, "forward"),
        backward_s=_medians(backward_s, layers, num_layers, where, "backward")
        if backward_s
        else None,
    )
    counts = np.bincount([layers[index] for index in forward_s], minlength=num_layers)
    return Trace(
        anchor=anchor,
        num_passes=int(counts.min()),
        devices=_devices(document, events.gpus, file),
        has_kernels=bool(events.kernels),
        not_read=_not_read(document, events, file),
    )


def trace_folder(
    traces: Mapping[tuple[int, int], Trace], *, device: str, model: str, precision: Precision
) -> dict[str, str]:
    """Return the files of a profile folder by name; ``traces`` are by tp and micro-batch size."""
    num_layers = len(next(iter(traces.values())).anchor.forward_s)
    has_backward = all(trace.anchor.backward_s is not None for trace in traces.values())
    names = dict.fromkeys(name for trace in traces.values() for name in trace.devices)
    passes = min(trace.num_passes for trace in traces.values())
    description = (
        "# Read from traces of the PyTorch profiler by amp-ray import trace.\n"
        f"num_layers: {num_layers}\n"
        f"model: {json.dumps(model)}\n"
        f"precision: {precision}\n"
        f"includes_all_reduces: {json.dumps(any(tp > 1 for tp, _ in traces))}\n"
        f"hardware: {json.dumps(', '.join(names) or 'no GPU in the trace')}\n"
        f"versions: {json.dumps(f'torch.profiler, {passes} passes or more of each layer')}\n"
    )
    lines = ["layer,tp,micro_batch_size,forward_s" + (",backward_s" if has_backward else "")]
    for (tp, size), trace in sorted(traces.items()):
        columns = [trace.anchor.forward_s]
        if has_backward and trace.anchor.backward_s is not None:
            columns.append(trace.anchor.backward_s)
        for layer, seconds in enumerate(zip(*columns, strict=True)):
            cells = ",".join(f"{value:.6g}" for value in seconds)
            lines.append(f"{layer},{tp},{size},{cells}")
    return {f"{device}.csv": "\n".join(lines) + "\n", DESCRIPTION_FILE: description}


def _collect(values: Sequence[object], file: str, ranges: str) -> _Events:
    """Sort the events by kind; refuse those with values of a wrong type."""
    events = _Events()
    before, _, behind = ranges.partition("{}")
    name_of_layer = re.compile(re.escape(before) + "([0-9]{1,6})" + re.escape(behind))
    for index, event in enumerate(values):
        if not isinstance(event, dict):
            where = Where(file=file, key=f"traceEvents.{index}")
            raise InputError(f"expected an event, found {shown(event)}", where=where)
        read = _Reader(event=event, file=file, index=index)
        phase = event.get("ph")
        if phase == "X":
            _add_span(events, read, name_of_layer)
        elif phase in {"s", "f"} and event.get("cat") == _LINK:
            ends = events.forward_ends if phase == "s" else events.backward_ends
            ends[read.identity("id")] = (read.thread(), read.time("ts"))
    return events


def _add_span(events: _Events, read: "_Reader", name_of_layer: re.Pattern[str]) -> None:
    kind = read.event.get("cat")
    if kind in _KERNEL_KINDS + _LAUNCH_KINDS:
        correlation = read.correlation()
        if correlation is None:
            return
        if kind in _KERNEL_KINDS:
            events.kernels.append((correlation, *read.span()))
            events.gpus |= read.gpu()
        else:
            events.launches[correlation] = (read.thread(), read.time("ts"))
    elif kind in _RANGE_KINDS:
        name = read.name()
        match = name_of_layer.fullmatch(name)
        if match:
            events.ranges.append((int(match[1]), read.thread(), *read.span()))
        elif kind == _RANGE_KINDS[0] and len(events.other_ranges) < _MOST_NAMED:
            events.other_ranges[name] = None
    elif kind == _OPERATION and read.name().startswith(_BACKWARD):
        events.backward.append((read.thread(), *read.span()))
    elif kind != _OPERATION and len(events.other_kinds) < _MOST_KINDS:
        events.other_kinds[str(kind)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    event: Mapping[str, Any]
    file: str
    index: int

    def _refuse(self, key: str, value: object, expected: str) -> InputError:
        where = Where(file=self.file, key=f"traceEvents.{self.index}.{key}")
        return InputError(f"found {shown(value)}; expected {expected}", where=where)

    def name(self) -> str:
        value = self.event.get("name")
        if not isinstance(value, str):
            raise self._refuse("name", value, "a text")
        return value

    def identity(self, key: str) -> object:
        value = self.event.get(key)
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise self._refuse(key, value, "a number or a text")
        return value

    def thread(self) -> Thread:
        return self.identity("pid"), self.identity("tid")

    def time(self, key: str) -> float:
        value = self.event.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refuse(key, value, "microseconds")
        if abs(value) > _MOST_MICROSECONDS:
            raise self._refuse(key, value, "microseconds of a clock")
        return float(value)

    def span(self) -> tuple[float, float]:
        start, duration = self.time("ts"), self.time("dur")
        if not 0 <= duration <= MOST_SECONDS / _MICRO:
            raise self._refuse("dur", duration, "microseconds, not negative")
        return start, start + duration

    def gpu(self) -> set[int]:
        """Return the number of the GPU that ran a kernel, if the event tells it."""
        value = self._argument("device") if self.event["cat"] == _KERNEL_KINDS[0] else None
        return {value} if isinstance(value, int) else set()

    def _argument(self, key: str) -> object:
        arguments = self.event.get("args", {})
        if not isinstance(arguments, dict):
            raise self._refuse("args", arguments, "a JSON object")
        return arguments.get(key)

    def correlation(self) -> int | None:
        value = self._argument("correlation")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._refuse("args.correlation", value, "a number")
        return value


def _check_ranges(events: _Events, where: Where, num_layers: int, ranges: str) -> None:
    """Refuse a trace that lacks the range of a layer, or has one of no layer."""
    layers = {layer for layer, *_ in events.ranges}
    advice = "put torch.profiler.record_function around each entry of the model's list of layers"
    if not layers:
        names = ", ".join(map(shown, events.other_ranges)) or "none"
        message = f"no range named {_range_of(0, ranges)!r}, ...; {advice} (other ranges: {names})"
        raise InputError(message, where=where)
    if max(layers) >= num_layers:
        message = f"{_range_of(max(layers), ranges)!r}: the model has layers 0..{num_layers - 1}"
        raise InputError(message, where=where)
    missing = [layer for layer in range(num_layers) if layer not in layers]
    if missing:
        names = ", ".join(repr(_range_of(layer, ranges)) for layer in missing[:_MOST_NAMED])
        more = ", ..." if len(missing) > _MOST_NAMED else ""
        message = f"no range named {names}{more}; {advice} (0..{num_layers - 1})"
        raise InputError(message, where=where)


def _by_thread(
    spans: Iterable[tuple[Thread, float, float]], where: Where | None = None
) -> dict[Thread, _Spans]:
    """Return intervals by thread, numbered as they come; refuse overlaps if there is a place."""
    result: dict[Thread, _Spans] = defaultdict(_Spans)
    numbered = enumerate(spans)
    for number, (thread, start, end) in sorted(numbered, key=lambda entry: entry[1][1:]):
        of_thread = result[thread]
        if of_thread.ends and start < of_thread.ends[-1]:
            if where is None:  # an operation of autograd within another one
                continue
            message = "ranges of layers overlap in one thread; each must end before the next begins"
            raise InputError(message, where=where)
        of_thread.starts.append(start)
        of_thread.ends.append(end)
        of_thread.names.append(number)
    return result


def _passes(events: _Events, where: Where) -> tuple[dict[int, float], dict[int, float]]:
    """Return the seconds of the forward and of the backward pass of each range, by its number."""
    of_layers = ((thread, start, end) for _, thread, start, end in events.ranges)
    ranges = _by_thread(of_layers, where)
    backward = _by_thread(events.backward)
    range_of_op: dict[int, int] = {}
    for number, (thread, time) in events.backward_ends.items():
        start = events.forward_ends.get(number)
        op = backward[thread].at(time) if thread in backward else None
        if start is None or op is None or start[0] not in ranges:
            continue
        inside = ranges[start[0]].at(start[1])
        if inside is not None:
            range_of_op.setdefault(op, inside)
    if not events.kernels:
        return _host_passes(events, ranges, range_of_op)
    spans: tuple[dict[int, tuple[float, float]], ...] = ({}, {})
    for correlation, start_us, end_us in events.kernels:
        if correlation not in events.launches:
            continue
        thread, time = events.launches[correlation]
        inside = ranges[thread].at(time) if thread in ranges else None
        is_backward = inside is None
        if inside is None:
            op = backward[thread].at(time) if thread in backward else None
            inside = None if op is None else range_of_op.get(op)
        if inside is not None:
            first, last = spans[is_backward].get(inside, (start_us, end_us))
            spans[is_backward][inside] = min(first, start_us), max(last, end_us)
    forward_s, backward_s = (
        {number: _MICRO * (last - first) for number, (first, last) in of_pass.items()}
        for of_pass in spans
    )
    return forward_s, backward_s


def _host_passes(
    events: _Events, ranges: Mapping[Thread, _Spans], range_of_op: Mapping[int, int]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the same for a trace without kernels, by the host's operations.

    What autograd computes again, in ranges within its operations, is no part of a backward pass.
    """
    forward_s = {
        number: _MICRO * (end - start) for number, (_, _, start, end) in enumerate(events.ranges)
    }
    backward_s: dict[int, float] = defaultdict(float)
    for op, number in range_of_op.items():
        thread, start, end = events.backward[op]
        again_us = sum(_within(ranges.get(thread, _Spans()), start, end))
        backward_s[number] += _MICRO * (end - start - again_us)
    return forward_s, backward_s


def _within(spans: _Spans, start: float, end: float) -> Iterator[float]:
    """Yield the lengths of the intervals that begin between two times."""
    index = bisect_right(spans.starts, start)
    while index < len(spans.starts) and spans.starts[index] < end:
        yield min(spans.ends[index], end) - spans.starts[index]
        index += 1


def _medians(
    seconds: Mapping[int, float],
    layers: Sequence[int],
    num_layers: int,
    where: Where,
    direction: str,
) -> FloatArray:
    """Return the median over the passes of each layer; refuse a layer without any."""
    of_layer: dict[int, list[float]] = defaultdict(list)
    for number, value in seconds.items():
        of_layer[layers[number]].append(value)
    missing = [layer for layer in range(num_layers) if layer not in of_layer]
    if missing:
        names = ", ".join(map(str, missing[:_MOST_NAMED]))
        more = ", ..." if len(missing) > _MOST_NAMED else ""
        message = (
            f"nothing of the {direction} pass of layer {names}{more}; record whole steps, without "
            "CUDA graphs or compilation across layers"
        )
        raise InputError(message, where=where)
    return np.array([float(np.median(of_layer[layer])) for layer in range(num_layers)])


def _range_of(layer: int, ranges: str) -> str:
    return ranges.replace("{}", str(layer))


def _devices(document: Mapping[str, Any], gpus: set[int], file: str) -> tuple[str, ...]:
    """Return the names of the GPUs that ran kernels, or else of all in a trace."""
    properties = document.get("deviceProperties", [])
    where = Where(file=file, key="deviceProperties")
    if not isinstance(properties, list):
        raise InputError(f"expected a list, found {shown(properties)}", where=where)
    entries = [entry for entry in properties if isinstance(entry, dict)]
    used = [entry for entry in entries if entry.get("id") in [*gpus]] or entries
    names = (entry.get("name") for entry in used)
    texts = [name[:_MOST_DEVICE_LETTERS] for name in names if isinstance(name, str)]
    return tuple(dict.fromkeys(texts))


def _not_read(document: Mapping[str, Any], events: _Events, file: str) -> tuple[NotRead, ...]:
    """Name the keys and the kinds of events that are not read and may matter."""
    version = document.get("schemaVersion", _SCHEMA)
    of_version = () if version == _SCHEMA else (f"schemaVersion {shown(version)}",)
    return (
        *not_read((*document, *of_version), file, known=_KEYS),
        *not_read(events.other_kinds, file, known=_KINDS, shown_as="events of {}"),
    )
