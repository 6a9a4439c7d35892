"""Reads measurements and calibrations of an experiment from files."""

from pathlib import Path

from amp_ray.calibration import Calibration, Observation, apply_calibration, parse_calibration
from amp_ray.calibration.observation import noise_of
from amp_ray.cost.estimate import Estimate
from amp_ray.errors import InputError, Where
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import Entry
from amp_ray.runtime.files import load_strategies, read_text
from amp_ray.search.planner import AMP_RAY, make_planner
from amp_ray.search.run import score_given
from amp_ray.strategies.strategy import Strategy


def load_measured(path: Path, experiment: Experiment) -> tuple[Entry, ...]:
    """Read a table of measured strategies."""
    measured = load_strategies(path, experiment)
    for entry in measured:
        if entry.measured_s is None and entry.failure is None:
            message = "nothing was measured; expected measured_s with seconds, oom or failed"
            raise InputError(message, where=entry.where)
    return measured


def load_observations(path: Path, experiment: Experiment) -> list[Observation]:
    """Read measured strategies; if a line has no cuts, use those that the planner chooses."""
    return [
        Observation(
            experiment=experiment,
            strategy=_strategy(entry, experiment),
            outcome=entry.failure or "measured",
            measured_s=entry.mean_s,
            spread_s=entry.spread_s,
            noise=noise_of(entry.measured_s, entry.spread_s),
            peak_memory_bytes=entry.peak_memory_bytes,
            where=entry.where,
        )
        for entry in load_measured(path, experiment)
    ]


def with_calibration(
    experiment: Experiment, calibration: Calibration | Path | None, *, transfer: bool
) -> Experiment:
    """Return an experiment with the constants of a calibration or its file; None changes nothing.

    With ``transfer``, it may be a calibration of another model, cluster or runtime.
    """
    if calibration is None:
        if transfer:
            raise InputError("--transfer-calibration needs --calibration FILE")
        return experiment
    file = "calibration"
    if isinstance(calibration, Path):
        file = str(calibration)
        calibration = parse_calibration(read_text(calibration), file=file)
    try:
        return apply_calibration(calibration, experiment, transfer=transfer)
    except ValueError as error:
        raise InputError(str(error), where=Where(file=file)) from error


def _strategy(entry: Entry, experiment: Experiment) -> Strategy:
    if entry.strategy is not None:
        return entry.strategy
    (result,) = score_given(make_planner(experiment, AMP_RAY), [entry])
    if isinstance(result, Estimate):
        return result.strategy
    raise InputError(str(result.reason), where=entry.where)
