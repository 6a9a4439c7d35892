import io
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console, RenderableType

from amp_ray.cost.estimate import Breakdown, Estimate, Infeasible, Reason, Result
from amp_ray.report import console as consoles
from amp_ray.report.strategy_text import what_is_planned
from amp_ray.report.tables import ResultsTable, is_in_order, places_text, ranking_table
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.ranking import Ranking, plainest_first, rank
from amp_ray.search.space import candidates_of
from amp_ray.strategies.candidate import Candidate, GroupsCandidate
from amp_ray.strategies.recompute import Recompute
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.strategies.zero import AUTO_STAGE, Zero
from support.checked import grid_of
from support.experiments import small_experiment

SMALL = small_experiment()
ANSWER = ("#", "tp", "dp", "pp", "batch", "s/iter", "GiB", "risk", "cuts")
BREAKDOWN = ("compute", "comm", "bubble", "p2p", "sync", "optim", "other")


def drawn(renderable: RenderableType, width: int = 180) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def table(*results: Result, title: str = "", num_tied: int = 0) -> ResultsTable:
    return ResultsTable(results=results, experiment=SMALL, title=title, num_tied=num_tied)


def ranking(*replacements: tuple[str, str]) -> Ranking:
    experiment = small_experiment(*replacements)
    planner = AmpRayPlanner(experiment=experiment)
    return search_candidates(planner, candidates_of(experiment), workers=ALONE)


def shown(ranked: Ranking, *, num_rows: int | None = 3, width: int = 180) -> str:
    return drawn(ranking_table(ranked, SMALL, title="small", num_rows=num_rows), width)


def bare(seconds: float, bounds: tuple[int, ...] = (0, 9)) -> Estimate:
    """An estimate of a model that knows neither parts nor memory."""
    candidate = grid_of(pp=len(bounds) - 1)
    return Estimate(strategy=Strategy.uniform(candidate, bounds), iteration_time_s=seconds)


def uneven(num_stages: int) -> Estimate:
    """Stages of alternating dp on the devices in reverse."""
    stages = tuple(
        Stage(
            first_layer=first,
            end_layer=end,
            options=StageOptions(tp=1, dp=1 + first % 2),
            shares=(3, 1) if first % 2 else (4,),
        )
        for first, end in pairwise(range(num_stages + 1))
    )
    num_ranks = sum(stage.num_ranks for stage in stages)
    strategy = Strategy(
        stages=stages,
        micro_batch_size=4,
        num_micro_batches=2,
        placement=tuple(reversed(range(num_ranks))),
    )
    return Estimate(strategy=strategy, iteration_time_s=1.0)


# ------------------------------------------------------------------------- columns


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_answer_is_there_in_every_width_and_no_line_is_longer(width: int) -> None:
    text = shown(ranking(("slots: 2,", "slots: 2, memory_gib: 3.0,")), num_rows=16, width=width)
    assert all(name in text for name in ANSWER)
    assert "0 3 4 5 9" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_a_narrow_terminal_shows_bounds_instead_of_some_figures() -> None:
    text = shown(ranking(("slots: 2,", "slots: 2, memory_gib: 3.0,")), num_rows=16, width=60)
    assert "0 3 4 5 9" in text
    assert "tok/s" in text
    assert "+-" not in text


def test_where_the_time_goes_is_left_out_where_there_is_no_room() -> None:
    narrow, wide = shown(ranking(), width=80), shown(ranking(), width=132)
    heads = "".join(narrow.splitlines()[:3])
    assert not any(name in heads for name in BREAKDOWN)
    assert "where the time goes: --wide" in narrow
    assert all(name in wide for name in BREAKDOWN)
    assert "--wide" not in wide


