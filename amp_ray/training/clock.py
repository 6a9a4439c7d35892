"""Where the time of a step goes: named spans, on the host's clock or on the device's."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

_MILLISECONDS_PER_SECOND: Final = 1000.0


class Clock(Protocol):
    """Takes marks now and tells their distance later."""

    def mark(self) -> Any:  # noqa: ANN401 - each clock has marks of its own
        """Return the present moment."""

    def seconds(self, start: Any, end: Any) -> float:  # noqa: ANN401
        """Return the time between two marks; the device must have been synchronised since."""

    def begin(self) -> None:
        """Call before a step, from which `moment` counts."""

    def moment(self, mark: Any) -> float:  # noqa: ANN401
        """Return when a mark was taken, on the host's monotonic clock."""


class HostClock:
    """For a CPU, where a call returns when its work is done."""

    def mark(self) -> float:
        """Return the present moment."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the time between two marks."""
        return end - start

    def begin(self) -> None:
        """Marks are moments already."""

    def moment(self, mark: float) -> float:
        """Return when a mark was taken."""
        return mark


class DeviceClock:
    """For CUDA: events in the stream, so that measuring waits for nothing."""

    def mark(self) -> Any:  # noqa: ANN401 - a CUDA event
        """Record an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:  # noqa: ANN401
        """Return the time between two events that have happened."""
        return float(start.elapsed_time(end)) / _MILLISECONDS_PER_SECOND

    def begin(self) -> None:
        """Let host and device meet."""
        torch.cuda.synchronize()
        self.first = self.mark()
        torch.cuda.synchronize()
        self.first_s = time.perf_counter()

    def moment(self, mark: Any) -> float:  # noqa: ANN401
        """Return when an event happened, by the device's distance from the last meeting."""
        return self.first_s + self.seconds(self.first, mark)


@dataclass(slots=True)
class Spans:
    """Marks of named pieces of work, summed up after the step."""

    clock: Clock
    # Name, instruction, start and end of every span since the last ``drain``
    marks: list[tuple[str, str | None, Any, Any]] = field(default_factory=list)
    # Of what was drained last, with begin and end on the host's clock
    instructions: list[tuple[str, float, float]] = field(default_factory=list)

    @contextmanager
    def span(self, name: str, instruction: str | None = None) -> Iterator[None]:
        """Note how long the body takes, which may be an instruction of the schedule."""
        start = self.clock.mark()
        yield
        self.marks.append((name, instruction, start, self.clock.mark()))

    def timed(
        self, name: str, function: Callable[..., Any], label: Callable[[], str | None]
    ) -> Callable[..., Any]:
        """Return the function with a span around every call, which ``label`` names."""

        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the function takes
            with self.span(name, label()):
                return function(*args, **kwargs)

        return call

    def drain(self) -> dict[str, float]:
        """Return seconds per name and forget all marks."""
        total: dict[str, float] = defaultdict(float)
        for name, _, start, end in self.marks:
            total[name] += self.clock.seconds(start, end)
        self.instructions = [
            (instruction, self.clock.moment(start), self.clock.moment(end))
            for _, instruction, start, end in self.marks
            if instruction is not None
        ]
        self.marks.clear()
        return dict(total)
