from amp_ray.search.effort import SearchEffort
from amp_ray.search.placement.node_moves import Scope
from amp_ray.search.placement.placement_problem import build_problem, build_within
from amp_ray.strategies.candidate import Candidate, StageOptions
from support.mixed_cluster import mixed_candidate, mixed_cost_model

LINK = (
    "global_batch_size",
    "  links: [{between: [node1, node2], gbit_per_s: 1}]\nglobal_batch_size",
)


def test_small_clusters_are_built_whole() -> None:
    built = build_problem(mixed_cost_model(), mixed_candidate(dp=2))
    assert built is not None
    assert built.scope.is_whole


def test_groups_that_no_node_holds_are_not_built() -> None:
    assert build_problem(mixed_cost_model(), mixed_candidate(tp=3)) is None


def test_ends_count_where_a_weight_is_tied() -> None:
    for tied in (False, True):
        built = build_problem(mixed_cost_model(tied=tied), mixed_candidate())
        assert built is not None
        assert built.scope.ends == tied


def test_too_many_options_narrow_the_scope() -> None:
    cost_model, candidate = mixed_cost_model(), mixed_candidate(dp=2)
    whole = build_problem(cost_model, candidate)
    assert whole is not None
    num_options = len(whole.problem.graph.source)
    fewer = SearchEffort(max_options=num_options - 1)
    narrower = build_problem(cost_model, candidate, fewer)
    assert narrower is not None
    assert not narrower.scope.is_whole
    assert len(narrower.problem.graph.source) < num_options


def test_no_scope_may_be_narrow_enough() -> None:
    nothing = SearchEffort(max_options=0)
    assert build_problem(mixed_cost_model(), mixed_candidate(dp=2), nothing) is None


def test_single_links_are_given_up_before_parts_of_nodes() -> None:
    cost_model, candidate = mixed_cost_model(LINK), mixed_candidate()
    without = build_within(cost_model, candidate, Scope(max_options=10_000, pairs=False))
    exact = build_within(cost_model, candidate, Scope(max_options=10_000))
    assert without is not None
    assert exact is not None
    num_options = len(without.graph.source)
    assert num_options < len(exact.graph.source)
    built = build_problem(cost_model, candidate, SearchEffort(max_options=num_options))
    assert built is not None
    assert (built.scope.pairs, built.scope.parts) == (False, "any")


def test_the_last_scope_takes_nodes_in_a_row() -> None:
    cost_model = mixed_cost_model(
        ("count: 1, slots: 2", "count: 12, slots: 8"), ("count: 2, slots: 2", "count: 12, slots: 8")
    )
    candidate = Candidate(
        micro_batch_size=1, options=StageOptions(tp=1, dp=24), pp=8, num_micro_batches=1
    )
    built = build_problem(cost_model, candidate)
    assert built is not None
    assert built.scope.parts == "row"
