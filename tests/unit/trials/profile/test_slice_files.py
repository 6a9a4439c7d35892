import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import pytest

from amp_ray.inputs.slice_table import parse_slice_table
from amp_ray.partition.problem import InfeasiblePartition
from amp_ray.partition.slices import SliceSolution, solve_slices
from amp_ray.search.token_slices import Granules, slice_tables
from amp_ray.trials.profile.points import LayerPoint, LinkPoint, slice_points
from amp_ray.trials.profile.records import LinkPlace, ProfileRecords
from amp_ray.trials.profile.tables import slice_files
from support.experiments import small_experiment

EXPERIMENT = small_experiment()
"""Sequences of 128 tokens, hidden 256, fp16, four devices, 6 blocks, a batch of 8."""

GRANULARITY = 48
POINTS = slice_points(EXPERIMENT.model, GRANULARITY, [(1, 1), (1, 2)])


def seconds(point: LayerPoint) -> float:
    many = point.micro_batch_size
    return many * (1e-5 * point.tokens + 1e-8 * point.tokens * point.context) + 1e-4


def measured(
    points: Sequence[LayerPoint], fits: Callable[[LayerPoint], bool] = lambda _: True
) -> ProfileRecords:
    records = ProfileRecords()
    for point in points:
        place: dict[str, Any] = {"devices": "T4", **asdict(point)}
        if fits(point):
            times = {"forward_s": seconds(point), "backward_s": 2 * seconds(point)}
            rest = {"all_reduce_s": 0.0, "spread_s": 0.0, "repeats": 5}
            sizes = {"kept_bytes": 3e6, "temporary_bytes": 1e6}
            records.add({"record": "slice", **place, **times, **rest, **sizes})
        else:
            records.add({"record": "oom", **place})
    return records


def table_of(
    records: ProfileRecords, points: Sequence[LayerPoint] = POINTS, granularity: int = GRANULARITY
) -> dict[str, Any]:
    files = slice_files(records, EXPERIMENT, granularity, {"T4": points})
    (text,) = files.values()
    table: dict[str, Any] = json.loads(text)
    return table


def test_all_lengths_without_context_and_a_few_with_some_are_measured() -> None:
    # 128 tokens in granules of 48: the last slice may have a remainder of 32.
    alone = {(1, 1, size, 0) for size in (32, 48, 96, 128)}
    found = {(p.tp, p.micro_batch_size, p.tokens, p.context) for p in POINTS}
    assert {place for place in found if place[1] == 1 and not place[3]} == alone
    behind = {(tokens, before) for _, _, tokens, before in found if before}
    assert behind
    assert all(tokens + before <= 128 for tokens, before in behind)
    assert {point.layer for point in POINTS} == {1}


def test_long_sequences_are_measured_sparingly() -> None:
    points = slice_points(EXPERIMENT.model, 4, [(1, 1)])
    assert len([point for point in points if not point.context]) == 32
    assert len([point for point in points if point.context]) == 8


def test_slices_and_their_fit_are_as_measured() -> None:
    points = slice_points(EXPERIMENT.model, 16, [(1, 1), (1, 2)])
    table = parse_slice_table(json.dumps(table_of(measured(points), points, 16)), file="t")
    assert (table.batch, table.tokens, table.num_stages, table.num_layers) == (8, 128, 4, 2)
    assert table.fitted
    tables = slice_tables(table)
    size, context = Granules(tokens=128, granularity=16).cells
    for index, (tokens, before) in enumerate(zip(size.tolist(), context.tolist(), strict=True)):
        for many in (1, 2):
            point = LayerPoint(micro_batch_size=many, tp=1, layer=1, tokens=tokens, context=before)
            expected = 2 * seconds(point)  # of two layers
            assert tables.forward_s[many - 1, index] == pytest.approx(expected, rel=1e-9)
    assert isinstance(solve_slices(tables, (1.0, 3.0)), SliceSolution)


def test_messages_within_a_host_are_told_by_their_tokens() -> None:
    records = measured(POINTS)
    for num_bytes, time_s in ((256, 1e-5), (1024, 2e-5), (4096, 3e-5)):
        message = LinkPoint(what="p2p", num_ranks=2, num_bytes=num_bytes)
        records.links[LinkPlace(scope="intra", devices="T4"), message] = time_s
    # A token is 256 numbers of 2 bytes.
    assert table_of(records)["communication"] == {"tokens": [2, 8], "seconds": [2e-5, 3e-5]}
    assert "communication" not in table_of(measured(POINTS))


def test_what_had_no_room_cannot_run() -> None:
    records = measured(POINTS, lambda point: point.tokens <= 48)
    tables = slice_tables(parse_slice_table(json.dumps(table_of(records)), file="t"))
    size, _ = Granules(tokens=128, granularity=GRANULARITY).cells
    assert (tables.forward_s[:2] < float("inf")).tolist() == [(size <= 48).tolist()] * 2


def test_nothing_that_runs_is_no_feasible_plan() -> None:
    records = measured(POINTS, lambda _: False)
    table = parse_slice_table(json.dumps(table_of(records)), file="t")
    assert isinstance(solve_slices(slice_tables(table), (1.0, 3.0)), InfeasiblePartition)


def test_what_is_not_measured_yet_is_no_table() -> None:
    records = measured(POINTS[:-1])
    assert slice_files(records, EXPERIMENT, GRANULARITY, {"T4": POINTS}) == {}
    assert slice_files(measured(POINTS), EXPERIMENT, GRANULARITY, {"T4": ()}) == {}


def test_each_tp_has_a_file() -> None:
    points = slice_points(EXPERIMENT.model, 64, product((1, 2), (1,)))
    files = slice_files(measured(points), EXPERIMENT, 64, {"T4": points})
    assert {name: json.loads(text)["stages"] for name, text in files.items()} == {
        "T4.tp1.slices.json": 4,
        "T4.tp2.slices.json": 2,
    }
