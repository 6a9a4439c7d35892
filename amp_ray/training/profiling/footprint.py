"""Memory of one layer: what it keeps for the backward pass, and what it takes on the way."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from amp_ray.training.profiling.subject import Subject


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
