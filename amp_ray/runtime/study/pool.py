"""Host groups that run trials in parallel: a pool has one runner per group."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import FIRST_COMPLETED, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, Self

from amp_ray.errors import AmpRayError, HostError, InterruptedTrialError, advice_for
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.hosts.host import MakeHost, experiment_folder, host_groups, host_maker
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.runtime.launch.log_process import read_logs_aside
from amp_ray.runtime.launch.program_files import program_files
from amp_ray.runtime.threads import in_thread
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.command import trial_launch, trial_reader, trial_warm_up
from amp_ray.trials.outcome import Outcome, Unreachable

_LOGGER = logging.getLogger(__name__)
CLOSE_TIMEOUT_S: Final = 30.0  # for a runner to end its trial and clean up; longer than any lease
SWEEP_TIMEOUT_S: Final = 120.0  # for the parallel sweeps of all groups, including connection time


class RunnerLostError(AmpRayError):
    """A runner cannot be used any more; the outcome of its trial is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One attempt at a trial."""

    number: int
    attempt: int  # from 0; higher if a host failed, or a driver ended, in an earlier attempt
    trial_id: str  # unique, a plain file name
    strategy: Strategy  # its placement numbers the devices of one group
    folder: Path  # path of this attempt's folder on the driver's machine; not created yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error on the driver's machine; the strategy is not to blame."""

    error: AmpRayError

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Convert an exception of the launcher to a fault with a readable message."""
        if isinstance(error, AmpRayError):
            return cls(error=error)
        if isinstance(error, OSError):
            file = f": {error.filename}" if error.filename else ""
            text = f"{error.strerror or error}{file}. {advice_for(error)}"
            return cls(error=AmpRayError(text))
        text = f"{type(error).__name__}: {error}. Run it again with -v to see where"
        _LOGGER.info("the launcher failed", exc_info=error)
        return cls(error=AmpRayError(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A finished attempt."""

    task: Task
    outcome: Outcome | Fault | None  # None if it was interrupted
    group: int


class Runner(Protocol):
    """Runs trials on one host group, one after the other."""

    def run(self, task: Task) -> Outcome | Fault | None:
        """Run a trial to its end; `run_task` converts errors.

        Raises `InterruptedTrialError` if ``interrupt`` was called, and `RunnerLostError` if the
        group cannot be used any more.
        """

    def interrupt(self) -> None:
        """End the running trial, if any; may be called from any thread."""

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """Remove processes and files of a dead driver's attempts; return a line per problem."""

    def close(self) -> None:
        """End everything that was started, and disconnect."""


MakeRunner = Callable[[int], Runner]  # the argument is the number of the host group
Call = Callable[..., "Future[Any]"]  # calls its first argument with the others


