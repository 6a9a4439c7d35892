"""Iteration times in the logs of a user's own program."""

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from amp_ray.inputs.own_program import SECONDS_PER_UNIT, BuiltIn, Pattern
from amp_ray.trials.result import Measurement
from amp_ray.trials.steps import check_times, same_length, slowest_of

# Possessive wherever something repeats: what was read once is not read again in another way.
_NUMBER: Final = r"[-+]?(?:\d++\.?+\d*+(?:[eE][-+]?\d++)?+|nan|inf)"

_ESCAPE: Final = re.compile(
    r"\x1b(?:\[[0-?]*+[ -/]*+[@-~]|\][^\x07\x1b]*+(?:\x07|\x1b\\)|[@-Z\\^_])"
)
"""Colours, cursor moves and window titles (ECMA-48)."""

MAX_LINE: Final = 4096  # characters of a line that are searched: no metric stands behind them
_MOST_STEP: Final = 2**53  # number of a step: up to here a float is exact
# How torchrun's ``--tee`` and mpirun's ``--tag-output`` mark the lines of the ranks of a host
_MARK: Final = re.compile(r"\[[\w,]++\](?:<std(?:out|err)>)?:")
_LOG: Final = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """How a log tells times."""

    pattern: re.Pattern[str]
    shown: str
    # What they are: the ``step``'s number, from which on the time is the mean since the line
    # before; its ``time``; its ``rate`` in samples per second
    groups: tuple[str, ...] = ("time",)
    unit_s: float = 1.0  # of the time, in seconds
    resolution_s: float = 0.0  # to which it is rounded; a rate that agrees with it may be finer


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One time in a log."""

    step: int | None  # number of the step, where the log has it
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
"""What Megatron logs on its last rank."""

DEEPSPEED_PIPELINE: Final = LogFormat(
    pattern=re.compile(
        rf"\bsteps: (\d++) loss: (?:(?!\bsteps: ).)*?iter time \(s\): ({_NUMBER}) "
        rf"samples/sec: ({_NUMBER})"
    ),
    shown="steps: N loss: X iter time (s): X samples/sec: X",
    groups=("step", "time", "rate"),
    resolution_s=SECONDS_PER_UNIT["ms"],
)
"""What a PipelineEngine prints on rank 0."""

DEEPSPEED_ENGINE: Final = LogFormat(
    pattern=re.compile(
        rf"\bglobal_step=(\d++), RunningAvgSamplesPerSec={_NUMBER}, "
        rf"CurrSamplesPerSec=({_NUMBER}),"
    ),
    shown="global_step=N, RunningAvgSamplesPerSec=X, CurrSamplesPerSec=X,",
    groups=("step", "rate"),
)
"""What every other engine of DeepSpeed logs on rank 0, from its third step on."""

BUILT_IN: Final[Mapping[BuiltIn, tuple[LogFormat, ...]]] = {
    "megatron": (MEGATRON,),
    "deepspeed": (DEEPSPEED_PIPELINE, DEEPSPEED_ENGINE),
}
"""The formats of a built-in metric; the first that is found counts."""


LogReader = Callable[..., Measurement]  # of logs and formats, with the options of ``read_logs``


def formats_of(metric: BuiltIn | Pattern) -> tuple[LogFormat, ...]:
    """Return the formats in which a metric may stand in a log."""
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
    r"""Return a text, perhaps empty, for each format: every line of that format contains it.

    Example:
        >>> words_of(BUILT_IN["megatron"])
        ('elapsed time per iteration (ms):',)
        >>> words_of(formats_of(Pattern(pattern=r"(?:took|in) ([0-9.]+) ms\b")))
        (' ms',)
    """
    return tuple(_longest_literal(entry.pattern) for entry in formats)


def _longest_literal(pattern: re.Pattern[str]) -> str:
    """Return the longest literal text that every match contains, without looking into groups."""
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
    """Find the times of all steps in the logs of all ranks.

    The first format of which a line is found counts; ``samples`` per step turn a rate into a time.
    Where several ranks tell, a step takes as long as on the slowest of them: by its number where
    the lines have one, else by its place, and then all ranks must tell equally often.
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
    r"""Yield the lines of a log as a person saw them.

    A carriage return ends a line, as a progress bar's; colours are left out.

    Example:
        >>> list(log_lines(b"10%\r20%\r\n\x1b[1mdone\x1b[0m"))
        ['10%', '20%', '', 'done']
    """
    text = _ESCAPE.sub("", data.decode("utf-8", "replace"))
    yield from re.split(r"[\r\n]", text)


def log_names(names: Iterable[str]) -> list[str]:
    """Pick the logs of ranks, in the order of the ranks."""
    ranks = {int(match[1]): name for name in names if (match := _LOG.fullmatch(name))}
    return [ranks[rank] for rank in sorted(ranks)]


def _sources(
    files: Mapping[str, bytes], log_format: LogFormat, samples: int
) -> dict[str, list[Entry]]:
    """Find the entries of every process, by the name of its log and its mark there."""
    sources: dict[str, list[Entry]] = {}
    for name in log_names(files):
        for line in log_lines(files[name]):
            mark = _MARK.match(line[:MAX_LINE])
            source = f"{name} {mark[0]}" if mark else name
            text = line[mark.end() if mark else 0 : MAX_LINE]
            for match in log_format.pattern.finditer(text):
                sources.setdefault(source, []).append(_entry(match, log_format, samples))
    for source, entries in sources.items():
        check_times([entry.seconds for entry in entries], source=source)
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
    """Return a time, from the rate where that has more digits and speaks of the same batch."""
    rate = numbers.get("rate")
    by_rate = math.inf if not rate else samples / rate
    if "time" not in numbers:
        return by_rate
    seconds = numbers["time"] * log_format.unit_s
    agrees = abs(by_rate - seconds) <= log_format.resolution_s / 2
    return by_rate if agrees else seconds


def _combined(sources: Mapping[str, Sequence[Entry]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Take the slowest rank of every step; return the last step of each entry, and its time."""
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
    """Count the entries that cover steps of the warm-up.

    An entry covers the steps since the one before. Numbers that start later go on from a
    checkpoint, and its warm-up starts there.
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