def test_bounds_and_places_are_whole_and_break_between_numbers_and_stages() -> None:
    long = replace(uneven(8), strategy=replace(uneven(8).strategy))
    cluster = small_experiment(("count: 2, device: T4, slots: 2", "count: 6, device: T4, slots: 2"))
    text = drawn(ResultsTable(results=[long], experiment=cluster, title=""), 60)
    last = [line[26:].strip() for line in text.splitlines()[3:]]
    assert "0 1 2 3 4 5 6 7 8" in last
    assert "tp1 dp1 on node5" in " ".join(last)
    assert all(not line.endswith((" on", "tp1", "dp1", "dp2")) for line in last)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (StageOptions(tp=1, dp=4, recompute=Recompute(kind="full", layers=5)), "5 of a stage's"),
        (
            StageOptions(tp=1, dp=4, zero=Zero(stage=3, shard_ranks=2)),
            "ZeRO 3/2: sharded over groups of 2 ranks",
        ),
        (StageOptions(tp=1, dp=4, zero=Zero(stage=3, keeps_weights=True)), "until the backward"),
    ],
)
def test_short_forms_are_explained_where_they_stand(options: StageOptions, text: str) -> None:
    plain = bare(1.0)
    grid = Candidate(options=options, pp=1, micro_batch_size=1, num_micro_batches=2)
    short = replace(plain, strategy=Strategy.uniform(grid, (0, 9)))
    chosen = replace(SMALL, zero_stage=AUTO_STAGE)
    assert text in drawn(ResultsTable(results=(short,), experiment=chosen, title=""))
    assert text not in drawn(table(plain))
    # What a row does not say needs no explanation
    if options.zero.stage:
        assert text not in drawn(table(short))


def test_what_ranks_of_a_layer_send_is_named_after_the_degrees_that_need_it() -> None:
    def with_options(tp: int, ep: int = 1) -> Estimate:
        grid = grid_of(tp=tp, dp=4, ep=ep, num_micro_batches=2)
        return replace(bare(1.0), strategy=Strategy.uniform(grid, (0, 9)), breakdown=Breakdown())

    plain, experts, wide = with_options(1), with_options(1, ep=2), with_options(2)
    assert " tp " in drawn(table(plain)).splitlines()[1]
    assert " ep " in drawn(table(plain, experts)).splitlines()[1]
    text = drawn(table(wide, experts))
    assert "layer comm: tensor parallel communication, experts' exchange\n" in text


def test_many_bounds_in_equal_steps_are_named_by_their_ends() -> None:
    text = drawn(table(bare(1.0, (0, *range(3, 99)))), 80)
    assert " 0 3 4 .. 98" in text
    assert "0 2 .. 8: 0 2 4 6 8" in text
    few = tuple(range(17))
    text = drawn(table(bare(1.0, few)), 80)
    assert set(few) <= {int(word) for word in text.split() if word.isdigit()}
    assert ".." not in text


def test_parts_memory_and_risk_are_left_out_where_the_model_knows_none() -> None:
    text = drawn(table(bare(1.0)))
    assert not any(name in text for name in (*BREAKDOWN, "GiB", "risk", "--wide"))
    assert "s/iter" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.12345, "0.1235"), (98.765, "98.77"), (9999.9, "10,000"), (12345.6, "12,346")],
)
def test_times_have_no_exponents(seconds: float, text: str) -> None:
    assert f" {text} " in drawn(table(bare(seconds)))


# ------------------------------------------------------------------------- rows


def test_ties_are_marked_and_explained() -> None:
    tied = rank([bare(1.0), bare(1.01, (0, 4, 9)), bare(2.0)], relative_error=0.06)
    text = shown(tied)
    assert "=2" in text
    assert "=3" not in text
    assert "= the first 2 are as good: closer than the model can tell apart\n" in text
    partly = replace(tied, num_compared=2)
    assert "= at least the first 2 are as good: " in shown(partly)


def test_a_first_row_that_is_not_the_fastest_is_explained() -> None:
    def with_cp(plan: Estimate) -> Estimate:
        stage = plan.strategy.stages[0]
        stages = (replace(stage, options=replace(stage.options, cp=2)),)
        return replace(plan, strategy=replace(plan.strategy, stages=stages, placement=(0, 1)))

    plain, fastest, slower = bare(1.01), with_cp(bare(1.0)), bare(1.015, (0, 4, 9))
    ranked = plainest_first(rank([plain, fastest, slower], relative_error=0.06))
    assert "# 1: the plainest of 3 within 2 % of the fastest, 1 s\n" in shown(ranked)
    ordered = plainest_first(rank([bare(0.999), fastest, slower], relative_error=0.06))
    assert "the first 3, within 2 % of the fastest: the plainest first\n" in shown(ordered)
    alone = plainest_first(rank([fastest, bare(1.03)], relative_error=0.06))
    assert "plainest" not in shown(alone)


def test_a_model_without_an_error_has_ties_of_equal_time_only() -> None:
    assert "= the first 2 take the same time\n" in shown(rank([bare(1.0), bare(1.0, (0, 4, 9))]))


