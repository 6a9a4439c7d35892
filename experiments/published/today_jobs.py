"""Figures of the published jobs of today: each table by what its rows tell, in one form for all."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.calibration.observation import Observation
from amp_ray.calibration.populations import upper_class
from published.a100_jobs import NUM_TRIALS, by_group, error_metrics, ranking_metrics, tuned
from published.evaluation import Metrics, Predicted, predict
from published.metrics import bias, median_absolute_error, precision_and_recall, spearman
from published.tables import Published, Row

TAIL: Final = 90
"""Percentile of the absolute error that stands beside the median."""

CUBLAS_BYTES: Final = 2 * 32 * 2**20
"""Workspaces that torch allocates for cuBLAS: one for the thread of the forward pass and one for
that of the backward pass, of this size from Hopper on and where CUBLAS_WORKSPACE_CONFIG is :4096:8,
as in Megatron-LM's tests (PyTorch, notes on CUDA semantics)."""

ENGINE_BYTES: Final = {True: 32 * 2**20, False: 4 * 2**20}
"""Transformer Engine's own, by whether the device computes in fp8, as Hopper does, not Ampere."""

StageChoice = Literal["first", "last", "largest"]
"""Whose peak a table tells: that of rank 0, of the last rank, or of the one that needs most."""

_STAGES: Final[Mapping[StageChoice, Callable[[Sequence[float]], float]]] = {
    "first": lambda peaks: peaks[0],
    "last": lambda peaks: peaks[-1],
    "largest": max,
}


def not_expressible(table: Published) -> dict[str, Metrics]:
    """Return how many rows cannot be expressed, by the reason."""
    reasons = table.not_expressible
    return {f"not expressible: {reason}": {"num_rows": reasons[reason]} for reason in reasons}


def time_figures(rows: Iterable[Row], label: str = "no measurement") -> dict[str, Metrics]:
    """Return the errors of iteration times and of the order within each group, nothing measured."""
    timed = [row for row in rows if row.tells_time]
    if not timed:
        return {label: {"num_rows": 0}}
    predicted = predict([row.observation for row in timed])
    has_pairs = len({row.group for row in timed}) < len(timed)
    metrics = ranking_metrics(timed, predicted) if has_pairs else error_metrics(predicted)
    return {label: {"num_rows": len(timed), **metrics}}


def by_model(rows: Iterable[Row]) -> dict[str, Metrics]:
    """Return the errors of iteration times of each model, the first word of the row's group."""
    of_model: dict[str, list[Observation]] = {}
    for row in rows:
        if row.tells_time:
            of_model.setdefault(row.group.split(" on ")[0], []).append(row.observation)
    return {
        model: {"num_rows": len(observations), **error_metrics(predict(observations))}
        for model, observations in of_model.items()
    }


def refusals(rows: Iterable[Row]) -> dict[str, Metrics]:
    """Return how many runs that were measured are predicted not to fit into memory."""
    ran = [row.observation for row in rows if row.observation.outcome == "measured"]
    refused, _ = predict(ran).failures()
    return {
        "said not to fit although it ran": {
            "num_rows": len(ran),
            "refused": sum(refused),
            "refused_fraction": float(np.mean(refused)),
        }
    }


def tuned_figures(rows: Iterable[Row]) -> dict[str, Metrics]:
    """Return how far the best of a few trials, best predicted next, is from the best of all."""
    groups = by_group(list(rows))
    regrets = [tuned(group, min(NUM_TRIALS, len(group)))[0] for group in groups.values()]
    return {
        f"{NUM_TRIALS} trials of each group": {
            "num_rows": sum(map(len, groups.values())),
            "regret_mean": float(np.mean(regrets)),
            "regret_worst": max(regrets),
        }
    }


def memory_figures(rows: Iterable[Row], stage: StageChoice) -> dict[str, Metrics]:
    """Return the errors of peaks of what torch had allocated: no context but cuBLAS's, no cache.

    Args:
        rows: Of a table.
        stage: Whose peak it tells.
    """
    measured = [row.observation for row in rows if row.observation.peak_memory_bytes]
    if not measured:
        return {"no measurement": {"num_peaks": 0}}
    predicted = predict([_allocated(observation) for observation in measured])
    ours = np.array([_STAGES[stage](result.peak_memory_bytes) for result in predicted.estimates])
    theirs = np.array([result.peak_memory_bytes[0] for result in measured])
    errors = np.abs(ours / theirs - 1.0)
    return {
        "no measurement": {
            "num_peaks": len(measured),
            "median_error": median_absolute_error(ours, theirs),
            "p90_error": float(np.percentile(errors, TAIL)),
            "bias": bias(ours, theirs),
        }
    }


