"""Timelines as Chrome traces."""

import json
from collections import Counter
from typing import Any

import pytest

from amp_ray.cost.model import CostModel
from amp_ray.cost.timeline import predicted_timeline
from amp_ray.exports.chosen import Chosen
from amp_ray.exports.trace import trace
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.timeline import RankTimeline
from support.checked import grid_of
from support.experiments import small_experiment

FIRST = ("0F0", 0.0, 0.25), ("0SEND_F0", 0.25, 0.5), ("0B0", 1.0, 2.0)
MEASURED = (
    RankTimeline(rank=0, host="a", stage=0, spans=FIRST),
    RankTimeline(rank=1, host="b", stage=1, spans=(("1F0", 0.5, 0.75),)),
)


def events(measured: tuple[RankTimeline, ...]) -> tuple[list[dict[str, Any]], float, int]:
    """Return a trace's events, the estimate and the number of predicted instructions."""
    grid = grid_of(tp=2, pp=2, micro_batch_size=2, num_micro_batches=4)
    plan, experiment = Strategy.uniform(grid, (0, 4, 9)), small_experiment()
    model = CostModel(experiment=experiment)
    timeline = predicted_timeline(model, plan)
    traced = trace(Chosen(experiment=experiment, strategy=plan), timeline, measured)
    record = json.loads(traced.files["trace.json"])
    total_s = model.estimate(plan).iteration_time_s
    return record["traceEvents"], total_s, sum(map(len, timeline))


def test_the_trace_has_every_instruction_and_ends_with_the_estimate() -> None:
    traced, total_s, number = events(())
    slices = [event for event in traced if event["ph"] == "X"]
    assert len(slices) == number
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(1e6 * total_s)
    assert {event["tid"] for event in slices} == {0, 1}
    assert Counter(event["cat"] for event in slices)["forward"] == 8


def test_every_message_is_an_arrow_between_two_stages() -> None:
    traced, *_ = events(())
    starts = {event["id"]: event for event in traced if event["ph"] == "s"}
    ends = {event["id"]: event for event in traced if event["ph"] == "f"}
    assert len(starts) == 8
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        assert {start["tid"], ends[number]["tid"]} == {0, 1}
        assert start["ts"] <= ends[number]["ts"]


def test_what_was_measured_is_a_process_of_its_own() -> None:
    traced, *_ = events(MEASURED)
    slices = [event for event in traced if event["ph"] == "X" and event["pid"] == 2]
    assert [(event["tid"], event["name"], event["cat"]) for event in slices] == [
        (0, "0F0", "forward"),
        (0, "0SEND_F0", "communication"),
        (0, "0B0", "backward"),
        (1, "1F0", "forward"),
    ]
    names = {event["args"]["name"] for event in traced if event["name"] == "process_name"}
    assert len(names) == 2
    assert "measured" in names
