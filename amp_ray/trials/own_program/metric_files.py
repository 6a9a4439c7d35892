"""Iteration times that a user's program reported by calls; one file per rank."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from amp_ray.trials.launch import RESULT_FILE
from amp_ray.trials.result import (
    MAX_MEMORY_BYTES,
    Measurement,
    MissingRankError,
    check_trial,
    parse_object,
    read_count,
    read_result,
    read_times,
)
from amp_ray.trials.steps import check_times, same_length, slowest_of

HELPER_FILE: Final = "amp_ray_metric.py"  # module in the trial's folder that the program imports
METRIC_FILES: Final = "metric-rank-*.json"  # pattern of the files that this module writes
MAX_RANKS: Final = 2**20  # more than any trial has
_FILE: Final = re.compile(r"metric-rank-(0|[1-9][0-9]{0,6})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMetrics:
    """Measurements of one rank."""

    num_ranks: int  # ranks of the trial, as seen by this rank
    num_files: int  # files that exist if every process reports that can
    stage: int | None  # its pipeline stage; None if unknown
    step_time_s: tuple[float, ...]
    peak_memory_bytes: int | None  # peak of its tensors; None if unknown


def read_told(files: Mapping[str, bytes], trial_id: str, *, num_warmup_steps: int) -> Measurement:
    """Read the times that ranks reported, or ``result.json``, which a program may write itself.

    The time of a step is the maximum over ranks. A single rank may report alone; if several do, all
    must, since the missing one may be the slowest. Raises `MissingRankError` if the file of a
    rank is missing or incomplete.
    """
    ranks = {
        int(match[1]): _read(name, files[name], trial_id, rank=int(match[1]))
        for name in files
        if (match := _FILE.fullmatch(name))
    }
    if not ranks and RESULT_FILE not in files:
        raise ValueError(
            "the metric never appeared: no rank called report_step, step or "
            f"report_iteration_times of {HELPER_FILE.removesuffix('.py')}, and there is no "
            f"{RESULT_FILE}"
        )
    if not ranks:
        result = read_result(files, trial_id)
        peaks = result.peak_memory_bytes
        return _checked(
            result.step_time_s, result.num_warmup_steps or num_warmup_steps, peaks, RESULT_FILE
        )
    _check_ranks(ranks)
    by_name = {f"rank {rank}": ranks[rank].step_time_s for rank in sorted(ranks)}
    same_length(by_name)
    times = slowest_of(tuple(by_name.values()))
    return _checked(times, num_warmup_steps, _peaks(tuple(ranks.values())), ", ".join(by_name))


def _check_ranks(ranks: Mapping[int, RankMetrics]) -> None:
    number = max(rank.num_files for rank in ranks.values())
    missing = [rank for rank in range(number) if rank not in ranks]
    if missing and 1 < len(ranks) < number:
        names = ", ".join(f"rank {rank}" for rank in missing)
        message = (
            f"{len(ranks)} of {number} ranks told their steps, but not {names}: let one rank tell, "
            "or all"
        )
        raise MissingRankError(message, missing[0])


def _checked(
    times: tuple[float, ...], num_warmup_steps: int, peaks: tuple[int, ...], source: str
) -> Measurement:
    """Return a measurement; raise an error if no step is left after the warm-up."""
    check_times(times, source=source)
    if len(times) <= num_warmup_steps:
        raise ValueError(
            f"{source} told {len(times)} steps, none of them after {num_warmup_steps} warm-up "
            "steps; the program has to train for total_steps steps"
        )
    return Measurement(
        step_time_s=times, num_warmup_steps=num_warmup_steps, peak_memory_bytes=peaks
    )


def _peaks(ranks: tuple[RankMetrics, ...]) -> tuple[int, ...]:
    """Return the peak of each stage, or one maximum; empty if a rank did not report its peak."""
    peaks = [rank.peak_memory_bytes for rank in ranks if rank.peak_memory_bytes is not None]
    if len(peaks) < max(rank.num_ranks for rank in ranks):
        return ()
    stages = sorted({rank.stage for rank in ranks if rank.stage is not None})
    if stages != list(range(len(stages))) or any(rank.stage is None for rank in ranks):
        return (max(peaks),)
    return tuple(
        max(rank.peak_memory_bytes or 0 for rank in ranks if rank.stage == stage)
        for stage in stages
    )


def _read(name: str, data: bytes, trial_id: str, *, rank: int) -> RankMetrics:
    try:
        record = parse_object(name, data, "what a rank told")
        num_ranks = read_count(name, "num_ranks", record.get("num_ranks"), most=MAX_RANKS) or 1
        num_files = read_count(name, "num_files", record.get("num_files"), most=MAX_RANKS)
        peak = record.get("peak_memory_bytes")
        is_whole = "step_s" not in record or record["step_s"] is not None
        metrics = RankMetrics(
            num_ranks=num_ranks,
            num_files=num_ranks if num_files is None else num_files,
            stage=read_count(name, "stage", record.get("stage"), most=MAX_RANKS),
            step_time_s=read_times(name, record) if is_whole else (),
            peak_memory_bytes=read_count(name, "peak_memory_bytes", peak, most=MAX_MEMORY_BYTES),
        )
    except ValueError as error:
        raise ValueError(f"{name} is not what {HELPER_FILE} writes: {error}") from None
    check_trial(name, record, trial_id)
    if not is_whole:
        message = (
            f"rank {rank} told steps and did not write them: its program ended by os._exit without "
            "a call of save(), or its disk is full"
        )
        raise MissingRankError(message, rank)
    return metrics
