import pytest

from amp_ray.trials.outcome import (
    Crashed,
    Measured,
    Outcome,
    OutOfMemory,
    TimedOut,
    Unreachable,
    outcome_from_json,
    outcome_to_json,
)

OUTCOMES: list[tuple[str, Outcome]] = [
    (
        "measured",
        Measured(
            measured_s=0.5,
            mean_s=0.5,
            spread_s=0.1,
            step_time_s=(0.9, 0.5, 0.5),
            num_warmup_steps=1,
            peak_memory_bytes=(5, 6),
            wall_s=9.0,
            warnings=("periodic", "trend"),
            remarks=("no timeline: it is cut",),
        ),
    ),
    ("oom", OutOfMemory(reason="full", rank=None, host="a", lines=("x",), wall_s=1.0)),
    ("timeout", TimedOut(reason="slow", timeout_s=3.0, lines=(), wall_s=3.1)),
    (
        "crashed",
        Crashed(reason="no", kind="crash", rank=3, host="b", lines=("x", "y"), wall_s=2.0),
    ),
    ("unreachable", Unreachable(reason="gone", host="c", wall_s=2.0)),
]


@pytest.mark.parametrize(("name", "outcome"), OUTCOMES)
def test_json_round_trips(name: str, outcome: Outcome) -> None:
    record = outcome_to_json(outcome)
    assert record["outcome"] == name
    assert outcome_from_json({"number": 7, **record}) == outcome


@pytest.mark.parametrize(("name", "outcome"), OUTCOMES)
def test_json_has_every_key_of_the_contract(name: str, outcome: Outcome) -> None:
    record = outcome_to_json(outcome)
    keys = {"outcome", "measured_s", "mean_s", "spread_s", "peak_memory_bytes", "wall_s", "reason"}
    assert keys <= set(record)
    assert isinstance(record["warnings"], list)


@pytest.mark.parametrize(
    ("steps", "spread_s", "mean_s", "warnings"),
    [
        ([9.0, 1.0, 1.0, 1.0, 1.0], 0.0, 1.0, ()),
        ([9.0, *[1.0] * 9, 3.0], 0.0, 1.2, ("periodic",)),
        ([9.0, 1.0, 1.0, 2.0, 2.0], 1.0, 1.5, ("unsteady",)),
        ([], 0.0, 1.0, ()),
        ([], 0.3, 1.0, ("unsteady",)),
    ],
)
def test_a_record_of_an_older_version_has_the_mean_of_its_steps_or_else_the_median(
    steps: list[float], spread_s: float, mean_s: float, warnings: tuple[str, ...]
) -> None:
    record = outcome_to_json(OUTCOMES[0][1])
    del record["mean_s"], record["warnings"]
    record |= {"measured_s": 1.0, "spread_s": spread_s, "step_time_s": steps}
    outcome = outcome_from_json(record)
    assert isinstance(outcome, Measured)
    assert outcome.mean_s == pytest.approx(mean_s)
    assert list(map(str, outcome.warnings)) == list(warnings)


def test_an_unknown_outcome_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"one of measured, oom, .* found 'lost'"):
        outcome_from_json({"outcome": "lost"})


def test_a_measurement_of_an_older_version_has_no_remarks() -> None:
    record = outcome_to_json(OUTCOMES[0][1])
    del record["remarks"]
    outcome = outcome_from_json(record)
    assert isinstance(outcome, Measured)
    assert outcome.remarks == ()


def test_a_remark_is_a_text() -> None:
    with pytest.raises(ValueError, match=r"remarks is \(7,\); expected a valid string"):
        outcome_from_json({**outcome_to_json(OUTCOMES[0][1]), "remarks": [7]})


def test_missing_keys_are_named() -> None:
    with pytest.raises(ValueError, match="needs the keys host, reason, wall_s"):
        outcome_from_json({"outcome": "unreachable"})
