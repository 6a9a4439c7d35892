"""How wide intervals of predicted times must be, by the measurements of tables."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray
from amp_ray.calibration.evidence import Evidence, Setting, backing, settings
from amp_ray.calibration.intervals import WIDTH, log_shifts, time_sigmas
from amp_ray.calibration.observation import Observation
from amp_ray.tuner.recommendation import student_quantile
from published.evaluation import Metrics, predict

COVERAGE: Final = 0.9
"""Least share of a table's measured times within their intervals."""

NORMAL_MEDIAN: Final = 0.6745
"""Median of the distances of a normal distribution from its mean, in sigmas."""

FAMILIES: Final = (
    *("A100-40 A100-80", "H100 H200 H800"),
    *("B200 B300", "GB200 GB300"),
)
"""Boards of one chip on the same kind of host, whose rows count together."""

FEWEST_ROWS: Final = 5  # of a table, for its share in the factor of a setting


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableErrors:
    """Errors of a table's predicted times; every array has shape ``(num_rows,)``."""

    logs: FloatArray  # logarithms of measured over predicted times
    sigmas: FloatArray  # what they should be like, by the uncertainty of the constants
    shipped: FloatArray  # the same with the package's evidence
    settings: tuple[Setting, ...]

    def of(self, setting: Setting) -> BoolArray:
        """Return which rows have this setting."""
        return np.array([each == setting for each in self.settings], dtype=np.bool_)

    def inside(self, sigmas: FloatArray) -> BoolArray:
        """Return which measured times lie within intervals of these sigmas."""
        inside: BoolArray = np.abs(self.logs) <= WIDTH * sigmas
        return inside


def table_errors(observations: Sequence[Observation]) -> TableErrors:
    """Return the errors of measured trials beside their sigmas."""
    estimates = predict(observations).estimates
    measured = np.array([observation.measured_s for observation in observations], dtype=np.float64)
    groups: dict[int, list[int]] = {}
    for index, observation in enumerate(observations):
        groups.setdefault(id(observation.experiment), []).append(index)
    sigmas = np.zeros(len(estimates))
    for indices in groups.values():
        experiment = observations[indices[0]].experiment
        shifts = log_shifts(experiment, [estimates[index] for index in indices])
        sigmas[indices] = time_sigmas(experiment, shifts)
    shipped = [
        Evidence.of(*observation.plan).sigma(sigma)
        for observation, sigma in zip(observations, sigmas.tolist(), strict=True)
    ]
    return TableErrors(
        logs=np.log(measured / [estimate.iteration_time_s for estimate in estimates]),
        sigmas=sigmas,
        shipped=np.array(shipped),
        settings=tuple(_setting(observation) for observation in observations),
    )


def _setting(observation: Observation) -> Setting:
    """Return a trial's setting, with all boards of its family."""
    setting = next(settings(*observation.plan))
    families = [boards for boards in FAMILIES if setting.board in boards.split()]
    return replace(setting, board=families[0]) if families else setting


def factor(tables: Sequence[TableErrors], setting: Setting) -> float | None:
    """Return the factor of sigmas with which intervals hold `COVERAGE` of every table's rows.

    It is the larger of two: `COVERAGE` of the rows lie within it, and so they would if errors were
    normal around 0 with the table's median distance, whose quantile is Student's for few rows. None
    without a table of at least `FEWEST_ROWS` rows in the setting.
    """
    factors = []
    for table in tables:
        rows = table.of(setting)
        if (number := int(rows.sum())) >= FEWEST_ROWS:
            scaled = np.abs(table.logs / table.sigmas)[rows]
            normal = student_quantile(COVERAGE, number) * np.median(scaled) / NORMAL_MEDIAN
            factors.append(max(float(np.quantile(scaled, COVERAGE, method="higher")), normal))
    return float(max(factors)) / WIDTH if factors else None


def rounded_up(value: float) -> float:
    """Return the next thousandth, so that no row at an interval's edge falls out of it."""
    return math.ceil(1000.0 * value - 1e-9) / 1000.0


def factors(tables: Mapping[str, TableErrors]) -> list[dict[str, str]]:
    """Return the rows of `amp_ray/data/interval-widths.csv`: factors and what they come from."""
    rows = []
    for setting in _all_settings(tables.values()):
        width = factor([*tables.values()], setting)
        counts = [int(table.of(setting).sum()) for table in tables.values()]
        if width is not None:
            rows.append(
                {
                    "program": setting.program,
                    "release": setting.release,
                    "boards": setting.board,
                    "kind": setting.kind,
                    "factor": f"{rounded_up(width):.3f}",
                    "num_tables": str(sum(count >= FEWEST_ROWS for count in counts)),
                    "num_rows": str(sum(count for count in counts if count >= FEWEST_ROWS)),
                }
            )
    return rows


def coverage(tables: Mapping[str, TableErrors]) -> dict[str, Metrics]:
    """Return how many measured times lie within their intervals, and the intervals' half widths.

    As shipped, and held: with the evidence of the other tables.
    """
    figures: dict[str, Metrics] = {}
    for name, table in tables.items():
        others = [each for other, each in tables.items() if other != name]
        held = _sigmas(table, _factors(others))
        median_error = float(np.median(np.abs(np.expm1(-table.logs))))
        figures[name] = {
            "num_rows": len(table.logs),
            "median_error": median_error,
            "coverage": float(table.inside(table.shipped).mean()),
            "interval_error": _half_width(table.shipped),
            "width_in_medians": _half_width(table.shipped) / median_error,
            "held_coverage": float(table.inside(held).mean()),
            "held_interval_error": _half_width(held),
        }
    return figures


def _factors(tables: Sequence[TableErrors]) -> dict[Setting, float]:
    """Return the factor of every setting of which the tables have enough rows."""
    widths = {setting: factor(tables, setting) for setting in _all_settings(tables)}
    return {setting: width for setting, width in widths.items() if width is not None}


def _sigmas(table: TableErrors, factors_of: Mapping[Setting, float]) -> FloatArray:
    """Return sigmas with these factors, and wider ones where there are none."""
    known = {each: backing(each, factors_of) for each in set(table.settings)}
    pairs = np.array([known[setting] for setting in table.settings])
    sigmas: FloatArray = np.hypot(pairs[:, 0] * table.sigmas, pairs[:, 1])
    return sigmas


def _half_width(sigmas: FloatArray) -> float:
    """Return the median half width of intervals, as a share of the predicted time."""
    return float(np.median(np.expm1(WIDTH * sigmas)))


def _all_settings(tables: Iterable[TableErrors]) -> list[Setting]:
    """Return every setting of the tables' rows, once, in alphabetical order."""
    return sorted({each for table in tables for each in table.settings}, key=astuple)
