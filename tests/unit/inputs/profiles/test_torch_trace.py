"""Traces of the PyTorch profiler: what their events say of layers, and hostile ones."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.profile import parse_profile
from amp_ray.inputs.profiles.torch_trace import Trace, read_trace, trace_folder

Event = dict[str, Any]

MAIN, AUTOGRAD = 1, 2
"""Threads of the forward and of the backward pass."""


def event(kind: str, name: str, start: float, length: float, **more: Any) -> Event:  # noqa: ANN401
    thread = {"pid": 7, "tid": MAIN, "args": {}}
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length} | thread | more


def kernel(number: int, launch: Event, start: float, length: float) -> tuple[Event, Event]:
    """Return a launch with its number, and the kernel."""
    arguments = {"args": {"correlation": number}}
    return launch | arguments, event("kernel", "gemm", start, length, **arguments)


def launch(start: float, thread: int = MAIN) -> Event:
    return event("cuda_runtime", "cudaLaunchKernel", start, 1, tid=thread)


def operation(start: float, length: float) -> Event:
    name = "autograd::engine::evaluate_function: MmBackward0"
    return event("cpu_op", name, start, length, tid=AUTOGRAD)


def link(number: int, forward: float, backward: float, thread: int = MAIN) -> tuple[Event, Event]:
    same = {"cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 7}
    return (
        {"ph": "s", "ts": forward, "tid": thread} | same,
        {"ph": "f", "ts": backward, "tid": AUTOGRAD} | same,
    )


def gpu_step(start: float = 0.0, scale: float = 1.0) -> list[Event]:
    """Two layers: layer 0 has two kernels 8 us apart, and one kernel in its backward pass."""
    number = int(start)
    return [
        event("user_annotation", "layer 0", start, 10),
        event("user_annotation", "layer 1", start + 10, 10),
        *kernel(number + 1, launch(start + 1), start + 100, 4 * scale),
        *kernel(number + 2, launch(start + 2), start + 100 + 8 * scale, 2 * scale),
        *kernel(number + 3, launch(start + 11), start + 120, 5 * scale),
        *kernel(number + 4, launch(start + 25), start + 130, 50),  # of the optimizer: no layer's
        operation(start + 30, 5),
        *link(number + 1, start + 12, start + 30),
        *kernel(number + 5, launch(start + 31, AUTOGRAD), start + 200, 11 * scale),
        operation(start + 40, 5),
        *link(number + 2, start + 2, start + 41),
        *kernel(number + 6, launch(start + 42, AUTOGRAD), start + 220, 7 * scale),
    ]


def host_step() -> list[Event]:
    """The same without a GPU; the backward pass of layer 0 computes it again within 2 us."""
    return [
        event("user_annotation", "layer 0", 0, 10),
        event("user_annotation", "layer 1", 10, 6),
        operation(30, 5),
        *link(1, 12, 30),
        operation(40, 9),
        *link(2, 2, 41),
        event("user_annotation", "layer 0", 42, 2, tid=AUTOGRAD),
    ]


def read(events: object, num_layers: int = 2, **more: Any) -> Trace:  # noqa: ANN401
    text = json.dumps({"traceEvents": events, **more})
    return read_trace(text, file="t.json", num_layers=num_layers)


def microseconds(trace: Trace) -> list[list[float]]:
    times = (trace.anchor.forward_s, trace.anchor.backward_s)
    return [[round(1e6 * value, 6) for value in row] for row in times if row is not None]


def test_a_pass_lasts_from_its_first_to_its_last_kernel() -> None:
    trace = read(gpu_step(), deviceProperties=[{"name": "NVIDIA H100"}, {"name": "NVIDIA H100"}])
    assert microseconds(trace) == [[10, 5], [7, 11]]
    assert (trace.num_passes, trace.devices) == (1, ("NVIDIA H100",))


def test_the_median_of_the_passes_counts_whatever_the_order_of_events() -> None:
    steps = [*gpu_step(), *gpu_step(1000.0, 3.0), *gpu_step(2000.0, 1.5)]
    trace = read(steps[::-1])
    assert microseconds(trace) == [[15, 7.5], [10.5, 16.5]]
    assert trace.num_passes == 3


def test_a_layer_computed_again_in_the_backward_pass_counts_as_forward() -> None:
    again = [
        event("user_annotation", "layer 0", 40.5, 1, tid=AUTOGRAD),
        *kernel(90, launch(40.6, AUTOGRAD), 210, 10),
    ]
    assert microseconds(read(gpu_step() + again)) == [[10, 5], [7, 11]]


def test_without_a_gpu_the_hosts_operations_count() -> None:
    trace = read(host_step())
    assert microseconds(trace) == [[6, 6], [7, 5]]
    assert trace.devices == ()


def test_a_trace_without_backward_pass_has_forward_times_alone() -> None:
    assert microseconds(read(gpu_step()[:9])) == [[10, 5]]


def test_other_names_of_ranges() -> None:
    events = [
        one | {"name": one["name"].replace("layer ", "h."), "cat": "python_function"}
        if one.get("cat") == "user_annotation"
        else one
        for one in gpu_step()
    ]
    text = json.dumps({"traceEvents": events})
    trace = read_trace(text, file="t.json", num_layers=2, ranges="h.{}")
    assert microseconds(trace) == [[10, 5], [7, 11]]


@pytest.mark.parametrize("ranges", ["layer", "{} {}", ""])
def test_a_name_without_one_place_for_the_number_is_refused(ranges: str) -> None:
    with pytest.raises(InputError, match=r"--ranges: found .*; expected one {}"):
        read_trace("{}", file="t.json", num_layers=2, ranges=ranges)


def test_a_folder_is_one_that_plans_read() -> None:
    hostile = 'H100"\n: [\x1b[31m'
    traces = {
        (1, 4): read(gpu_step(), deviceProperties=[{"name": hostile}]),
        (2, 4): read(gpu_step(0.0, 0.5)),
    }
    files = trace_folder(traces, device="H100", model="gpt2: {two}", precision="bf16")
    profile = parse_profile(files, folder="p", num_layers=2, precision="bf16")
    assert profile.includes_all_reduces
    anchors = profile.tables["H100"]
    assert list(anchors) == [(1, 4), (2, 4)]
    assert anchors[1, 4].forward_s == pytest.approx([10e-6, 5e-6])
    assert anchors[2, 4].backward_s == pytest.approx([3.5e-6, 5.5e-6])
    alone = trace_folder({(1, 1): read(gpu_step()[:9])}, device="T4", model="m", precision="fp16")
    assert alone["T4.csv"].startswith("layer,tp,micro_batch_size,forward_s\n0,1,1,1e-05\n")
    assert 'hardware: "no GPU in the trace"' in alone["profile.yaml"]


def without(*names: str) -> Callable[[list[Event]], object]:
    return lambda events: [one for one in events if one.get("name") not in names]


def changed(index: int, **values: object) -> Callable[[list[Event]], object]:
    return lambda events: [*events[:index], events[index] | values, *events[index + 1 :]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: {}, "t.json: traceEvents: expected the list of events of torch.profiler's"),
        (lambda _: [3], "t.json: traceEvents.0: expected an event, found 3"),
        (lambda _: [], r"no range named 'layer 0', \.\.\.; put .*record_function around each"),
        (without("layer 1"), r"no range named 'layer 1'; put .* \(0\.\.1\)"),
        (changed(1, name="layer 2"), r"'layer 2': the model has layers 0\.\.1"),
        (changed(1, name="layer one"), r"no range named 'layer 1'"),
        (changed(1, ts=5), "ranges of layers overlap in one thread"),
        (changed(0, ts="0"), "t.json: traceEvents.0.ts: found '0'; expected microseconds"),
        (changed(0, ts=True), "traceEvents.0.ts: found true; expected microseconds"),
        (changed(0, ts=10**200), "traceEvents.0.ts: found 1000.*; expected microseconds of a"),
        (changed(0, dur=-1), "traceEvents.0.dur: found -1.*; expected microseconds, not negative"),
        (changed(0, dur=None), "traceEvents.0.dur: found null; expected microseconds"),
        (changed(0, name=3), "traceEvents.0.name: found 3; expected a text"),
        (changed(0, tid=[]), r"traceEvents.0.tid: found \[\]; expected a number or a text"),
        (changed(2, args=[]), r"traceEvents.2.args: found \[\]; expected a JSON object"),
        (
            changed(2, args={"correlation": "1"}),
            "traceEvents.2.args.correlation: found '1'; expected a number",
        ),
        (changed(6, cat=None), "nothing of the forward pass of layer 1; record whole steps"),
        (changed(12, id={}), r"traceEvents.12.id: found {}; expected a number or a text"),
        (without("fwdbwd"), None),
        (changed(12, id=99), "nothing of the backward pass of layer 1; record whole steps"),
    ],
)
def test_a_hostile_or_incomplete_trace_is_refused_with_its_place(
    change: Callable[[list[Event]], object], message: str | None
) -> None:
    events = change(gpu_step())
    if message is None:
        assert len(microseconds(read(events))) == 1
        return
    with pytest.raises(InputError, match=message):
        read(events)


@pytest.mark.parametrize("length", [0.1, 0.5, 0.99])
def test_a_trace_that_is_cut_short_is_refused(length: float) -> None:
    text = json.dumps({"traceEvents": gpu_step()}, indent=1)
    with pytest.raises(InputError, match=r"t\.json:[0-9]+: not valid JSON: .*cut short"):
        read_trace(text[: int(length * len(text))].rstrip(), file="t.json", num_layers=2)


@pytest.mark.parametrize("properties", [{}, "H100", 3])
def test_wrong_properties_of_devices_are_refused(properties: object) -> None:
    with pytest.raises(InputError, match="deviceProperties: expected a list"):
        read(gpu_step(), deviceProperties=properties)


@pytest.mark.parametrize("entry", [{}, {"name": 3}, 3, None])
def test_a_device_without_a_name_is_left_out(entry: Mapping[str, object] | int | None) -> None:
    assert read(gpu_step(), deviceProperties=[entry]).devices == ()
