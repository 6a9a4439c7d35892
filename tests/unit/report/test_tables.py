import io
from dataclasses import replace

from rich.console import Console, RenderableType

from amp_ray.cost.estimate import Estimate, Infeasible, Reason
from amp_ray.report.tables import ranking_table, reasons_text, results_table
from amp_ray.search.planner import AmpRayPlanner, search
from amp_ray.search.ranking import Ranking, rank
from amp_ray.spec.candidate import Candidate
from amp_ray.spec.strategy import StageOptions, Strategy
from amp_ray.testing.experiments import small_experiment

CLUSTER = small_experiment().cluster


def drawn(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=180)
    console.print(renderable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def ranking(*replacements: tuple[str, str]) -> Ranking:
    experiment = small_experiment(*replacements)
    planner = AmpRayPlanner(experiment=experiment)
    return search(experiment, planner, progress=lambda _d, _t: None)


def bare(seconds: float, bounds: tuple[int, ...] = (0, 9)) -> Estimate:
    """An estimate of a model that knows neither parts nor memory."""
    candidate = Candidate(
        micro_batch_size=1,
        options=StageOptions(tp=1, dp=1),
        pp=len(bounds) - 1,
        num_micro_batches=1,
    )
    return Estimate(strategy=Strategy.uniform(candidate, bounds), iteration_time_s=seconds)


def test_only_as_many_rows_as_asked_and_what_is_left_out() -> None:
    text = drawn(ranking_table(ranking(), CLUSTER, title="small", num_rows=4))
    assert "12 more feasible strategies: --top K or --all" in text


def test_ties_are_marked_and_explained() -> None:
    tied = rank([bare(1.0), bare(1.01, (0, 4, 9)), bare(2.0)], relative_error=0.06)
    text = drawn(ranking_table(tied, CLUSTER, title="ties", num_rows=3))
    assert "=2" in text
    assert "=3" not in text
    assert "the first 2 are ties within the model's error of 6 %" in text


def test_infeasible_rows_say_why() -> None:
    text = drawn(
        ranking_table(ranking(("num_heads: 8", "num_heads: 1")), CLUSTER, title="", num_rows=None)
    )
    assert "tp does not divide the attention heads: tp 2, num_heads 1" in text


def test_infeasible_that_are_not_shown_are_counted() -> None:
    found = ranking(("num_heads: 8", "num_heads: 1"))
    text = drawn(ranking_table(found, CLUSTER, title="", num_rows=2))
    assert "7 not feasible: 7 tp does not divide the attention heads" in text


def test_nothing_feasible_draws_no_empty_table() -> None:
    candidate = Candidate(
        micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=9, num_micro_batches=1
    )
    reason = Reason(kind="more stages than layers", detail="pp 9, 3 layers")
    only = rank([Infeasible(candidate=candidate, reason=reason)])
    assert drawn(ranking_table(only, CLUSTER, title="none", num_rows=3)) == (
        "1 not feasible: 1 more stages than layers\n"
    )
    assert reasons_text(only) == "1 more stages than layers"


def test_parts_and_memory_are_left_out_where_the_model_knows_none() -> None:
    text = drawn(results_table([bare(1.0)], CLUSTER, title="bare"))
    assert "bubble" not in text
    assert "GiB" not in text
    assert "s/iter" in text


def test_long_bounds_are_shortened_at_a_number() -> None:
    text = drawn(results_table([bare(1.0, tuple(range(100)))], CLUSTER, title="long"))
    assert " ..." in text
    assert "98 99" not in text


def test_where_stages_run_is_shown_where_that_is_not_the_order_of_the_devices() -> None:
    given = bare(1.0, (0, 4, 9))
    turned = replace(given, strategy=replace(given.strategy, placement=(2, 0)))
    assert "stages on" not in drawn(results_table([given], CLUSTER, title="in order"))
    assert "node1, node0" in drawn(results_table([turned], CLUSTER, title="turned"))
