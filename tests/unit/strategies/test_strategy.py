from dataclasses import replace
from typing import Any

import pytest

from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import AUTO
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy, TokenSlices, candidate_of


def candidate(**degrees: int) -> Candidate:
    known = {"micro_batch_size": 2, "pp": 2, "num_micro_batches": 4} | degrees
    options = StageOptions(tp=known.pop("tp", 2), dp=known.pop("dp", 1))
    return Candidate(options=options, **known)


def stage(first: int, end: int, **others: object) -> Stage:
    shares = others.pop("shares", None)
    options = StageOptions(**({"tp": 1, "dp": 1} | others))  # type: ignore[arg-type]
    return Stage(first_layer=first, end_layer=end, options=options, shares=shares)  # type: ignore[arg-type]


def strategy(*stages: Stage, placement: tuple[int, ...], micro_batch_size: int = 4) -> Strategy:
    return Strategy(
        stages=stages,
        micro_batch_size=micro_batch_size,
        num_micro_batches=2,
        placement=placement,
    )


DIFFERENT = strategy(
    stage(0, 3, tp=1, dp=2, shares=(1, 3)),
    stage(3, 4, tp=2, dp=1, shares=(4,)),
    placement=(3, 2, 1, 0),
)
UNIFORM = Strategy.uniform(candidate(micro_batch_size=4), (0, 1, 2))


def test_a_candidate_knows_its_devices_and_batch() -> None:
    assert (candidate(dp=3).num_devices, candidate(dp=3).global_batch_size) == (12, 24)


def test_candidates_order_by_size_then_tp_then_dp() -> None:
    found = [candidate(dp=3), candidate(tp=4), candidate(micro_batch_size=1, tp=8), candidate()]
    assert [(one.micro_batch_size, one.options.tp, one.options.dp) for one in sorted(found)] == [
        (1, 8, 1),
        (2, 2, 1),
        (2, 2, 3),
        (2, 4, 1),
    ]


@pytest.mark.parametrize("degree", ["micro_batch_size", "tp", "dp", "pp", "num_micro_batches"])
def test_a_degree_of_zero_is_refused(degree: str) -> None:
    with pytest.raises(ValueError, match=r"start at 1, found .*\b0"):
        candidate(**{degree: 0})


def test_ranks_run_on_the_devices_in_order_unless_placed() -> None:
    assert Strategy.uniform(candidate(), (0, 1, 2)).placement == (0, 1, 2, 3)


def test_degrees_that_stages_share_are_told() -> None:
    uniform = Strategy.uniform(candidate(), (0, 1, 2))
    assert (uniform.tp, uniform.dp, str(uniform.recompute), uniform.is_uniform) == (
        *(2, 1, "none", True),
    )


def test_degrees_that_stages_do_not_share_are_none() -> None:
    assert (DIFFERENT.tp, DIFFERENT.dp, DIFFERENT.is_uniform) == (None, None, False)
    assert DIFFERENT.global_batch_size == 4 * 2


def test_each_stage_has_its_own_devices() -> None:
    assert [DIFFERENT.devices(0), DIFFERENT.devices(1)] == [(3, 2), (1, 0)]
    assert DIFFERENT.first_rank == (0, 2)


SLICES = ((1, (6, 2)), (3, (3, 3, 2)))


def test_a_micro_batch_may_be_cut_into_slices_of_any_tokens() -> None:
    assert UNIFORM.token_slices == ()
    assert replace(UNIFORM, token_slices=SLICES).token_slices == SLICES


def test_only_equal_stages_with_whole_micro_batches_are_a_candidate() -> None:
    with pytest.raises(ValueError, match=r"expected one tp, dp and recompute .* found tp \[1, 2\]"):
        candidate_of(DIFFERENT)
    with pytest.raises(ValueError, match="expected whole micro-batches, found token slices"):
        candidate_of(replace(UNIFORM, token_slices=SLICES))


TWO_REPLICAS = {"dp": 2, "shares": (1, 3)}
ONE_SHARE = "shares need one positive count per dp index"
SUM = "each adding up to micro_batch_size 4"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"tp": 0}, {}, "tp and dp start at 1, found tp 0 and dp 1"),
        ({"dp": 0}, {}, "tp and dp start at 1, found tp 1 and dp 0"),
        ({"recompute": AUTO}, {}, "recompute 'auto' is for a search to choose"),
        *(({"dp": 2, "shares": shares}, {}, ONE_SHARE) for shares in ((4,), (1, 1, 2), (0, 4))),
        ({"dp": 2}, {}, r"stages with dp \[2, 1\] need shares"),
        (TWO_REPLICAS, {}, SUM),
        ({"dp": 2, "shares": (1, 2)}, {"shares": (4,)}, SUM),
        (TWO_REPLICAS, {"shares": (3,)}, SUM),
        ({"shares": (4,)}, {"shares": (4,)}, "and none where every dp is 1"),
        ({}, {"first": 2}, "stage 1 starts at layer 2; expected 1"),
        *(
            ({}, {"placement": placement}, "placement must give 2 ranks a device each")
            for placement in ((0,), (0, 1, 2), (1, 1), (-1, 0))
        ),
    ],
)
def test_stages_that_make_no_strategy_are_refused(
    first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    ranks = first.get("dp", 1) + 1
    placement = second.pop("placement", tuple(range(ranks)))
    with pytest.raises(ValueError, match=message):
        strategy(
            stage(0, 1, **first), stage(second.pop("first", 1), 3, **second), placement=placement
        )


@pytest.mark.parametrize("bounds", [(0, 1), (0, 1, 2, 3), (1, 2, 3)])
def test_bounds_of_another_number_of_stages_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="bounds must run from 0 in 2 stages"):
        Strategy.uniform(candidate(), bounds)


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        (((1, (8,)), (2, (8,))), r"add up to micro_batch_size 4, found \[1, 2\]"),
        (((0, (8,)), (4, (8,))), r"add up to micro_batch_size 4, found \[0, 4\]"),
        (((1, (8,)), (3, (4, 3))), r"one sequence length into positive .* \[\[8\], \[4, 3\]\]"),
        (((4, (8, 0)),), r"positive numbers of tokens, found \[\[8, 0\]\]"),
        (((4, ()),), r"positive numbers of tokens, found \[\[\]\]"),
    ],
)
def test_slices_that_make_no_micro_batch_are_refused(slices: TokenSlices, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(UNIFORM, token_slices=slices)


def test_no_stages_an_empty_one_and_slices_of_uneven_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="a strategy needs stages"):
        strategy(placement=())
    with pytest.raises(ValueError, match=r"a stage needs layers, found \[2, 2\)"):
        Strategy.uniform(candidate(), (0, 2, 2))
    with pytest.raises(ValueError, match="token_slices need stages that share samples evenly"):
        replace(DIFFERENT, token_slices=SLICES)
