"""Time and memory of one layer: both passes, many times, without their all-reduces."""

import statistics
import time
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from amp_ray.training.clock import Spans
from amp_ray.training.profiling.subject import Subject

TARGET_S: Final = 0.4
"""How long the measured passes of one layer take together, where the limits below allow."""

MIN_REPEATS: Final = 5
MAX_REPEATS: Final = 40
WARMUP_PASSES: Final = 3
LAUNCH_PASSES: Final = 5


SLICE_TARGET_S: Final = 0.2
"""The same of a slice, of which there are many."""


def repeats_for(pass_s: float, target_s: float = TARGET_S) -> int:
    """Return how often to measure passes that take so long.

    Example:
        >>> repeats_for(1e-4), repeats_for(0.02), repeats_for(3.0)
        (40, 20, 5)
    """
    wanted = target_s / max(pass_s, 1e-9)
    return int(min(MAX_REPEATS, max(MIN_REPEATS, wanted)))


def warm_up(subject: Subject, *, cuda: bool) -> float:
    """Run both passes a few times; return the seconds of the last time."""
    elapsed_s = 0.0
    for _ in range(WARMUP_PASSES):
        start = time.perf_counter()
        subject.forget_gradients()
        subject.backward(subject.forward())
        _wait(cuda=cuda)
        elapsed_s = time.perf_counter() - start
    return elapsed_s


def time_passes(subject: Subject, spans: Spans, repeats: int, *, cuda: bool) -> dict[str, float]:
    """Time both passes.

    On a GPU they follow each other without a pause, so that a pass takes what the slower of
    device and host takes. Tensor-parallel all-reduces note their time in ``spans``.

    Returns:
        Medians ``forward_s`` and ``backward_s`` without all-reduces, ``all_reduce_s`` of both
        passes, and ``spread_s``, the distance of the quartiles of both passes together.
    """
    spans.marks.clear()
    passes = [_one(subject, spans) for _ in range(repeats)]
    _wait(cuda=cuda)
    clock = spans.clock
    forward, backward, talking = [], [], []
    for marks, counts in passes:
        talk = [
            sum(clock.seconds(start, end) for _, _, start, end in spans.marks[first:last])
            for first, last in (counts[:2], counts[1:])
        ]
        forward.append(clock.seconds(marks[0], marks[1]) - talk[0])
        backward.append(clock.seconds(marks[1], marks[2]) - talk[1])
        talking.append(sum(talk))
    spans.marks.clear()
    both = [sum(pair) for pair in zip(forward, backward, strict=True)]
    low, _, high = statistics.quantiles(both, n=4, method="inclusive")
    return {
        "forward_s": statistics.median(forward),
        "backward_s": statistics.median(backward),
        "all_reduce_s": statistics.median(talking),
        "spread_s": high - low,
    }


def time_launch(subject: Subject, *, cuda: bool) -> dict[str, float]:
    """Time how long the host needs to start both passes, with nothing queued before.

    On a CPU, where a call returns when its work is done, that is the pass itself. The medians
    ``forward_launch_s`` and ``backward_launch_s`` include all-reduces.
    """
    forward, backward = [], []
    for _ in range(LAUNCH_PASSES):
        subject.forget_gradients()
        _wait(cuda=cuda)
        start = time.perf_counter()
        output = subject.forward()
        forward.append(time.perf_counter() - start)
        _wait(cuda=cuda)
        start = time.perf_counter()
        subject.backward(output)
        backward.append(time.perf_counter() - start)
    _wait(cuda=cuda)
    return {
        "forward_launch_s": statistics.median(forward),
        "backward_launch_s": statistics.median(backward),
    }


def _one(subject: Subject, spans: Spans) -> tuple[tuple[Any, Any, Any], tuple[int, int, int]]:
    """Run both passes once; return the marks around them and how many spans there were."""
    subject.forget_gradients()
    first, start = len(spans.marks), spans.clock.mark()
    output = subject.forward()
    turn, middle = len(spans.marks), spans.clock.mark()
    subject.backward(output)
    return (start, middle, spans.clock.mark()), (first, turn, len(spans.marks))


def _wait(*, cuda: bool) -> None:
    """Wait until the device has done everything."""
    if cuda:
        torch.cuda.synchronize()


def footprint(subject: Subject, *, cuda: bool) -> dict[str, int]:
    """Run both passes once and return their bytes.

    The parameters' gradients exist before, as they do from the second micro-batch of a step on.

    Returns:
        ``kept_bytes``: distinct memory that autograd holds between the passes, the layer's input
        included where it is needed, weights not. ``temporary_bytes``: the most that is allocated
        beyond that at any moment of both passes.
    """
    subject.forget_gradients()
    for parameter in subject.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weights = {_place(parameter) for parameter in subject.parameters()}
    kept: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        place = _place(value)
        if place not in weights:
            kept[place] = value.untyped_storage().nbytes()
        return value

    def both() -> None:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            output = subject.forward()
        subject.backward(output)

    peak_bytes = _cuda_peak(both) if cuda else _host_peak(both)
    subject.forget_gradients()
    # The input exists before the layer runs, whether it is kept or not.
    made = sum(size for place, size in kept.items() if place != _place(subject.source))
    return {"kept_bytes": sum(kept.values()), "temporary_bytes": max(0, peak_bytes - made)}


def _place(value: Tensor) -> int:
    """Return what tells one piece of memory from another."""
    return int(value.untyped_storage().data_ptr())


def _cuda_peak(both: Any) -> int:  # noqa: ANN401 - a function
    """Return the most that was allocated at once, beyond what was before."""
    torch.cuda.synchronize()
    before = int(torch.cuda.memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def _host_peak(both: Any) -> int:  # noqa: ANN401 - a function
    """Return the same from torch's own record of every allocation: CPUs keep no statistics."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        both()
    events: list[tuple[int, int]] = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    sizes = (size for _, size in sorted(events, key=lambda entry: entry[0]))
    return max(accumulate(sizes, initial=0))
