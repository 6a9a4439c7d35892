from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Estimate, Infeasible
from amp_ray.inputs.strategies import parse_strategies
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.planner import evaluate
from amp_ray.search.space import candidates_of
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE, Recompute
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.units import GIB
from support.experiments import SMALL, experiment_from, small_experiment
from support.metis import metis_profile_files

MEGATRON = ("name: small", "name: small\nruntime: megatron")


def pipeline(pp: int, *, num_micro_batches: int = 4) -> Candidate:
    return Candidate(
        micro_batch_size=2,
        options=StageOptions(tp=1, dp=4 // pp),
        pp=pp,
        num_micro_batches=num_micro_batches // (4 // pp),
    )


def planned(candidate: Candidate, *replacements: tuple[str, str]) -> Estimate:
    result = AmpRayPlanner(experiment=small_experiment(*replacements)).plan(candidate)
    assert isinstance(result, Estimate)
    return result


def test_a_search_ranks_every_candidate() -> None:
    experiment = small_experiment()
    ranking = search_candidates(
        AmpRayPlanner(experiment=experiment), candidates_of(experiment), workers=ALONE
    )
    assert len(ranking.results) == ranking.num_feasible == 16
    times = [result.iteration_time_s for result in ranking.results if isinstance(result, Estimate)]
    assert times == sorted(times)


def test_a_dense_model_has_no_experts_to_share_out() -> None:
    candidate = pipeline(1)
    candidate = replace(candidate, options=replace(candidate.options, ep=2))
    experiment = small_experiment()
    planner = AmpRayPlanner(experiment=experiment)
    result = planner.plan(candidate)
    assert isinstance(result, Infeasible)
    assert str(result.reason) == "ep needs a model with experts: ep 2"
    scored = planner.score(Strategy.uniform(candidate, (0, experiment.model.num_layers)))
    assert isinstance(scored, Estimate)
    assert not scored.feasible
    assert scored.warnings == ("runtime 'deepspeed' has no expert parallelism, found ep 2",)


def test_progress_runs_from_none_to_all() -> None:
    experiment = small_experiment()
    seen: list[tuple[int, int]] = []
    search_candidates(
        AmpRayPlanner(experiment=experiment),
        candidates_of(experiment),
        workers=ALONE,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[0] == (0, 16)
    assert seen[-1] == (16, 16)


def every_cut(planner: AmpRayPlanner, candidate: Candidate) -> list[Estimate]:
    """Estimate two stages with every cut."""
    num_layers = planner.experiment.model.num_layers
    results = [
        planner.score(Strategy.uniform(candidate, (0, cut, num_layers)))
        for cut in range(1, num_layers)
    ]
    return [result for result in results if isinstance(result, Estimate)]


def test_the_cuts_are_the_best_by_simulation_too() -> None:
    experiment = small_experiment(("global_batch_size: 8", "global_batch_size: 64"))
    planner = AmpRayPlanner(experiment=experiment)
    candidate = pipeline(2, num_micro_batches=32)
    best = planner.plan(candidate)
    assert isinstance(best, Estimate)
    fastest_s = min(result.iteration_time_s for result in every_cut(planner, candidate))
    assert best.iteration_time_s == pytest.approx(fastest_s, rel=0.02)


def test_too_little_memory_is_estimated_and_told() -> None:
    result = planned(pipeline(2), ("slots: 2,", "slots: 2, memory_gib: 2.5,"))
    assert not result.feasible
    assert result.iteration_time_s > 0
    assert "out of memory: stage" in str(result.reasons[0])


def test_memory_moves_the_cuts_before_it_makes_a_plan_infeasible() -> None:
    wide = ("vocab_size: 1024", "vocab_size: 50000")
    planner = AmpRayPlanner(experiment=small_experiment(wide))
    free = planner.plan(pipeline(2))
    assert isinstance(free, Estimate)
    least_bytes = min(max(result.peak_memory_bytes) for result in every_cut(planner, pipeline(2)))
    assert least_bytes < max(free.peak_memory_bytes)
    limit_gib = (least_bytes + 1) / 2**30
    tight = planned(pipeline(2), wide, ("slots: 2,", f"slots: 2, memory_gib: {limit_gib},"))
    assert tight.strategy.bounds != free.strategy.bounds
    assert tight.feasible


@pytest.mark.parametrize(
    ("candidate", "replacements", "kind"),
    [
        (
            Candidate(
                micro_batch_size=8, options=StageOptions(tp=1, dp=1), pp=4, num_micro_batches=1
            ),
            (("num_layers: 6", "num_layers: 6, layer_list: runtime"), MEGATRON),
            "pp does not divide the blocks",
        ),
        (
            Candidate(
                micro_batch_size=8, options=StageOptions(tp=4, dp=1), pp=1, num_micro_batches=1
            ),
            (("num_heads: 8", "num_heads: 2"),),
            "tp does not divide the attention heads",
        ),
    ],
)
def test_candidates_that_no_strategy_can_have_are_told(
    candidate: Candidate, replacements: tuple[tuple[str, str], ...], kind: str
) -> None:
    result = AmpRayPlanner(experiment=small_experiment(*replacements)).plan(candidate)
    assert isinstance(result, Infeasible)
    assert result.reason.kind == kind


def test_more_stages_than_layers_is_a_result() -> None:
    sixteen = ("{count: 2, device: T4, slots: 2", "{count: 4, device: T4, slots: 4")
    planner = AmpRayPlanner(experiment=small_experiment(sixteen))
    result = planner.plan(
        Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=16, num_micro_batches=8)
    )
    assert isinstance(result, Infeasible)
    assert str(result.reason) == "more stages than layers: pp 16, 9 layers"


def test_every_stage_has_parameters_where_the_runtime_needs_them() -> None:
    published = (
        ("vocab_size: 1024", "vocab_size: 1024, layer_list: amp-2022"),
        ("{count: 2, device: T4, slots: 2", "{count: 2, device: T4, slots: 4"),
    )
    experiment = small_experiment(*published)
    result = AmpRayPlanner(experiment=experiment).plan(
        Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=8, num_micro_batches=8)
    )
    assert isinstance(result, Estimate)
    assert result.feasible


