"""Turn messages of agents into signs of failure, and choose the sign that is the cause.

When one rank dies, its peers see connections break and often report first. So reports of other
problems take precedence over communication errors; among those, the earliest is the cause.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from amp_ray.errors import printable
from amp_ray.trials.outcome import CauseKind, Crashed, Outcome, OutOfMemory, TimedOut, Unreachable

SignKind = CauseKind | Literal["memory", "lost", "deadline", "warm"]

_DISK_WORDS: Final = ("no space left on device", "disk quota exceeded")
_TEXT_KINDS: Final[Mapping[SignKind, tuple[str, ...]]] = {
    "memory": (
        *("out of memory", "outofmemory", "memoryerror", "not enough memory", "std::bad_alloc"),
        *("can't allocate memory", "cannot allocate memory", "cuda_error_out_of_memory"),
        *("cudaerrormemoryallocation", "cublas_status_alloc_failed"),
    ),
    "port": ("address already in use", "eaddrinuse"),
    "disk": _DISK_WORDS,
    "communication": (
        *("connection reset", "connection closed", "connection was closed", "connection refused"),
        *("connectionreseterror", "connectionrefusederror", "broken pipe", "brokenpipeerror"),
        *("socket timeout", "socket closed", "timed out waiting", "processgroup", "tcpstore"),
        *("disterror", "distbackenderror", "distnetworkerror", "diststoreerror", "nccl", "gloo"),
    ),
}
"""Patterns in a rank's last lines (lower case), by kind of failure; the first match counts."""

TRACEBACK: Final = "Traceback (most recent call last)"
_NUM_ERROR_LINES: Final = 12

# Maximum characters of texts from hosts in an outcome; the trial's folder has the whole logs
MAX_TEXT: Final = 2000
MAX_LINE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One hint at the cause of a failure."""

    kind: SignKind
    host: str
    rank: int | None  # rank that failed; None if the sign concerns no single rank
    time_s: float  # time since launch at which the controller received it
    text: str
    lines: tuple[str, ...] = ()  # last lines of the rank's output

    def __post_init__(self) -> None:
        """Make the host's text safe for journals and terminals: limit its length, drop escapes."""
        object.__setattr__(self, "text", _bounded(self.text, MAX_TEXT))
        object.__setattr__(self, "lines", tuple(_bounded(line, MAX_LINE) for line in self.lines))


def _bounded(text: str, length: int) -> str:
    """Shorten a text from a host to ``length`` characters, noting how many were cut."""
    more = len(text) - length
    return printable(text if more <= 0 else f"{text[:length]} ... ({more} more characters)")


def kind_of_text(lines: Sequence[str]) -> SignKind:
    """Classify a failure by a rank's last lines of output.

    Example:
        >>> kind_of_text(["RuntimeError: [gloo] Connection closed by peer"])
        'communication'
        >>> kind_of_text(["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"])
        'memory'
    """
    text = "\n".join(error_lines(lines)).lower()
    for kind, words in _TEXT_KINDS.items():
        if any(word in text for word in words):
            return kind
    return "crash"


