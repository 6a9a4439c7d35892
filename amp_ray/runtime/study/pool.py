"""Groups of hosts that run trials side by side: what a driver asks of them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, Self

from amp_ray.errors import AmpRayError, HostError, InterruptedTrialError, advice_for
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Outcome, Unreachable

_LOGGER = logging.getLogger(__name__)
CLOSE_TIMEOUT_S: Final = 30.0  # for a runner to end its trial and clean up: more than any lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One attempt at one trial."""

    number: int
    attempt: int  # from 0; above it only after a host was unreachable or the driver ended
    trial_id: str  # unique, a plain file name
    strategy: Strategy  # what to run; its placement is in devices of one group
    folder: Path  # of this attempt, on the driver's machine; not yet made


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something went wrong on this machine, not in the trial: it says nothing of the strategy."""

    error: AmpRayError

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return the fault that an exception of the launcher is."""
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
    """An attempt that is over."""

    task: Task
    outcome: Outcome | Fault | None  # what came of it; None if it was interrupted
    group: int


class Runner(Protocol):
    """Runs one trial after the other on one group of hosts."""

    def run(self, task: Task) -> Outcome:
        """Run a trial to its end; `InterruptedTrialError` if ``interrupt`` was called."""

    def interrupt(self) -> None:
        """End the trial that runs, from any thread; does nothing where none does."""

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """End and remove what attempts of a driver that has died have left; say what stays."""

    def close(self) -> None:
        """End everything that was started, and disconnect."""


class Pool(Protocol):
    """All groups of hosts of a study."""

    def free(self) -> tuple[int, ...]:
        """Return the groups that are idle and in use."""

    def start(self, task: Task, group: int) -> None:
        """Start a trial on a group that is free."""

    def wait(self, timeout_s: float) -> list[Finished]:
        """Wait until some attempts are over or the time is; return those that are."""

    def set_aside(self, group: int) -> None:
        """Use a group no more."""

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """Have every group sweep; see ``Runner.sweep``."""

    def close(self) -> None:
        """Interrupt what runs, return when all is clean; ``wait`` has what ended, once."""


def run_task(runner: Runner, task: Task) -> Outcome | Fault | None:
    """Run an attempt: its outcome, None if it was interrupted, or a fault of this machine."""
    try:
        return runner.run(task)
    except InterruptedTrialError:
        return None
    except HostError as error:
        return Unreachable(reason=str(error), host="", wall_s=0.0)
    except Exception as error:  # noqa: BLE001 - a thread must tell its end, whatever it is
        return Fault.of(error)


def sweep_lines(runner: Runner, trial_ids: Sequence[str]) -> list[str]:
    """Sweep one group; where that fails, the reason is a line."""
    try:
        return runner.sweep(trial_ids)
    except Exception as error:  # noqa: BLE001 - a host that is not swept must not end a study
        return [str(Fault.of(error).error)]
