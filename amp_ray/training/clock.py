"""Where the time of a step goes: named spans of one rank, and a timeline of all ranks."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from amp_ray.runtime.whole_file import write_whole

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


TIMELINE_FILE: Final = "timeline.json"
SCHEMA: Final = 1

NUM_ROUND_TRIPS: Final = 20
"""Messages to compare clocks; the fastest counts, since a message that had to wait tells little."""

_PLACE: Final = ("rank", "host", "stage", "dp_rank", "cp_rank", "tp_rank")
"""Of a rank's report."""

BOOT_FILE: Final = Path("/proc/sys/kernel/random/boot_id")


def clock_offset_s(device: torch.device) -> float:
    """Return what to add to this rank's clock to get that of rank 0; every rank calls it.

    Ranks of one kernel share its monotonic clock. Others exchange messages with rank 0, which
    answers with its own time; half of the fastest round trip is taken for the way back.

    References:
        Cristian, Probabilistic clock synchronization, Distributed Computing 3, 1989.
    """
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    boots: list[str] = [""] * num_ranks
    torch.distributed.all_gather_object(boots, _boot())
    offset_s = 0.0
    for other in range(1, num_ranks):
        if boots[other] == boots[0] or rank not in {0, other}:
            continue
        message = torch.zeros(1, dtype=torch.float64, device=device)
        trips = [_round_trip(rank, other, message) for _ in range(NUM_ROUND_TRIPS)]
        if rank == other:
            offset_s = min(trips)[1]
    return offset_s


def _round_trip(rank: int, other: int, message: torch.Tensor) -> tuple[float, float]:
    """Ask rank 0 for its time; return how long that took, and the offset that follows."""
    if rank == 0:
        torch.distributed.recv(message, other)
        message.fill_(time.perf_counter())
        torch.distributed.send(message, other)
        return 0.0, 0.0
    start = time.perf_counter()
    torch.distributed.send(message, 0)
    torch.distributed.recv(message, 0)
    theirs = float(message)
    end = time.perf_counter()
    return end - start, theirs - (start + end) / 2


def _boot() -> str:
    """Name the running kernel, whose monotonic clock all its processes share."""
    try:
        return BOOT_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return f"unknown-{os.getpid()}-{time.perf_counter()}"


def instructions_of(spans: Spans, offset_s: float) -> list[tuple[str, float, float]]:
    """Return the instructions of the last step with begin and end on rank 0's clock."""
    return [
        (instruction, begin_s + offset_s, end_s + offset_s)
        for instruction, begin_s, end_s in spans.instructions
    ]


def write_timeline(out_dir: str, trial_id: str, step: int, ranks: Sequence[dict[str, Any]]) -> None:
    """Write the instructions of all ranks; times count from the first instruction of any."""
    start_s = min((rank["instructions"][0][1] for rank in ranks if rank["instructions"]), default=0)
    record = {
        "schema": SCHEMA,
        "trial_id": trial_id,
        "step": step,
        "ranks": [
            {
                **{key: rank[key] for key in _PLACE},
                "instructions": [
                    [name, round(begin_s - start_s, 9), round(end_s - start_s, 9)]
                    for name, begin_s, end_s in rank["instructions"]
                ],
            }
            for rank in ranks
        ],
    }
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    write_whole(Path(out_dir) / TIMELINE_FILE, [json.dumps(record).encode(), b"\n"])
