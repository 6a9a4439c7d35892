"""Fit a calibration to trials: few named constants, physical priors, robust losses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration.calibration import (
    Calibration,
    FittedConstant,
    RefusedConstant,
    TrialRecord,
)
from amp_ray.calibration.choice import (
    NO_EFFECT,
    TOLD_SHARE,
    identified,
    not_identified,
    prior_effects,
)
from amp_ray.calibration.evidence import COMMON, Evidence
from amp_ray.calibration.fingerprint import fingerprint
from amp_ray.calibration.memory_fit import MemoryFit, MemoryTrials
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.predictions import MEMORY_CONSTANTS, PRIOR, Point, Predictor
from amp_ray.calibration.time_fit import TimeFit, TimeTrials
from amp_ray.clusters.constants import PRIOR_SIGMA, PROGRAM_SCALE, Constants
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import strategy_to_json
from amp_ray.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which constants a calibration may fit."""

    names: tuple[str, ...] | None = None  # only these; None: the rule in `choice` decides
    most_time: int = 6  # how many constants of time the rule may choose
    most_memory: int = 2  # how many constants of memory it may choose


_HURTS: Final = "not needed: the fit to all trials predicts each from the rest no better with it"

_COMMON: Final = [PROGRAM_SCALE]  # the constant that may move without being of more use

RULE = Choice()  # at most eight constants, by the rule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fits:
    """Both fits with the names of fitted constants, and why others were dropped."""

    time: TimeFit
    memory_names: tuple[str, ...]
    memory: MemoryFit
    dropped: dict[str, str]

    @property
    def point(self) -> Point:
        names = (*self.time.names, *self.memory_names)
        return Point.of(names, np.concatenate([self.time.fit.values, self.memory.values]))


def calibrate(
    experiment: Experiment,
    observations: Sequence[Observation],
    choice: Choice = RULE,
    *,
    predictor: Predictor | None = None,
    thorough: bool = True,
) -> Calibration:
    """Fit constants to trials; list unidentified constants in the result, with the reason.

    Times: maximum a posteriori of the logarithms of constants under normal priors, with a
        pseudo-Huber loss of the logarithm of predicted over measured time; failed trials and those
        of a second population (`populations`) are ignored, unsteady trials have a larger error.
    Memory: the same for measured peaks. The peak of a trial that ran out of memory lies above the
        limit; the peak of a trial that finished lies below it. A trial that failed for an unknown
        cause ran out of memory or of time.

    The constants of ``experiment`` are the priors; trials may come from other experiments of the
    same site and runtime. A ``predictor`` remembers predictions between calls. If ``thorough``, the
    fit is refined and every trial is also predicted by a fit without it. Otherwise fifty trials
    take less than half a second, if the predictor remembers all but the last. A ``ValueError`` says
    why constants given by name cannot be fitted.
    """
    predictor = predictor or Predictor()
    timed = TimeTrials(
        predictor=predictor,
        observations=tuple(trial for trial in observations if trial.tells_time),
        prior_error=experiment.constants.time_error,
        **_common(experiment, observations) if choice.names is None else {},
    ).without_second_population()
    fits = _fit(experiment.constants, observations, timed, choice, thorough=thorough)
    left_out = timed.left_out_times(fits.time) if thorough else []
    by_trial = dict.fromkeys(map(id, timed.observations)) | dict(
        zip(map(id, timed.observations), left_out, strict=False)
    )
    names, covariance = timed.covariance(fits.time)
    return Calibration(
        experiment=experiment.name,
        fingerprint=fingerprint(experiment),
        constants=_fitted(fits, experiment.constants),
        refused=_refused(fits, timed, choice),
        time_error=fits.time.fit.error,
        memory_error=fits.memory.error,
        time_constants=names,
        covariance=tuple(tuple(map(float, row)) for row in covariance),
        trials=_records(observations, by_trial, fits.point, predictor),
    )


def _common(experiment: Experiment, observations: Sequence[Observation]) -> dict[str, float]:
    """Return the sigma of the common factor of all times, of the trial that is known least."""
    evidence = (Evidence.of(experiment, each.strategy) for each in observations)
    return {"common_sigma": max((each.common_sigma for each in evidence), default=COMMON)}


def _fit(
    constants: Constants,
    observations: Sequence[Observation],
    timed: TimeTrials,
    choice: Choice,
    *,
    thorough: bool,
) -> _Fits:
    if not observations:
        raise ValueError("there is no trial to calibrate with")
    if choice.names is None:
        names, dropped = timed.choose(choice.most_time)
        time = timed.fit(names, thorough=thorough)
        for fewer in (_COMMON, []):
            if thorough and timed.hurts(time):
                time = timed.fit(fewer, thorough=True)
                dropped |= {name: _HURTS for name in names if name not in fewer}
        trials = MemoryTrials.of(timed.predictor, observations, time.point, constants)
        chosen, memory, more = trials.choose(choice.most_memory)
        return _Fits(time=time, memory_names=chosen, memory=memory, dropped=dropped | more)
    names, of_memory = _split(choice.names)
    _check_count(names, len(timed.observations), len(observations))
    time = timed.fit(names, thorough=thorough)
    _check_identified(names, time.fit.covariance, len(timed.observations))
    trials = MemoryTrials.of(timed.predictor, observations, time.point, constants)
    _check_count(of_memory, len(trials.observations), len(observations))
    memory = trials.fit(of_memory)
    _check_identified(of_memory, memory.covariance, len(trials.observations))
    return _Fits(time=time, memory_names=tuple(of_memory), memory=memory, dropped={})


