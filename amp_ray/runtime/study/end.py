"""How a study ends: why, with what, and which of its trials is the best."""

from dataclasses import dataclass
from typing import Final, Literal

from amp_ray.tuner.certificate import Certificate
from amp_ray.tuner.common_failure import CommonFailure
from amp_ray.tuner.knowledge import Knowledge
from amp_ray.tuner.state import TunerState

Ending = Literal[
    "certificate", "budget", "time-budget", "exhausted", "hosts", "crashes", "interrupted", "failed"
]

ENDINGS: Final[dict[Ending, str]] = {
    "certificate": "no untested strategy is likely to be better",
    "budget": "the budget of trials is spent",
    "time-budget": "the time budget is spent",
    "exhausted": "every strategy that is expected to run has run",
    "hosts": "no group of hosts is left that can be reached",
    "crashes": "two strategies crashed in the same way before anything was measured",
    "interrupted": "it was interrupted",
    "failed": "it could not go on",
}
"""A study goes on after any of them, with ``--resume``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The end of a study, or of one run of its driver.

    Args:
        certificate: What is known of the strategies that have not run; None without any trial.
        common_failure: The trials that crashed alike, where it stopped for that.
    """

    state: TunerState
    knowledge: Knowledge
    certificate: Certificate | None
    ending: Ending
    common_failure: CommonFailure | None = None

    @property
    def best_number(self) -> int | None:
        """Number of the best trial; see `best_trial`."""
        return best_trial(self.knowledge)


def best_trial(knowledge: Knowledge) -> int | None:
    """Return the number of the trial that stands for the best measured strategy; None without any.

    Of several runs of it, that is the one in the middle, whose time counts.
    """
    best = knowledge.status.best
    if best is None:
        return None
    figure = knowledge.status.figures[best]
    return figure.numbers[figure.runs.index(figure.typical)]
