"""The run of one rank of a trial: set-up, training loop and reports."""

import importlib
import math
import os
import platform
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch._dynamo  # torch optimizers import it on first use; import it before the fork

from amp_ray.training.clock import (
    DeviceClock,
    HostClock,
    Spans,
    clock_offset_s,
    write_timeline,
)
from amp_ray.training.connect import connect, use_cuda
from amp_ray.training.events import EventChannel, summarise, write_result
from amp_ray.training.grid import Coordinates
from amp_ray.training.job import Job
from amp_ray.trials.steps import num_more_steps, slowest_of

_BYTES_PER_KIB: Final = 1024

_RESET_PEAK: Final = "5"
"""Value for ``/proc/self/clear_refs`` that resets VmHWM to the current size (proc(5))."""


ENGINES: Final = {
    "deepspeed": "amp_ray.training.pipeline",
    "torch": "amp_ray.training.executor.engine",
}
"""Module of each runtime, imported when used; it has ``start_engine``."""


class Engine(Protocol):
    """A runtime's trainer of this rank's part of the model."""

    num_parameters: int

    def load(self, step: int) -> Any:  # noqa: ANN401 - the form of data depends on the engine
        """Generate the data of a step."""

    def train(self, batches: Any) -> float:  # noqa: ANN401
        """Train one step and return its loss, the same on all ranks."""


class PeakMemory:
    """Peak memory, measured from just before the model is built.

    On a CPU, initial weights are created in full before they are sliced. This peak is
    due to this program, not to the strategy, so ``built`` resets it if the kernel
    allows that.
    """

    def __init__(self, *, cuda: bool) -> None:
        """Record the memory of the program without a model."""
        self.cuda = cuda
        self.base_bytes = 0 if cuda else _status_bytes("VmRSS")
        if cuda:
            torch.cuda.reset_peak_memory_stats()

    def built(self) -> None:
        """Reset the peak; call when the model's weights exist."""
        if not self.cuda:
            try:
                Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
            except OSError:
                # The kernel does not allow it: the peak includes the build and is an upper bound.
                return

    def peak(self) -> dict[str, int]:
        """Return ``peak_memory_bytes`` and the bytes of its parts."""
        if self.cuda:
            return {
                "peak_memory_bytes": int(torch.cuda.max_memory_allocated()),
                "reserved_memory_bytes": int(torch.cuda.max_memory_reserved()),
                "base_memory_bytes": 0,
            }
        top = _status_bytes("VmHWM")
        return {
            "peak_memory_bytes": max(0, top - self.base_bytes),
            "reserved_memory_bytes": top,
            "base_memory_bytes": self.base_bytes,
        }


