import numpy as np
import pytest

from published.metrics import (
    bias,
    kendall,
    mean_absolute_error,
    median_absolute_error,
    pair_agreement,
    precision_and_recall,
    regret,
    spearman,
)

PREDICTED = np.array([1.0, 2.0, 2.0, 4.0, 3.0])
MEASURED = np.array([1.1, 1.9, 2.5, 3.0, 3.0])


def test_errors_are_relative_to_what_was_measured() -> None:
    predicted, measured = np.array([1.1, 1.8]), np.array([1.0, 2.0])
    assert mean_absolute_error(predicted, measured) == pytest.approx(0.1)
    assert median_absolute_error(predicted, measured) == pytest.approx(0.1)
    assert bias(predicted, measured) == pytest.approx(0.0)


def test_equal_values_share_their_mean_place() -> None:
    # places 0, 1.5, 1.5, 4, 3 against 0, 1, 2, 3.5, 3.5: deviations' products 9, squares 9.5 each
    assert spearman(PREDICTED, MEASURED) == pytest.approx(9 / 9.5)


def test_tied_pairs_count_in_neither_direction() -> None:
    # of 10 pairs one is tied in each: 8 agree, and the root of 9 x 9 counts
    assert kendall(PREDICTED, MEASURED) == pytest.approx(8 / 9)


def test_pairs_across_groups_do_not_count() -> None:
    groups = [(np.array([1.0, 2.0]), np.array([1.0, 2.0]))] * 2
    assert pair_agreement(groups) == 1.0


def test_pairs_that_lie_close_can_be_left_out() -> None:
    groups = [(np.array([1.0, 0.9, 2.0]), np.array([1.0, 1.01, 2.0]))]
    assert pair_agreement(groups) == pytest.approx(1 / 3)
    assert pair_agreement(groups, apart_fraction=0.05) == 1.0


def test_regret_is_what_trusting_the_prediction_costs() -> None:
    assert regret(np.array([1.0, 2.0]), np.array([1.1, 1.0])) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("told", "failed", "expected"),
    [
        ([True, True, False], [True, False, True], (0.5, 0.5)),
        ([False, False], [True, False], (1.0, 0.0)),
        ([True, False], [False, False], (0.0, 1.0)),
    ],
)
def test_precision_and_recall_of_failures(
    told: list[bool], failed: list[bool], expected: tuple[float, float]
) -> None:
    assert precision_and_recall(told, failed) == expected
