import json
from pathlib import Path

import pytest

from support.commands import Run
from support.experiments import LONG

CSV = "tp,pp,dp,micro_batch_size,bounds\n2,2,1,2,0 4 9\n1,4,1,1,\n1,1,4,2,0 9\n"


def test_rows_come_in_the_order_of_the_file(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    strategies = tmp_path / "mine.csv"
    strategies.write_text(CSV, encoding="utf-8")
    ended = amp_ray("score", small, "--strategies", strategies, "--json")
    assert ended.code == 0
    rows = ended.json["rows"]
    assert ended.json["schema"] == 1
    assert [row["strategy"]["pp"] for row in rows] == [2, 4, 1]
    assert rows[0]["strategy"]["bounds"] == [0, 4, 9]
    assert len(rows[1]["strategy"]["bounds"]) == 5
    assert {row["position"] for row in rows} == {None}


def test_a_ranking_can_be_scored_again(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    ranking = amp_ray("plan", small, "--all", "--json").json["ranking"]
    strategies = tmp_path / "plan.json"
    strategies.write_text(json.dumps([row["strategy"] for row in ranking]), encoding="utf-8")
    rows = amp_ray("score", small, "--strategies", strategies, "--json").json["rows"]
    assert [row["iteration_time_s"] for row in rows] == [row["iteration_time_s"] for row in ranking]


def test_stages_may_differ_and_devices_stay_idle(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    strategies = tmp_path / "mine.json"
    stages = [
        {"layers": [0, 4], "tp": 1, "dp": 2, "shares": [1, 3]},
        {"layers": [4, 9], "tp": 1, "dp": 1, "shares": [4]},
    ]
    record = {
        "micro_batch_size": 4,
        "num_micro_batches": 2,
        "stages": stages,
        "placement": [["node0", 0], ["node1", 1], ["node1", 0]],
    }
    strategies.write_text(json.dumps([record]), encoding="utf-8")
    [row] = amp_ray("score", small, "--strategies", strategies, "--json").json["rows"]
    assert row["feasible"]
    assert not row["launchable"]
    assert [stage["shares"] for stage in row["strategy"]["stages"]] == [[1, 3], [4]]
    for cost_model in ("amp-2022", "metis-2024"):
        options = ("--strategies", strategies, "--cost-model", cost_model)
        assert amp_ray("score", small, *options).code == 2


def test_the_table_shows_every_strategy(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    strategies = tmp_path / "mine.csv"
    strategies.write_text(CSV, encoding="utf-8")
    out = amp_ray("score", small, "--strategies", strategies).out
    assert "3 strategies" in out
    assert "0 4 9" in out


def test_a_narrow_table_has_the_answer_and_a_wide_one_everything(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    strategies = tmp_path / "mine.csv"
    strategies.write_text(CSV.partition("1,4,1")[0], encoding="utf-8")
    narrow = amp_ray("score", small, "--strategies", strategies, columns="80").out
    wide = amp_ray("score", small, "--strategies", strategies, "--wide", columns="80").out
    assert narrow.startswith("small: 1 strategy, cost model amp-ray\n")
    assert max(map(len, narrow.splitlines())) <= 80
    for text in (narrow, wide):
        assert "0 4 9" in text
    assert ("bubble" in narrow, "bubble" in wide) == (False, True)


@pytest.mark.guest("amp2022")
def test_the_published_planner_scores_too(amp_ray: Run, tmp_path: Path) -> None:
    strategies = tmp_path / "mine.csv"
    strategies.write_text("tp,pp,dp,micro_batch_size,bounds\n1,2,8,1,0 15 30\n", encoding="utf-8")
    experiment = Path(__file__).parents[3] / "experiments" / "homogeneous.yaml"
    ended = amp_ray(
        "score", experiment, "--strategies", strategies, "--cost-model", "amp-2022", "--json"
    )
    assert round(ended.json["rows"][0]["iteration_time_s"], 4) == 1.2665


EXPERIMENT = LONG + "global_batch_size: 1\nsearch: {token_slices: true}\n"


def test_plans_with_token_slices_can_be_scored_again(amp_ray: Run, tmp_path: Path) -> None:
    experiment, strategies = tmp_path / "long.yaml", tmp_path / "plan.json"
    experiment.write_text(EXPERIMENT, encoding="utf-8")
    ranking = amp_ray("plan", experiment, "--json").json["ranking"]
    assert any("token_slices" in row["strategy"] for row in ranking)
    strategies.write_text(json.dumps(ranking), encoding="utf-8")
    rows = amp_ray("score", experiment, "--strategies", strategies, "--json").json["rows"]
    assert [row["iteration_time_s"] for row in rows] == [row["iteration_time_s"] for row in ranking]


def test_slices_of_other_sequences_are_refused(amp_ray: Run, tmp_path: Path) -> None:
    experiment, strategies = tmp_path / "long.yaml", tmp_path / "plan.json"
    experiment.write_text(EXPERIMENT, encoding="utf-8")
    ranking = amp_ray("plan", experiment, "--json").json["ranking"]
    [row] = [row["strategy"] for row in ranking if "token_slices" in row["strategy"]][:1]
    row["token_slices"] = [[1, [4096]]]
    strategies.write_text(json.dumps([row]), encoding="utf-8")
    ended = amp_ray("score", experiment, "--strategies", strategies)
    assert ended.code == 2
    assert "token_slices: found slices of 4096 tokens together; the experiment's" in ended.err
