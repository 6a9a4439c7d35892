"""Whom a driver tells what happens: its journal, which keeps it, and people, who watch."""

from typing import Any, Protocol

from amp_ray.tuner.knowledge import Knowledge
from amp_ray.tuner.state import Trial, TrialRecord, TunerState
from amp_ray.tuner.surprise import Surprise


class EventLog(Protocol):
    """Where events are written down for good."""

    def append(self, record: dict[str, Any], /) -> None:
        """Write an event; when this returns, it survives a crash."""
        ...


class View(Protocol):
    """Who watches a study."""

    def started(self, trial: Trial, group: int) -> None:
        """See that an attempt begins."""
        ...

    def ended(self, trial_record: TrialRecord, surprise: Surprise | None) -> None:
        """See what came of a trial."""
        ...

    def halted(self, trial: Trial) -> None:
        """See that an attempt is over and the trial is not: it has to run again."""
        ...

    def learned(self, state: TunerState, knowledge: Knowledge) -> None:
        """See what is known now."""
        ...

    def note(self, text: str) -> None:
        """See anything else that matters."""
        ...
