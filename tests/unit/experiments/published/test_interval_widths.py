import numpy as np
import pytest

from amp_ray.calibration.intervals import WIDTH
from published.interval_widths import TableErrors, coverage, factor, factors


def table(logs: list[float], kind: str = "dense", sigma: float = 0.1) -> TableErrors:
    """A table whose errors are these, of predictions with one sigma."""
    return TableErrors(
        logs=np.array(logs),
        sigmas=np.full(len(logs), sigma),
        shipped=np.ones(len(logs)),
        kinds=(kind,) * len(logs),
    )


def test_a_factor_holds_the_times_of_the_tables_each_with_the_same_weight() -> None:
    small, large = table([0.3] * 10), table([0.01] * 1000)
    assert factor([small, large], "dense") == pytest.approx(3.0 / WIDTH)
    assert factor([table([0.3] * 3 + [0.01] * 97), large], "dense") == pytest.approx(0.1 / WIDTH)


def test_normal_errors_of_the_expected_size_need_no_factor() -> None:
    generator = np.random.default_rng(1)
    tables = [table(generator.normal(0.0, 0.1, 2000).tolist()) for _ in range(5)]
    assert factor(tables, "dense") == pytest.approx(1.0, abs=0.03)


def test_a_bias_of_each_table_widens_intervals() -> None:
    generator = np.random.default_rng(1)
    tables = [
        table(generator.normal(bias, 0.05, 200).tolist()) for bias in generator.normal(0, 0.2, 20)
    ]
    assert factor(tables, "dense") > 1.05


def test_a_kind_of_evidence_without_three_rows_of_a_table_has_no_factor() -> None:
    tables = [table([0.2] * 5), table([0.9, 0.9], kind="experts")]
    assert factor(tables, "experts") == 1.0
    rows = factors(dict(zip(("one", "two"), tables, strict=True)))
    assert rows == [
        {"evidence": "dense", "factor": f"{2 / WIDTH:.3f}", "num_tables": "1", "num_rows": "5"}
    ]


def test_a_held_table_has_no_part_in_its_width() -> None:
    tables = {"near": table([0.1] * 4), "far": table([0.5] * 4)}
    found = coverage(tables)
    assert found["far"]["held_coverage"] == 0.0
    assert found["near"]["held_coverage"] == 1.0
    assert found["near"]["coverage"] == 1.0
    assert found["near"]["held_interval_error"] == pytest.approx(np.expm1(0.5))
    assert found["near"]["width_in_medians"] == pytest.approx(
        np.expm1(WIDTH * 0.1) / -np.expm1(-0.1)
    )
