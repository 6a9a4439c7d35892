"""A pool with an actor per group: where one dies its trial is unreachable, and it starts again.

No Ray here: `actors` has Ray's. Without Ray, or where it is lost, the actors are threads.
"""

import logging
import os
import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import FIRST_COMPLETED, Future
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from amp_ray.errors import AmpRayError
from amp_ray.runtime.ray.address import RayUnavailableError
from amp_ray.runtime.ray.trial_worker import Hello, MakeRunner
from amp_ray.runtime.study.pool import (
    CLOSE_TIMEOUT_S,
    Fault,
    Finished,
    Runner,
    Task,
    run_task,
    sweep_lines,
)
from amp_ray.trials.outcome import Outcome, Unreachable

_LOGGER = logging.getLogger(__name__)
START_TIMEOUT_S: Final = 180.0  # for all, side by side: a new process takes 1 s, if busy 60 s
SWEEP_TIMEOUT_S: Final = 120.0  # side by side; silent hosts take a connection's time-out each


class ActorLostError(AmpRayError):
    """An actor has died or cannot be reached; what it was doing is unknown."""


class TrialActors(Protocol):
    """One actor per group, each a `trial_worker.TrialWorker` in a process of its own."""

    def begin(self, group: int) -> None:
        """Start a group's actor anew; returns at once."""

    def call(self, group: int, method: str, *arguments: object) -> Hashable:
        """Call a method; returns at once, with what stands for the result."""

    def ready(self, calls: Iterable[Any], timeout_s: float) -> list[Any]:
        """Wait for the first of some calls to end, or less long; return all that have.

        Raises `RayUnavailableError` if none of the calls will ever end.
        """

    def result(self, call: Any) -> Any:  # noqa: ANN401 - of any method
        """Return a result, or raise what the method did; `ActorLostError` if the actor has died."""

    def end(self, group: int) -> None:
        """Kill a group's actor."""

    def substitute(self) -> "TrialActors":
        """Leave the cluster that is lost; return what takes the place of its actors."""


class ThreadActors:
    """Trial actors in this process: a thread per call. They cannot be killed."""

    def __init__(self, make_runner: MakeRunner) -> None:
        self._make_runner = make_runner
        self._runners: dict[int, Runner] = {}

    def begin(self, group: int) -> None:
        """Do nothing: opening makes the runner."""

    def call(self, group: int, method: str, *arguments: Any) -> Hashable:  # noqa: ANN401 - of any
        """Call a method."""
        call: Future[Any] = Future()

        def work() -> None:
            try:
                call.set_result(self._do(group, method, *arguments))
            except Exception as error:  # noqa: BLE001 - raised where the result is asked for
                call.set_exception(error)

        threading.Thread(target=work, name=f"{method} {group}", daemon=True).start()
        return call

    def ready(self, calls: Iterable[Any], timeout_s: float) -> list[Any]:
        """Wait for the first of some calls to end; return all that have."""
        waiting = list(calls)
        if not waiting:
            time.sleep(timeout_s)
        return list(futures.wait(waiting, timeout_s, return_when=FIRST_COMPLETED).done)

    def result(self, call: Any) -> Any:  # noqa: ANN401 - of any method
        """Return the result of a call that has ended."""
        return call.result()

    def end(self, group: int) -> None:
        """Do nothing: what it has started was ended when it was closed."""

    def substitute(self) -> "TrialActors":
        """Return itself: it is never lost."""
        return self

    def _do(self, group: int, method: str, *arguments: Any) -> Any:  # noqa: ANN401 - of any method
        """Do what `trial_worker.TrialWorker` does, where the driver is."""
        if method == "open":
            self._runners[group] = self._make_runner(group)
            if any(arguments):
                sweep_lines(self._runners[group], *arguments)
            return Hello.here()
        runner = self._runners[group]
        if method == "run":
            return run_task(runner, *arguments)
        if method == "sweep":
            return sweep_lines(runner, *arguments)
        return runner.interrupt() if method == "interrupt" else runner.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """A trial that runs."""

    task: Task
    group: int
    start_s: float  # since when, by a steady clock


