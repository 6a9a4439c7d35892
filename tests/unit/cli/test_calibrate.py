import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from support.commands import Run
from support.experiments import SMALL, small_experiment
from support.planted import planted_observations, small_strategies

COLUMNS: Final = ("tp", "pp", "dp", "micro_batch_size", "bounds", "measured_s")
PLANTED: Final = {"host_scale": 1.4, "nic_efficiency": 0.8}


def planted_rows() -> list[list[str]]:
    """Measurements of the small experiment on a slower cluster."""
    experiment = small_experiment()
    return [
        [
            *map(str, (plan.tp, plan.pp, plan.dp, plan.micro_batch_size)),
            " ".join(map(str, plan.bounds)),
            f"{trial.measured_s:.9f}",
        ]
        for trial in planted_observations(experiment, small_strategies(experiment), PLANTED)
        for plan in [trial.strategy]
    ]


def write(path: Path, rows: Sequence[Sequence[str]], columns: Sequence[str] = COLUMNS) -> Path:
    """Write a measurements file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


@pytest.fixture
def measurements(tmp_path: Path) -> Path:
    """A file of good measurements."""
    return write(tmp_path / "measured.csv", planted_rows())


@pytest.fixture
def calibration(amp_ray: Run, small: Path, measurements: Path, tmp_path: Path) -> Path:
    """A calibration file of the small experiment."""
    path = tmp_path / "calibration.json"
    ended = amp_ray("calibrate", small, "--measurements", measurements, "-o", path)
    assert ended.code == 0, ended.err
    return path


def test_table_shows_constants_trials_and_errors(
    amp_ray: Run, small: Path, measurements: Path, tmp_path: Path
) -> None:
    ended = amp_ray("calibrate", small, "--measurements", measurements, "-o", tmp_path / "c.json")
    assert ended.code == 0
    for part in ("host_scale", "ratio", "prior sigma", "left out", "leave-one-out", "16 timed"):
        assert part in ended.out


def test_json_on_stdout_is_what_the_file_holds(
    amp_ray: Run, small: Path, measurements: Path, tmp_path: Path
) -> None:
    path = tmp_path / "c.json"
    ended = amp_ray("calibrate", small, "--measurements", measurements, "-o", path, "--json")
    assert ended.json == json.loads(path.read_text(encoding="utf-8"))
    assert ended.json["schema"] == 1


def test_named_constants_are_fitted(
    amp_ray: Run, small: Path, measurements: Path, tmp_path: Path
) -> None:
    ended = amp_ray(
        *("calibrate", small, "--measurements", measurements, "-o", tmp_path / "c.json"),
        *("--constants", "host_scale, nic_efficiency", "--json"),
    )
    ratios = {each["name"]: each["ratio"] for each in ended.json["constants"]}
    assert ratios == pytest.approx(PLANTED, rel=0.05)


def test_a_plan_with_a_calibration_is_nearer_to_what_was_measured(
    amp_ray: Run, small: Path, measurements: Path, calibration: Path
) -> None:
    errors = []
    for more in ((), ("--calibration", calibration)):
        rows = amp_ray("score", small, "--strategies", measurements, *more, "--json").json["rows"]
        measured = [float(row[-1]) for row in planted_rows()]
        pairs = zip(rows, measured, strict=True)
        errors.append(sum(abs(row["iteration_time_s"] / seconds - 1) for row, seconds in pairs))
    assert errors[1] < 0.3 * errors[0]


def test_plan_takes_a_calibration(amp_ray: Run, small: Path, calibration: Path) -> None:
    plain, calibrated = (
        amp_ray("plan", small, *more, "--json").json["ranking"][0]["iteration_time_s"]
        for more in ((), ("--calibration", calibration))
    )
    assert calibrated != plain


@pytest.mark.parametrize("command", ["plan", "score"])
def test_a_calibration_of_another_model_is_refused(
    amp_ray: Run, tmp_path: Path, measurements: Path, calibration: Path, command: str
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(SMALL.replace("vocab_size: 1024", "vocab_size: 2048"), encoding="utf-8")
    given = ("--strategies", measurements) if command == "score" else ()
    ended = amp_ray(command, other, *given, "--calibration", calibration)
    assert ended.code == 2
    assert "model.vocab_size is 1024 in the calibration, 2048 here" in ended.err
    taken = amp_ray(command, other, *given, "--calibration", calibration, "--transfer-calibration")
    assert taken.code == 0


def test_transfer_without_a_calibration_is_refused(amp_ray: Run, small: Path) -> None:
    ended = amp_ray("plan", small, "--transfer-calibration")
    assert ended.code == 2
    assert "--calibration FILE" in ended.err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["1", "1", "4", "1", "0 8", "-1"], "measured.csv:2: measured_s: found '-1'"),
        (["1", "1", "4", "1", "0 8", "0"], "measured.csv:2: measured_s: found '0'"),
        (["1", "1", "4", "1", "0 8", "crash"], "'crash'; expected seconds, from 1e-06 to"),
        (["1", "1", "4", "1", "", ""], "measured.csv:2: nothing was measured"),
        (["1", "1", "8", "1", "", "1"], "measured.csv:2: tp 1 x pp 1 x dp 8 = 8 devices"),
        (["1", "1", "4", "3", "", "1"], "micro_batch_size 3 = 12 does not divide"),
    ],
)
def test_bad_measurements_are_refused_with_their_line(
    amp_ray: Run, small: Path, tmp_path: Path, row: list[str], message: str
) -> None:
    num_layers = small_experiment().model.num_layers
    cells = [cell.replace("0 8", f"0 {num_layers}") for cell in row]
    path = write(tmp_path / "measured.csv", [cells])
    ended = amp_ray("calibrate", small, "--measurements", path, "-o", tmp_path / "c.json")
    assert ended.code == 2
    assert message in ended.err
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ("host_scale,nic_efficiency,message_scale", "3 constants"),
        ("warp", "found warp"),
        ("profile_scale", "profile_scale is not identified"),
    ],
)
def test_constants_that_cannot_be_fitted_are_refused(
    amp_ray: Run, small: Path, tmp_path: Path, constants: str, message: str
) -> None:
    path = write(tmp_path / "measured.csv", planted_rows()[:2])
    ended = amp_ray(
        *("calibrate", small, "--measurements", path, "-o", tmp_path / "c.json"),
        *("--constants", constants),
    )
    assert ended.code == 2
    assert message in ended.err


def test_cuts_that_are_left_out_are_the_planners(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    path = write(
        tmp_path / "measured.csv",
        [["1", "2", "2", "1", "0.05"], ["1", "2", "2", "2", "failed"]],
        ("tp", "pp", "dp", "micro_batch_size", "measured_s"),
    )
    ended = amp_ray("calibrate", small, "--measurements", path, "-o", tmp_path / "c.json", "--json")
    assert ended.code == 0
    assert len(ended.json["trials"][0]["strategy"]["bounds"]) == 3