def _split(names: Sequence[str]) -> tuple[list[str], list[str]]:
    wrong = [name for name in names if name not in PRIOR_SIGMA]
    if wrong or len(set(names)) < len(names) or not names:
        raise ValueError(
            f"constants to fit are named once each, at least one of {', '.join(PRIOR_SIGMA)}; "
            f"found {', '.join(names) or 'none'}"
        )
    memory = [name for name in names if name in MEMORY_CONSTANTS]
    return [name for name in names if name not in MEMORY_CONSTANTS], memory


def _check_count(names: Sequence[str], num_usable: int, num_trials: int) -> None:
    if len(names) > num_usable:
        raise ValueError(
            f"{len(names)} constants ({', '.join(names)}) need at least as many usable trials, "
            f"found {num_usable} of {num_trials}: failed ones tell no time. Name fewer "
            "constants, or leave the choice to the rule"
        )


def _check_identified(names: Sequence[str], covariance: FloatArray, num_trials: int) -> None:
    shares = identified(covariance, names)
    vague = [
        f"{name} is {not_identified(float(share), num_trials, TOLD_SHARE)}"
        for name, share in zip(names, shares, strict=True)
        if share > TOLD_SHARE
    ]
    if vague:
        raise ValueError("; ".join(vague))


def _fitted(fits: _Fits, constants: Constants) -> tuple[FittedConstant, ...]:
    logs = dict(fits.point.logs)
    sigmas = np.sqrt(
        np.concatenate([np.diag(fits.time.fit.covariance), np.diag(fits.memory.covariance)])
    )
    names = (*fits.time.names, *fits.memory_names)
    priors = (*fits.time.problem.prior_sigma, *(PRIOR_SIGMA[name] for name in fits.memory_names))
    return tuple(
        FittedConstant(
            name=name,
            prior=getattr(constants, name),
            value=getattr(constants, name) * math.exp(logs.get(name, 0.0)),
            prior_sigma=float(prior),
            sigma=float(sigma),
        )
        for name, prior, sigma in zip(names, priors, sigmas, strict=True)
    )


def _refused(fits: _Fits, timed: TimeTrials, choice: Choice) -> tuple[RefusedConstant, ...]:
    """Return the constants that stay at their priors, with the reason."""
    slopes = timed.slopes(timed.names, PRIOR)
    effects = dict(zip(timed.names, prior_effects(slopes, timed.names), strict=True))
    refused = []
    for name in PRIOR_SIGMA:
        if name in (*fits.time.names, *fits.memory_names):
            continue
        effect = float(effects.get(name, 0.0))
        if name in fits.dropped:
            reason = fits.dropped[name]
        elif choice.names is not None:
            reason = "not asked for"
        elif name in MEMORY_CONSTANTS:
            reason = "not identified: no trial tells about memory"
        elif name == PROGRAM_SCALE and name not in timed.names:
            reason = "not needed: the other constants can explain what was measured"
        elif effect <= NO_EFFECT:
            reason = "not identified: no trial depends on it"
        else:
            reason = f"its prior moves these trials by {100 * effect:.1f} %, less than the chosen"
        refused.append(RefusedConstant(name=name, reason=reason))
    return tuple(refused)


def _records(
    observations: Sequence[Observation],
    left_out: Mapping[int, float | None],
    point: Point,
    predictor: Predictor,
) -> tuple[TrialRecord, ...]:
    plans = [observation.plan for observation in observations]
    return tuple(
        TrialRecord(
            strategy=_strategy(observation.strategy, observation.experiment),
            outcome=observation.outcome,
            tells_time=id(observation) in left_out,
            measured_s=observation.measured_s,
            spread_s=observation.spread_s,
            noise=observation.noise,
            before_s=before.time_s,
            after_s=after.time_s,
            left_out_s=left_out.get(id(observation)),
            peak_memory_bytes=observation.peak_memory_bytes,
            peak_before_bytes=before.peaks_bytes,
            peak_after_bytes=after.peaks_bytes,
        )
        for observation, before, after in zip(
            observations,
            predictor.predict(plans, PRIOR),
            predictor.predict(plans, point),
            strict=True,
        )
    )


def _strategy(strategy: Strategy, experiment: Experiment) -> dict[str, object]:
    """Return the STRATEGY object, its placement left out where it is the default one."""
    record = strategy_to_json(strategy, experiment.cluster)
    if strategy.placement == tuple(range(len(strategy.placement))):
        del record["placement"]
    return record
