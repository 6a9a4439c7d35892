import pytest

from amp_ray.tuner import TunerSettings
from amp_ray.tuner.repeats import to_repeat
from amp_ray.tuner.trial_status import Figure, TrialStatus
from support.replaying import measured

SETTINGS = TunerSettings(budget=100)


def figure(time_s: float, sigma: float, runs: int = 1) -> Figure:
    """A figure of a few runs."""
    outcome = measured(time_s)
    return Figure(
        measured_s=time_s, sigma=sigma, runs=(outcome,) * runs, numbers=tuple(range(runs))
    )


def status(
    *figures: Figure, running: tuple[int, ...] = (), launched: dict[int, int] | None = None
) -> TrialStatus:
    """Measured candidates, by place."""
    counts = {place: len(each.runs) for place, each in enumerate(figures)}
    return TrialStatus(
        figures=dict(enumerate(figures)),
        out_of_memory={},
        closed=frozenset(range(len(figures))),
        silent=frozenset(),
        running=running,
        launched=counts | (launched or {}),
    )


def test_steady_leaders_are_not_repeated() -> None:
    assert to_repeat(status(figure(1.0, 0.01), figure(1.02, 0.01)), SETTINGS) == ()


def test_uncertain_leaders_are_repeated_the_fastest_first() -> None:
    assert to_repeat(status(figure(1.03, 0.1), figure(1.0, 0.1)), SETTINGS) == (1, 0)


def test_a_strategy_far_behind_is_not_repeated() -> None:
    found = to_repeat(status(figure(1.0, 0.1), figure(1.02, 0.1), figure(3.0, 0.1)), SETTINGS)
    assert found == (0, 1)


def test_a_single_strategy_has_no_rival() -> None:
    assert to_repeat(status(figure(1.0, 0.5)), SETTINGS) == ()


def test_what_was_run_less_often_comes_first() -> None:
    assert to_repeat(status(figure(1.0, 0.1, 2), figure(1.03, 0.1)), SETTINGS) == (1, 0)


@pytest.mark.parametrize("launched", [3, 4])
def test_repeats_end(launched: int) -> None:
    found = status(figure(1.0, 0.1), figure(1.03, 0.1), launched={0: launched})
    assert to_repeat(found, SETTINGS) == (1,)


def test_no_repeats_where_none_are_allowed() -> None:
    settings = TunerSettings(budget=100, max_repeats=0)
    assert to_repeat(status(figure(1.0, 0.1), figure(1.03, 0.1)), settings) == ()


def test_what_runs_is_not_repeated_beside_it() -> None:
    found = status(figure(1.0, 0.1), figure(1.03, 0.1), running=(0,))
    assert to_repeat(found, SETTINGS) == (1,)


def test_nothing_measured_nothing_repeated() -> None:
    assert to_repeat(status(), SETTINGS) == ()


def test_equal_times_without_any_spread_are_not_repeated() -> None:
    assert to_repeat(status(figure(1.0, 0.0), figure(1.0, 0.0)), SETTINGS) == ()


def test_the_leader_of_many_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[TrialStatus] = []

    def best(found: TrialStatus) -> int:
        looks.append(found)
        return 0

    monkeypatch.setattr(TrialStatus, "best", property(best))
    assert to_repeat(status(*[figure(1.0, 0.1)] * 20), SETTINGS)[0] == 0
    assert len(looks) == 1
