"""Time measurement within a step: named spans of one rank, and a timeline of all ranks."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from amp_ray.cost.instructions import Kind
from amp_ray.runtime.whole_file import write_whole

_MILLISECONDS_PER_SECOND: Final = 1000.0


SPAN_NAMES: Final[Mapping[Kind, str]] = {
    "F": "forward",
    "B": "backward",
    "SEND_F": "send",
    "SEND_B": "send",
    "RECV_F": "receive",
    "RECV_B": "receive",
    "REDUCE_GRAD": "gradient_sync",
    "STEP": "optimizer",
}
"""Span name of each instruction; the time to receive includes waiting."""


class HostClock:
    """Takes marks of moments on a CPU, where a call returns when its work is done."""

    def mark(self) -> Any:  # noqa: ANN401 - the type depends on the clock
        """Return the present moment."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:  # noqa: ANN401
        """Return the seconds between two marks; call it after a synchronisation of the device."""
        return float(end - start)

    def begin(self) -> None:
        """Set the reference time of `moment`; call before each step."""

    def moment(self, mark: Any) -> float:  # noqa: ANN401
        """Return the time of a mark on the host's monotonic clock."""
        return float(mark)


class DeviceClock(HostClock):
    """Clock for CUDA: a mark is an event in the stream, so that taking one never blocks."""

    def mark(self) -> Any:  # noqa: ANN401
        """Record an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:  # noqa: ANN401
        """Return the seconds between two completed events."""
        return float(start.elapsed_time(end)) / _MILLISECONDS_PER_SECOND

    def begin(self) -> None:
        """Synchronise the device, and record a reference time on host and device."""
        torch.cuda.synchronize()
        self.first = self.mark()
        torch.cuda.synchronize()
        self.first_s = time.perf_counter()

    def moment(self, mark: Any) -> float:  # noqa: ANN401
        """Return the host's time of an event: the reference plus the device's elapsed time."""
        return self.first_s + self.seconds(self.first, mark)


@dataclass(slots=True)
class Spans:
    """Time spans of named pieces of work, summed by name after the step."""

    clock: HostClock
    # Name, instruction, start and end of every span since the last ``drain``
    marks: list[tuple[str, str | None, Any, Any]] = field(default_factory=list)
    # Instructions that the last ``drain`` returned, with start and end on the host's clock
    instructions: list[tuple[str, float, float]] = field(default_factory=list)

    @contextmanager
    def span(self, name: str, instruction: str | None = None) -> Iterator[None]:
        """Record the duration of the body, which may be an instruction of the schedule."""
        start = self.clock.mark()
        yield
        self.marks.append((name, instruction, start, self.clock.mark()))

    def timed(
        self, name: str, function: Callable[..., Any], label: Callable[[], str | None]
    ) -> Callable[..., Any]:
        """Return ``function`` with a span around each call; ``label`` returns the instruction."""

        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the function takes
            with self.span(name, label()):
                return function(*args, **kwargs)

        return call

    def drain(self) -> dict[str, float]:
        """Return the total seconds per name, and forget all spans."""
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
"""Number of messages to compare clocks; only the fastest round trip counts: others were delayed."""

_PLACE: Final = ("rank", "host", "stage", "dp_rank", "cp_rank", "tp_rank")
"""Key of the clock offset in a rank's report."""

BOOT_FILE: Final = Path("/proc/sys/kernel/random/boot_id")


def clock_offset_s(device: torch.device) -> float:
    """Return rank 0's clock minus this rank's clock, in seconds; every rank calls it.

    Ranks that run on rank 0's kernel share its monotonic clock. All others exchange messages with
    rank 0, which replies with its time; a reply is assumed to take half of the fastest round trip.

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
    """Ask rank 0 for its time; return the seconds of the round trip and the clock offset."""
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
    """Return an identifier of the running kernel, whose processes share a monotonic clock."""
    try:
        return BOOT_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return f"unknown-{os.getpid()}-{time.perf_counter()}"


def write_timeline(out_dir: str, trial_id: str, step: int, ranks: Sequence[dict[str, Any]]) -> None:
    """Write the instructions of all ranks; times count from the first instruction of any rank."""
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
