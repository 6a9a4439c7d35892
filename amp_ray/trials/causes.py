"""Which of many signs is the cause of a failure.

When one rank dies its peers see connections break, and often report first. So a sign that
speaks of communication loses against every other, and among the others the earliest wins.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from amp_ray.errors import printable
from amp_ray.trials.outcome import (
    CauseKind,
    Crashed,
    Outcome,
    OutOfMemory,
    TimedOut,
    Unreachable,
)

SignKind = CauseKind | Literal["memory", "lost", "deadline", "warm"]

MEMORY_WORDS: Final = (
    "out of memory",
    "outofmemory",
    "memoryerror",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "cuda_error_out_of_memory",
    "cudaerrormemoryallocation",
    "cublas_status_alloc_failed",
)
PORT_WORDS: Final = ("address already in use", "eaddrinuse")
DISK_WORDS: Final = ("no space left on device", "disk quota exceeded")
COMMUNICATION_WORDS: Final = (
    "connection reset",
    "connection closed",
    "connection was closed",
    "connection refused",
    "connectionreseterror",
    "connectionrefusederror",
    "broken pipe",
    "brokenpipeerror",
    "socket timeout",
    "socket closed",
    "timed out waiting",
    "disterror",
    "distbackenderror",
    "distnetworkerror",
    "diststoreerror",
    "processgroup",
    "nccl",
    "gloo",
    "tcpstore",
)

_TEXT_KINDS: Final[tuple[tuple[SignKind, tuple[str, ...]], ...]] = (
    ("memory", MEMORY_WORDS),
    ("port", PORT_WORDS),
    ("disk", DISK_WORDS),
    ("communication", COMMUNICATION_WORDS),
)
TRACEBACK: Final = "Traceback (most recent call last)"
_NUM_ERROR_LINES: Final = 12

MAX_TEXT: Final = 2000
MAX_LINE: Final = 1000
"""Characters of what a host says that an outcome keeps; the trial's folder has the whole logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One hint at what went wrong.

    Args:
        rank: Of which rank; None if of none.
        time_s: When the controller heard of it, since launch.
        lines: Last lines of the rank's output.
    """

    kind: SignKind
    host: str
    rank: int | None
    time_s: float
    text: str
    lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Make what a host said fit for journals and terminals: bounded, and without escapes."""
        object.__setattr__(self, "text", _bounded(self.text, MAX_TEXT))
        object.__setattr__(self, "lines", tuple(_bounded(line, MAX_LINE) for line in self.lines))


def _bounded(text: str, length: int) -> str:
    """Return the start of a text that a host wrote, and how much more there is."""
    more = len(text) - length
    return printable(text if more <= 0 else f"{text[:length]} ... ({more} more characters)")


def kind_of_text(lines: Sequence[str]) -> SignKind:
    """Sort a rank's last lines.

    Example:
        >>> kind_of_text(["RuntimeError: [gloo] Connection closed by peer"])
        'communication'
        >>> kind_of_text(["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"])
        'memory'
    """
    text = "\n".join(error_lines(lines)).lower()
    for kind, words in _TEXT_KINDS:
        if any(word in text for word in words):
            return kind
    return "crash"


def last_error(lines: Sequence[str]) -> str:
    """Return the line that names the error: the first after a traceback that is not indented.

    Example:
        >>> last_error(["Traceback (most recent call last):", "  File x", "ValueError: no", "bye"])
        'ValueError: no'
    """
    error = [line for line in error_lines(lines) if line.strip()]
    if not error:
        return ""
    if TRACEBACK in error[0]:
        named = [line for line in error[1:] if not line.startswith((" ", "\t"))]
        return named[0].strip() if named else error[-1].strip()
    return error[-1].strip()


def first_cause(signs: Iterable[Sign]) -> Sign | None:
    """Choose the sign that explains the others; None if there is none.

    The earliest wins, but anything wins against a deadline and anything else against
    communication, and a warm process that died takes its ranks along. Ties are broken by rank,
    then host.
    """
    tiers: dict[SignKind, int] = {"warm": -1, "deadline": 1, "communication": 2, "no-result": 3}

    def order(sign: Sign) -> tuple[int, float, int, str, str]:
        rank = -1 if sign.rank is None else sign.rank
        return tiers.get(sign.kind, 0), sign.time_s, rank, sign.host, sign.text

    return min(signs, key=order, default=None)


def failure(signs: Sequence[Sign], *, timeout_s: float, wall_s: float) -> Outcome:
    """Turn the signs of a failed trial into its outcome.

    Raises:
        ValueError: If there is no sign.
    """
    cause = first_cause(signs)
    if cause is None:
        message = "a failed trial needs at least one sign of failure"
        raise ValueError(message)
    where = f"rank {cause.rank} on {cause.host}" if cause.rank is not None else cause.host
    reason = f"{where}: {cause.text}"
    lines = cause.lines or _lines_of(signs, cause)
    if cause.kind == "lost" or cause.kind == "warm":  # noqa: PLR1714 - this narrows the type
        return Unreachable(reason=reason, host=cause.host, wall_s=wall_s)
    if cause.kind == "deadline":
        return TimedOut(reason=cause.text, timeout_s=timeout_s, lines=lines, wall_s=wall_s)
    if cause.kind == "memory":
        return OutOfMemory(
            reason=reason, rank=cause.rank, host=cause.host, lines=lines, wall_s=wall_s
        )
    return Crashed(
        reason=reason,
        kind=cause.kind,
        rank=cause.rank,
        host=cause.host,
        lines=lines,
        wall_s=wall_s,
    )


def _lines_of(signs: Iterable[Sign], cause: Sign) -> tuple[str, ...]:
    """Find what the same rank printed, which may have come with a later sign."""
    same = [sign for sign in signs if sign.rank == cause.rank and sign.lines]
    return same[0].lines if cause.rank is not None and same else ()


def error_lines(lines: Sequence[str]) -> Sequence[str]:
    """Return the last traceback and what follows, or the last lines."""
    starts = [index for index, line in enumerate(lines) if TRACEBACK in line]
    return lines[starts[-1] :] if starts else lines[-_NUM_ERROR_LINES:]
