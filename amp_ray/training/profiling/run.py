"""One rank of a profile run, from the rendezvous to the end."""

import gc
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch
from torch import Tensor

from amp_ray.training.clock import Clock, DeviceClock, HostClock, Spans
from amp_ray.training.connect import connect, use_cuda
from amp_ray.training.events import EventChannel, write_result
from amp_ray.training.pipeline import join
from amp_ray.training.profiling.group import Ranks
from amp_ray.training.profiling.job import ProfileJob
from amp_ray.training.profiling.passes import (
    SLICE_TARGET_S,
    TARGET_S,
    Subject,
    SwitchedParallel,
    footprint,
    make_subject,
    repeats_for,
    time_launch,
    time_passes,
    warm_up,
)
from amp_ray.training.profiling.step import time_step
from amp_ray.trials.profile.points import LayerPoint, LinkPoint

SCHEMA: Final = 1

LINK_TARGET_S: Final = 0.25
"""How long the repeats of one message take together, where the limits below allow."""

MIN_REPEATS: Final = 4
MAX_REPEATS: Final = 30
WARMUP_REPEATS: Final = 2
BYTES_PER_ELEMENT: Final = 4

PAIR: Final = 2
"""Ranks that exchange messages, and messages of a round trip."""


class _Run:
    """State of one rank."""

    def __init__(self, job: ProfileJob, channel: EventChannel) -> None:
        """Meet the others."""
        self.job, self.channel = job, channel
        self.start = time.monotonic()
        self.cuda = use_cuda(job.trial)
        connect(job.trial, cuda=self.cuda)
        join(job.trial, cuda=self.cuda)
        local_rank = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", local_rank) if self.cuda else torch.device("cpu")
        self.ranks = Ranks(device, job.group_sizes)

    def clock(self) -> Clock:
        """Return a clock of the device."""
        return DeviceClock() if self.cuda else HostClock()

    def tell(self, event: str, **values: Any) -> None:  # noqa: ANN401 - JSON values
        """Send an event, from one rank for all."""
        if self.ranks.rank == 0:
            self.channel.send(event, **values)

    def is_over(self) -> bool:
        """Tell whether the time is up for any rank."""
        elapsed_s = time.monotonic() - self.start
        return bool(self.ranks.largest(int(elapsed_s > self.job.seconds)))


def run(job: ProfileJob, channel: EventChannel) -> None:
    """Measure everything that the time allows; rank 0 tells."""
    state = _Run(job, channel)
    state.tell("hardware", hardware=hardware(cuda=state.cuda), versions=versions())
    complete = _links(state) and _step(state) and _layers(state)
    if state.ranks.rank == 0:
        elapsed_s = time.monotonic() - state.start
        record = {"schema": SCHEMA, "trial_id": job.trial.trial_id}
        write_result(job.trial.out_dir, {**record, "complete": complete, "elapsed_s": elapsed_s})
    # Nobody leaves before the result is on disk: a rank that is gone looks like a failure.
    state.ranks.barrier()
    torch.distributed.destroy_process_group()


def _links(state: _Run) -> bool:
    """Measure messages; tell whether the time was enough."""
    for link in state.job.links:
        if state.is_over():
            return False
        seconds = time_link(link, state.ranks, state.clock())
        if seconds is not None:
            values = {"num_ranks": link.num_ranks, "bytes": link.num_bytes, "seconds": seconds}
            state.tell("link", what=link.what, **values)
    return True


def _step(state: _Run) -> bool:
    """Measure the step around the layers; tell whether the time was enough."""
    if state.job.step:
        if state.is_over():
            return False
        figures = time_step(state.job.trial, state.ranks, cuda=state.cuda)
        if figures is not None:
            state.tell("step", **figures)
    return True


def _layers(state: _Run) -> bool:
    """Measure layers; tell whether the time was enough."""
    too_large: list[LayerPoint] = []
    for point in state.job.points:
        if any(map(point.is_as_large_as, too_large)):
            continue
        if state.is_over():
            return False
        state.tell("begin", **point.to_json())
        figures = _layer(state, point)
        gc.collect()
        if figures is None:
            too_large.append(point)
            state.tell("oom", **point.to_json())
        else:
            state.tell("slice" if point.tokens else "layer", **point.to_json(), **figures)
    return True


