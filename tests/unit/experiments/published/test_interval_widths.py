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


def test_a_factor_holds_nine_of_ten_times_of_every_table() -> None:
    even = table([0.001 * number for number in range(100)])
    assert factor([even], "dense") == pytest.approx(0.9 / WIDTH)
    assert factor([even, table([0.3] * 10)], "dense") == pytest.approx(3.0 / WIDTH)
    assert factor([even, table([0.01] * 89 + [0.3] * 11)], "dense") == pytest.approx(3.0 / WIDTH)
    assert factor([even, table([0.01] * 91 + [0.3] * 9)], "dense") == pytest.approx(0.9 / WIDTH)


def test_a_new_table_is_held_as_often_as_its_rank_among_the_tables_says() -> None:
    generator = np.random.default_rng(1)
    held = []
    for _ in range(200):
        *seen, new = [
            table(generator.normal(bias, 0.05, 40).tolist()) for bias in generator.normal(0, 0.2, 5)
        ]
        tables = {"new": new} | {str(index): each for index, each in enumerate(seen)}
        held.append(coverage(tables)["new"]["held_coverage"] >= 0.9)
    assert np.mean(held) == pytest.approx(4 / 5, abs=0.09)  # three standard errors


def test_a_kind_of_evidence_without_three_rows_of_a_table_has_no_factor() -> None:
    tables = [table([0.2] * 5), table([0.9, 0.9], kind="experts")]
    assert factor(tables, "experts") == 1.0
    rows = factors(dict(zip(("one", "two"), tables, strict=True)))
    assert rows == [{"evidence": "dense", "factor": "1.021", "num_tables": "1", "num_rows": "5"}]
    assert float(rows[0]["factor"]) >= 2 / WIDTH  # rounded up


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
