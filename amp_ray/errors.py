"""The exceptions of the package; messages are safe to show in a terminal."""

import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from amp_ray.redaction import redact

_MOST_TOLD: Final = 20
"""Most mistakes of one input that a message lists."""

_ADVICE: Final = {
    errno.ENOSPC: "Make room",
    errno.EDQUOT: "Make room within the quota",
    errno.EFBIG: "Raise the limit of file sizes",
    errno.EMFILE: "Raise the limit of open files",
    errno.EROFS: "Make it writable",
    errno.EACCES: "Make it writable",
    errno.EPERM: "Make it writable",
    errno.EEXIST: "Move it away",
}
"""Advice by error number; other errors are faults of the disk or the file system."""


def printable(text: str) -> str:
    r"""Escape control characters of foreign text, so that none reaches a terminal.

    It replaces all characters that ``repr`` would escape: escape sequences, changes of the writing
    direction, lone surrogates. Lines and tabs stay, and doing it twice changes nothing.

    Example:
        >>> print(printable("a\x1b[31m\u202e\nü"))
        a\x1b[31m\u202e
        ü
    """
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or letter in "\n\t"
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


class AmpRayError(Exception):
    """Base class of all exceptions that the package raises on purpose."""

    def __init__(self, message: str = "") -> None:
        """Take the message, which may quote a host, a file or a program; secrets are left out."""
        super().__init__(redact(printable(message)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A place in a file, for messages."""

    file: str  # as the user gave it
    line: int | None = None  # counted from 1; None where the format has no lines
    key: str | None = None  # dotted key or column name, e.g. ``cluster.nodes.0.slots``

    def __str__(self) -> str:
        """Render as ``file:line: key``, without unknown parts."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return (place if self.key is None else f"{place}: {self.key}").replace("\n", "\\n")

    def is_as_exact_as(self, other: "Where") -> bool:
        """Return whether another place adds nothing: this one is a line, an option, or the same."""
        is_option = self.file.startswith("--")
        return self.line is not None or is_option or str(self) == str(other)

    def at(self, key: str) -> "Where":
        """Narrow the place down to a key or column."""
        return replace(self, key=key)


class InputError(AmpRayError, ValueError):
    """A file or an argument is wrong; only its author can correct it, a retry never helps."""

    def __init__(
        self,
        message: str,
        *,
        where: Where | None = None,
        parts: tuple["InputError", ...] = (),
    ) -> None:
        """Keep the place; ``parts`` are the mistakes of a message with several."""
        super().__init__(message if where is None else f"{where}: {message}")
        self.where = where
        self._parts = parts

    @property
    def parts(self) -> tuple["InputError", ...]:
        """The single mistakes: this one, or its parts."""
        return self._parts or (self,)


class Mistakes:
    """Collects the mistakes of an input, to report all of them at once."""

    def __init__(self) -> None:
        """Start without any."""
        self._found: dict[str, InputError] = {}

    def add(self, error: InputError) -> None:
        """Keep an error for later; equal errors are kept once."""
        for part in error.parts:
            self._found.setdefault(str(part), part)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep an ``InputError`` for later."""
        try:
            yield
        except InputError as error:
            self.add(error)

    def check(self) -> None:
        """Raise the collected mistakes, in the order in which they were added."""
        parts = tuple(self._found.values())
        if len(parts) == 1:
            raise parts[0]
        if parts:
            raise InputError("\n".join(told(parts)), parts=parts)


def told(parts: Sequence[InputError]) -> list[str]:
    """Return the messages of the first mistakes, and the number of the others."""
    messages = [str(part) for part in parts[:_MOST_TOLD]]
    more = len(parts) - len(messages)
    return [*messages, f"and {more} more mistake{'s' if more > 1 else ''}"] if more else messages


class NotFeasibleError(AmpRayError):
    """No strategy is expected to run."""


class HostError(AmpRayError):
    """A host could not be reached or used; the caller may try again elsewhere."""


class InterruptedTrialError(AmpRayError):
    """A trial was ended on purpose before it was over; it may be run again."""


def advice_for(error: OSError) -> str:
    """Return short advice about an error of the operating system."""
    return _ADVICE.get(error.errno or 0, "See to that")


@contextmanager
def placed(where: Where, kind: type[ValueError] = InputError) -> Iterator[None]:
    """Add the place of the input to an error that it caused.

    An error that already names a line, an option or this place stays; ``where`` is put in front of
    others.
    Catch ``ValueError`` only around code that checks a user's input, since elsewhere it may be a
    bug.
    """
    try:
        yield
    except kind as error:
        mistakes = Mistakes()
        for part in error.parts if isinstance(error, InputError) else (error,):
            place = part.where if isinstance(part, InputError) else None
            if isinstance(part, InputError) and place and place.is_as_exact_as(where):
                mistakes.add(part)
            else:
                mistakes.add(InputError(str(part), where=where))
        mistakes.check()


LONGEST_VALUE: Final = 60  # characters of a value that a message shows


def shown(value: object) -> str:
    """Render a value for a message, shortened if it is long.

    Example:
        >>> shown("a"), shown(True), shown(None)
        ("'a'", 'true', 'null')
    """
    try:
        text = json.dumps(value) if isinstance(value, bool | None) else repr(value)
    except ValueError:  # Python writes no integer of so many digits
        text = "a number of thousands of digits"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