def _layer(state: _Run, point: LayerPoint) -> dict[str, float] | None:
    """Measure one layer; None where it does not fit into memory."""
    ranks, cuda = state.ranks, state.cuda
    spans = Spans(clock=state.clock())
    parallel = SwitchedParallel(
        rank=ranks.rank % point.tp, size=point.tp, group=ranks.group(point.tp), spans=spans
    )
    made = ranks.attempt(lambda: _rehearse(state, point, parallel))
    if made is None:
        return None
    subject, sizes = made
    parallel.silent = False
    target_s = SLICE_TARGET_S if point.tokens else TARGET_S
    repeats = ranks.largest(repeats_for(warm_up(subject, cuda=cuda), target_s))
    launch = {} if point.tokens else time_launch(subject, cuda=cuda)
    times = time_passes(subject, spans, repeats, cuda=cuda)
    medians = {
        key: statistics.median(ranks.gather(value)) for key, value in {**times, **launch}.items()
    }
    most = {key: float(ranks.largest(value)) for key, value in sizes.items()}
    return {**medians, **most, "repeats": repeats}


def _rehearse(
    state: _Run, point: LayerPoint, parallel: SwitchedParallel
) -> tuple[Subject, dict[str, int]]:
    """Build a layer and run it without talking to anyone: if memory is short, it is so here."""
    parallel.silent = True
    subject = make_subject(state.job.trial, point, parallel, state.ranks.device)
    subject.backward(subject.forward())
    return subject, footprint(subject, cuda=state.cuda)


def hardware(*, cuda: bool) -> str:
    """Name the device that this rank runs on."""
    if cuda:
        return str(torch.cuda.get_device_name())
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.machine()
    return f"{name}, {torch.get_num_threads()} of {len(models)} threads per rank"


def versions() -> str:
    """Name the versions that a measurement depends on."""
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}{cuda}, "
        f"DeepSpeed {deepspeed.__version__}"
    )


def time_link(point: LinkPoint, ranks: Ranks, clock: Clock) -> float | None:
    """Time a message, there and back between pairs of ranks, or an all-reduce within groups.

    All groups talk at the same time, as in training. The seconds are the median over repeats and
    groups; None where the tensor does not fit into memory.
    """
    value = ranks.attempt(
        lambda: torch.zeros(point.num_bytes // BYTES_PER_ELEMENT, device=ranks.device)
    )
    if value is None:
        return None
    once_s = max(_times(point, ranks, clock, value, WARMUP_REPEATS))
    repeats = int(min(MAX_REPEATS, max(MIN_REPEATS, LINK_TARGET_S / max(once_s, 1e-9))))
    repeats = ranks.largest(repeats)
    times = _times(point, ranks, clock, value, repeats)
    share = PAIR if point.what == "p2p" else 1
    return statistics.median(ranks.gather(statistics.median(times) / share))


def _times(
    point: LinkPoint, ranks: Ranks, clock: Clock, value: Tensor, repeats: int
) -> list[float]:
    """Return the seconds of every repeat on this rank."""
    ranks.barrier()
    marks = []
    for _ in range(repeats):
        start = clock.mark()
        if point.what == "p2p":
            _there_and_back(ranks, value)
        else:
            torch.distributed.all_reduce(value, group=ranks.group(point.num_ranks))
        marks.append((start, clock.mark()))
    ranks.wait()
    return [clock.seconds(start, end) for start, end in marks]


def _there_and_back(ranks: Ranks, value: Tensor) -> None:
    """Exchange with the neighbour, even ranks first; the last of an odd number has none."""
    even = ranks.rank % PAIR == 0
    partner = ranks.rank + 1 if even else ranks.rank - 1
    if partner == ranks.size:
        return
    send: Any = torch.distributed.send
    receive: Any = torch.distributed.recv
    for exchange in (send, receive) if even else (receive, send):
        exchange(value, partner)
