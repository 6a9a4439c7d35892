"""How wide intervals of predicted times must be, by the measurements of other tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray
from amp_ray.calibration.intervals import WIDTH, evidence, log_shifts, time_sigmas, width_factor
from amp_ray.calibration.observation import Observation
from published.evaluation import Metrics, predict

COVERAGE: Final = 0.9
"""Least share of a table's measured times within their intervals."""

FEWEST_ROWS: Final = 3  # of a table, for its share in the factor of a kind of evidence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableErrors:
    """Errors of a table's predicted times; every array has shape ``(num_rows,)``."""

    logs: FloatArray  # logarithms of measured over predicted times
    sigmas: FloatArray  # what they should be like, by the uncertainty of the constants
    shipped: FloatArray  # factors of these sigmas in the package
    kinds: tuple[str, ...]  # what speaks for each prediction

    def of(self, kind: str) -> BoolArray:
        """Return which rows have this evidence."""
        return np.array([each == kind for each in self.kinds], dtype=np.bool_)

    def inside(self, factors: FloatArray) -> BoolArray:
        """Return which measured times lie within intervals whose sigmas have these factors."""
        inside: BoolArray = np.abs(self.logs) <= WIDTH * factors * self.sigmas
        return inside


def table_errors(observations: Sequence[Observation]) -> TableErrors:
    """Return the errors of measured trials beside their sigmas."""
    estimates = predict(observations).estimates
    measured = np.array([observation.measured_s for observation in observations], dtype=np.float64)
    logs = np.log(measured / [estimate.iteration_time_s for estimate in estimates])
    groups: dict[int, list[int]] = {}
    for index, observation in enumerate(observations):
        groups.setdefault(id(observation.experiment), []).append(index)
    sigmas, shipped, kinds = np.zeros(len(logs)), np.zeros(len(logs)), [""] * len(logs)
    for indices in groups.values():
        experiment = observations[indices[0]].experiment
        shifts = log_shifts(experiment, [estimates[index] for index in indices])
        sigmas[indices] = time_sigmas(experiment, shifts)
        shipped[indices] = width_factor(experiment)
        for index in indices:
            kinds[index] = evidence(experiment)
    return TableErrors(logs=logs, sigmas=sigmas, shipped=shipped, kinds=tuple(kinds))


def factor(tables: Sequence[TableErrors], kind: str) -> float:
    """Return the least factor of sigmas with which intervals hold `COVERAGE` of every table.

    Errors within a table are alike, and a user's cluster is another table. If its quantile of the
    errors in sigmas is drawn as those of ``n`` tables, it lies below the largest of them with
    probability ``n / (n + 1)``, whatever their distribution.
    """
    return (
        max(
            (
                float(
                    np.quantile(np.abs(table.logs / table.sigmas)[rows], COVERAGE, method="higher")
                )
                for table, rows in ((table, table.of(kind)) for table in tables)
                if _counts(rows)
            ),
            default=WIDTH,
        )
        / WIDTH
    )


def rounded_up(value: float) -> float:
    """Return the next thousandth, so that no row at an interval's edge falls out of it."""
    return math.ceil(1000.0 * value - 1e-9) / 1000.0


def factors(tables: Mapping[str, TableErrors]) -> list[dict[str, str]]:
    """Return the rows of `amp_ray/data/interval-widths.csv`: factors and what they come from."""
    rows = []
    for kind in sorted({each for table in tables.values() for each in table.kinds}):
        counts = [int(table.of(kind).sum()) for table in tables.values() if _counts(table.of(kind))]
        if counts:
            rows.append(
                {
                    "evidence": kind,
                    "factor": f"{rounded_up(factor([*tables.values()], kind)):.3f}",
                    "num_tables": str(len(counts)),
                    "num_rows": str(sum(counts)),
                }
            )
    return rows


def coverage(tables: Mapping[str, TableErrors]) -> dict[str, Metrics]:
    """Return how many measured times lie within their intervals, and the intervals' half widths.

    As shipped, and held: with the factors that the other tables give.
    """
    figures: dict[str, Metrics] = {}
    for name, table in tables.items():
        others = [each for other, each in tables.items() if other != name]
        by_kind = {kind: factor(others, kind) for kind in set(table.kinds)}
        held = np.array([by_kind[kind] for kind in table.kinds])
        median_error = float(np.median(np.abs(np.expm1(-table.logs))))
        figures[name] = {
            "num_rows": len(table.logs),
            "median_error": median_error,
            "coverage": float(table.inside(table.shipped).mean()),
            "interval_error": _half_width(table, table.shipped),
            "width_in_medians": _half_width(table, table.shipped) / median_error,
            "held_coverage": float(table.inside(held).mean()),
            "held_interval_error": _half_width(table, held),
        }
    return figures


def _half_width(table: TableErrors, factors_of_rows: FloatArray) -> float:
    """Return the median half width of intervals, as a share of the predicted time."""
    return float(np.median(np.expm1(WIDTH * factors_of_rows * table.sigmas)))


def _counts(rows: BoolArray) -> bool:
    return int(rows.sum()) >= FEWEST_ROWS
