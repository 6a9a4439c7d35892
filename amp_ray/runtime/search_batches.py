"""A search as batches of candidates: who plans which, what comes back, and what is lost.

No Ray here: `search_crew` tells workers apart by numbers, and `runtime.actors` has real ones.
"""

import math
from dataclasses import dataclass, field
from typing import Final

from amp_ray.cost.estimate import Result

TARGET_S: Final = 0.1
"""Time of one batch: a call costs about 1 ms, and a lost batch should not cost much."""

LEAST_S: Final = 0.05
"""Near the end batches shrink, so that all workers end together, but not below this."""

IN_FLIGHT: Final = 2
"""Batches per worker: one that it plans, and one so that it need not wait for the next."""

PATIENCE_S: Final = 2.0
"""A batch that is out for longer is given to an idle worker too: far more than it should take."""

_SMOOTHING: Final = 0.5
"""Weight of the last batch in the time per candidate: large and small candidates come in runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Consecutive candidates.

    Args:
        start: Number of the first.
        stop: Number after the last.
    """

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a worker made of a batch.

    Args:
        results: Of the first candidates of the batch; of all, if there is no error.
        error: What the next candidate raised; it is told as in one process.
        busy_s: Time that the planner took.
        warm: False for the first batch of a process, which may compile and fill caches.
    """

    results: tuple[Result, ...]
    error: ValueError | None
    busy_s: float
    warm: bool


@dataclass(slots=True)
class _Copies:
    """Who has a batch.

    Args:
        workers: Their numbers.
        since_s: When the last of them got it.
    """

    workers: set[int] = field(default_factory=set)
    since_s: float = 0.0


class Batches:
    """The candidates of one search, handed out in order and collected in any."""

    def __init__(self, num_candidates: int) -> None:
        """Begin with nothing handed out.

        Args:
            num_candidates: How many there are.
        """
        self._results: list[Result | None] = [None] * num_candidates
        self._next = 0
        self._lost: list[Batch] = []
        self._out: dict[Batch, _Copies] = {}
        self._error: tuple[int, ValueError] | None = None
        self._each_s: float | None = None
        self.num_done = 0

    @property
    def complete(self) -> bool:
        """Whether every result is there, or every one before the first error."""
        if self._error is None:
            return self.num_done == len(self._results)
        return None not in self._results[: self._error[0]]

    def results(self) -> list[Result]:
        """Return all results, in the order of the candidates.

        Raises:
            ValueError: What planning raised for the first candidate for which it raised anything.
        """
        if self._error is not None:
            raise self._error[1]
        return [result for result in self._results if result is not None]

    def take(self, worker: int, *, num_workers: int, now_s: float) -> Batch | None:
        """Hand out a batch: a lost one, a new one, or one that another is slow with.

        Args:
            worker: For whom.
            num_workers: How many share the rest.
            now_s: Time of a steady clock.

        Returns:
            None if there is nothing to do for this worker.
        """
        batch = self._take_lost() or self._take_new(num_workers) or self._take_slow(worker, now_s)
        if batch is not None:
            copies = self._out.setdefault(batch, _Copies())
            copies.workers.add(worker)
            copies.since_s = now_s
        return batch

    def collect(self, batch: Batch, answer: Answer) -> None:
        """Take an answer; one that another worker has given already changes nothing."""
        self._out.pop(batch, None)
        for number, result in enumerate(answer.results, start=batch.start):
            if self._results[number] is None:
                self._results[number] = result
                self.num_done += 1
        if answer.error is not None:
            self._note_error(batch.start + len(answer.results), answer.error)
        elif answer.warm:
            each_s = answer.busy_s / (batch.stop - batch.start)
            before_s = each_s if self._each_s is None else self._each_s
            self._each_s = before_s + _SMOOTHING * (each_s - before_s)

    def lose(self, worker: int, batch: Batch) -> None:
        """Take note that a worker will not answer; somebody else has to."""
        copies = self._out.get(batch)
        if copies is None:
            return
        copies.workers.discard(worker)
        if not copies.workers:
            del self._out[batch]
            self._lost.append(batch)

    def _note_error(self, number: int, error: ValueError) -> None:
        """Keep the error of the first candidate; those after it do not matter any more."""
        if self._error is None or number < self._error[0]:
            self._error = (number, error)
            self._next = len(self._results)

    def _take_lost(self) -> Batch | None:
        """Hand out a batch that nobody has any more."""
        return self._lost.pop() if self._lost else None

    def _take_new(self, num_workers: int) -> Batch | None:
        """Hand out the next candidates."""
        start, rest = self._next, len(self._results) - self._next
        if rest == 0:
            return None
        self._next += min(rest, self._size(rest, num_workers))
        return Batch(start=start, stop=self._next)

    def _size(self, rest: int, num_workers: int) -> int:
        """Choose a size by the time that candidates took; one until that is known."""
        if self._each_s is None:
            return 1
        each_s = max(self._each_s, LEAST_S / len(self._results))
        share = math.ceil(rest / (num_workers * IN_FLIGHT))
        return max(1, round(LEAST_S / each_s), min(share, round(TARGET_S / each_s)))

    def _take_slow(self, worker: int, now_s: float) -> Batch | None:
        """Hand out a batch again that has been out for long: its worker or node may be dead."""
        slow = [
            (copies.since_s, batch.start, batch)
            for batch, copies in self._out.items()
            if worker not in copies.workers and now_s - copies.since_s > PATIENCE_S
        ]
        return min(slow)[2] if slow else None
