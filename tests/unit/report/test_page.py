"""The report is one file that loads nothing, and nothing of the input is markup in it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import amp_ray as amp
from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.strategies import strategy_to_json
from amp_ray.report.page import abridged, measured_lanes, page, plan_record, study_record
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.study.reading import ReadStudy
from amp_ray.trials.outcome import Outcome, outcome_to_json
from amp_ray.trials.timeline import RankTimeline
from support.checked import required
from support.experiments import SMALL, experiment_from
from support.replaying import measured, out_of_memory

MOST_BYTES = 5_000_000
HOSTILE = "</script><script>alert(1)</script>"


ALL_USED = f"{SMALL}search: {{idle_devices: false}}\n"


def record(text: str = SMALL) -> dict[str, Any]:
    planned = plan_experiment(experiment_from(text), progress=lambda _done, _all: None)
    return plan_record(planned, source="my experiment.yaml")


def data_of(text: str) -> Any:  # noqa: ANN401 - any JSON value
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    return json.loads(data[1])


def test_nothing_is_loaded_from_anywhere() -> None:
    text = page(record())
    assert "default-src 'none'" in text
    assert not re.search(r"<(link|img|iframe|script)[^>]*(src|href)=", text)


def test_nothing_of_the_input_is_markup() -> None:
    page_record = record()
    page_record |= {
        "title": HOSTILE,
        "subtitle": "<b>",
        "lead": "Use <b>",
        "names": [HOSTILE for _ in page_record["names"]],
    }
    text = page(page_record)
    assert HOSTILE not in text
    assert "<b>" not in text.split("<script")[0]
    assert data_of(text)["names"][0] == HOSTILE


def test_a_measured_timeline_has_a_lane_per_stage() -> None:
    spans = (("0F0", 0.0, 0.5),)
    ranks = [
        RankTimeline(rank=rank, host="a", stage=stage, tp_rank=tp_rank, spans=spans)
        for rank, (stage, tp_rank) in enumerate([(1, 0), (0, 1), (0, 0)])
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


def test_commands_set_what_was_set_from_outside(tmp_path: Path) -> None:
    file, target = tmp_path / "my small.yaml", tmp_path / "report.html"
    file.write_text(SMALL, encoding="utf-8")
    words = f"'{file}' --set zero_stage=1"
    amp.write_report(file, target, changes=["zero_stage=1"])
    commands = [text for _, text in data_of(target.read_text(encoding="utf-8"))["commands"]]
    assert commands[1:] == [
        f"amp-ray export {words} --to deepspeed -o start",
        f"amp-ray tune {words}",
        f"amp-ray export {words} --to ...",
    ]
    amp.write_report(file, target, changes=["zero_stage=1", "runtime=megatron-core"])
    commands = [text for _, text in data_of(target.read_text(encoding="utf-8"))["commands"]]
    words = f"{words} --set runtime=megatron-core"
    assert "pretrain_gpt.py" in commands[0]
    assert commands[1:] == [
        f"amp-ray export {words} --to megatron-lm -o megatron.sh",
        f"amp-ray export {words} --to ...",
    ]


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ("torch", ["torchrun", "-m amp_ray.training", "job.json", '"runtime": "torch"']),
        ("nanotron", ["torchrun", "run_train.py", "--config-file nanotron.yaml", "--to nanotron"]),
        ("fsdp2", ["torchrun", "torchtitan.train", "--config planned", "--to torchtitan"]),
        ("llm-foundry", []),
    ],
)
def test_the_start_is_that_of_the_runtime(runtime: str, words: list[str]) -> None:
    text = SMALL.replace("device: T4", "device: A100-40").replace("gpt2", "llama")
    text = f"{text}precision: bf16\nruntime: {runtime}\nsearch: {{max_pp: 1}}\n"
    texts = [text for _, text in record(text)["commands"]]
    assert all(word in "".join(texts[:2]) for word in words)
    assert ("--to ..." in texts[0]) == (not words)


def test_a_plan_that_its_runtime_cannot_be_told_says_why_there_is_no_start() -> None:
    text = SMALL.replace("device: T4", "device: A100-40").replace("fp16", "bf16")
    (note,) = record(f"{text}runtime: fsdp2\n")["notes"]
    assert note == (
        "fsdp2 has no start command for this plan: torchtitan is told llama here, not model "
        "family 'gpt2'."
    )


def test_the_page_leads_with_a_sentence() -> None:
    planned = plan_experiment(experiment_from(ALL_USED), progress=lambda _done, _all: None)
    page_record = plan_record(planned, source="a.yaml")
    assert page_record["title"] == "gpt2, 5.03 million parameters on 4 x T4 in 2 nodes"
    ties = {0: "", 1: "; one other is as good", 3: "; three others are as good"}
    ends = ties.get(planned.ranking.num_tied - 1, " others are as good")
    assert re.fullmatch(
        r"Use tp \d, dp \d, pp \d, micro-batch \d: [\d,]+ tokens/s per GPU, ±\d+ %.*",
        page_record["lead"],
    )
    assert page_record["lead"].endswith(f"{ends}.")


def test_the_sentence_says_why_a_plan_is_not_the_fastest() -> None:
    planned = plan_experiment(
        experiment_from(ALL_USED), num_rows=4, progress=lambda _done, _all: None
    )
    first, second, *rest = planned.ranking.results
    assert isinstance(first, Estimate)
    assert isinstance(second, Estimate)
    slower = replace(first, iteration_time_s=second.iteration_time_s * 1.01)
    ranking = replace(planned.ranking, results=(slower, second, *rest), num_near=2)
    lead = plan_record(replace(planned, ranking=ranking), source="a.yaml")["lead"]
    assert "; the plainest of 2 within 2 % of the fastest; " in lead


def passes(num_micro_batches: int) -> list[dict[str, Any]]:
    """One stage that computes forward and backward passes of a second in turns."""
    items = []
    for index in range(num_micro_batches):
        for half, kind in enumerate("FB"):
            begin = float(2 * index + half)
            items.append((f"0{kind}{index}", begin, begin + 1.0))
    return [{"name": "stage 0", "items": items}]


def test_the_steady_part_of_a_timeline_is_left_out() -> None:
    shown = required(abridged(passes(20)))
    assert (shown["cut"], shown["num_cut"], shown["step"]) == ((4.0, 36.0), 16, 1)
    names = [name for name, *_ in shown["lanes"][0]["items"]]
    assert names == ["0F0", "0B0", "0F1", "0B1", "0F18", "0B18", "0F19", "0B19"]


def test_a_short_timeline_is_whole_and_many_stages_are_thinned_out() -> None:
    short = passes(6)
    assert abridged(short) == {"lanes": short, "cut": None, "num_cut": 0, "step": 1}
    assert abridged(None) is None
    shown = required(abridged(passes(6) * 1200))
    assert (shown["step"], len(shown["lanes"])) == (3, 400)


def test_times_to_be_read_with_care_are_told_and_unsteady_ones_are_not_compared() -> None:
    planned = plan_experiment(experiment_from(ALL_USED), progress=lambda _done, _all: None)
    cluster = planned.experiment.cluster
    best = required(planned.ranking.best)
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
