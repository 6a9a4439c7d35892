import json
from collections.abc import Callable
from typing import Any

import pytest

from amp_ray.calibration.calibrate import calibrate
from amp_ray.calibration.calibration import Calibration, calibration_to_json, parse_calibration
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from support.planted import Plant

Record = dict[str, Any]


@pytest.fixture(scope="module")
def calibration(small: Experiment, plant: Plant) -> Calibration:
    """Fitted by the rule."""
    return calibrate(small, plant({"host_scale": 1.4})[:6])


def test_a_written_calibration_is_read_back_unchanged(calibration: Calibration) -> None:
    text = json.dumps(calibration_to_json(calibration))
    assert json.dumps(calibration_to_json(parse_calibration(text, file="c.json"))) == text


def test_a_file_carries_schema_ratios_and_trials(calibration: Calibration) -> None:
    record = calibration_to_json(calibration)
    assert (record["schema"], record["kind"]) == (1, "calibration")
    assert record["constants"][0]["ratio"] == calibration.constants[0].ratio
    assert [trial["measured_s"] for trial in record["trials"]] == [
        trial.measured_s for trial in calibration.trials
    ]
    assert record["trials"][0]["strategy"]["bounds"][0] == 0


def test_ranks_in_device_order_need_no_placement(calibration: Calibration) -> None:
    assert "placement" not in calibration_to_json(calibration)["trials"][0]["strategy"]


def change(key: str, value: object) -> Callable[[Record], None]:
    """Return what sets one key."""
    return lambda record: record.update({key: value})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("kind", "plan"), "not a calibration"),
        (change("schema", 2), "schema 2; this version reads 1"),
        (lambda record: record.pop("time_error"), "time_error: Field required"),
        (change("time_error", "x"), "time_error: .*number"),
        (change("covariance", [[1.0]]), "covariance: expected 14 rows"),
        (change("fingerprint", {}), "key 'model' is missing"),
        (
            change(
                "constants",
                [{"name": "warp", "prior": 1, "value": 1, "prior_sigma": 1, "sigma": 1}],
            ),
            "unknown constant 'warp'",
        ),
        (change("constants", [{"name": "host_scale"}]), r"constants\.0\.prior"),
    ],
)
def test_what_is_no_calibration_is_refused_with_its_place(
    calibration: Calibration, spoil: Callable[[Record], object], message: str
) -> None:
    record = json.loads(json.dumps(calibration_to_json(calibration)))
    spoil(record)
    with pytest.raises(InputError, match=rf"c\.json.*{message}"):
        parse_calibration(json.dumps(record), file="c.json")


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "tp,pp,dp\n1,1,1\n"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="calibrate"):
        parse_calibration(text, file="c.json")


@pytest.mark.parametrize("value", [0.0, -1.0, 1e300, float("inf"), float("nan")])
def test_values_that_no_constant_can_have_are_refused(
    calibration: Calibration, value: float
) -> None:
    record = json.loads(json.dumps(calibration_to_json(calibration)))
    record["constants"][0]["value"] = value
    with pytest.raises(InputError, match=r"positive|finite"):
        parse_calibration(json.dumps(record), file="c.json")