class Pool(Protocol):
    """All host groups of a study."""

    def free(self) -> tuple[int, ...]:
        """Return the groups that run no trial and are not set aside."""

    def start(self, task: Task, group: int) -> None:
        """Start a trial on a free group."""

    def wait(self, timeout_s: float) -> list[Finished]:
        """Wait for the first attempt to end; return all that have ended, each once."""

    def set_aside(self, group: int) -> None:
        """Start no more trials on a group."""

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """Call ``Runner.sweep`` on every group; return all lines."""

    def close(self) -> None:
        """Interrupt all trials and clean up; a last ``wait`` returns the interrupted attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    task: Task
    group: int
    start_s: float  # start time by the monotonic clock


class RunnerPool:
    """A `Pool` with a runner per group."""

    def __init__(
        self, make_runner: MakeRunner, num_groups: int, *, begin: Call = in_thread
    ) -> None:
        """Make all runners in parallel; if one fails, close the others and raise its error.

        ``begin`` begins a trial: in a thread of this process, or at once.
        """
        self._begin = begin
        self._runners: dict[int, Runner] = {}
        self._attempts: dict[Future[Outcome | Fault | None], _Attempt] = {}
        self._finished: list[Finished] = []
        self._aside: set[int] = set()
        calls = [in_thread(make_runner, group) for group in range(num_groups)]
        try:
            futures.wait(calls)
            made = {group: call for group, call in enumerate(calls) if call.exception() is None}
            self._runners = {group: call.result() for group, call in made.items()}
            for call in calls:
                call.result()
        except BaseException:
            self.close()
            raise

    def free(self) -> tuple[int, ...]:
        """Return the groups that run no trial and are not set aside."""
        busy = self._aside | {attempt.group for attempt in self._attempts.values()}
        return tuple(group for group in self._runners if group not in busy)

    def start(self, task: Task, group: int) -> None:
        """Start a trial on a free group."""
        assert group in self.free()
        call = self._begin(run_task, self._runners[group], task)
        self._attempts[call] = _Attempt(task=task, group=group, start_s=time.monotonic())

    def wait(self, timeout_s: float) -> list[Finished]:
        """Wait for the first attempt to end; return all that have ended, each once."""
        if not self._finished:
            self._finish_some(timeout_s)
        finished, self._finished = self._finished, []
        return finished

    def set_aside(self, group: int) -> None:
        """Start no more trials on a group."""
        self._aside.add(group)

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """Call ``Runner.sweep`` on all groups in parallel; return all lines."""
        runners = self._runners.items()
        calls = {in_thread(sweep_lines, runner, trial_ids): group for group, runner in runners}
        futures.wait(calls, SWEEP_TIMEOUT_S)
        late = f"was not swept in {SWEEP_TIMEOUT_S:g} s"
        return [
            line
            for call, group in calls.items()
            for line in (call.result() if call.done() else [f"host group {group} {late}"])
        ]

    def close(self) -> None:
        """Interrupt all trials and clean up; a last ``wait`` returns the interrupted attempts."""
        for attempt in self._attempts.values():
            self._runners[attempt.group].interrupt()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while self._attempts and (left_s := deadline_s - time.monotonic()) > 0.0:
            self._finish_some(left_s)
        self._attempts.clear()
        calls = {in_thread(runner.close): group for group, runner in self._runners.items()}
        for call in futures.wait(calls, CLOSE_TIMEOUT_S).not_done:
            _LOGGER.warning("host group %d was not closed in %g s", calls[call], CLOSE_TIMEOUT_S)
        self._runners.clear()

    def _finish_some(self, timeout_s: float) -> None:
        """Wait until an attempt ends; move all attempts that have ended to ``_finished``."""
        if not self._attempts:
            time.sleep(timeout_s)
        done = futures.wait(self._attempts, timeout_s, FIRST_COMPLETED).done
        for call in [call for call in self._attempts if call in done]:
            self._finished.append(self._finish(call, self._attempts.pop(call)))

    def _finish(self, call: "Future[Outcome | Fault | None]", attempt: _Attempt) -> Finished:
        outcome: Outcome | Fault | None
        try:
            outcome = call.result()
        except RunnerLostError as error:
            _LOGGER.warning("host group %d is set aside: %s", attempt.group, error)
            self._aside.add(attempt.group)
            wall_s = time.monotonic() - attempt.start_s
            outcome = Unreachable(reason=str(error), host="", wall_s=wall_s)
        return Finished(task=attempt.task, outcome=outcome, group=attempt.group)


def run_task(runner: Runner, task: Task) -> Outcome | Fault | None:
    """Run an attempt; return its outcome, a fault of this machine, or None if interrupted."""
    try:
        return runner.run(task)
    except InterruptedTrialError:
        return None
    except RunnerLostError:
        raise
    except HostError as error:
        return Unreachable(reason=str(error), host="", wall_s=0.0)
    except Exception as error:  # noqa: BLE001 - the driver needs a result for every exception
        return Fault.of(error)


def sweep_lines(runner: Runner, trial_ids: Sequence[str]) -> list[str]:
    """Sweep one group; a failure becomes one more line."""
    try:
        return runner.sweep(trial_ids)
    except Exception as error:  # noqa: BLE001 - a failed sweep must not end the study
        return [str(Fault.of(error).error)]


class TrialRunner:
    """A `Runner` for the strategies of one experiment."""

    def __init__(
        self,
        experiment: Experiment,
        group: int,
        make_host: MakeHost,
        settings: AgentSettings | None = None,
    ) -> None:
        self._experiment = experiment
        self._names = host_groups(experiment)[group]
        hosts = [make_host(name) for name in self._names]
        self._python = experiment.trials.python or hosts[0].python
        self._files = program_files(experiment, experiment_folder(experiment))
        warm_up = trial_warm_up(experiment, self._python)
        self._launcher = Launcher(hosts, settings, warm_up=warm_up)

    def run(self, task: Task) -> Outcome:
        """Run a trial to its end; errors on the hosts are outcomes too.

        Raises `InterruptedTrialError` if ``interrupt`` was called, after the hosts were cleaned up.
        """
        launch = trial_launch(
            self._experiment,
            task.strategy,
            trial_id=task.trial_id,
            hosts=self._names,
            files=self._files,
            python=self._python,
        )
        reader = trial_reader(self._experiment, read_logs_aside)
        return self._launcher.run(launch, task.folder, reader=reader)

    def interrupt(self) -> None:
        """End the running trial, if any; may be called from any thread."""
        self._launcher.interrupt()

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """Remove a dead driver's leftovers; list what remains, and the hosts without answer."""
        return self._launcher.group.sweep_trials(trial_ids)

    def close(self) -> None:
        """End everything that was started, and disconnect."""
        self._launcher.close()


def make_runner(experiment: Experiment, group: int) -> TrialRunner:
    """Make the runner of one group; a module-level function, so that Ray can pickle it."""
    return TrialRunner(experiment, group, host_maker(experiment))


def portable(experiment: Experiment) -> Experiment:
    """Make the experiment file's path absolute: other processes have other working directories."""
    source = replace(experiment.source, file=str(Path(experiment.source.file).absolute()))
    return replace(experiment, source=source)


class ReplayRunner:
    """A `Runner` that returns recorded outcomes and starts no process."""

    def __init__(self, answers: Mapping[Strategy, Outcome]) -> None:
        self._answers = answers

    def run(self, task: Task) -> Outcome:
        """Return the recorded outcome of a strategy."""
        return self._answers[task.strategy]

    def interrupt(self) -> None:
        """Do nothing: no trial takes time."""

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:  # noqa: ARG002 - nothing was started
        """Return no lines: no process was started."""
        return []

    def close(self) -> None:
        """Do nothing: no process was started."""