def last_error(lines: Sequence[str]) -> str:
    """Return the line that names the error: the first line after a traceback that is not indented.

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
    """Choose the sign that caused the others; None if there are no signs.

    Kinds of signs in order of precedence: the death of a warm process, which ends its ranks; all
    kinds not listed here; deadlines; communication errors; missing results. Within each, the
    earliest sign wins; ties are broken by rank, then host.
    """
    tiers: dict[SignKind, int] = {"warm": -1, "deadline": 1, "communication": 2, "no-result": 3}

    def order(sign: Sign) -> tuple[int, float, int, str, str]:
        rank = -1 if sign.rank is None else sign.rank
        return tiers.get(sign.kind, 0), sign.time_s, rank, sign.host, sign.text

    return min(signs, key=order, default=None)


def failure(
    signs: Sequence[Sign],
    *,
    timeout_s: float,
    wall_s: float,
    folders: Mapping[str, str] = MappingProxyType({}),
) -> Outcome:
    """Turn the signs of a failed trial into its outcome; ``folders`` maps hosts to its folders."""
    cause = first_cause(signs)
    if cause is None:
        raise ValueError("a failed trial needs at least one sign of failure")
    where = f"rank {cause.rank} on {cause.host}" if cause.rank is not None else cause.host
    reason = f"{where}: {cause.text}{_room_advice(cause, folders)}"
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


def _room_advice(cause: Sign, folders: Mapping[str, str]) -> str:
    """Return advice on where to free disk space; empty unless the disk was full."""
    if cause.kind != "disk" or not _is_full("\n".join([cause.text, *cause.lines])):
        return ""
    folder = folders.get(cause.host)
    place = f" ({_bounded(folder, MAX_LINE)} there)" if folder else ""
    return f"; make room on the disk of {cause.host} that this trial used{place}"


def _is_full(text: str) -> bool:
    return any(word in text.lower() for word in _DISK_WORDS)


def _lines_of(signs: Iterable[Sign], cause: Sign) -> tuple[str, ...]:
    """Return the last lines of the rank that failed, which may be attached to a later sign."""
    of_rank = [sign for sign in signs if sign.rank == cause.rank and sign.lines]
    return of_rank[0].lines if cause.rank is not None and of_rank else ()


def error_lines(lines: Sequence[str]) -> Sequence[str]:
    """Return the last traceback and all lines after it; without a traceback, the last lines."""
    starts = [index for index, line in enumerate(lines) if TRACEBACK in line]
    return lines[starts[-1] :] if starts else lines[-_NUM_ERROR_LINES:]


SIGKILL: Final = 9
# Exit codes by which shells and Python programs report that a child process was killed
KILLED_CODES: Final = (128 + SIGKILL, 256 - SIGKILL)
# Exit codes of the training program, by kind of failure
EXIT_CODE_KINDS: Final[dict[int, SignKind]] = {42: "memory", 43: "communication", 44: "port"}

EVENT_KINDS: Final[dict[str, SignKind]] = {
    "out_of_memory": "memory",
    "communication": "communication",
    "port_taken": "port",
}
"""Kind of failure for each cause in a ``failed`` event; every other cause is a crash."""

TROUBLE_KINDS: Final[dict[str, SignKind]] = {
    "disk-full": "disk",
    "folder": "disk",
    "network": "network",
    "start": "start",
    "warm": "warm",
}
"""Kind of failure for each of the agent's names for a problem of a host."""

NEEDED_MODULES: Final = ("torch", "deepspeed")

MISSING_ADVICE: Final = (
    "; install it on that host for the interpreter that trains, or name another interpreter as "
    "trials.python"
)

STATES: Final = {
    "T": " (stopped by a signal)",
    "D": " (waits in the kernel, as for a disk or a device)",
}
"""Process states (the kernel's letters) that explain a hang at the deadline."""

NUM_KEPT_LINES: Final = 20  # last lines of a rank's output kept in an outcome


def sign_of_event(host: str, message: Mapping[str, Any], time_s: float) -> Sign | None:
    """Turn a rank's event (message ``said``) into a sign; None unless it reports a failure."""
    data = message["data"]
    if data.get("event") != "failed":
        return None
    lines = data.get("traceback", ())
    return Sign(
        kind=_kind_of_event(data),
        host=host,
        rank=_speaker(message),
        time_s=time_s,
        text=_with_advice(f"{data.get('type', 'error')}: {data.get('message', '')}"),
        lines=keep_last([line for line in lines if isinstance(line, str)])
        if isinstance(lines, list)
        else (),
    )


def sign_of_trouble(host: str, message: Mapping[str, Any], time_s: float) -> Sign:
    """Turn an agent's report of a host problem (message ``trouble``) into a sign."""
    kind = TROUBLE_KINDS[message["what"]]
    return Sign(kind=kind, host=host, rank=message["rank"], time_s=time_s, text=message["text"])


