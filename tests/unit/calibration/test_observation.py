import pytest

from amp_ray.calibration.observation import Observation, noise_of, observe
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Crashed, Measured, OutOfMemory, TimedOut, Unreachable
from support.checked import required

NOT_TELLING = [
    TimedOut(reason="slow", timeout_s=1.0, lines=(), wall_s=1.0),
    Crashed(reason="bug", kind="crash", rank=None, host="a", lines=(), wall_s=1.0),
    Unreachable(reason="gone", host="a", wall_s=1.0),
]


def measured(small: Experiment, strategy: Strategy, spread_s: float | None) -> Observation:
    """A trial of one second."""
    return Observation(
        experiment=small,
        strategy=strategy,
        outcome="measured",
        measured_s=1.0,
        spread_s=spread_s,
    )


@pytest.mark.parametrize("spread_s", [None, 0.25, 5.0])
def test_a_measured_trial_tells_its_time_however_steady_it_was(
    small: Experiment, strategies: tuple[Strategy, ...], spread_s: float | None
) -> None:
    assert measured(small, strategies[0], spread_s).tells_time


@pytest.mark.parametrize(("spread_s", "noise"), [(None, 0.0), (0.25, 0.0), (0.5, 0.117)])
def test_an_unsteady_trial_has_an_error_of_its_own(spread_s: float | None, noise: float) -> None:
    assert noise_of(1.0, spread_s) == pytest.approx(noise, abs=1e-3)
    assert noise_of(None, None) == 0.0


def test_a_failed_trial_tells_no_time(small: Experiment, strategies: tuple[Strategy, ...]) -> None:
    failed = Observation(experiment=small, strategy=strategies[0], outcome="oom")
    assert not failed.tells_time


@pytest.mark.parametrize(
    ("outcome", "seconds", "message"),
    [
        ("oom", 1.0, "does not go with"),
        ("measured", None, "does not go"),
        ("measured", -1.0, "pos"),
    ],
)
def test_outcome_and_time_that_contradict_each_other_are_refused(
    small: Experiment,
    strategies: tuple[Strategy, ...],
    outcome: str,
    seconds: float | None,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        Observation(
            experiment=small,
            strategy=strategies[0],
            outcome=outcome,  # type: ignore[arg-type]
            measured_s=seconds,
        )


def test_peaks_of_some_stages_only_are_refused(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    deep = max(strategies, key=lambda strategy: strategy.pp)
    with pytest.raises(ValueError, match="one per stage"):
        Observation(
            experiment=small,
            strategy=deep,
            outcome="measured",
            measured_s=1.0,
            peak_memory_bytes=(1.0,) * (deep.pp - 1),
        )


def test_a_measured_outcome_becomes_an_observation(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    outcome = Measured(
        measured_s=0.5,
        mean_s=0.5,
        spread_s=0.01,
        step_time_s=(0.5,),
        num_warmup_steps=0,
        peak_memory_bytes=(1024,),
        wall_s=9.0,
    )
    found = required(observe(small, strategies[0], outcome))
    assert (found.outcome, found.measured_s, found.spread_s) == ("measured", 0.5, 0.01)
    assert found.peak_memory_bytes == (1024.0,)


def test_out_of_memory_becomes_an_observation(
    small: Experiment, strategies: tuple[Strategy, ...]
) -> None:
    outcome = OutOfMemory(reason="full", rank=0, host="a", lines=(), wall_s=1.0)
    found = required(observe(small, strategies[0], outcome))
    assert found.outcome == "oom"


@pytest.mark.parametrize("outcome", NOT_TELLING)
def test_other_outcomes_tell_nothing(
    small: Experiment,
    strategies: tuple[Strategy, ...],
    outcome: TimedOut | Crashed | Unreachable,
) -> None:
    assert observe(small, strategies[0], outcome) is None
