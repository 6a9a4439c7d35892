"""The report is one file that loads nothing, and nothing of the input is markup in it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import amp_ray as amp
from amp_ray.report.page import page, plan_record
from amp_ray.runtime.planning import OURS, plan_experiment
from support.experiments import SMALL, experiment_from

MOST_BYTES = 5_000_000
HOSTILE = "</script><script>alert(1)</script>"


def record(text: str = SMALL) -> dict[str, Any]:
    planned = plan_experiment(experiment_from(text), OURS, progress=lambda _done, _all: None)
    return plan_record(planned, source="my experiment.yaml")


def data_of(text: str) -> Any:  # noqa: ANN401 - any JSON value
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_the_plan() -> None:
    given = record()
    data = data_of(page(given))
    assert data == json.loads(json.dumps(given))
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
    given = record()
    given |= {"title": HOSTILE, "subtitle": "<b>", "names": [HOSTILE for _ in given["names"]]}
    text = page(given)
    assert HOSTILE not in text
    assert "<b>" not in text.split("<script")[0]
    assert data_of(text)["names"][0] == HOSTILE


def test_1500_candidates_stay_below_5_megabytes() -> None:
    given = record()
    rows = given["rows"]
    given["rows"] = [{**rows[index % len(rows)], "position": index + 1} for index in range(1500)]
    given["names"] = [f"{name} {index}" for index, name in enumerate(given["names"] * 100)]
    assert len(page(given).encode()) < MOST_BYTES


def test_where_nothing_fits_the_page_says_so() -> None:
    given = record(SMALL.replace("slots: 2", "slots: 2, memory_gib: 0.1"))
    assert given["best"] is None
    (note,) = given["notes"]
    assert re.match(r"No strategy can run: \d+ out of memory; closest: tp \d", note)
    assert len(data_of(page(given))["rows"]) == len(given["rows"]) > 0


def test_stages_may_differ_in_what_they_compute_again() -> None:
    tight = SMALL.replace("slots: 2", "slots: 2, memory_gib: 2.2")
    given = record(f"{tight}recompute: auto\nsearch: {{max_tp: 1, max_dp: 1}}\n")
    assert any("recompute" in name for name in given["names"])


def test_commands_set_what_was_set_from_outside(tmp_path: Path) -> None:
    file, target = tmp_path / "my small.yaml", tmp_path / "report.html"
    file.write_text(SMALL, encoding="utf-8")
    told = f"'{file}' --set zero_stage=1"
    amp.write_report(file, target, changes=["zero_stage=1"])
    commands = [text for _, text in data_of(target.read_text(encoding="utf-8"))["commands"]]
    assert commands == [f"amp-ray tune {told}", f"amp-ray export {told} --to ..."]
    amp.write_report(file, target, changes=["zero_stage=1", "runtime=megatron-core"])
    (command,) = data_of(target.read_text(encoding="utf-8"))["commands"]
    assert command[1] == f"amp-ray export {told} --set runtime=megatron-core --to ..."