@dataclass(slots=True)
class Record:
    """Measurements of one rank."""

    step_s: list[float] = field(default_factory=list)  # seconds of every step, warm-up included
    # Loss of every step; None if it is not finite
    losses: list[float | None] = field(default_factory=list)
    # Seconds per kind of work, summed over the measured steps
    spans_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    # Seconds of every phase before the first step
    startup_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the duration of a phase of the start."""
        start = time.perf_counter()
        yield
        self.startup_s[name] = time.perf_counter() - start


def run(job: Job, channel: EventChannel, imports_s: float) -> None:
    """Train, measure and report; rank 0 writes the result.

    ``imports_s`` is the time that the imports of torch and DeepSpeed took.
    """
    begun_s = time.perf_counter() - imports_s
    record = Record(startup_s={"imports": imports_s})
    cuda = use_cuda(job)
    runtime: Any = importlib.import_module(ENGINES[job.runtime])
    with record.phase("connect"):
        connect(job, cuda=cuda)
    process = torch.distributed.get_rank()
    place = job.grid.coordinates(job.grid.rank_map.index(process))
    spans = Spans(clock=DeviceClock() if cuda else HostClock())
    memory = PeakMemory(cuda=cuda)
    with record.phase("build"):
        engine: Engine = runtime.start_engine(job, place, spans, memory.built, cuda=cuda)
    channel.send("ready", startup_s=record.startup_s)
    num_steps = job.warmup_steps + job.steps
    while len(record.step_s) < num_steps:
        step = len(record.step_s)
        timed_step(job, engine, record, spans)
        if step == 0:
            channel.send("first_step", step_s=record.step_s[0])
        if process == 0:
            channel.send("step", step=step, step_s=record.step_s[-1], loss=record.losses[-1])
        if step + 1 == num_steps:
            num_steps += _num_more(job, record.step_s, time.perf_counter() - begun_s)
    report = _report(job, record, place, memory)
    report["num_parameters"] = engine.num_parameters
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    offset_s = clock_offset_s(device)
    report["instructions"] = [
        (name, begin_s + offset_s, end_s + offset_s) for name, begin_s, end_s in spans.instructions
    ]
    _finish(job, channel, report)


def timed_step(job: Job, engine: "Engine", record: Record, spans: Spans) -> None:
    """Train and time one step: generate its data first, then let all ranks start together."""
    step = len(record.step_s)
    batches = engine.load(step)
    spans.drain()
    spans.clock.begin()
    torch.distributed.barrier()
    start = time.perf_counter()
    value = engine.train(batches)
    if isinstance(spans.clock, DeviceClock):
        torch.cuda.synchronize()
    record.step_s.append(time.perf_counter() - start)
    record.losses.append(value if math.isfinite(value) else None)
    if step >= job.warmup_steps:
        for name, seconds in spans.drain().items():
            record.spans_s[name] += seconds


def _num_more(job: Job, step_s: list[float], elapsed_s: float) -> int:
    """Return the number of additional steps, the same on all ranks, which share their times."""
    if job.most_steps <= len(step_s) - job.warmup_steps:
        return 0
    ranks: list[Any] = [None] * job.grid.num_ranks
    torch.distributed.all_gather_object(ranks, (step_s[job.warmup_steps :], elapsed_s))
    return num_more_steps(
        slowest_of([times for times, _ in ranks]),
        most=job.most_steps,
        left_s=job.more_steps_within_s - max(seconds for _, seconds in ranks),
    )


def _report(
    job: Job,
    record: Record,
    place: Coordinates,
    memory: PeakMemory,
) -> dict[str, Any]:
    num_measured = len(record.step_s) - job.warmup_steps
    device = torch.cuda.get_device_name() if memory.cuda else platform.processor() or "cpu"
    return {
        "rank": int(os.environ["RANK"]),
        "host": socket.gethostname(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "stage": place.pp,
        "dp_rank": place.dp,
        "cp_rank": place.cp,
        "tp_rank": place.tp,
        "device": device,
        "step_s": record.step_s,
        "losses": record.losses,
        "spans_s": {name: seconds / num_measured for name, seconds in record.spans_s.items()},
        "startup_s": record.startup_s,
        **memory.peak(),
    }


def _finish(job: Job, channel: EventChannel, report: dict[str, Any]) -> None:
    """Collect all reports on rank 0, and synchronise all ranks before they exit."""
    reports: list[dict[str, Any]] = [{} for _ in range(job.grid.num_ranks)]
    torch.distributed.all_gather_object(reports, report)
    if report["rank"] == 0:
        last = len(report["step_s"]) - 1
        write_timeline(job.out_dir, job.trial_id, last, reports)
        for rank in reports:
            del rank["instructions"]
        stages = [job.grid.chunks_of(stage) for stage in range(job.grid.pp)]
        result = summarise(job.trial_id, job.warmup_steps, stages, reports)
        result["versions"] = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **({"deepspeed": version("deepspeed")} if job.runtime == "deepspeed" else {}),
        }
        write_result(job.out_dir, result)
        channel.send(
            "result",
            iteration_time_s=result["iteration_time_s"],
            peak_memory_bytes=result["peak_memory_bytes"],
        )
    # No rank may exit before the result is on disk: its exit would look like a failure.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * _BYTES_PER_KIB
    raise OSError(f"/proc/self/status has no {key}; memory of a CPU rank is measured on Linux only")
