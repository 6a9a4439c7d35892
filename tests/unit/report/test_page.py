"""The report is one file that loads nothing, and nothing of the input is markup in it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import amp_ray as amp
from amp_ray.inputs.strategies import strategy_to_json
from amp_ray.report.page import measured_lanes, page, plan_record, study_record
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.study.reading import ReadStudy
from amp_ray.trials.outcome import Outcome, outcome_to_json
from amp_ray.trials.timeline import RankTimeline
from support.experiments import SMALL, experiment_from
from support.replaying import measured, out_of_memory

MOST_BYTES = 5_000_000
HOSTILE = "</script><script>alert(1)</script>"


def record(text: str = SMALL) -> dict[str, Any]:
    planned = plan_experiment(experiment_from(text), progress=lambda _done, _all: None)
    return plan_record(planned, source="my experiment.yaml")


def data_of(text: str) -> Any:  # noqa: ANN401 - any JSON value
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    return json.loads(data[1])


def test_the_page_holds_the_plan() -> None:
    page_record = record()
    data = data_of(page(page_record))
    assert data == json.loads(json.dumps(page_record))
    assert [row["position"] for row in data["rows"]] == list(range(1, len(data["rows"]) + 1))
    assert data["names"][data["best"]["id"]].startswith("tp ")
    assert {len(node["stages"]) for node in data["cluster"]} == {2}
    assert "'my experiment.yaml'" in data["commands"][0][1]
    end_s = max(end for lane in data["timeline"] for _, _, end in lane["items"])
    assert end_s == pytest.approx(data["best"]["iteration_time_s"], rel=1e-6)


def test_nothing_is_loaded_from_anywhere() -> None:
    text = page(record())
    assert "default-src 'none'" in text
    assert not re.search(r"<(link|img|iframe|script)[^>]*(src|href)=", text)


def test_nothing_of_the_input_is_markup() -> None:
    page_record = record()
    page_record |= {
        "title": HOSTILE,
        "subtitle": "<b>",
        "names": [HOSTILE for _ in page_record["names"]],
    }
    text = page(page_record)
    assert HOSTILE not in text
    assert "<b>" not in text.split("<script")[0]
    assert data_of(text)["names"][0] == HOSTILE


def test_a_measured_timeline_has_a_lane_per_stage() -> None:
    spans = (("0F0", 0.0, 0.5),)
    ranks = [
        RankTimeline(rank=rank, host="a", stage=stage, is_first=is_first, spans=spans)
        for rank, (stage, is_first) in enumerate([(1, True), (0, False), (0, True)])
    ]
    assert measured_lanes(ranks) == [
        {"name": "stage 0", "items": spans},
        {"name": "stage 1", "items": spans},
    ]
    assert measured_lanes([]) is None


def test_remarks_on_a_trial_are_notes() -> None:
    strategy = {"tp": 1, "pp": 1, "dp": 4, "micro_batch_size": 1, "num_micro_batches": 1}
    trial = {"number": 3, "strategy": strategy, "remarks": ["no timeline: it is cut"]}
    result = {"trials": [trial], "ranking": [], "ending_text": "it is over"}
    study = ReadStudy(folder=Path("no study"), experiment=experiment_from(SMALL), result=result)
    assert "Trial 3: no timeline: it is cut." in study_record(study, source="study")["notes"]


def test_1500_candidates_stay_below_5_megabytes() -> None:
    page_record = record()
    rows = page_record["rows"]
    page_record["rows"] = [
        {**rows[index % len(rows)], "position": index + 1} for index in range(1500)
    ]
    page_record["names"] = [
        f"{name} {index}" for index, name in enumerate(page_record["names"] * 100)
    ]
    assert len(page(page_record).encode()) < MOST_BYTES


def test_where_nothing_fits_the_page_says_so() -> None:
    page_record = record(SMALL.replace("slots: 2", "slots: 2, memory_gib: 0.1"))
    assert page_record["best"] is None
    (note,) = page_record["notes"]
    assert re.match(r"No strategy can run: \d+ out of memory; closest: tp \d", note)
    assert len(data_of(page(page_record))["rows"]) == len(page_record["rows"]) > 0


def test_stages_may_differ_in_what_they_compute_again() -> None:
    tight = SMALL.replace("slots: 2", "slots: 2, memory_gib: 2.2")
    page_record = record(f"{tight}recompute: auto\nsearch: {{max_tp: 1, max_dp: 1}}\n")
    assert any("recompute" in name for name in page_record["names"])


def test_commands_set_what_was_set_from_outside(tmp_path: Path) -> None:
    file, target = tmp_path / "my small.yaml", tmp_path / "report.html"
    file.write_text(SMALL, encoding="utf-8")
    words = f"'{file}' --set zero_stage=1"
    amp.write_report(file, target, changes=["zero_stage=1"])
    commands = [text for _, text in data_of(target.read_text(encoding="utf-8"))["commands"]]
    assert commands == [f"amp-ray tune {words}", f"amp-ray export {words} --to ..."]
    amp.write_report(file, target, changes=["zero_stage=1", "runtime=megatron-core"])
    (command,) = data_of(target.read_text(encoding="utf-8"))["commands"]
    assert command[1] == f"amp-ray export {words} --set runtime=megatron-core --to ..."


def test_times_to_be_read_with_care_are_told_and_unsteady_ones_are_not_compared() -> None:
    planned = plan_experiment(experiment_from(SMALL), progress=lambda _done, _all: None)
    cluster = planned.experiment.cluster
    best = planned.ranking.best
    assert best is not None
    outcomes: list[Outcome] = [
        measured(0.5),
        replace(measured(0.4), mean_s=0.48, warnings=("periodic",)),
        replace(measured(0.1, spread_fraction=0.5), warnings=("unsteady",)),
        out_of_memory(),
    ]
    trials = [
        {
            **outcome_to_json(outcome),
            "number": number,
            "predicted_s": 0.45,
            "predicted_sigma": 0.1,
            "strategy": strategy_to_json(best.strategy, cluster),
        }
        for number, outcome in enumerate(outcomes)
    ]
    del trials[0]["mean_s"], trials[0]["warnings"]  # as an older version wrote it
    result = {"trials": trials, "ranking": [], "ending_text": "the budget is spent"}
    study = ReadStudy(folder=Path("no study"), experiment=planned.experiment, result=result)
    shown = study_record(study, source="study")["trials"]
    assert [trial["mean_s"] for trial in shown] == [0.5, 0.48, 0.1, None]
    assert [trial["tells_time"] for trial in shown] == [True, True, False, False]
    assert [[text.split(":")[0] for text in trial["warnings"]] for trial in shown] == [
        [],
        ["periodic"],
        ["unsteady"],
        [],
    ]
