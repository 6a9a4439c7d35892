"""Iteration times of a user's own program.

The times come from the logs of ranks, or from files that ranks wrote by calling a helper module.
"""

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from amp_ray.inputs.experiment import SECONDS_PER_UNIT, BuiltIn, Pattern
from amp_ray.trials.launch import RESULT_FILE
from amp_ray.trials.result import (
    MAX_MEMORY_BYTES,
    Measurement,
    MissingRankError,
    check_trial,
    of_rank,
    parse_object,
    read_count,
    read_result,
    read_times,
)
from amp_ray.trials.steps import check_times, same_length, slowest_of

# All repetitions are possessive, so that matching never backtracks.
_NUMBER: Final = r"[-+]?(?:\d++\.?+\d*+(?:[eE][-+]?\d++)?+|nan|inf)"

_ESCAPE: Final = re.compile(
    r"\x1b(?:\[[0-?]*+[ -/]*+[@-~]|\][^\x07\x1b]*+(?:\x07|\x1b\\)|[@-Z\\^_])"
)
"""Escape sequences for colours, cursor moves and window titles (ECMA-48)."""

MAX_LINE: Final = 4096  # characters to search per line; no metric comes later in a line
_MOST_STEP: Final = 2**53  # maximum step number; floats are exact up to here
# Prefix that torchrun's ``--tee`` and mpirun's ``--tag-output`` put before the lines of each rank
_MARK: Final = re.compile(r"\[[\w,]++\](?:<std(?:out|err)>)?:")
_LOG: Final = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """Format of a log's lines with times."""

    pattern: re.Pattern[str]
    shown: str
    # Meaning of each group of the pattern: ``time``; ``rate`` in samples per second; ``step``, the
    # number of the step: in a format with it, a time is the mean since the previous line
    groups: tuple[str, ...] = ("time",)
    unit_s: float = 1.0  # unit of ``time``, in seconds
    resolution_s: float = 0.0  # rounding of ``time``; a rate may be more precise


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One time read from a log."""

    step: int | None  # number of the step; None if the log has no numbers
    seconds: float


MEGATRON: Final = LogFormat(
    pattern=re.compile(
        rf"\biteration\s++(\d++)\s*+/\s*+\d++\s*+\|(?:(?!\biteration\s++\d++\s*+/).)*?"
        rf"elapsed time per iteration \(ms\):\s*+({_NUMBER})\s*+\|"
    ),
    shown="iteration N/ N | ... elapsed time per iteration (ms): X |",
    groups=("step", "time"),
    unit_s=SECONDS_PER_UNIT["ms"],
)
"""Format of Megatron's log on its last rank."""

DEEPSPEED_PIPELINE: Final = LogFormat(
    pattern=re.compile(
        rf"\bsteps: (\d++) loss: (?:(?!\bsteps: ).)*?iter time \(s\): ({_NUMBER}) "
        rf"samples/sec: ({_NUMBER})"
    ),
    shown="steps: N loss: X iter time (s): X samples/sec: X",
    groups=("step", "time", "rate"),
    resolution_s=SECONDS_PER_UNIT["ms"],
)
"""Format of the output of DeepSpeed's PipelineEngine on rank 0."""

DEEPSPEED_ENGINE: Final = LogFormat(
    pattern=re.compile(
        rf"\bglobal_step=(\d++), RunningAvgSamplesPerSec={_NUMBER}, "
        rf"CurrSamplesPerSec=({_NUMBER}),"
    ),
    shown="global_step=N, RunningAvgSamplesPerSec=X, CurrSamplesPerSec=X,",
    groups=("step", "rate"),
)
"""Format of the log of DeepSpeed's other engines on rank 0, from the third step on."""

BUILT_IN: Final[Mapping[BuiltIn, tuple[LogFormat, ...]]] = {
    "megatron": (MEGATRON,),
    "deepspeed": (DEEPSPEED_PIPELINE, DEEPSPEED_ENGINE),
}
"""Formats of each built-in metric; the first that matches a line is used."""


LogReader = Callable[..., Measurement]  # has the signature of ``read_logs``


def formats_of(metric: BuiltIn | Pattern) -> tuple[LogFormat, ...]:
    """Return the log formats of a metric, in the order in which they are tried."""
    if not isinstance(metric, Pattern):
        return BUILT_IN[metric]
    return (
        LogFormat(
            pattern=re.compile(metric.pattern),
            shown=metric.pattern,
            unit_s=SECONDS_PER_UNIT[metric.unit],
        ),
    )


