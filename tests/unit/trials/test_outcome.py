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
            iteration_time_s=0.5,
            spread_s=0.1,
            step_time_s=(0.9, 0.5, 0.5),
            num_warmup_steps=1,
            peak_memory_bytes=(5, 6),
            wall_s=9.0,
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
    keys = {"outcome", "measured_s", "spread_s", "peak_memory_bytes", "wall_s", "reason"}
    assert keys <= set(outcome_to_json(outcome))


def test_json_of_a_measurement_has_its_time_and_no_reason() -> None:
    record = outcome_to_json(OUTCOMES[0][1])
    assert (record["measured_s"], record["spread_s"], record["reason"]) == (0.5, 0.1, None)


def test_an_unknown_outcome_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"one of measured, oom, .* found 'lost'"):
        outcome_from_json({"outcome": "lost"})


def test_missing_keys_are_named() -> None:
    with pytest.raises(ValueError, match="needs the keys host, reason, wall_s"):
        outcome_from_json({"outcome": "unreachable"})