def sign_of_exit(
    host: str, message: Mapping[str, Any], time_s: float, *, num_oom_kills: int
) -> Sign | None:
    """Turn the end of a rank (message ``exit``) into a sign; None if it succeeded or was stopped.

    ``message`` has ``rank``, ``code``, ``signal``, ``tail`` and ``ended``; ``num_oom_kills``
    counts the processes that the host's kernel killed for lack of memory during the trial.
    """
    code, signal, lines = message["code"], message["signal"], message["tail"]
    if message["ended"] or code == 0:
        return None
    return Sign(
        kind=_kind_of_exit(code, signal, lines, num_oom_kills=num_oom_kills),
        host=host,
        rank=message["rank"],
        time_s=time_s,
        text=_with_advice(describe_exit(code, signal, lines)),
        lines=keep_last(lines),
    )


def sign_of_deadline(
    host: str,
    ended: Sequence[tuple[str, Mapping[str, Any]]],
    time_s: float,
    *,
    timeout_s: float,
) -> Sign:
    """Return a sign that names the ranks still running at the deadline."""
    ranks = ", ".join(
        f"rank {message['rank']} on {place}{STATES.get(str(message.get('state')), '')}"
        for place, message in sorted(ended, key=lambda entry: entry[1]["rank"])
    )
    # A stopped rank keeps its peers waiting, and the last lines of the peers say little.
    first = sorted(ended, key=lambda entry: str(entry[1].get("state")) not in STATES)[:1]
    lines = keep_last(first[0][1]["tail"]) if first else ()
    text = f"still running after {timeout_s:g} s: {ranks or host}"
    return Sign(kind="deadline", host=host, rank=None, time_s=time_s, text=text, lines=lines)


def describe_exit(code: int | None, signal: int | None, lines: Sequence[str]) -> str:
    """Describe how a rank ended in one sentence, with its last error if it printed one.

    Example:
        >>> describe_exit(1, None, ["Traceback (most recent call last):", "ValueError: no"])
        'ValueError: no (exit code 1)'
        >>> describe_exit(None, 9, [])
        'ended by signal 9'
    """
    how = f"ended by signal {signal}" if signal is not None else f"exit code {code}"
    error = last_error(lines)
    return f"{error} ({how})" if error else how


def keep_last(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last `NUM_KEPT_LINES` lines, each shortened."""
    return tuple(lines[-NUM_KEPT_LINES:])


def _with_advice(text: str) -> str:
    """Append advice to an error text if it says that the interpreter lacks a training package."""
    missing = any(f"No module named '{name}'" in text for name in NEEDED_MODULES)
    return text + MISSING_ADVICE if missing else text


def _speaker(message: Mapping[str, Any]) -> int:
    """Return the rank that sent an event; if a process has several ranks, the event names it."""
    named = message["data"].get("rank")
    sender: int = message["rank"]
    return named if isinstance(named, int) and named >= 0 else sender


def _kind_of_event(data: Mapping[str, Any]) -> SignKind:
    """Classify a failure reported by a rank; recognise a full disk, which it reports as a crash."""
    kind = EVENT_KINDS.get(str(data.get("cause")), "crash")
    text = f"{data.get('message')} {data.get('traceback')}"
    return "disk" if kind == "crash" and _is_full(text) else kind


def _kind_of_exit(
    code: int | None, signal: int | None, lines: Sequence[str], *, num_oom_kills: int
) -> SignKind:
    if signal == SIGKILL or code in KILLED_CODES:
        return "memory" if num_oom_kills > 0 else "killed"
    if code in EXIT_CODE_KINDS:
        return EXIT_CODE_KINDS[code]
    kind = kind_of_text(lines)
    return "killed" if signal is not None and kind == "crash" else kind