def words_of(formats: Iterable[LogFormat]) -> tuple[str, ...]:
    r"""Return for each format a text that all its lines contain; it may be empty.

    Example:
        >>> words_of(BUILT_IN["megatron"])
        ('elapsed time per iteration (ms):',)
        >>> words_of(formats_of(Pattern(pattern=r"(?:took|in) ([0-9.]+) ms\b")))
        (' ms',)
    """
    return tuple(_longest_literal(entry.pattern) for entry in formats)


def _longest_literal(pattern: re.Pattern[str]) -> str:
    """Return the longest literal text that all matches contain; text in groups does not count."""
    if pattern.flags & re.IGNORECASE:
        return ""
    runs = [""]
    for kind, value in re._parser.parse(pattern.pattern, pattern.flags):  # type: ignore[attr-defined] # noqa: SLF001
        if str(kind) == "LITERAL":
            runs[-1] += chr(value)
        elif str(kind) != "AT":
            runs.append("")
    return max(runs, key=len)


def read_logs(
    files: Mapping[str, bytes],
    formats: Sequence[LogFormat],
    *,
    num_warmup_steps: int,
    samples: int,
) -> Measurement:
    """Read the times of all steps from the logs of all ranks.

    Use the first format that matches a line; ``samples``, the number per step, converts a rate to a
    time. If several ranks log times, take the maximum per step. Match the ranks' lines by step
    number; without numbers, match by position, and all ranks must have the same number of lines.
    """
    for entry in formats:
        sources = _sources(files, entry, samples)
        if sources:
            steps, step_time_s = _combined(sources)
            return Measurement(
                step_time_s=step_time_s,
                num_warmup_steps=_count_warmup(steps, num_warmup_steps),
            )
    shown = " or ".join(repr(entry.shown) for entry in formats)
    lines = (line for name in log_names(files) for line in log_lines(files[name]))
    num_cut = sum(len(line) > MAX_LINE for line in lines)
    names = ", ".join(log_names(files)) or "any log"
    message = f"the metric never appeared: no line of {names} has {shown}"
    if num_cut:
        message += f"; {num_cut} lines were searched in their first {MAX_LINE} characters only"
    raise ValueError(message)


def log_lines(data: bytes) -> Iterator[str]:
    r"""Yield the lines of a log as a terminal would show them.

    A carriage return (of a progress bar) ends a line; escape sequences are removed.

    Example:
        >>> list(log_lines(b"10%\r20%\r\n\x1b[1mdone\x1b[0m"))
        ['10%', '20%', '', 'done']
    """
    text = _ESCAPE.sub("", data.decode("utf-8", "replace"))
    yield from re.split(r"[\r\n]", text)


def log_names(names: Iterable[str]) -> list[str]:
    """Return the names of ranks' logs, in the order of the ranks."""
    ranks = {int(match[1]): name for name in names if (match := _LOG.fullmatch(name))}
    return [ranks[rank] for rank in sorted(ranks)]


def _sources(
    files: Mapping[str, bytes], log_format: LogFormat, samples: int
) -> dict[str, list[Entry]]:
    """Return the entries of each process, keyed by log name and line prefix."""
    sources: dict[str, list[Entry]] = {}
    for name in log_names(files):
        of_file: dict[str, list[Entry]] = {}
        match = _LOG.fullmatch(name)
        assert match is not None
        with of_rank(name, int(match[1])):
            for line in log_lines(files[name]):
                mark = _MARK.match(line[:MAX_LINE])
                source = f"{name} {mark[0]}" if mark else name
                text = line[mark.end() if mark else 0 : MAX_LINE]
                for step in log_format.pattern.finditer(text):
                    of_file.setdefault(source, []).append(_entry(step, log_format, samples))
            for source, entries in of_file.items():
                check_times([entry.seconds for entry in entries], source=source)
        sources |= of_file
    return sources


def _entry(match: re.Match[str], log_format: LogFormat, samples: int) -> Entry:
    numbers: dict[str, float] = {}
    for name, text in zip(log_format.groups, match.groups(), strict=True):
        try:
            numbers[name] = float(text)
        except (TypeError, ValueError):
            raise ValueError(
                f"the pattern {log_format.shown!r} found {reprlib.repr(text)}, which is no number, "
                f"in {reprlib.repr(match[0])}"
            ) from None
    step = numbers.get("step")
    if step is not None and step > _MOST_STEP:
        raise ValueError(f"a log says that {step:g} steps are done; expected at most {_MOST_STEP}")
    return Entry(
        step=None if step is None else int(step), seconds=_seconds(numbers, log_format, samples)
    )


