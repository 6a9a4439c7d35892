"""Messages of agents: each is checked before anything acts on it, and queued with a limit."""

import math
import queue
import reprlib
import threading
from collections.abc import Mapping
from typing import Any, Final

from amp_ray.runtime.hosts.agent.wire import TEXT_CHARACTERS, WireError, printable
from amp_ray.trials.causes import TROUBLE_KINDS

Message = dict[str, Any]

_MAX_DEPTH: Final = 8
_MAX_VALUES: Final = 20_000
_MAX_INTEGER: Final = 2**63

_SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "hello": {"isolation": str, "hostname": str},
    "prepared": {
        "folder": str,
        "address": str,
        "interface": str,
        "port": int | None,
        "missing": list[str],
    },
    "stored": {"digest": str},
    "warm": {"problem": str, "import_s": int | float},
    "claimed": {"problem": str},
    "warm-died": {"text": str},
    "started": {"rank": int, "pid": int},
    "said": {"rank": int, "data": dict},
    "trouble": {"what": TROUBLE_KINDS, "rank": int | None, "text": str},
    "exit": {
        "rank": int,
        "code": int | None,
        "signal": int | None,
        "ended": bool,
        "tail": list[str],
    },
    "collecting": {"reason": str},
    "file": {"name": str, "data": str, "num_cut": int, "last": bool},
    "done": {"reason": str, "clean": bool, "left": list[str], "num_oom_kills": int},
    "lost": {"text": str},
    "swept": {"found": list[str], "left": list[str]},
}
"""By kind: what has to be there, and of which type, or which of some words."""


def _fits(value: object, shape: Any) -> bool:  # noqa: ANN401 - a type, a list of texts, or words
    """Tell whether a value is of a type; true and false are no numbers."""
    if shape == list[str]:
        return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    if shape is TROUBLE_KINDS:
        return isinstance(value, str) and value in shape
    return isinstance(value, shape) and (shape is bool or not isinstance(value, bool))


def check_message(message: Message) -> Message:
    """Return a message as it may be acted on, recorded and shown.

    Texts are cut and shown without control characters; a kind or a key that is not known passes.
    Raises `WireError` if something is missing, of another type, or out of all proportion.
    """
    kind = message["kind"]
    for key, shape in _SHAPES.get(kind, {}).items():
        if key not in message or not _fits(message[key], shape):
            found = printable(reprlib.repr(message.get(key)))
            raise WireError(f"a message {printable(kind)!r} has {key} {found}")
    return message if kind == "file" else clean(message)


def clean(message: Message) -> Message:
    """Return a message of a host with nothing in it that could harm a reader.

    Numbers that JSON does not have (``nan``) become texts. Raises `WireError` if it is nested too
    deeply, or has too many values or too large a number.
    """
    num_values = 0

    def visit(value: Any, depth: int) -> Any:  # noqa: ANN401 - JSON
        nonlocal num_values
        num_values += 1
        if depth > _MAX_DEPTH or num_values > _MAX_VALUES:
            text = f"a message is nested deeper than {_MAX_DEPTH} or has over {_MAX_VALUES} values"
            raise WireError(text)
        if isinstance(value, str):
            return printable(value, TEXT_CHARACTERS)
        if isinstance(value, list):
            return [visit(entry, depth + 1) for entry in value]
        if isinstance(value, dict):
            return {printable(key): visit(entry, depth + 1) for key, entry in value.items()}
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, int) and abs(value) >= _MAX_INTEGER:
            raise WireError("a message has a number of more than 63 bits")
        return value

    cleaned: Message = visit(message, 0)
    return cleaned


_WINDOW: Final = 8  # messages of one agent that may wait here: a flood can take no more memory
_POLL_S: Final = 0.5


class Inbox:
    """A queue with a place of limited size for each agent, by its tag."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
        self._rooms: dict[str, threading.Semaphore] = {}
        self._gone: set[str] = set()

    def put(self, tag: str, message: Message) -> None:
        """Add a message, when there is room for one more of this agent and it is not gone."""
        room = self._room(tag)
        while tag not in self._gone:
            if room.acquire(timeout=_POLL_S):
                self._queue.put((tag, message))
                return

    def get(self, timeout_s: float) -> tuple[str, Message]:
        """Take the oldest message; `queue.Empty` if none comes in time."""
        tag, message = self._queue.get(timeout=timeout_s)
        self._room(tag).release()
        return tag, message

    def forget(self, tag: str) -> None:
        """Let nobody wait for room that an agent's messages take, which nobody will read."""
        self._gone.add(tag)

    def _room(self, tag: str) -> threading.Semaphore:
        """Return the place of an agent; by one call, since threads ask at the same time."""
        return self._rooms.setdefault(tag, threading.Semaphore(_WINDOW))
