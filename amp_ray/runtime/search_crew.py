"""A search by several workers: a loop that loses time to a dead worker, and nothing else."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import amp_ray
from amp_ray.cost.estimate import Result
from amp_ray.errors import AmpRayError
from amp_ray.runtime.search_batches import IN_FLIGHT, Answer, Batch, Batches
from amp_ray.search.planner import Planner
from amp_ray.spec.candidate import AnyCandidate

POLL_S: Final = 0.5
"""How often batches are looked at that are out for too long."""

START_TIMEOUT_S: Final = 60.0
"""Until the first worker answers: a new process takes 1 s, on a busy machine 10 s."""

SILENCE_TIMEOUT_S: Final = 300.0
"""Without any answer: the largest known candidates take 0.1 s, a dead node is noticed in 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a process tells of itself before it gets work.

    Args:
        version: Of this package, there.
        pid: Process id.
        host: Name of its machine.
    """

    version: str
    pid: int
    host: str

    @classmethod
    def here(cls) -> "Hello":
        """Describe this process."""
        return cls(version=amp_ray.__version__, pid=os.getpid(), host=platform.node())

    def check_version(self) -> None:
        """Refuse a process that runs another version: it might plan or launch differently.

        Raises:
            AmpRayError: If it does.
        """
        if self.version != amp_ray.__version__:
            message = (
                f"{self.host} has amp-ray {self.version} and this machine {amp_ray.__version__}: "
                "install the same version on every node of the Ray cluster"
            )
            raise AmpRayError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every worker is given once.

    Args:
        planner: Plans one candidate.
        candidates: All of them; batches name them by number.
    """

    planner: Planner
    candidates: tuple[AnyCandidate, ...]


class SearchWorker:
    """Plans batches in a process of its own."""

    def __init__(self, work: Work) -> None:
        """Keep the work."""
        self._work = work
        self._warm = False

    def plan(self, batch: Batch) -> Answer:
        """Plan candidates up to the first error of the user's."""
        start_s = time.perf_counter()
        results: list[Result] = []
        error: ValueError | None = None
        for candidate in self._work.candidates[batch.start : batch.stop]:
            try:
                results.append(self._work.planner.plan(candidate))
            except ValueError as caught:
                error = caught
                break
        warm, self._warm = self._warm, True
        busy_s = time.perf_counter() - start_s
        return Answer(results=tuple(results), error=error, busy_s=busy_s, warm=warm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened to a worker.

    Args:
        worker: Its number.
        batch: Which batch it is about; None for the worker itself.
        answer: Of the batch; None if it is lost.
        gone: Why the worker will never answer again; None if it lives or is restarted.
    """

    worker: int
    batch: Batch | None = None
    answer: Answer | None = None
    gone: str | None = None


class Crew(Protocol):
    """Workers that are starting or have started."""

    @property
    def num_workers(self) -> int:
        """How many were asked for."""
        ...

    def ask(self, worker: int, batch: Batch) -> None:
        """Give a worker a batch."""
        ...

    def events(self, timeout_s: float) -> Sequence[Event]:
        """Wait for something to happen; the first event of a worker says that it has started."""
        ...

    def shortage(self) -> str:
        """Say what there is to run workers on, for a message that none has started."""
        ...


class CrewSearch:
    """One search by a crew."""

    def __init__(self, crew: Crew, num_candidates: int, num_done: Callable[[int], None]) -> None:
        """Begin.

        Args:
            crew: Who works.
            num_candidates: How many candidates the crew's work has.
            num_done: Called with the number of results that there are.
        """
        self._crew = crew
        self._batches = Batches(num_candidates)
        self._num_done = num_done
        self._load: dict[int, int] = {}
        self._gone: dict[int, str] = {}
        self._heard_s = time.monotonic()

    def run(self) -> list[Result]:
        """Work until every result is there.

        Returns:
            Results in the order of the candidates.

        Raises:
            ValueError: The one that planning in one process would raise.
            AmpRayError: If no worker starts, or all fall silent.
        """
        while not self._batches.complete:
            for worker in sorted(self._load, key=lambda worker: (self._load[worker], worker)):
                self._fill(worker)
            events = self._crew.events(POLL_S)
            if events:
                self._heard_s = time.monotonic()
            for event in events:
                self._note(event)
            self._check()
        return self._batches.results()

    def _fill(self, worker: int) -> None:
        """Give a worker as much as it may have."""
        while self._load[worker] < IN_FLIGHT:
            batch = self._batches.take(worker, num_workers=len(self._load), now_s=time.monotonic())
            if batch is None:
                return
            self._crew.ask(worker, batch)
            self._load[worker] += 1

    def _note(self, event: Event) -> None:
        """Take note of an event."""
        if event.gone is not None:
            self._gone[event.worker] = event.gone
            self._load.pop(event.worker, None)
        elif event.batch is None:
            self._load[event.worker] = 0
        if event.batch is None:
            return
        if event.worker in self._load:
            self._load[event.worker] -= 1
        if event.answer is None:
            self._batches.lose(event.worker, event.batch)
        else:
            self._batches.collect(event.batch, event.answer)
            self._num_done(self._batches.num_done)

    def _check(self) -> None:
        """Give up where waiting helps no more."""
        if len(self._gone) == self._crew.num_workers:
            message = f"no worker of the search is left: {next(iter(self._gone.values()))}"
            raise AmpRayError(message)
        silent_s = time.monotonic() - self._heard_s
        if not self._load and silent_s > START_TIMEOUT_S:
            message = (
                f"no worker of the search has started in {START_TIMEOUT_S:g} s: "
                f"{self._crew.shortage()}"
            )
            raise AmpRayError(message)
        if silent_s > SILENCE_TIMEOUT_S:
            message = f"no worker of the search has answered for {SILENCE_TIMEOUT_S:g} s"
            raise AmpRayError(message)
