"""The exceptions of the package; each says who may try again."""

from dataclasses import dataclass


class AmpRayError(Exception):
    """Base of everything that the package raises on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A place in a file that a person can go to.

    Args:
        file: Name of the file as the user gave it.
        line: Line number, counted from 1; None where the format has no lines.
        key: Dotted key or column name, e.g. ``cluster.nodes.0.slots``.
    """

    file: str
    line: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        """Render as ``file:line: key``, leaving out what is unknown."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return place if self.key is None else f"{place}: {self.key}"


class InputError(AmpRayError, ValueError):
    """A file or an argument is wrong; only its author can mend it, a retry never helps."""

    def __init__(self, message: str, *, where: Where | None = None) -> None:
        """Remember the place, so that callers can add to it."""
        super().__init__(message if where is None else f"{where}: {message}")
        self.where = where


class HostError(AmpRayError):
    """A host could not be reached or used; the caller may try again elsewhere."""
