"""Figures of the published jobs with Megatron on A100."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from amp_ray.calibration.calibrate import Choice
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.predictions import Predictor
from published.evaluation import Metrics, Predicted, band, fitted, predict, with_values
from published.metrics import (
    bias,
    mean_absolute_error,
    median_absolute_error,
    pair_agreement,
    precision_and_recall,
    regret,
)
from published.tables import Row

APART: Final = 0.05
"""Plans that lie closer than a repeat of one run are ties (reference: BigScience chronicles)."""

NUM_TRIALS: Final = 5

TIME_ONLY: Final = Choice(most_memory=0)

MEMORY_ONLY: Final = Choice(names=("context_scale", "allocator_scale"))


def error_metrics(predicted: Predicted) -> Metrics:
    """Return mean error and bias."""
    ours, theirs = predicted.times()
    return {"mean_error": mean_absolute_error(ours, theirs), "bias": bias(ours, theirs)}


def by_group(rows: Sequence[Row]) -> dict[str, list[Observation]]:
    """Return the observations that tell their time, by group."""
    groups: dict[str, list[Observation]] = {}
    for row in rows:
        if row.tells_time:
            groups.setdefault(row.group, []).append(row.observation)
    return groups


def ranking_metrics(rows: Sequence[Row], predicted: Predicted) -> Metrics:
    """Return errors and how well the order within each group is met."""
    ours, theirs = predicted.times()
    names = np.array([row.group for row in rows])
    groups = [(ours[names == name], theirs[names == name]) for name in dict.fromkeys(names)]
    order = predicted.order()
    regrets = [regret(order[names == name], theirs[names == name]) for name in dict.fromkeys(names)]
    return {
        **error_metrics(predicted),
        "pair_agreement": pair_agreement(groups),
        "pair_agreement_apart": pair_agreement(groups, apart_fraction=APART),
        "regret_mean": float(np.mean(regrets)),
        "regret_worst": max(regrets),
    }


def vtrain_blind(rows: Sequence[Row], num_draws: int) -> dict[str, Metrics]:
    """Return the figures of vTrain's table without any measurement."""
    observations = [row.observation for row in rows]
    figures: dict[str, Metrics] = {
        "no measurement": {"num_constants": 0, **ranking_metrics(rows, predict(observations))}
    }
    for name, group in by_group(rows).items():
        figures[name] = {**error_metrics(predict(group)), "regret": regret(*predict(group).times())}
    if num_draws:
        figures["band of no measurement"] = band(
            observations, lambda predicted: ranking_metrics(rows, predicted), num_draws
        )
    return figures


def tuned(observations: Sequence[Observation], num_trials: int) -> tuple[float, int | None]:
    """Measure the best predicted strategy, calibrate, and again.

    Args:
        observations: Alternatives to each other.
        num_trials: How many are measured.

    Returns:
        How much slower the best measured one is than the best of all, and after how many trials
        the best of all was found, if it was.
    """
    predictor = Predictor()
    untried, tried = list(observations), list[Observation]()
    predicted = predict(untried)
    while len(tried) < num_trials:
        if tried:
            predicted = predict(untried, with_values(fitted(tried, TIME_ONLY, predictor)))
        tried.append(untried.pop(int(np.argmin(predicted.times()[0]))))
    measured = [observation.measured_s or np.inf for observation in tried]
    best = min(observation.measured_s or np.inf for observation in observations)
    found_at = measured.index(best) + 1 if best in measured else None
    return min(measured) / best - 1.0, found_at


def vtrain_tuned(rows: Sequence[Row]) -> dict[str, Metrics]:
    """Return the regret of vTrain's groups after a few measured trials."""
    figures: dict[str, Metrics] = {}
    for name, group in by_group(rows).items():
        regret, found_at = tuned(group, NUM_TRIALS)
        figures[f"{name}, {NUM_TRIALS} trials"] = {
            "regret": regret,
            **({} if found_at is None else {"best_found_at_trial": found_at}),
        }
    return figures


def bloom_time(rows: Sequence[Row], num_draws: int) -> dict[str, Metrics]:
    """Return the errors of BLOOM's iteration times without any measurement."""
    observations = [row.observation for row in rows if row.tells_time]
    figures: dict[str, Metrics] = {
        "no measurement": {"num_constants": 0, **error_metrics(predict(observations))}
    }
    if num_draws:
        figures["band of no measurement"] = band(observations, error_metrics, num_draws)
    return figures


