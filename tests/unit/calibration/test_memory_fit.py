import numpy as np
import pytest

from amp_ray.calibration.memory_fit import Limit, MemoryProblem, Peaks, StagePeaks, fit_memory

GIB = 2.0**30


def stages(*peaks: float, share: float = 1.0) -> StagePeaks:
    """Peaks of which a share grows with the one constant."""
    prior = np.array(peaks) * GIB
    return StagePeaks(prior_bytes=prior, parts_bytes=(share * prior)[:, None])


def limit(peak: float, *, failed: bool, other: float = 0.0) -> Limit:
    """A trial with one stage on a device of 16 GiB."""
    return Limit(
        predicted=stages(peak),
        limits_bytes=np.array([16 * GIB]),
        failed=failed,
        other_probability=other,
    )


def measured(*gib: float, predicted: StagePeaks) -> Peaks:
    """A trial whose peaks were measured."""
    return Peaks(predicted=predicted, measured_bytes=np.array(gib) * GIB)


def problem(*trials: Peaks | Limit, sigma: float = 0.2) -> MemoryProblem:
    """One constant."""
    return MemoryProblem(
        peaks=tuple(trial for trial in trials if isinstance(trial, Peaks)),
        limits=tuple(trial for trial in trials if isinstance(trial, Limit)),
        prior_sigma=np.array([sigma]),
        prior_error=0.08,
    )


def ratio(*trials: Peaks | Limit) -> float:
    """The fitted constant over its prior."""
    return float(np.exp(fit_memory(problem(*trials)).values[0]))


def test_peaks_grow_with_their_part_only() -> None:
    predicted = StagePeaks(
        prior_bytes=np.array([10.0]),
        parts_bytes=np.array([[4.0, 6.0]]),
    )
    assert predicted.at(np.log([2.0, 1.0])) == pytest.approx([14.0])


def test_one_figure_is_the_largest_of_all_stages() -> None:
    assert ratio(measured(12.0, predicted=stages(4.0, 12.0))) == pytest.approx(1.0)


def test_running_out_of_memory_below_the_predicted_limit_raises_the_constant() -> None:
    assert ratio(limit(15.0, failed=True)) > 1.02


def test_finishing_above_the_predicted_limit_lowers_the_constant() -> None:
    assert ratio(limit(17.0, failed=False)) < 0.98


def test_outcomes_far_from_the_limit_tell_nothing() -> None:
    fit = fit_memory(problem(limit(4.0, failed=False), limit(60.0, failed=True)))
    assert fit.values[0] == pytest.approx(0.0, abs=1e-3)
    assert np.sqrt(fit.covariance[0, 0]) == pytest.approx(0.2, rel=0.01)


def test_a_failure_with_another_likely_cause_tells_little() -> None:
    assert ratio(limit(15.0, failed=True, other=0.9)) < ratio(limit(15.0, failed=True))


def test_one_strange_outcome_does_not_outvote_the_others() -> None:
    usual = [limit(peak, failed=peak > 16) for peak in (14.0, 15.0, 15.5, 17.0, 18.0)] * 3
    assert ratio(*usual, limit(2.0, failed=True)) == pytest.approx(ratio(*usual), abs=0.01)


def test_error_is_learnt_from_measured_peaks_only() -> None:
    exact = [measured(peak, predicted=stages(peak)) for peak in np.linspace(5, 15, 30)]
    assert fit_memory(problem(*exact)).error < 0.04
    assert fit_memory(problem(limit(15.0, failed=True))).error == 0.08


def test_no_constant_is_a_fit_too() -> None:
    nothing = MemoryProblem(
        peaks=(),
        limits=(
            Limit(
                predicted=StagePeaks(
                    prior_bytes=np.array([15 * GIB]), parts_bytes=np.empty((1, 0))
                ),
                limits_bytes=np.array([16 * GIB]),
                failed=True,
            ),
        ),
        prior_sigma=np.empty(0),
        prior_error=0.08,
    )
    assert fit_memory(nothing).values.tolist() == []