@pytest.mark.parametrize(
    ("probability", "text"),
    [(0.0, "<1 %"), (0.08, "8 %"), (0.434, "43 %"), (0.999, ">99 %")],
)
def test_the_risk_of_running_out_of_memory_is_shown(probability: float, text: str) -> None:
    first = replace(bare(1.0), failure_probability=0.5)
    drawing = drawn(table(first, replace(bare(2.0), failure_probability=probability)))
    assert "OOM" in drawing
    assert text in drawing


def test_where_a_launcher_gives_up_the_risk_is_not_of_memory_alone() -> None:
    traits = replace(SMALL.traits, launch_limit_s=60.0, launch_iterations=2)
    experiment = replace(SMALL, traits=traits)
    risky = replace(bare(1.0), failure_probability=0.5)
    text = drawn(ResultsTable(results=[risky], experiment=experiment, title=""))
    assert "failure" in text
    assert "OOM" not in text


def test_the_time_of_a_row_that_does_not_fit_is_explained() -> None:
    lacking = replace(bare(1.0), reasons=(Reason(kind="out of memory", detail="stage 0"),))
    ranked = rank([lacking, bare(2.0)])
    text = shown(ranked, num_rows=None)
    assert "rows that do not fit: with enough memory" in text
    assert "rows that do not fit: with enough memory" in drawn(table(lacking))
    assert "do not fit" not in shown(ranked, num_rows=1)


def test_a_row_that_does_not_fit_has_its_cuts_and_its_recompute() -> None:
    lacking = replace(bare(1.0, (0, 2, 9)), reasons=(Reason(kind="out of memory", detail=""),))
    stages = (
        replace(stage, options=replace(stage.options, recompute=Recompute(kind="full")))
        for stage in lacking.strategy.stages
    )
    strategy = replace(lacking.strategy, stages=tuple(stages))
    assert "0 2 9, recompute full" in drawn(table(replace(lacking, strategy=strategy)))


def test_a_risky_strategy_stands_behind_safe_ones_and_a_note_says_so() -> None:
    leader = replace(bare(1.0), failure_probability=0.43)
    safe = replace(bare(1.03, (0, 4, 9)), failure_probability=0.08)
    text = shown(rank([leader, safe], relative_error=0.06))
    rows = [line for line in text.splitlines() if " % " in line]
    assert ["8 %" in rows[0], "43 %" in rows[1]] == [True, True]
    assert "strategies with a risk of 10 % or more come after all others" in text


def test_a_row_names_the_devices_that_it_leaves_idle() -> None:
    assert "whole, 3 x T4 idle" in drawn(table(bare(1.0)))
    assert "idle" not in shown(ranking())


def test_where_stages_run_is_shown_where_that_is_not_the_order_of_the_devices() -> None:
    plain = bare(1.0, (0, 4, 9))
    turned = replace(plain, strategy=replace(plain.strategy, placement=(2, 0)))
    assert "node" not in drawn(table(plain))
    assert "on node1, node0" in drawn(table(turned))
    both = drawn(table(turned, plain))
    assert "on node0 x2" in both
    assert "below cuts: the nodes of each stage in turn\n" in both
    assert "x2: 2 stages in a row\n" in both
    assert "in a row" not in drawn(table(turned))


def test_a_micro_batch_that_is_shared_out_is_told_from_one_of_a_replica() -> None:
    text = drawn(table(uneven(2), bare(1.0)))
    assert "4 split" in text
    assert "split: samples of all dp ranks of a stage together, else of one replica" in text
    assert "split" not in drawn(table(bare(1.0)))
    groups = GroupsCandidate(micro_batch_size=8, num_micro_batches=1)
    reason = Reason(kind="no device group can be a stage", detail="")
    assert "8 split" in drawn(table(Infeasible(candidate=groups, reason=reason)))


def test_warnings_are_told_once_and_marked_in_the_rows() -> None:
    warnings = (("all", "x"), ("all", "x", "y"), ("all",))
    lines = drawn(table(*(replace(bare(1.0), warnings=texts) for texts in warnings))).splitlines()
    assert [line.split("1  ")[-1].strip() for line in lines[4:7]] == [
        "whole (a), 3 x T4 idle",
        "whole (a) (b), 3 x T4 idle",
        "whole, 3 x T4 idle",
    ]
    assert all(line in lines for line in ("(a) x", "(b) y", "remark: all"))
    reason = Reason(kind="out of memory", detail="")
    full = replace(bare(1.0), warnings=("all",), reasons=(reason,))
    assert "remark: all" in drawn(table(full))


