"""Places of ranks, samples of shares, and who sends what to whom."""

from collections import Counter
from itertools import pairwise
from math import lcm

from hypothesis import given
from hypothesis import strategies as st

from amp_ray.training.grid import (
    Coordinates,
    Grid,
    GridStage,
    incoming,
    outgoing,
    rank_map,
    rows_for_others,
    shard_range,
    shared_rows,
)


def make_grid(*stages: GridStage, **changes: object) -> Grid:
    ranks = tuple(range(sum(stage.num_ranks for stage in stages)))
    values = {"micro_batch_size": 4, "num_micro_batches": 2, "bounds": (0, 1, 2), **changes}
    return Grid(stages=stages, rank_map=ranks, **values)  # type: ignore[arg-type]


def test_tp_is_fastest_then_dp_then_stages() -> None:
    grid = make_grid(GridStage(tp=2, dp=2), GridStage(tp=1, dp=3))
    assert [grid.coordinates(rank) for rank in (0, 1, 2, 4, 6)] == [
        Coordinates(pp=0, dp=0, tp=0),
        Coordinates(pp=0, dp=0, tp=1),
        Coordinates(pp=0, dp=1, tp=0),
        Coordinates(pp=1, dp=0, tp=0),
        Coordinates(pp=1, dp=2, tp=0),
    ]


def test_ranks_that_divide_sequences_count_before_replicas() -> None:
    grid = make_grid(GridStage(tp=2, cp=2, dp=2), GridStage(tp=2, cp=2, dp=2))
    places = [grid.coordinates(rank) for rank in range(grid.num_ranks)]
    assert [(place.pp, place.dp, place.cp, place.tp) for place in places] == [
        (pp, dp, cp, tp) for pp in (0, 1) for dp in (0, 1) for cp in (0, 1) for tp in (0, 1)
    ]
    assert [grid.process(own.pp, own.dp, own.tp, own.cp) for own in places] == [*range(16)]


def test_shares_take_contiguous_samples_of_a_micro_batch() -> None:
    grid = make_grid(GridStage(tp=1, dp=2, shares=(3, 1)), GridStage(tp=1, dp=1, shares=(4,)))
    assert [grid.samples(0, passage) for passage in grid.passages] == [
        ((0, 3), (3, 4)),
        ((4, 7), (7, 8)),
    ]


def test_batch_slices_take_their_part_of_every_replica() -> None:
    slices = ((1, (8,)), (3, (4, 4)))
    grid = make_grid(GridStage(tp=1, dp=2), num_micro_batches=1, token_slices=slices)
    first, second = grid.passages
    assert (grid.samples(0, first), first.tokens) == (((0, 1), (4, 5)), (8,))
    assert (grid.samples(0, second), second.num_slices) == (((1, 4), (5, 8)), 2)


@st.composite
def stages(draw: st.DrawFn, total: int) -> GridStage:
    """A stage whose shares add up."""
    dp = draw(st.integers(1, min(3, total)))
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), min_size=dp - 1, max_size=dp - 1)))
    ends = [0, *cuts, total]
    shares = tuple(end - first for first, end in pairwise(ends))
    return GridStage(tp=draw(st.integers(1, 4)), dp=dp, shares=shares)


@st.composite
def pairs(draw: st.DrawFn) -> Grid:
    """Two stages that differ in everything."""
    total = draw(st.integers(3, 6))
    return make_grid(draw(stages(total)), draw(stages(total)), micro_batch_size=total)


def places(grid: Grid, stage: int) -> list[Coordinates]:
    return [
        Coordinates(pp=stage, dp=dp, tp=tp)
        for dp in range(grid.stages[stage].dp)
        for tp in range(grid.stages[stage].tp)
    ]


@given(pairs(), st.booleans())
def test_every_rank_gets_all_of_its_samples_once(
    grid: Grid,
    backward: bool,  # noqa: FBT001 - drawn
) -> None:
    source, target = (1, 0) if backward else (0, 1)
    passage = grid.passages[1]
    sent: Counter[tuple[int, int, int, int, int, int]] = Counter()
    for place in places(grid, source):
        start = grid.samples(source, passage)[place.dp][0]
        process = grid.process(source, place.dp, place.tp)
        for piece in outgoing(grid, place, target, passage):
            span = (start + piece.first, start + piece.end)
            part = (piece.feature_part, piece.num_feature_parts)
            sent[process, piece.process, *span, *part] += 1
    for place in places(grid, target):
        first, end = grid.samples(target, passage)[place.dp]
        lanes = lcm(grid.stages[source].tp, grid.stages[target].tp)
        covered: Counter[tuple[int, int]] = Counter()
        for piece in incoming(grid, place, source, passage):
            own = grid.process(target, place.dp, place.tp)
            span = (first + piece.first, first + piece.end)
            part = (piece.feature_part, piece.num_feature_parts)
            sent[piece.process, own, *span, *part] -= 1
            width = lanes // piece.num_feature_parts
            covered.update(
                (sample, piece.feature_part * width + lane)
                for sample in range(*span)
                for lane in range(width)
            )
        assert covered == Counter((sample, i) for sample in range(first, end) for i in range(lanes))
    assert set(sent.values()) == {0}


@given(pairs(), st.integers(7, 20))
def test_shared_tables_meet_row_by_row(grid: Grid, num_rows: int) -> None:
    sent: Counter[tuple[int, int, int, int]] = Counter()
    for stage in (0, 1):
        for place in places(grid, stage):
            own = grid.process(stage, place.dp, place.tp)
            start, end = shard_range(num_rows, place.tp, grid.stages[stage].tp)
            for rows in rows_for_others(grid, place, 1 - stage, num_rows):
                sent[own, rows.process, start + rows.first, start + rows.end] += 1
            received = shared_rows(grid, place, 1 - stage, num_rows)
            for rows in received:
                sent[rows.process, own, start + rows.first, start + rows.end] -= 1
            spans = [row for rows in received for row in range(rows.first, rows.end)]
            assert spans == list(range(end - start))
    assert set(sent.values()) == {0}


@given(order=st.permutations([(host, slot) for host in "abc" for slot in range(2)]))
def test_every_rank_is_played_at_its_place(order: list[tuple[str, int]]) -> None:
    placement = [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1)]
    processes = rank_map(placement, order)
    assert [order[process] for process in processes] == placement


@given(size=st.integers(0, 200), num_shards=st.integers(1, 16))
def test_shards_cover_everything_once_and_evenly(size: int, num_shards: int) -> None:
    ranges = [shard_range(size, index, num_shards) for index in range(num_shards)]
    assert [item for first, end in ranges for item in range(first, end)] == list(range(size))
    lengths = [end - first for first, end in ranges]
    assert max(lengths) - min(lengths) <= 1