def _seconds(numbers: Mapping[str, float], log_format: LogFormat, samples: int) -> float:
    """Return a line's time; use its rate if that is more precise and agrees with the time."""
    rate = numbers.get("rate")
    by_rate = math.inf if not rate else samples / rate
    if "time" not in numbers:
        return by_rate
    seconds = numbers["time"] * log_format.unit_s
    agrees = abs(by_rate - seconds) <= log_format.resolution_s / 2
    return by_rate if agrees else seconds


def _combined(sources: Mapping[str, Sequence[Entry]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Combine the entries of all ranks: return each entry's last step, and its slowest time."""
    entries = [entry for source in sources.values() for entry in source]
    if any(entry.step is None for entry in entries):
        times = {name: [entry.seconds for entry in source] for name, source in sources.items()}
        number = same_length(times)
        return tuple(range(1, number + 1)), slowest_of(tuple(times.values()))
    slowest: dict[int, float] = {}
    for entry in entries:
        step = entry.step or 0
        slowest[step] = max(entry.seconds, slowest.get(step, 0.0))
    steps = tuple(sorted(slowest))
    return steps, tuple(slowest[step] for step in steps)


def _count_warmup(steps: Sequence[int], num_warmup_steps: int) -> int:
    """Count the entries that include warm-up steps.

    An entry covers the steps since the previous entry. If the step numbers continue from a
    checkpoint, the warm-up starts at the lowest number.
    """
    interval = steps[1] - steps[0] if len(steps) > 1 else steps[0]
    done = max(0, steps[0] - interval)
    start = done if done > num_warmup_steps else 0
    number = sum(before < start + num_warmup_steps for before in (done, *steps[:-1]))
    if number == len(steps):
        raise ValueError(
            f"found {number} times, none of them after {num_warmup_steps} warm-up steps; the "
            "program has to train for total_steps steps and log each of them"
        )
    return number


# The helper module, and the files that it writes: one per rank
HELPER_FILE: Final = "amp_ray_metric.py"  # module in the trial's folder that the program imports
METRIC_FILES: Final = "metric-rank-*.json"  # pattern of the files that the helper module writes
MAX_RANKS: Final = 2**20  # more than any trial has
_METRIC_FILE: Final = re.compile(r"metric-rank-(0|[1-9][0-9]{0,6})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMetrics:
    """Measurements of one rank."""

    num_ranks: int  # ranks of the trial, as seen by this rank
    num_files: int  # number of files if every process that can report does so
    stage: int | None  # its pipeline stage; None if unknown
    step_time_s: tuple[float, ...]
    peak_memory_bytes: int | None  # peak of its tensors; None if unknown


def read_told(files: Mapping[str, bytes], trial_id: str, *, num_warmup_steps: int) -> Measurement:
    """Read the times that ranks reported, or ``result.json``, which a program may write itself.

    The time of a step is the maximum over ranks. A single rank may report alone; if several do, all
    must, since the missing one may be the slowest. Raises `MissingRankError` if the file of a
    rank is missing or incomplete.
    """
    ranks = {}
    for name in files:
        if match := _METRIC_FILE.fullmatch(name):
            rank = int(match[1])
            with of_rank(name, rank):
                ranks[rank] = _read_rank(name, files[name], trial_id, rank=rank)
                check_times(ranks[rank].step_time_s, source=f"rank {rank}")
    if not ranks and RESULT_FILE not in files:
        raise ValueError(
            "the metric never appeared: no rank called report_step, step or "
            f"report_iteration_times of {HELPER_FILE.removesuffix('.py')}, and there is no "
            f"{RESULT_FILE}"
        )
    if not ranks:
        result = read_result(files, trial_id)
        peaks = result.peak_memory_bytes
        return _measurement(
            result.step_time_s, result.num_warmup_steps or num_warmup_steps, peaks, RESULT_FILE
        )
    _check_ranks(ranks)
    by_name = {f"rank {rank}": ranks[rank].step_time_s for rank in sorted(ranks)}
    same_length(by_name)
    times = slowest_of(tuple(by_name.values()))
    return _measurement(times, num_warmup_steps, _peaks(tuple(ranks.values())), ", ".join(by_name))


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


def _measurement(
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
    """Return the peak of each stage, or one maximum if stages are unknown; empty without peaks."""
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


def _read_rank(name: str, data: bytes, trial_id: str, *, rank: int) -> RankMetrics:
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
        raise MissingRankError(message, rank, name)
    return metrics