def test_what_ranks_share_out_is_told_where_the_search_chose_it() -> None:
    estimate = bare(1.0)
    stage = replace(
        estimate.strategy.stages[0], options=StageOptions(tp=1, dp=2, zero=Zero(stage=1))
    )
    sharing = replace(
        estimate, strategy=replace(estimate.strategy, stages=(stage,), placement=(0, 1))
    )
    assert "ZeRO" not in drawn(table(sharing))
    chosen = ResultsTable(
        results=(sharing,), experiment=replace(SMALL, zero_stage=AUTO_STAGE), title="", num_tied=0
    )
    assert "ZeRO 1" in drawn(chosen)


# ------------------------------------------------------------------------- infeasible ones


def test_infeasible_rows_have_one_reason_each() -> None:
    text = shown(ranking(("num_heads: 8", "num_heads: 1")), num_rows=None)
    assert text.count("tp does not divide the attention heads: tp 2, num_heads 1") == 7
    both = tuple(Reason(kind=kind, detail="by far") for kind in ("out of memory", "too slow"))
    text = drawn(table(replace(bare(1.0), reasons=both)))
    assert "out of memory: by far" in text
    assert "too slow" not in text


def test_nothing_feasible_draws_no_empty_table() -> None:
    candidate = grid_of(pp=9)
    reason = Reason(kind="more stages than layers", detail="pp 9, 3 layers")
    only = rank([Infeasible(candidate=candidate, reason=reason)])
    assert shown(only) == "1 of 1 candidate ruled out: 1 more stages than layers\n"


# ------------------------------------------------------------------------- places


CLUSTER = SMALL.cluster
GRID = Strategy.uniform(
    Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=3, num_micro_batches=2),
    (0, 1, 2, 3),
)


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ((0, 1, 2), "node0 x2, node1"),
        ((2, 0, 1), "node1, node0 x2"),
        ((0, 2, 1), "node0, node1, node0"),
    ],
)
def test_stages_are_named_by_their_nodes_in_runs(placement: tuple[int, ...], text: str) -> None:
    assert places_text(replace(GRID, placement=placement), CLUSTER) == text


def test_degrees_are_told_where_stages_differ() -> None:
    stages = (
        Stage(first_layer=0, end_layer=1, options=StageOptions(tp=1, dp=2), shares=(2, 1)),
        Stage(first_layer=1, end_layer=3, options=StageOptions(tp=2, dp=1), shares=(3,)),
    )
    strategy = Strategy(
        stages=stages, micro_batch_size=3, num_micro_batches=1, placement=(1, 2, 3, 0)
    )
    assert places_text(strategy, CLUSTER) == "tp1 dp2 on node0+node1, tp2 dp1 on node1+node0"


def test_the_order_of_the_devices_is_recognised() -> None:
    assert is_in_order(GRID)
    assert not is_in_order(replace(GRID, placement=(1, 0, 2)))


def test_of_many_nodes_in_a_row_only_the_ends_are_named() -> None:
    cluster = small_experiment(("count: 2, device: T4, slots: 2", "count: 6, device: T4, slots: 1"))
    wide = grid_of(dp=5)
    strategy = Strategy.uniform(wide, (0, 1), (5, 1, 2, 3, 4))
    assert places_text(strategy, cluster.cluster) == "node5+node1..node4"


@pytest.mark.parametrize("width", [40, 80, 180])
def test_tables_of_many_rows_are_drawn_to_the_same_lines(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked = ranking()
    few = shown(ranked, num_rows=None, width=width)
    monkeypatch.setattr(consoles, "_MANY_ROWS", 1)
    assert shown(ranked, num_rows=None, width=width) == few


def test_the_line_above_a_plan_names_the_limit_of_power() -> None:
    slots = "device: T4, slots: 2"
    limited = small_experiment((slots, f"{slots}, power_w: 50"))
    for experiment, boards in ((small_experiment(), "4 x T4"), (limited, "4 x T4 at 50 W")):
        assert what_is_planned(experiment)[0][-1] == f"{boards} in 2 nodes"
