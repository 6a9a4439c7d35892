import numpy as np
import pytest

from amp_ray.calibration.evidence import FIRST_MET, Setting
from amp_ray.calibration.intervals import WIDTH
from published.interval_widths import TableErrors, coverage, factor, factors


def setting(program: str = "megatron", kind: str = "dense") -> Setting:
    """A setting on A100."""
    return Setting(program=program, release="", board="A100-40 A100-80", kind=kind)


def table(logs: list[float], where: Setting | None = None, sigma: float = 0.1) -> TableErrors:
    """A table whose errors are these, of predictions with one sigma."""
    return TableErrors(
        logs=np.array(logs),
        sigmas=np.full(len(logs), sigma),
        shipped=np.full(len(logs), sigma),
        settings=(where or setting(),) * len(logs),
    )


def test_a_factor_holds_nine_of_ten_times_of_every_table_in_a_setting() -> None:
    even = table([0.001 * number for number in range(100)])
    assert factor([even], setting()) == pytest.approx(0.9 / WIDTH, rel=0.4)
    far = table([0.01] * 89 + [0.3] * 11)
    assert factor([even, far], setting()) == pytest.approx(3.0 / WIDTH)
    other = table([2.0] * 10, setting(program="nanotron"))
    assert factor([even, far, other], setting()) == pytest.approx(3.0 / WIDTH)


@pytest.mark.parametrize("number", [8, 40, 400])
def test_errors_of_one_sign_are_one_draw_of_a_sites_error(number: int) -> None:
    """Rows that are all off by the same may lie further away on the next site."""
    width = factor([table([0.1] * number)], setting())
    assert width is not None
    assert 1.64 / 0.6745 < width * WIDTH < 1.86 / 0.6745
    fewer = factor([table([0.1] * (number - 1))], setting())
    assert fewer is not None
    assert fewer > width


def test_a_setting_with_few_rows_of_a_table_has_no_factor() -> None:
    experts = setting(kind="experts")
    tables = [table([0.2] * 40), table([0.9] * 4, experts)]
    assert factor(tables, experts) is None
    (row,) = factors(dict(zip(("one", "two"), tables, strict=True)))
    assert (row["boards"], row["kind"], row["num_rows"]) == ("A100-40 A100-80", "dense", "40")
    assert float(row["factor"]) >= 2 / WIDTH  # rounded up


def test_a_held_table_has_no_part_in_its_width() -> None:
    found = coverage({"near": table([0.1] * 6), "far": table([1.0] * 6)})
    assert found["far"]["held_coverage"] == 0.0
    assert found["near"]["held_coverage"] == 1.0
    assert found["near"]["held_interval_error"] > np.expm1(1.0)
    assert found["near"]["interval_error"] == pytest.approx(np.expm1(WIDTH * 0.1))
    assert found["near"]["width_in_medians"] == pytest.approx(
        np.expm1(WIDTH * 0.1) / -np.expm1(-0.1)
    )


def test_a_program_that_no_other_table_has_is_held_as_one_never_met() -> None:
    found = coverage({"one": table([0.1] * 6), "two": table([0.4] * 6, setting("nanotron"))})
    wide = np.expm1(WIDTH * np.hypot(0.1, FIRST_MET))
    assert found["one"]["held_interval_error"] == pytest.approx(wide)
    assert found["two"]["held_coverage"] == 1.0
