import math
from dataclasses import replace

import pytest

from amp_ray.trials.outcome import Crashed, Outcome, TimedOut, Unreachable
from amp_ray.trials.steps import StepWarning
from amp_ray.tuner.state import TunerState
from amp_ray.tuner.trial_status import TrialStatus, observations, status_of
from support.replaying import crashed, measured, out_of_memory, ran

UNREACHABLE = Unreachable(reason="no answer", host="a", wall_s=1.0)
FULL = Crashed(reason="full", kind="disk", rank=0, host="a", lines=(), wall_s=1.0)
TIMED_OUT = TimedOut(reason="too slow", timeout_s=1.0, lines=(), wall_s=1.0)


def after(state: TunerState, *told: tuple[int, Outcome | None]) -> TunerState:
    """A study with trials of candidates, by index, and what came of them."""
    for index, outcome in told:
        state = ran(state, index, outcome, predicted_s=1.0, sigma=1.0)
    return state


def learnt(
    state: TunerState, status: TrialStatus, most: int
) -> dict[int, tuple[str, float | None]]:
    """What a calibration gets, by index."""
    strategies = [estimate.strategy for estimate in state.candidates]
    found = observations(state.experiment, strategies, status, most)
    return {index: (each.outcome, each.measured_s) for index, each in found.items()}


def test_a_figure_is_the_mean_of_the_runs(state: TunerState) -> None:
    runs = [(0, measured(1.0)), (1, measured(5.0)), (0, measured(1.3)), (0, measured(1.1))]
    status = status_of(after(state, *runs))
    mean_s = (1.0 * 1.3 * 1.1) ** (1 / 3)
    assert status.figures[0].measured_s == pytest.approx(mean_s)
    assert status.figures[0].numbers == (0, 2, 3)
    assert (status.best, status.best_s) == (0, status.figures[0].measured_s)


def test_a_spread_makes_a_figure_uncertain_and_repeats_make_it_less_so(state: TunerState) -> None:
    unsteady = measured(1.0, spread_fraction=0.2)
    once = status_of(after(state, (0, unsteady))).figures[0].sigma
    often = status_of(after(state, *[(0, unsteady)] * 4)).figures[0].sigma
    assert 0.04 < once < 0.06  # of ten steps
    assert often == pytest.approx(once / 2)


def test_runs_count_by_their_errors(state: TunerState) -> None:
    runs = [measured(1.1, spread_fraction=0.2), measured(1.0)]
    figure = status_of(after(state, *((0, run) for run in runs))).figures[0]
    assert 1.0 < figure.measured_s < 1.02


def test_an_unsteady_measurement_counts_with_the_prediction_by_their_errors(
    state: TunerState,
) -> None:
    runs = (0, measured(1.0, spread_fraction=0.3)), (1, measured(1.0, spread_fraction=0.2))
    status = status_of(after(state, *runs))
    sigma = status.figures[0].sigma
    expected = status.with_predictions({0: 2.0, 1: 2.0}, sigma).figures
    assert expected[0].expected_s == pytest.approx(math.sqrt(2.0))
    assert expected[0].expected_sigma == pytest.approx(sigma / math.sqrt(2.0))
    assert (expected[1].expected_s, expected[1].expected_sigma) == (1.0, expected[1].sigma)
    sure = status.with_predictions({0: 2.0}, 1e-3).figures[0]
    assert sure.expected_s == pytest.approx(2.0, rel=1e-3)
    unsure = status.with_predictions({0: 2.0}, 1e3).figures[0]
    assert unsure.expected_s == pytest.approx(1.0)
    assert status.with_predictions({}, 0.1).figures[0].expected_s == 1.0


def test_the_best_is_what_is_expected_to_be_the_fastest(state: TunerState) -> None:
    runs = (0, measured(0.95, spread_fraction=0.9)), (1, measured(1.0))
    status = status_of(after(state, *runs))
    assert status.best == 0
    assert status.with_predictions({0: 1.5, 1: 1.5}, 0.06).best == 1


