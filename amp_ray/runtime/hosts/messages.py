"""Messages of agents: each is checked before anything acts on it, and queued with a limit."""

import math
import queue
import reprlib
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

from amp_ray.runtime.hosts.agent.wire import TEXT_CHARACTERS, WireError, printable
from amp_ray.trials.causes import TROUBLE_KINDS

Message = dict[str, Any]

_MAX_DEPTH: Final = 8
_MAX_VALUES: Final = 20_000
_MAX_INTEGER: Final = 2**63

_Test = Callable[[Any], bool]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _optional(test: _Test) -> _Test:
    """Let a value be null, too."""
    return lambda value: value is None or test(value)


_SHAPES: Final[Mapping[str, Mapping[str, _Test]]] = {
    "hello": {"isolation": _is_text, "hostname": _is_text},
    "prepared": {
        "folder": _is_text,
        "address": _is_text,
        "interface": _is_text,
        "port": _optional(_is_integer),
        "missing": _is_texts,
    },
    "stored": {"digest": _is_text},
    "warm": {"problem": _is_text, "import_s": lambda value: isinstance(value, int | float)},
    "claimed": {"problem": _is_text},
    "warm-died": {"text": _is_text},
    "started": {"rank": _is_integer, "pid": _is_integer},
    "said": {"rank": _is_integer, "data": lambda value: isinstance(value, dict)},
    "trouble": {
        "what": lambda value: isinstance(value, str) and value in TROUBLE_KINDS,
        "rank": _optional(_is_integer),
        "text": _is_text,
    },
    "exit": {
        "rank": _is_integer,
        "code": _optional(_is_integer),
        "signal": _optional(_is_integer),
        "ended": _is_bool,
        "tail": _is_texts,
    },
    "collecting": {"reason": _is_text},
    "file": {"name": _is_text, "data": _is_text, "num_cut": _is_integer, "last": _is_bool},
    "done": {
        "reason": _is_text,
        "clean": _is_bool,
        "left": _is_texts,
        "num_oom_kills": _is_integer,
    },
    "lost": {"text": _is_text},
    "swept": {"found": _is_texts, "left": _is_texts},
}
"""By kind: what has to be there, and what it has to be."""


def check_message(message: Message) -> Message:
    """Return a message as it may be acted on, recorded and shown.

    Texts are cut and shown without control characters; a kind or a key that is not known passes.
    Raises `WireError` if something is missing, of another type, or out of all proportion.
    """
    kind = message["kind"]
    for key, test in _SHAPES.get(kind, {}).items():
        if key not in message or not test(message[key]):
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


_WINDOW: Final = 8
"""Messages of one agent that may wait here: they are what a flood can take of our memory."""

_POLL_S: Final = 0.5


class Inbox:
    """A queue with a place of limited size for each agent, by its tag."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
        self._rooms: defaultdict[str, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(_WINDOW)
        )
        self._lock = threading.Lock()
        self._gone: set[str] = set()

    def put(self, tag: str, message: Message) -> None:
        """Add a message, when there is room for one more of this agent and it is not gone."""
        room = self._room(tag)
        while tag not in self._gone:
            if room.acquire(timeout=_POLL_S):
                self._queue.put((tag, message))
                return

    def get(self, timeout_s: float) -> tuple[str, Message]:
        """Take the oldest message.

        Raises `queue.Empty` if none comes in time.
        """
        tag, message = self._queue.get(timeout=timeout_s)
        self._room(tag).release()
        return tag, message

    def forget(self, tag: str) -> None:
        """Let nobody wait for room that an agent's messages take, which nobody will read."""
        self._gone.add(tag)

    def _room(self, tag: str) -> threading.Semaphore:
        with self._lock:
            return self._rooms[tag]
