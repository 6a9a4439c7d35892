"""The policies on the published trials of the homogeneous experiment."""

from dataclasses import fields, replace
from typing import Final

import numpy as np
import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.planner import make_planner
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Measured
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.recommendation import recommend
from amp_ray.tuner.state import TunerSettings
from amp_ray.tuner.unexpected import surprise_of
from support.checked import as_estimate, required
from support.replaying import Answers, Replay, fastest, play, study, with_factors

NO_TIME: Final = (
    *("memory_error", "time_error", "context_scale", "allocator_scale"),
    "program_scale",  # moves all others
    "expert_imbalance",  # of models with experts
)
TIME: Final = [each.name for each in fields(Constants) if each.name not in NO_TIME]


def played(experiment: Experiment, recorded: Answers, settings: TunerSettings) -> Replay:
    """A study of the recorded strategies."""
    state = study(experiment, recorded, settings)
    return play(state, lambda strategy, _: recorded[strategy])


@pytest.fixture(scope="module")
def best(homogeneous: Experiment, recorded: Answers) -> Replay:
    """Our own policy with the constants as shipped."""
    return played(homogeneous, recorded, TunerSettings(budget=20))


def test_the_best_strategy_is_found_within_two_trials(best: Replay, recorded: Answers) -> None:
    assert (best.found_at(fastest(recorded)[0]) or 99) <= 2


def test_the_study_is_settled_within_five_trials_and_says_what_surprises_leave_open(
    best: Replay, recorded: Answers
) -> None:
    certificate = best.certificate
    assert best.num_trials <= 5
    assert certificate is not None
    assert certificate.settled
    assert certificate.best_s == fastest(recorded)[1]
    assert certificate.chance_without_surprises <= 0.05 < certificate.chance
    assert f"(up to {100 * certificate.chance:.2g} % likely)" in certificate.text


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_program_that_is_slower_or_faster_in_all_costs_no_further_trial(
    homogeneous: Experiment, recorded: Answers, best: Replay, factor: float
) -> None:
    scaled = {
        strategy: replace(
            outcome, measured_s=factor * outcome.measured_s, mean_s=factor * outcome.mean_s
        )
        if isinstance(outcome, Measured)
        else outcome
        for strategy, outcome in recorded.items()
    }
    found = played(homogeneous, scaled, TunerSettings(budget=20))
    assert found.num_trials <= best.num_trials
    assert found.certificate is not None
    assert found.certificate.settled
    assert found.certificate.best_s == fastest(scaled)[1]


def test_no_trial_fails_and_none_surprises(best: Replay) -> None:
    assert best.num_failed == 0
    surprises = [surprise_of(best.state, trial_record) for trial_record in best.state.trials]
    assert not any(surprises)


def test_the_best_measured_is_recommended(best: Replay, recorded: Answers) -> None:
    found = required(recommend(best.state, best.knowledge))
    assert (found.strategy, found.measured_s) == fastest(recorded)


@pytest.mark.guest("amp2022")
def test_the_published_order_needs_four_trials_and_one_of_its_first_five_fails(
    homogeneous: Experiment, recorded: Answers
) -> None:
    planner = make_planner(homogeneous, "amp-2022")

    def predicted_s(strategy: Strategy) -> float:
        """What the published planner says."""
        result = as_estimate(planner.score(strategy))
        return result.iteration_time_s

    settings = TunerSettings(budget=5, policy="amp-2022")
    state = study(homogeneous, recorded, settings, sorted(recorded, key=predicted_s))
    found = play(state, lambda strategy, _: recorded[strategy])
    assert found.found_at(fastest(recorded)[0]) == 4
    assert found.num_failed == 1


def test_groups_side_by_side_find_it_with_few_more_trials(
    homogeneous: Experiment, recorded: Answers
) -> None:
    state = study(homogeneous, recorded, TunerSettings(budget=20))
    found = play(state, lambda strategy, _: recorded[strategy], num_groups=4)
    assert found.certificate is not None
    assert found.certificate.settled
    assert (found.found_at(fastest(recorded)[0]) or 99) <= 4
    assert found.num_trials <= 8


@pytest.mark.parametrize("seed", range(4))
def test_a_model_with_wrong_constants_never_certifies_what_is_not_so(
    homogeneous: Experiment, recorded: Answers, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    drawn = generator.uniform(0.7, 1.3, 16) if seed % 2 else generator.choice([0.7, 1.3], 16)
    wrong = with_factors(homogeneous, dict(zip(TIME, map(float, drawn), strict=True)))
    found = played(wrong, recorded, TunerSettings(budget=15))
    certificate, best_s = found.certificate, fastest(recorded)[1]
    assert certificate is not None
    assert not certificate.holds or certificate.best_s <= 1.05 * best_s


def test_replaying_the_same_study_gives_the_same_trials(
    homogeneous: Experiment, recorded: Answers, best: Replay
) -> None:
    state = study(homogeneous, recorded, TunerSettings(budget=20))
    again = play(state, lambda strategy, _: recorded[strategy], predictor=BoundedPredictor())
    assert [trial_record.trial for trial_record in again.state.trials] == [
        trial_record.trial for trial_record in best.state.trials
    ]
