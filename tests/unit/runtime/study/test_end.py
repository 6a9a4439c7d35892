import itertools
from typing import get_args

import pytest

from amp_ray.runtime.study.result import ENDINGS, Ending, StudyResult, best_trial
from amp_ray.trials.outcome import Outcome
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.knowledge import learn
from amp_ray.tuner.state import Trial, record, start
from support.driving import drive, small_study
from support.replaying import crashed, measured, out_of_memory

PREDICTOR = BoundedPredictor()


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all drivers remember the same predictions: it saves time and changes nothing."""
    monkeypatch.setattr("amp_ray.runtime.study.driver.BoundedPredictor", lambda: PREDICTOR)


def ended(*outcomes: Outcome) -> StudyResult:
    turns = itertools.cycle(outcomes)
    return drive(small_study(budget=len(outcomes)), lambda _task, _group: next(turns))


def test_every_ending_has_a_sentence() -> None:
    assert [*ENDINGS] == [*get_args(Ending)]
    assert len({*ENDINGS.values()}) == len(ENDINGS)


@pytest.mark.parametrize(
    ("outcomes", "best"),
    [
        ((measured(3.0), measured(1.0), measured(2.0)), 1),
        ((measured(1.0), measured(1.0)), 0),
        ((out_of_memory(), measured(9.0)), 1),
        ((out_of_memory(), crashed()), None),
    ],
)
def test_the_best_trial_is_the_fastest_measured(
    outcomes: tuple[Outcome, ...], best: int | None
) -> None:
    assert ended(*outcomes).best_number == best


@pytest.mark.parametrize(
    ("times_s", "best"), [((1.0, 3.0, 2.0), 2), ((3.0, 1.0), 1), ((2.0, 2.0, 1.0), 0)]
)
def test_of_a_strategy_that_ran_several_times_the_middle_run_stands_for_it(
    times_s: tuple[float, ...], best: int
) -> None:
    state = small_study(budget=9)
    first = state.candidates[0]
    for number, time_s in enumerate(times_s):
        trial = Trial(
            number=number,
            strategy=first.strategy,
            predicted_s=1.0,
            sigma=0.1,
            repeats=0 if number else None,
            reason="again",
        )
        state = record(start(state, trial), number, measured(time_s))
    assert best_trial(learn(state, PREDICTOR)) == best
