"""Strategies that crash in the same way before anything is measured: the program is at fault."""

import re
from dataclasses import dataclass
from typing import Final

from amp_ray.trials.outcome import Crashed, Measured
from amp_ray.tuner.state import TunerState

_PLACES: Final = re.compile(
    r"\branks? \d+( to \d+)?( on \S+)?|\bpid\W{0,2}\d+|\bport \d+|0x[0-9a-fA-F]+"
    r"|\b\d+\.\d+\.\d+\.\d+(:\d+)?|\S*amp-ray-\S+"
)
"""What differs between two runs of one mistake: who it happened to, addresses, folders of trials.
Other numbers stay: an error that names a degree is one of that strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonFailure:
    """Two trials of different strategies that crashed in the same way."""

    numbers: tuple[int, int]
    sign: str  # what they have in common, without ranks, hosts and addresses
    reason: str


def common_failure(state: TunerState, number: int) -> CommonFailure | None:
    """Return a trial and an earlier one that crashed alike while nothing has been measured.

    Some failures are not crashes: a program that exits with 0 but reports no time, lost hosts, full
    disks, and a strategy that ran out of memory or time.
    """
    failed = state.trials[number]
    sign = _sign(failed.outcome)
    if sign is None or any(
        isinstance(trial_record.outcome, Measured) for trial_record in state.trials
    ):
        return None
    for trial_record in state.trials:
        if trial_record.candidate != failed.candidate and _sign(trial_record.outcome) == sign:
            assert failed.outcome is not None
            numbers = (
                min(trial_record.trial.number, number),
                max(trial_record.trial.number, number),
            )
            return CommonFailure(numbers=numbers, sign=sign, reason=str(failed.outcome.reason))
    return None


def _sign(outcome: object) -> str | None:
    """Return the kind and the reason of a crash without what differs from run to run."""
    if not isinstance(outcome, Crashed) or outcome.kind in {"no-result", "disk"}:
        return None
    host = rf"(?<!\w){re.escape(outcome.host)}(?!\w)" if outcome.host else "$"
    text = re.sub(host, "", _PLACES.sub("", outcome.reason))
    return f"{outcome.kind}: {' '.join(text.split())}"