class ActorPool:
    """A pool with an actor per group of hosts; see `pool.Pool`."""

    def __init__(
        self, actors: TrialActors, num_groups: int, *, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        self._actors = actors
        self._num_groups = num_groups
        self._start_timeout_s = start_timeout_s
        self._attempts: dict[Any, _Attempt] = {}
        self._finished: list[Finished] = []
        self._is_closing = False
        self._aside: set[int] = set()
        self._restarted: set[int] = set()
        self._begun: set[int] = set()
        try:
            self._open(dict.fromkeys(range(num_groups), ()))
        except BaseException:
            self._end()
            raise

    def free(self) -> tuple[int, ...]:
        """Return the groups that are idle and in use."""
        busy = self._aside | {attempt.group for attempt in self._attempts.values()}
        return tuple(group for group in range(self._num_groups) if group not in busy)

    def start(self, task: Task, group: int) -> None:
        """Start a trial on a group that is free."""
        assert group in self.free()
        # An actor on this machine may have another working folder.
        sent = replace(task, folder=task.folder.absolute())
        call = self._actors.call(group, "run", sent)
        self._attempts[call] = _Attempt(task=task, group=group, start_s=time.monotonic())

    def wait(self, timeout_s: float) -> list[Finished]:
        """Wait until some attempts are over or the time is; return those that are.

        An actor that has died is started again before this returns, once per group; after that,
        or if it cannot be, its group is set aside. Where Ray is lost, all attempts are over.
        """
        if not self._finished:
            try:
                for call in self._actors.ready(self._attempts, timeout_s):
                    self._finished.append(self._finish(call, self._attempts[call]))
                    del self._attempts[call]
            except RayUnavailableError as error:
                self._go_on_here(error)
        finished, self._finished = self._finished, []
        return finished

    def set_aside(self, group: int) -> None:
        """Use a group no more."""
        self._aside.add(group)

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """Have every group sweep, side by side."""
        calls = {self._actors.call(group, "sweep", trial_ids): group for group in self._begun}
        lines = []
        ended = self._until(calls, SWEEP_TIMEOUT_S)
        for call, group in sorted(ended.items(), key=lambda entry: entry[1]):
            try:
                lines += self._actors.result(call)
            except ActorLostError as error:
                lines.append(f"host group {group} was not swept: {error}")
        lines += [
            f"host group {group} was not swept in {SWEEP_TIMEOUT_S:g} s" for group in calls.values()
        ]
        return lines

    def close(self) -> None:
        """Interrupt what runs, and return when everything is clean; ``wait`` has what ended."""
        self._is_closing = True
        try:
            self._close()
        except RayUnavailableError as error:
            _LOGGER.warning("%s. What runs on hosts ends by its lease", error)
        self._attempts.clear()
        self._end()

    def _close(self) -> None:
        running = {attempt.group for attempt in self._attempts.values()}
        for group in running:
            self._actors.call(group, "interrupt")
        calls = {call: attempt.group for call, attempt in self._attempts.items()}
        for call in self._until(calls, CLOSE_TIMEOUT_S):
            self._finished.append(self._finish(call, self._attempts.pop(call)))
        closing = {self._actors.call(group, "close"): group for group in self._begun}
        self._until(closing, CLOSE_TIMEOUT_S)
        for group in closing.values():
            _LOGGER.warning("host group %d was not closed in %g s", group, CLOSE_TIMEOUT_S)

    def _go_on_here(self, error: RayUnavailableError) -> None:
        """Replace all actors by threads, which first end what was running."""
        _LOGGER.warning("%s. Threads of this process hold the hosts from now on", error)
        lost, self._attempts = self._attempts, {}
        self._actors = self._actors.substitute()
        left: dict[int, Sequence[str]] = dict.fromkeys(self._begun, ())
        left.update({attempt.group: (attempt.task.trial_id,) for attempt in lost.values()})
        self._open(left)
        self._finished += [self._lose(attempt, str(error)) for attempt in lost.values()]

    def _until(self, calls: dict[Any, int], timeout_s: float) -> dict[Any, int]:
        """Wait for all calls; move those that have ended from ``calls`` to the result."""
        ended: dict[Any, int] = {}
        deadline_s = time.monotonic() + timeout_s
        while calls and (left_s := deadline_s - time.monotonic()) > 0:
            for call in self._actors.ready(calls, left_s):
                ended[call] = calls.pop(call)
        return ended

    def _open(self, groups: dict[int, Sequence[str]]) -> None:
        """Start the actors of some groups, each with the trials that its last one left behind."""
        calls = {}
        for group, lost in groups.items():
            self._actors.begin(group)
            self._begun.add(group)
            calls[self._actors.call(group, "open", lost)] = group
        for call, group in self._until(calls, self._start_timeout_s).items():
            opened = self._actors.result(call)
            if not isinstance(opened, Hello):
                raise opened
            opened.check_version()
            if opened.pid != os.getpid():
                _LOGGER.info("trial actor %d: process %d on %s", group, opened.pid, opened.host)
        if calls:
            raise AmpRayError(
                f"the trial actors of host groups {sorted(calls.values())} have not started in "
                f"{self._start_timeout_s:g} s: see whether the nodes of the Ray cluster are alive"
            )

    def _finish(self, call: Any, attempt: _Attempt) -> Finished:  # noqa: ANN401 - see TrialActors
        """Fetch an outcome; the death of the actor is one."""
        outcome: Outcome | Fault | None
        try:
            outcome = self._actors.result(call)
        except ActorLostError as error:
            if not self._is_closing:
                self._restart(attempt)
            return self._lose(attempt, f"the actor of host group {attempt.group} died: {error}")
        except RayUnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - as in pool.run_task: its end must be told
            outcome = Fault.of(error)
        return Finished(task=attempt.task, outcome=outcome, group=attempt.group)

    @staticmethod
    def _lose(attempt: _Attempt, reason: str) -> Finished:
        """Return the end of an attempt of which nothing more will be heard."""
        wall_s = time.monotonic() - attempt.start_s
        outcome = Unreachable(reason=reason, host="", wall_s=wall_s)
        return Finished(task=attempt.task, outcome=outcome, group=attempt.group)

    def _restart(self, attempt: _Attempt) -> None:
        """Replace a dead actor once; the new one first ends what the old one has left."""
        group = attempt.group
        if group in self._restarted:
            _LOGGER.warning("host group %d is set aside: its actor died twice", group)
            self._aside.add(group)
            return
        self._restarted.add(group)
        try:
            self._actors.end(group)
            self._open({group: (attempt.task.trial_id,)})
        except RayUnavailableError:
            raise
        except AmpRayError as error:
            _LOGGER.warning("host group %d is set aside: %s", group, error)
            self._aside.add(group)

    def _end(self) -> None:
        for group in self._begun:
            self._actors.end(group)
        self._begun.clear()


def thread_pool(make_runner: MakeRunner, num_groups: int) -> ActorPool:
    """Return a pool whose actors are threads of this process."""
    return ActorPool(ThreadActors(make_runner), num_groups)
