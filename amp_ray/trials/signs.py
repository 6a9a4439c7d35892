"""From what agents say to signs of failure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from amp_ray.trials.causes import DISK_WORDS, Sign, SignKind, kind_of_text, last_error

SIGKILL: Final = 9

KILLED_CODES: Final = (128 + SIGKILL, 256 - SIGKILL)
"""How shells, and how programs written in Python, pass on that a process of theirs was killed."""

EXIT_CODE_KINDS: Final[dict[int, SignKind]] = {42: "memory", 43: "communication", 44: "port"}
"""Codes by which the training program tells its cause."""

EVENT_KINDS: Final[dict[str, SignKind]] = {
    "out_of_memory": "memory",
    "communication": "communication",
    "port_taken": "port",
}
"""Causes in the ``failed`` events of the training program; all others are crashes."""

TROUBLE_KINDS: Final[dict[str, SignKind]] = {
    "disk-full": "disk",
    "folder": "disk",
    "network": "network",
    "start": "start",
    "warm": "warm",
}
"""The agent's words for what is wrong with a host."""

NEEDED_MODULES: Final = ("torch", "deepspeed")

MISSING_ADVICE: Final = (
    "; install it on that host for the interpreter that trains, or name another interpreter as "
    "trials.python"
)

STATES: Final = {
    "T": " (stopped by a signal)",
    "D": " (waits in the kernel, as for a disk or a device)",
}
"""What a rank did at the deadline, by the kernel's letter, where that explains a hang."""

NUM_KEPT_LINES: Final = 20
"""Of a rank's output, in an outcome."""


def sign_of_event(host: str, message: Mapping[str, Any], time_s: float) -> Sign | None:
    """Read a rank's event (``said``); None unless it reports a failure."""
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
    """Read what is wrong with a host (``trouble``)."""
    kind = TROUBLE_KINDS[message["what"]]
    return Sign(kind=kind, host=host, rank=message["rank"], time_s=time_s, text=message["text"])


def sign_of_exit(
    host: str, message: Mapping[str, Any], time_s: float, *, num_oom_kills: int
) -> Sign | None:
    """Read the end of a rank (``exit``); None if it went well or was asked for.

    ``message`` has ``rank``, ``code``, ``signal``, ``tail`` and ``ended``; ``num_oom_kills``
    counts how often the host's kernel ended a process for want of memory meanwhile.
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
    """Say who was still running at the deadline."""
    ranks = ", ".join(
        f"rank {message['rank']} on {place}{STATES.get(message.get('state', ''), '')}"
        for place, message in sorted(ended, key=lambda entry: entry[1]["rank"])
    )
    # Who is stopped keeps the others waiting, whose last lines say little.
    first = sorted(ended, key=lambda entry: entry[1].get("state") not in STATES)[:1]
    lines = keep_last(first[0][1]["tail"]) if first else ()
    text = f"still running after {timeout_s:g} s: {ranks or host}"
    return Sign(kind="deadline", host=host, rank=None, time_s=time_s, text=text, lines=lines)


def describe_exit(code: int | None, signal: int | None, lines: Sequence[str]) -> str:
    """Put a rank's end in one sentence, with its last error where it printed one.

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
    """Return the lines that an outcome keeps."""
    return tuple(lines[-NUM_KEPT_LINES:])


def _with_advice(text: str) -> str:
    """Add what to do about an interpreter that cannot train."""
    missing = any(f"No module named '{name}'" in text for name in NEEDED_MODULES)
    return text + MISSING_ADVICE if missing else text


def _speaker(message: Mapping[str, Any]) -> int:
    """Return the rank that sent an event: where a process plays several, the event says which."""
    said = message["data"].get("rank")
    own: int = message["rank"]
    return said if isinstance(said, int) and said >= 0 else own


def _kind_of_event(data: Mapping[str, Any]) -> SignKind:
    """Sort a failure that a rank reports: the program does not tell a full disk from a crash."""
    kind = EVENT_KINDS.get(str(data.get("cause")), "crash")
    is_full = any(word in str(data.get("message")).lower() for word in DISK_WORDS)
    return "disk" if kind == "crash" and is_full else kind


def _kind_of_exit(
    code: int | None, signal: int | None, lines: Sequence[str], *, num_oom_kills: int
) -> SignKind:
    """Sort the end of a rank that nobody asked to end."""
    if signal == SIGKILL or code in KILLED_CODES:
        return "memory" if num_oom_kills > 0 else "killed"
    if code in EXIT_CODE_KINDS:
        return EXIT_CODE_KINDS[code]
    kind = kind_of_text(lines)
    return "killed" if signal is not None and kind == "crash" else kind