def test_even_blocks_where_the_runtime_knows_nothing_else() -> None:
    result = planned(
        Candidate(micro_batch_size=2, options=StageOptions(tp=1, dp=2), pp=2, num_micro_batches=2),
        MEGATRON,
    )
    assert result.strategy.bounds == (0, 4, 9)


def test_given_strategies_keep_their_cuts_and_others_get_the_best() -> None:
    experiment = small_experiment()
    planner = AmpRayPlanner(experiment=experiment)
    text = "tp,pp,dp,micro_batch_size,bounds\n1,2,2,2,0 2 9\n1,2,2,2,\n"
    given, free = (
        evaluate(planner, entry)
        for entry in parse_strategies(text, file="s.csv", experiment=experiment)
    )
    assert isinstance(given, Estimate)
    assert isinstance(free, Estimate)
    assert given.strategy.bounds == (0, 2, 9)
    assert free.iteration_time_s <= given.iteration_time_s


def test_a_given_strategy_that_heads_cannot_be_divided_for_is_told_so() -> None:
    planner = AmpRayPlanner(experiment=small_experiment(("num_heads: 8", "num_heads: 1")))
    candidate = Candidate(
        micro_batch_size=2, options=StageOptions(tp=2, dp=2), pp=1, num_micro_batches=2
    )
    result = planner.score(Strategy.uniform(candidate, (0, 9)))
    assert isinstance(result, Estimate)
    assert not result.feasible
    assert not result.launchable
    assert str(result.reasons[0]).startswith("tp does not divide the attention heads: tp 2")


def test_key_value_heads_must_be_divided_too() -> None:
    llama = ("family: gpt2", "family: llama, num_key_value_heads: 1")
    candidate = Candidate(
        micro_batch_size=2, options=StageOptions(tp=2, dp=2), pp=1, num_micro_batches=2
    )
    result = AmpRayPlanner(experiment=small_experiment(llama)).plan(candidate)
    assert isinstance(result, Infeasible)
    assert str(result.reason).endswith("num_key_value_heads 1")


def test_a_degree_that_a_published_profile_lacks_makes_a_candidate_infeasible() -> None:
    text = SMALL.replace("num_layers: 6", "num_layers: 2") + "profile: {source: metis, path: p}\n"
    files = metis_profile_files(kinds=("T4",), tps=(1,))
    experiment = experiment_from(text, {f"p/{name}": text for name, text in files.items()})
    ranking = search_candidates(
        AmpRayPlanner(experiment=experiment), candidates_of(experiment), workers=ALONE
    )
    lacking = {
        result.candidate.options.tp: str(result.reason)
        for result in ranking.results
        if isinstance(result, Infeasible) and isinstance(result.candidate, Candidate)
    }
    assert lacking == {2: "not in the profile: tp 2 on T4"}
    assert ranking.num_feasible > 0


# ------------------------------------------------------------------------- nothing fits


@pytest.mark.parametrize("space", ["uniform", "placement", "heterogeneous"])
def test_what_comes_closest_fits_as_soon_as_devices_have_what_it_needs(space: str) -> None:
    chosen = ("name: small", f"name: small\nsearch: {{space: {space}}}")
    short = small_experiment(("slots: 2,", "slots: 2, memory_gib: 0.5,"), chosen)
    planner = AmpRayPlanner(experiment=short)
    assert search_candidates(planner, candidates_of(short), workers=ALONE).num_feasible == 0
    needs_bytes = min(max(estimate.peak_memory_bytes) for estimate in planner.roomiest())
    for share, fits in ((0.999, False), (1.001, True)):
        size = f"slots: 2, memory_gib: {share * needs_bytes / GIB!r},"
        given = small_experiment(("slots: 2,", size), chosen)
        planner = AmpRayPlanner(experiment=given)
        found = search_candidates(planner, candidates_of(given), workers=ALONE)
        assert (found.num_feasible > 0) == fits


def test_limits_that_leave_no_uniform_strategy_leave_none_to_compare_with() -> None:
    limits = ("name: small", "name: small\nsearch: {micro_batch_sizes: [3]}")
    assert AmpRayPlanner(experiment=small_experiment(limits)).roomiest() == ()


def test_the_runtimes_own_cuts_are_the_only_ones() -> None:
    roomiest = AmpRayPlanner(experiment=small_experiment(MEGATRON)).roomiest()
    found = {estimate.strategy.bounds for estimate in roomiest if estimate.strategy.pp == 2}
    assert len(found) == 1


@pytest.mark.parametrize("recompute", [NO_RECOMPUTE, AUTO])
def test_idle_devices_are_the_slower_ones_whatever_is_computed_again(recompute: Recompute) -> None:
    slow = "{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}"
    fast = slow.replace("T4", "V100-16").replace("count: 2", "count: 1")
    candidate = pipeline(2, num_micro_batches=8)
    options = replace(candidate.options, recompute=recompute)
    found = planned(
        replace(candidate, options=options), (slow, f"{slow}\n    - {fast}\n    - {fast}")
    )
    assert sorted(found.strategy.placement) == [4, 5, 6, 7]
