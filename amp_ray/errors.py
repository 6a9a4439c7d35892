"""The exceptions of the package; each says who may try again, in words that a terminal can show."""

import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from amp_ray.redaction import redact

_MOST_TOLD: Final = 20
"""Mistakes of one input that are told at once."""

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
"""What a person can do; anything else is the disk's or the file system's trouble."""


def printable(text: str) -> str:
    r"""Show control characters of a text that others wrote, instead of sending them to a terminal.

    Everything is replaced that ``repr`` would not show: escape sequences, changes of the writing
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
    """Base of everything that the package raises on purpose."""

    def __init__(self, message: str = "") -> None:
        """Take the message, which may quote a host, a file or a program; secrets are left out."""
        super().__init__(redact(printable(message)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A place in a file that a person can go to."""

    file: str  # as the user gave it
    line: int | None = None  # counted from 1; None where the format has no lines
    key: str | None = None  # dotted key or column name, e.g. ``cluster.nodes.0.slots``

    def __str__(self) -> str:
        """Render as ``file:line: key``, leaving out what is unknown."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return (place if self.key is None else f"{place}: {self.key}").replace("\n", "\\n")

    def at(self, key: str) -> "Where":
        """Narrow the place down to a key or column."""
        return replace(self, key=key)


class InputError(AmpRayError, ValueError):
    """A file or an argument is wrong; only its author can mend it, a retry never helps."""

    def __init__(
        self,
        message: str,
        *,
        where: Where | None = None,
        parts: tuple["InputError", ...] = (),
    ) -> None:
        """Remember the place; ``parts`` are the mistakes, where the message tells several."""
        super().__init__(message if where is None else f"{where}: {message}")
        self.where = where
        self._parts = parts

    @property
    def parts(self) -> tuple["InputError", ...]:
        """The single mistakes: this one, or those that it was made of."""
        return self._parts or (self,)


class Mistakes:
    """Collects the mistakes of an input, so that all of them are told at once."""

    def __init__(self) -> None:
        """Start without any."""
        self._found: dict[str, InputError] = {}

    def add(self, error: InputError) -> None:
        """Keep an error for later; one that is known already is kept once."""
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
        """Raise what was collected, in the order in which it was found."""
        parts = tuple(self._found.values())
        if len(parts) == 1:
            raise parts[0]
        if parts:
            raise InputError("\n".join(told(parts)), parts=parts)


def told(parts: Sequence[InputError]) -> list[str]:
    """Return the messages of the first mistakes, and how many more there are."""
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
    """Say in a few words what a person can do about an error of the system."""
    return _ADVICE.get(error.errno or 0, "See to that")


@contextmanager
def placed(where: Where, kind: type[ValueError] = InputError) -> Iterator[None]:
    """Lead an error to the place of the input that caused it.

    An error that names a line of its own stays as it is; any other gets ``where`` in front.

    Args:
        where: The place that led here.
        kind: What is caught. Give ``ValueError`` only around code that checks what a user wrote,
            since elsewhere it may be a mistake of ours.
    """
    try:
        yield
    except kind as error:
        mistakes = Mistakes()
        for part in error.parts if isinstance(error, InputError) else (error,):
            if isinstance(part, InputError) and part.where is not None and part.where.line:
                mistakes.add(part)
            else:
                mistakes.add(InputError(str(part), where=where))
        mistakes.check()


LONGEST_VALUE: Final = 60  # characters of a found value that a message shows


def shown(value: object) -> str:
    """Render a found value for a message, cut where it is long.

    Example:
        >>> shown("a"), shown(True), shown(None)
        ("'a'", 'true', 'null')
    """
    try:
        text = json.dumps(value) if isinstance(value, bool | None) else repr(value)
    except ValueError:  # Python writes no integer of so many digits
        text = "a number of thousands of digits"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