def bloom_calibrated(rows: Sequence[Row], num_draws: int) -> dict[str, Metrics]:
    """Return the errors of the rest of BLOOM's rows after five of them."""
    observations = [row.observation for row in rows if row.tells_time]
    predictor = Predictor()
    figures: dict[str, Metrics] = {}
    for label, pick in (("spread", spread), ("random", at_random)):
        errors = [
            _rest_error(observations, pick(observations, NUM_TRIALS, seed), predictor)
            for seed in range(num_draws)
        ]
        figures[f"{NUM_TRIALS} trials, {label}"] = {
            "num_draws": num_draws,
            "mean_error": float(np.mean(errors)),
            "worst_error": max(errors),
        }
    groups = by_group(rows)
    for name, group in groups.items():
        rest = [row for other, rows_of in groups.items() if other != name for row in rows_of]
        calibration = fitted(group, TIME_ONLY, predictor)
        ours, theirs = predict(rest, with_values(calibration)).times()
        figures[f"fit on width {name}, other width"] = {
            "num_constants": calibration.num_constants,
            "mean_error": mean_absolute_error(ours, theirs),
        }
    return figures


def bloom_memory(rows: Sequence[Row], num_draws: int) -> dict[str, Metrics]:
    """Return the errors of BLOOM's peaks, as shipped and with two constants of the other width."""
    trusted = [row for row in rows if _tells_memory(row)]
    observations = [row.observation for row in trusted]
    figures: dict[str, Metrics] = {
        "no measurement": {"num_constants": 0, **memory_metrics(predict(observations))}
    }
    for width in dict.fromkeys(row.group for row in trusted):
        ours = [row.observation for row in trusted if row.group == width]
        rest = [row.observation for row in trusted if row.group != width]
        calibration = fitted(ours, MEMORY_ONLY)
        figures[f"fit on width {width}, other width"] = {
            "num_constants": calibration.num_constants,
            **memory_metrics(predict(rest, with_values(calibration))),
        }
    if num_draws:
        figures["band of no measurement"] = band(observations, memory_metrics, num_draws)
    return figures


def megatron_jobs(rows: Sequence[Row], num_draws: int) -> dict[str, Metrics]:
    """Return the errors of Megatron-LM's jobs, all together and one by one."""
    observations = [row.observation for row in rows]
    figures: dict[str, Metrics] = {
        "no measurement": {"num_constants": 0, **error_metrics(predict(observations))}
    }
    for row in rows:
        figures[row.group] = {"bias": error_metrics(predict([row.observation]))["bias"]}
    if num_draws:
        figures["band of no measurement"] = band(observations, error_metrics, num_draws)
    return figures


def memory_metrics(predicted: Predicted) -> Metrics:
    """Return errors of peaks and what was told of failures."""
    ours, theirs = predicted.peaks()
    predicted_to_fail, failed = predicted.failures()
    precision, recall = precision_and_recall(predicted_to_fail, failed)
    return {
        "num_peaks": len(ours),
        "median_error": median_absolute_error(ours, theirs),
        "bias": bias(ours, theirs),
        "failures_found": sum(a and b for a, b in zip(predicted_to_fail, failed, strict=True)),
        "failures": sum(failed),
        "false_alarms": sum(a and not b for a, b in zip(predicted_to_fail, failed, strict=True)),
        "failure_precision": precision,
        "failure_recall": recall,
    }


def spread(observations: Sequence[Observation], count: int, seed: int) -> list[int]:
    """Pick trials that lie far apart in tp, pp and micro-batch size; the first one at random."""
    generator = np.random.default_rng(seed)
    degrees = [
        (plan.tp or 1, plan.pp, plan.micro_batch_size)
        for plan in (observation.strategy for observation in observations)
    ]
    places = np.log2(np.array(degrees, dtype=np.float64))
    picked = [int(generator.integers(len(places)))]
    while len(picked) < count:
        nearest = np.min([np.abs(places - places[index]).sum(axis=1) for index in picked], axis=0)
        nearest[picked] = -1.0
        furthest = np.flatnonzero(nearest == nearest.max())
        picked.append(int(generator.choice(furthest)))
    return picked


def at_random(observations: Sequence[Observation], count: int, seed: int) -> list[int]:
    """Pick trials at random."""
    generator = np.random.default_rng(seed)
    return [int(index) for index in generator.choice(len(observations), count, replace=False)]


def _rest_error(
    observations: Sequence[Observation], picked: Sequence[int], predictor: Predictor
) -> float:
    """Return the mean error of the trials that were not picked."""
    trials = [observations[index] for index in picked]
    rest = [observation for index, observation in enumerate(observations) if index not in picked]
    return mean_absolute_error(
        *predict(rest, with_values(fitted(trials, TIME_ONLY, predictor))).times()
    )


def _tells_memory(row: Row) -> bool:
    """Tell whether a row has a trustworthy peak, or ran out of memory."""
    if row.observation.outcome == "oom":
        return True
    return row.tells_time and bool(row.observation.peak_memory_bytes)