def test_repeats_that_disagree_make_all_measurements_uncertain(state: TunerState) -> None:
    steady = after(state, (1, measured(1.0)), (0, measured(1.0)), (0, measured(1.01)))
    assert status_of(steady).figures[1].is_steady
    differ = after(state, (1, measured(1.0)), (0, measured(1.0)), (0, measured(1.4)))
    assert not status_of(differ).figures[1].is_steady


@pytest.mark.parametrize("warning", ["trend", "unsteady", "warm_up"])
def test_a_disturbed_run_counts_until_its_strategy_has_run_undisturbed(
    state: TunerState, warning: StepWarning
) -> None:
    disturbed = replace(measured(1.3), warnings=(warning,))
    figure = status_of(after(state, (0, disturbed))).figures[0]
    assert (figure.measured_s, figure.is_steady) == (1.3, False)
    status = status_of(after(state, (0, disturbed), (0, measured(1.0))))
    figure = status.figures[0]
    assert (figure.measured_s, figure.is_steady, figure.typical_number) == (1.0, True, 1)
    assert (figure.numbers, status.num_repeats) == ((0, 1), 0)


def test_the_mean_of_the_steps_decides(state: TunerState) -> None:
    periodic = replace(measured(1.0), mean_s=1.2)
    status = status_of(after(state, (0, periodic), (1, measured(1.1))))
    assert (status.best, status.figures[0].measured_s) == (1, 1.2)


def test_runs_that_differ_make_a_figure_uncertain_however_steady_each_was(
    state: TunerState,
) -> None:
    status = status_of(after(state, (0, measured(1.0)), (0, measured(1.3))))
    assert status.figures[0].sigma > 0.08


def test_out_of_memory_closes_a_strategy_and_teaches(state: TunerState) -> None:
    state = after(state, (3, out_of_memory()))
    status = status_of(state)
    assert not status.is_new(3)
    assert learnt(state, status, 10) == {3: ("oom", None)}


def test_a_crash_and_a_time_out_close_a_strategy_and_teach_nothing(state: TunerState) -> None:
    state = after(state, (3, crashed()), (4, TIMED_OUT))
    status = status_of(state)
    assert status.silent == {3, 4}
    assert not status.is_new(3)
    assert not status.is_new(4)
    assert learnt(state, status, 10) == {}


@pytest.mark.parametrize("outcome", [UNREACHABLE, FULL])
def test_a_host_that_fails_leaves_the_strategy_open_once(
    state: TunerState, outcome: Outcome
) -> None:
    assert status_of(after(state, (3, outcome))).is_new(3)
    assert not status_of(after(state, (3, outcome), (3, outcome))).is_new(3)


def test_a_running_strategy_is_not_new(state: TunerState) -> None:
    status = status_of(after(state, (3, None)))
    assert status.running == (3,)
    assert not status.is_new(3)


def test_a_strategy_that_ran_once_runs_whatever_came_later(state: TunerState) -> None:
    state = after(state, (3, measured(2.0)), (3, out_of_memory()), (3, crashed()))
    status = status_of(state)
    assert status.out_of_memory == {}
    assert status.silent == frozenset()
    assert learnt(state, status, 10) == {3: ("measured", 2.0)}


def test_a_calibration_learns_the_mean_of_repeats(state: TunerState) -> None:
    state = after(state, (0, measured(1.0)), (0, measured(2.0)))
    outcome, measured_s = learnt(state, status_of(state), 10)[0]
    assert outcome == "measured"
    assert measured_s == pytest.approx(math.sqrt(2.0))


def test_of_too_many_the_fastest_and_the_latest_are_learnt_from(state: TunerState) -> None:
    times = [5.0, 1.0, 6.0, 2.0, 7.0, 8.0, 9.0]
    told = [(index, measured(time_s)) for index, time_s in enumerate(times)]
    state = after(state, *told, (10, out_of_memory()))
    assert sorted(learnt(state, status_of(state), 4)) == [1, 3, 6, 10]