def failure_figures(rows: Iterable[Row]) -> dict[str, Metrics]:
    """Return how well failures are told."""
    predicted: Predicted = predict([row.observation for row in rows])
    predicted_to_fail, failed = predicted.failures()
    precision, recall = precision_and_recall(predicted_to_fail, failed)
    return {
        "failures": {
            "num_rows": len(predicted_to_fail),
            "failures": sum(failed),
            "failure_precision": precision,
            "failure_recall": recall,
        }
    }


MOST_MISSING: Final = 0.3
"""Share of the predicted memory that a run of the stated settings may lack. Of the playbook's runs
without a pipeline the smallest part is .8 for most of them, and .1 to .65 for 13."""


def playbook(table: Published) -> dict[str, Metrics]:
    """Return the figures of the playbook's times: without a pipeline, with one, after trials.

    Runs over several nodes are shown apart, and of these the ones whose peak fits their settings.
    """
    flat = [row for row in table.rows if row.observation.strategy.pp == 1]
    clean, second = pipeline_populations(table.rows)
    figures = time_figures(flat, "pp = 1, no measurement")
    for tp in (16, 32):
        wide = [row for row in flat if row.observation.strategy.tp == tp and row.tells_time]
        figures |= time_figures(wide, f"pp = 1, tp {tp}")
        figures |= time_figures(_with_memory(wide), f"pp = 1, tp {tp}, memory of its settings")
    return {
        **figures,
        **tuned_figures(flat),
        **time_figures(clean, "pp > 1, clean"),
        **_second_population(clean, second),
        **not_expressible(table),
    }


def pipeline_populations(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Return the timed rows with a pipeline below and beyond the gap in seconds per slot.

    The seconds are those that the prediction leaves; the gap divides all pipelines of the table in
    two parts of least variance. Time that a slot takes whatever its work is no cost of a strategy.
    """
    piped = [row for row in rows if row.tells_time and row.observation.strategy.pp > 1]
    slow = upper_class(_excess_s(piped)).tolist()
    return (
        [row for row, is_slow in zip(piped, slow, strict=True) if not is_slow],
        [row for row, is_slow in zip(piped, slow, strict=True) if is_slow],
    )


def _excess_s(rows: Sequence[Row]) -> FloatArray:
    """Return measured minus predicted seconds of each row, per slot of its pipeline."""
    predicted = predict([row.observation for row in rows]).estimates
    pairs = zip(rows, predicted, strict=True)
    return np.array([row.observation.excess_s(ours.iteration_time_s) for row, ours in pairs])


def _second_population(clean: Sequence[Row], second: Sequence[Row]) -> dict[str, Metrics]:
    """Return the gap, the seconds per slot beyond it, and how many rows have them, by nodes."""
    if not second:
        return {}
    excess_s = _excess_s(second)
    predicted, _ = predict([row.observation for row in second]).times()
    work_s = predicted / [row.observation.strategy.num_micro_batches for row in second]
    clean_nodes, nodes = (
        [len(row.observation.experiment.cluster.nodes) for row in rows] for rows in (clean, second)
    )
    figures: dict[str, Metrics] = {
        "pp > 1, second population": {
            "num_rows": len(second),
            "gap_from_s": float(_excess_s(clean).max()),
            "gap_to_s": float(excess_s.min()),
            "median_s_per_slot": float(np.median(excess_s)),
            "correlation_with_work": spearman(excess_s, work_s),
        }
    }
    for count in sorted({*nodes, *clean_nodes}):
        here, elsewhere = nodes.count(count), clean_nodes.count(count)
        fraction = here / (here + elsewhere)
        figures[f"second population, nodes: {count}"] = {"num_rows": here, "fraction": fraction}
    return figures


def _with_memory(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose rank 0 used about as much memory as their settings need."""
    predicted = predict([_allocated(row.observation) for row in rows])
    return [
        row
        for row, estimate in zip(rows, predicted.estimates, strict=True)
        if row.observation.peak_memory_bytes
        and row.observation.peak_memory_bytes[0]
        >= (1 - MOST_MISSING) * estimate.peak_memory_bytes[0]
    ]


def _allocated(observation: Observation) -> Observation:
    """Return an observation whose peaks are predicted as torch counts what it has allocated."""
    experiment = observation.experiment
    workspaces = CUBLAS_BYTES
    if experiment.traits.fused_pointwise:
        workspaces += ENGINE_BYTES[experiment.cluster.nodes[0].device.fp8_flops is not None]
    traits = replace(experiment.traits, context_bytes=workspaces, allocator_factor=1.0)
    return replace(observation, experiment=replace(experiment, traits=traits))
