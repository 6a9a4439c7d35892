"""An immutable sequence that is cheap to extend; older versions stay valid."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, overload

Item = TypeVar("Item")

CHUNK: Final = 128
"""Items that stand together. A change copies one chunk and the list of chunks, so that the best
size is about the root of the length: 10,000 trials are 79 chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log(Sequence[Item]):
    """An immutable sequence that is cheap to extend and to correct.

    Example:
        >>> [*Log().appended("a").appended("b").replaced(0, "c")]
        ['c', 'b']
    """

    # Runs of `CHUNK` items; only the last one may be shorter
    chunks: tuple[tuple[Item, ...], ...] = ()

    def __len__(self) -> int:
        return CHUNK * (len(self.chunks) - 1) + len(self.chunks[-1]) if self.chunks else 0

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        at, inner = divmod(self._checked(index), CHUNK)
        return self.chunks[at][inner]

    def __iter__(self) -> Iterator[Item]:
        for chunk in self.chunks:
            yield from chunk

    def appended(self, item: Item) -> "Log[Item]":
        """Return the sequence with one more item."""
        if self.chunks and len(self.chunks[-1]) < CHUNK:
            return Log(chunks=(*self.chunks[:-1], (*self.chunks[-1], item)))
        return Log(chunks=(*self.chunks, (item,)))

    def replaced(self, index: int, item: Item) -> "Log[Item]":
        """Return the sequence with another item at one index."""
        at, inner = divmod(self._checked(index), CHUNK)
        chunk = self.chunks[at]
        changed = (*chunk[:inner], item, *chunk[inner + 1 :])
        return Log(chunks=(*self.chunks[:at], changed, *self.chunks[at + 1 :]))

    def _checked(self, index: int) -> int:
        """Count a negative index from the end, and refuse one that is out of range."""
        checked = index + len(self) if index < 0 else index
        if not 0 <= checked < len(self):
            raise IndexError(f"the log has {len(self)} items, asked for number {index}")
        return checked
