from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Estimate, Infeasible
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import parse_strategies
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.planner import PlannerChoice, PlannerTraits
from amp_ray.search.ranking import Ranking, is_risky
from amp_ray.search.run import score_given
from amp_ray.search.space import candidates_of, searched_dimensions
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE, Recompute
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.units import GIB
from support.checked import as_estimate, grid_of
from support.experiments import SMALL, experiment_from, small_experiment
from support.metis import metis_profile_files

MEGATRON = ("name: small", "name: small\nruntime: megatron")
BLOCKS = ("num_layers: 6", "num_layers: 6, layer_list: runtime")
TWO_HEADS = ("num_heads: 8", "num_heads: 2")
GROUPED = ("family: gpt2", "family: llama, num_key_value_heads: 1")
SIXTEEN = ("{count: 2, device: T4, slots: 2", "{count: 4, device: T4, slots: 4")


def pipeline(pp: int, *, num_micro_batches: int = 4) -> Candidate:
    return grid_of(
        dp=4 // pp, micro_batch_size=2, pp=pp, num_micro_batches=num_micro_batches // (4 // pp)
    )


def planned(candidate: Candidate, *replacements: tuple[str, str]) -> Estimate:
    return as_estimate(AmpRayPlanner(experiment=small_experiment(*replacements)).plan(candidate))


def test_a_dense_model_has_no_experts_to_send_tokens_to() -> None:
    """Also in a program that sends a token once for all of its experts, of which it has none."""
    candidate = pipeline(1)
    candidate = replace(candidate, options=replace(candidate.options, ep=2))
    experiment = replace(small_experiment(), traits=RUNTIMES["megatron-core"])
    strategy = Strategy.uniform(candidate, (0, experiment.model.num_layers))
    scored = AmpRayPlanner(experiment=experiment).score(strategy)
    assert isinstance(scored, Estimate)
    assert "ep needs a model with experts: ep 2" in map(str, scored.reasons)


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
    assert "runtime 'deepspeed' has no expert parallelism, found ep 2" in scored.warnings


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


def test_a_plan_has_only_the_dimensions_that_its_planner_chooses() -> None:
    class Degrees(AmpRayPlanner):
        traits = PlannerTraits(dimensions=("tp", "dp", "pp"))

    choice = PlannerChoice(name="degrees", planner_class=Degrees)
    plan = plan_experiment(
        small_experiment(), choice, workers=ALONE, progress=lambda _done, _total: None
    )
    assert set(searched_dimensions(plan.experiment)) == {"tp", "dp", "pp", "micro_batch_size"}


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
    best = as_estimate(planner.plan(candidate))
    fastest_s = min(result.iteration_time_s for result in every_cut(planner, candidate))
    assert best.iteration_time_s == pytest.approx(fastest_s, rel=0.02)


def test_too_little_memory_is_estimated_and_told() -> None:
    result = planned(pipeline(2), ("slots: 2,", "slots: 2, memory_gib: 2.5,"))
    assert not result.feasible
    assert result.iteration_time_s > 0
    assert "out of memory: stage" in str(result.reasons[0])


def test_memory_moves_the_cuts_before_it_makes_a_plan_infeasible() -> None:
    wide = ("vocab_size: 1024", "vocab_size: 100000")
    planner = AmpRayPlanner(experiment=small_experiment(wide))
    free = as_estimate(planner.plan(pipeline(2)))
    least_bytes = min(max(result.peak_memory_bytes) for result in every_cut(planner, pipeline(2)))
    assert least_bytes < max(free.peak_memory_bytes)
    limit_gib = (least_bytes + 1) / 2**30
    tight = planned(pipeline(2), wide, ("slots: 2,", f"slots: 2, memory_gib: {limit_gib},"))
    assert tight.strategy.bounds != free.strategy.bounds
    assert tight.feasible


@pytest.mark.parametrize(
    ("tp", "pp", "replacements", "reason"),
    [
        (1, 4, (BLOCKS, MEGATRON), "pp does not divide the blocks: pp 4, 6 blocks"),
        (1, 16, (SIXTEEN,), "more stages than layers: pp 16, 9 layers"),
        (4, 1, (TWO_HEADS,), "tp does not divide the attention heads: tp 4, num_heads 2"),
        (2, 1, (GROUPED,), "tp does not divide the key/value heads: tp 2, num_key_value_heads 1"),
    ],
)
def test_candidates_that_no_strategy_can_have_are_told(
    tp: int, pp: int, replacements: tuple[tuple[str, str], ...], reason: str
) -> None:
    candidate = grid_of(tp=tp, micro_batch_size=2, pp=pp, num_micro_batches=4)
    result = AmpRayPlanner(experiment=small_experiment(*replacements)).plan(candidate)
    assert isinstance(result, Infeasible)
    assert str(result.reason) == reason


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
    entries = parse_strategies(text, file="s.csv", experiment=experiment)
    given, free = score_given(planner, entries)
    assert isinstance(given, Estimate)
    assert isinstance(free, Estimate)
    assert given.strategy.bounds == (0, 2, 9)
    assert free.iteration_time_s <= given.iteration_time_s


def test_a_given_strategy_that_heads_cannot_be_divided_for_is_told_so() -> None:
    planner = AmpRayPlanner(experiment=small_experiment(("num_heads: 8", "num_heads: 1")))
    candidate = grid_of(tp=2, dp=2, micro_batch_size=2, num_micro_batches=2)
    result = as_estimate(planner.score(Strategy.uniform(candidate, (0, 9))))
    assert not result.feasible
    assert not result.launchable
    assert str(result.reasons[0]).startswith("tp does not divide the attention heads: tp 2")


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


LLAMA_3_70B = """\
name: llama-3-70b
model: {family: llama, num_layers: 80, hidden_size: 8192, num_heads: 64, num_key_value_heads: 8,
        feed_forward_size: 28672, sequence_length: 8192, vocab_size: 128256, tied_embedding: false}
cluster:
  nodes:
    - {count: 8, device: H100, slots: 8, intra_gbit_per_s: 2900, inter_gbit_per_s: 3200}
precision: bf16
optimizer: adamw
zero_stage: 1
runtime: megatron-core
global_batch_size: 128
"""
DENSE_FLOPS = 6 * 70.6e9 * 128 * 8192
"""Of a step's products with weights, without attention."""


def ranking_of(experiment: Experiment) -> Ranking:
    candidates = candidates_of(experiment)
    return search_candidates(AmpRayPlanner(experiment=experiment), candidates, workers=ALONE)


def test_llama_3_70b_fits_64_h100_at_the_speed_that_practice_reaches() -> None:
    best = as_estimate(ranking_of(experiment_from(LLAMA_3_70B)).results[0])
    assert best.feasible
    assert best.launchable
    assert not is_risky(best)
    assert best.strategy.tp in {4, 8}
    assert best.strategy.sequence_parallel
    utilisation = DENSE_FLOPS / best.iteration_time_s / (64 * 989e12)
    assert 0.3 < utilisation < 0.5


def test_fewer_strategies_fit_without_sequence_parallelism() -> None:
    divided = experiment_from(LLAMA_3_70B)
    whole = replace(divided, sequence_parallel=False)
    assert ranking_of(divided).num_feasible > 2 * ranking_of(whole).num_feasible
