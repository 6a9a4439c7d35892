"""When a rank did what in one step, on one clock for all hosts."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from amp_ray.runtime.whole_file import write_whole
from amp_ray.training.clock import Spans

TIMELINE_FILE: Final = "timeline.json"
SCHEMA: Final = 1

NUM_ROUND_TRIPS: Final = 20
"""Of which the fastest counts: a message that had to wait says little about a clock."""

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
    """Write what all ranks did; times count from the first instruction of any."""
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
