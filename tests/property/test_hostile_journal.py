"""``--resume`` of a study with a damaged journal names the damaged line, or continues the study.

A journal is damaged as bytes, or has records with correct checksums and wrong contents.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.errors import AmpRayError
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.study.journal import encode
from amp_ray.runtime.study.space import TuneOptions
from amp_ray.runtime.study.tuning import Tuning, prepare
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from support.bounded import bounded
from support.driving import NotingView
from support.examples import examples
from support.recorded import table_text, write_experiment

BUDGET: Final = 3
PREDICTOR: Final = BoundedPredictor()

PIECES: Final = (b"", b"\0", b"\n", b"{", b'"', b"1", b"9" * 5000, b"[" * 5000, b"\xff", b"NaN")
VALUES: Final[tuple[object, ...]] = (
    *(None, True, False, 0, 1, -1, 1.5, 2**63, 10**400, 1e308, "", "x", "\ud800", "../../owned"),
    *("/abs", "\x1b[2J", "x" * 9999, [], {}, [None], [[]], {"": {}}, "measured", "oom", "started"),
)


class Made:
    """A study that has ended, and its inputs."""

    def __init__(self, folder: Path) -> None:
        """Run the study in ``folder``."""
        experiment = load_experiment(write_experiment(folder))
        table = folder / "table.csv"
        table.write_text(table_text(experiment, {1: "oom", 2: "failed"}), encoding="utf-8")
        options = TuneOptions(
            backend="replay", table=table, budget=BUDGET, policy="predicted-order"
        )
        self.tuning: Tuning = prepare(experiment, options, lambda _done, _all: None)
        self.tuning.run(folder / "study", NotingView(), resume=False)
        self.journal = (folder / "study/journal.jsonl").read_bytes()
        self.bodies = [json.loads(line)["body"] for line in self.journal.splitlines()]
        self.times = {body.get("measured_s") for body in self.bodies}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Run a study once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amp_ray.runtime.study.driver.BoundedPredictor", lambda: PREDICTOR)
        yield Made(tmp_path_factory.mktemp("made"))


def resume(made: Made, journal: bytes, folder: Path) -> None:
    """Resume the study with another journal."""
    study = folder / "study"
    (study / "trials").mkdir(parents=True)
    (study / "journal.jsonl").write_bytes(journal)
    with bounded(), suppress(AmpRayError):
        made.tuning.run(study, NotingView(), resume=True)
        result = json.loads((study / "result.json").read_text("utf-8"))
        json.dumps(result, allow_nan=False)
        lines = (study / "history.jsonl").read_text("utf-8").splitlines()
        trials = [json.loads(line) for line in lines]
        assert [trial["number"] for trial in trials] == list(range(len(trials)))
        for trial in trials:
            assert (trial["outcome"] == "measured") == (trial["measured_s"] is not None)
    assert [path.name for path in folder.iterdir()] == ["study"]


@examples(120)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_left_out(
    data: st.DataObject, made: Made, tmp_path_factory: pytest.TempPathFactory
) -> None:
    journal = made.journal
    for _ in range(data.draw(st.integers(1, 3))):
        lines = journal.splitlines(keepends=True) or [b""]
        place = data.draw(st.integers(0, len(journal)))
        one = data.draw(st.integers(0, len(lines) - 1))
        other = data.draw(st.integers(0, len(lines) - 1))
        piece = data.draw(st.sampled_from(PIECES) | st.binary(max_size=9))
        journal = data.draw(
            st.sampled_from(
                (
                    journal[:place],
                    journal[:place] + piece + journal[place:],
                    journal[:place] + piece + journal[place + len(piece) :],
                    b"".join([*lines[:one], lines[other], *lines[one:]]),
                    b"".join([*lines[:one], *lines[one + 1 :]]),
                )
            )
        )
    resume(made, journal, tmp_path_factory.mktemp("case"))


@st.composite
def changes(draw: st.DrawFn, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Draw events with changed values, or with events left out, repeated or moved."""
    found = [dict(body) for body in bodies]
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(found) - 1))
        way = draw(st.sampled_from(["value", "value", "deep", "drop", "repeat", "move", "key"]))
        if way in {"value", "key"} and found[index]:
            key = draw(st.sampled_from(sorted(found[index])))
            if way == "key":
                del found[index][key]
            else:
                found[index][key] = draw(st.sampled_from(VALUES))
        elif way == "deep" and isinstance(found[index].get("strategy"), dict):
            strategy = dict(found[index]["strategy"])
            strategy[draw(st.sampled_from(sorted(strategy)))] = draw(st.sampled_from(VALUES))
            found[index]["strategy"] = strategy
        elif way == "drop" and len(found) > 1:
            del found[index]
        elif way == "repeat":
            found.insert(draw(st.integers(0, len(found))), dict(found[index]))
        elif way == "move":
            found.insert(draw(st.integers(0, len(found) - 1)), found.pop(index))
    return found


@examples(120)
@given(data=st.data())
def test_records_that_nobody_writes_are_refused_with_their_line(
    data: st.DataObject, made: Made, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bodies = data.draw(changes(made.bodies))
    journal = b"".join(encode(number, body) for number, body in enumerate(bodies))
    resume(made, journal, tmp_path_factory.mktemp("case"))
