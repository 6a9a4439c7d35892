"""Why a plan is what it is, and what would help it."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from support.commands import Run


def test_stages_and_parts_are_those_of_the_plan(amp_ray: Run, small: Path) -> None:
    record = amp_ray("explain", small, "--no-advice", "--json").json
    plan = amp_ray("plan", small, "--json").json["ranking"]
    assert record["row"] == plan[0]
    assert record["other"]["row"] == plan[1]
    bounds = plan[0]["strategy"]["bounds"]
    assert [stage["layers"] for stage in record["stages"]] == [
        list(pair) for pair in pairwise(bounds)
    ]
    assert [stage["peak_memory_bytes"] for stage in record["stages"]] == (
        plan[0]["peak_memory_bytes"]
    )
    assert sum(stage["is_bottleneck"] for stage in record["stages"]) == 1
    seconds = record["other"]["difference_s"]
    total_s = seconds.pop("iteration_time")
    assert total_s == pytest.approx(plan[1]["iteration_time_s"] - plan[0]["iteration_time_s"])
    assert sum(seconds.values()) == pytest.approx(total_s)


def test_the_bottleneck_has_the_longest_passes(amp_ray: Run, small: Path) -> None:
    changes = ("--set", "search.max_dp=1", "--set", "search.max_tp=1")
    stages = amp_ray("explain", small, *changes, "--no-advice", "--json").json["stages"]
    assert len(stages) == 4
    longest = max(stages, key=lambda stage: stage["forward_s"] + stage["backward_s"])
    assert longest["is_bottleneck"]
    cuts = amp_ray("explain", small, *changes, "--no-advice", "--json").json["links"]
    assert [cut["scope"] for cut in cuts[:3]] == ["within nodes", "between nodes", "within nodes"]


def test_another_position_is_compared_with_the_best(amp_ray: Run, small: Path) -> None:
    record = amp_ray("explain", small, "--position", "4", "--no-advice", "--json").json
    assert (record["row"]["position"], record["other"]["row"]["position"]) == (4, 1)
    assert record["other"]["difference_s"]["iteration_time"] <= 0


def test_advice_is_what_planning_with_the_change_gives(amp_ray: Run, small: Path) -> None:
    record = amp_ray("explain", small, "--json").json
    speedups = [each["speedup"] for each in record["advice"] if each["speedup"] is not None]
    assert speedups == sorted(speedups, reverse=True)
    changes = {each["what"] for each in record["advice"]}
    assert changes >= {
        "twice the batch",
        "twice the rate between nodes",
        "half more memory on every device",
        "one more node of 2 x T4",
        "recompute full",
    }
    best = record["row"]["strategy"]
    samples = best["micro_batch_size"] * best["num_micro_batches"] * best["dp"]
    rate = samples / record["row"]["iteration_time_s"]
    for each in record["advice"]:
        options = [word for change in each["set"] for word in ("--set", change)]
        row = amp_ray("plan", small, *options, "--json").json["ranking"][0]
        assert each["row"] == row
        plan = row["strategy"]
        samples = plan["micro_batch_size"] * plan["num_micro_batches"] * plan["dp"]
        assert each["speedup"] == pytest.approx(samples / row["iteration_time_s"] / rate)


def test_where_nothing_fits_the_advice_says_what_would(amp_ray: Run, small: Path) -> None:
    tight = ("--set", "cluster.nodes.0.memory_gib=2")
    ended = amp_ray("explain", small, *tight, "--json")
    assert ended.code == 3
    assert "no feasible strategy" in ended.err
    assert ended.json["row"] is None
    fits = [each["what"] for each in ended.json["advice"] if each["row"]]
    assert "half more memory on every device" in fits
    assert "fits" in amp_ray("explain", small, *tight).out


def test_a_position_beyond_the_ranking_is_refused(amp_ray: Run, small: Path) -> None:
    ended = amp_ray("explain", small, "--position", "99")
    assert ended.code == 2
    assert "the ranking has 16 feasible strategies" in ended.err


def test_at_80_columns_it_reads(amp_ray: Run, small: Path) -> None:
    out = amp_ray("explain", small, columns="80").out
    assert max(map(len, out.splitlines())) <= 80
    for text in (
        "where the time goes: ",
        "bottleneck: stage",
        "fullest: stage",
        "takes",
    ):
        assert text in out
    assert re.search(r"of its memory, of that \w+ \d+%", " ".join(out.split()))
