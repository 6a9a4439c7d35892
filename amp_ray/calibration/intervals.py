"""Intervals of predicted times, from the uncertainty of the constants."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration.evidence import COMMON, Evidence
from amp_ray.calibration.predictions import PRIOR, TIME_CONSTANTS, Point, Predictor
from amp_ray.clusters.constants import PRIOR_SIGMA, PROGRAM_SCALE, Uncertainty
from amp_ray.cost.estimate import Estimate, Result
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.ranking import Ranking, leader_order, with_more_ties

WIDTH: Final = 1.96  # sigmas to either side that hold 95 % of a normal distribution
_TRANSFERRED: Final = 0.10
"""The same beside constants that were fitted elsewhere: on new sites, with programs that were
known, the model was off by 10 to 19 % (docs/cost-model.md)."""

_MEASURED_LINKS: Final = 0.15
"""Sigma of the rate within nodes if it was measured on these boards: other machines reach it
within 3 % (vTrain's benchmark of A100), collectives beside computation less of it."""

_GUESSED_PROTOCOL: Final = 0.9
"""Sigma of latencies if the protocol is assumed: RDMA takes 5 us, TCP 25."""


def prior_uncertainty(experiment: Experiment) -> Uncertainty:
    """Return the uncertainty of the constants of time on a site without any trials.

    It is smaller for links that were measured elsewhere, and larger for guesses.
    """
    cluster = experiment.cluster
    sigmas = {name: PRIOR_SIGMA[name] for name in TIME_CONSTANTS}
    sigmas[PROGRAM_SCALE] = COMMON
    if all(node.intra.board for node in cluster.nodes):
        sigmas["intra_efficiency"] = _MEASURED_LINKS
    if cluster.assumed_network:
        sigmas["latency_scale"] = _GUESSED_PROTOCOL
    return Uncertainty(
        names=tuple(sigmas), covariance=_rows(np.diag(np.array([*sigmas.values()]) ** 2))
    )


def partly_known(
    posterior: Uncertainty, kept: Sequence[str], experiment: Experiment
) -> Uncertainty:
    """Return the priors, replaced where the uncertainty of a constant is known."""
    prior = prior_uncertainty(experiment)
    covariance = np.array(prior.covariance)
    scale = prior.names.index(PROGRAM_SCALE)
    covariance[scale, scale] = _TRANSFERRED**2
    both = [name for name in posterior.names if name in kept and name in prior.names]
    ours, theirs = (
        [names.index(name) for name in both] for names in (prior.names, posterior.names)
    )
    covariance[np.ix_(ours, ours)] = np.array(posterior.covariance)[np.ix_(theirs, theirs)]
    return Uncertainty(names=prior.names, covariance=_rows(covariance))


def log_shifts(experiment: Experiment, estimates: Sequence[Estimate]) -> FloatArray:
    """Return the shifts of log times along independent directions, one sigma each.

    Shape ``(num_directions, num_estimates)``. The sum of squares over directions is the variance
    that comes from the constants; strategies that move alike are uncertain together.
    """
    uncertainty = experiment.uncertainty or prior_uncertainty(experiment)
    directions = _square_root(np.array(uncertainty.covariance))
    plans = [(experiment, estimate.strategy) for estimate in estimates]
    predictor = Predictor()
    here = predictor.log_times(plans, PRIOR)
    points = [Point.of(uncertainty.names, direction) for direction in directions if direction.any()]
    shifts = [predictor.log_times(plans, point) - here for point in points]
    return np.array(shifts).reshape(len(shifts), len(plans))


def tie_errors(experiment: Experiment, shifts: FloatArray) -> FloatArray:
    """Return the sigma of each log time's difference from the first one.

    A constant that moves both times alike adds nothing, so that a scale of the whole site is no
    reason for a tie. If no constant separates two strategies, the model's own error remains.
    ``shifts`` are those of `log_shifts`; the result has shape ``(num_estimates,)``.
    """
    variance = _sum_of_rows((shifts - shifts[:, :1]) ** 2)
    errors: FloatArray = np.sqrt(variance + experiment.constants.time_error**2)
    return errors


def time_sigmas(experiment: Experiment, shifts: FloatArray) -> FloatArray:
    """Return the sigma of each log time, from what is known of constants and of the model's error.

    ``shifts`` are those of `log_shifts`; the result has shape ``(num_estimates,)``.
    """
    sigmas: FloatArray = np.sqrt(_sum_of_rows(shifts**2) + experiment.constants.time_error**2)
    return sigmas


def with_intervals(
    experiment: Experiment, estimates: Sequence[Estimate], shifts: FloatArray | None = None
) -> list[Estimate]:
    """Return estimates with the 95 % intervals of their measured times.

    ``shifts`` are those of `log_shifts`, if the caller has them.
    """
    if not estimates:
        return []
    if shifts is None:
        shifts = log_shifts(experiment, estimates)
    sigmas = time_sigmas(experiment, shifts).tolist()
    return [
        _with_interval(estimate, sigma, Evidence.of(experiment, estimate.strategy))
        for estimate, sigma in zip(estimates, sigmas, strict=True)
    ]


def _with_interval(estimate: Estimate, sigma: float, evidence: Evidence) -> Estimate:
    """Return an estimate with its interval, and a warning if no measurement backs that."""
    factor = math.exp(WIDTH * evidence.sigma(sigma))
    time_s = estimate.iteration_time_s
    return replace(
        estimate,
        interval_s=(time_s / factor, time_s * factor),
        warnings=(*estimate.warnings, *evidence.warnings),
    )


def rank_with_intervals(experiment: Experiment, ranking: Ranking, num_rows: int) -> Ranking:
    """Add intervals to the first ``num_rows`` feasible rows, and mark the ties with the fastest.

    The fastest strategy has one too. Intervals of all rows would take longer than
    the search: each needs an estimate per uncertain constant.
    """
    feasible = [
        result for result in ranking.results[: ranking.num_feasible] if isinstance(result, Estimate)
    ]
    if not feasible:
        return ranking
    fastest = min(feasible, key=leader_order)
    first = sorted(feasible[:num_rows], key=leader_order)
    if not any(estimate is fastest for estimate in first):
        first.insert(0, fastest)
    shifts = log_shifts(experiment, first)
    bounded = with_intervals(experiment, first, shifts)
    ranking = replace(ranking, results=_exchanged(ranking.results, first, bounded))
    if experiment.objective != "time" or experiment.limits.batch_tolerance:
        return ranking
    errors = tie_errors(experiment, shifts).tolist()
    return with_more_ties(ranking, list(zip(bounded, errors, strict=True)))


def score_with_intervals(
    experiment: Experiment, results: Sequence[Result], num_rows: int
) -> tuple[Result, ...]:
    """Add intervals to the first feasible scores."""
    feasible = [result for result in results if isinstance(result, Estimate) and result.feasible]
    first = feasible[:num_rows]
    return _exchanged(results, first, with_intervals(experiment, first))


def _exchanged(
    results: Sequence[Result], old: Sequence[Estimate], new: Sequence[Estimate]
) -> tuple[Result, ...]:
    """Return results with some of them replaced in their positions."""
    by_id = dict(zip(map(id, old), new, strict=True))
    return tuple(by_id.get(id(result), result) for result in results)


def _square_root(covariance: FloatArray) -> FloatArray:
    """Return the symmetric square root of a covariance: its rows are independent directions.

    The symmetric root is unique, whereas the eigenvectors of equal eigenvalues (constants that were
    not measured have equal priors) depend on the machine's linear algebra. Times are not linear in
    the constants, so other directions would give other intervals.
    """
    values, vectors = np.linalg.eigh(covariance)
    root: FloatArray = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    return root


def _sum_of_rows(array: FloatArray) -> FloatArray:
    """Add rows one after the other: `numpy.sum` rounds a single column in another way."""
    total = np.zeros(array.shape[1])
    for row in array:
        total += row
    return total


def _rows(matrix: FloatArray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, row)) for row in matrix)
