"""The planner on experiments, and strategies as its plans."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import pytest

from amp_ray.cost.estimate import Estimate, Infeasible
from amp_ray.errors import InputError
from amp_ray.planners.metis2024.plan import MetisPlan
from amp_ray.planners.metis2024.planner import Metis2024Planner, MetisTranslation
from amp_ray.planners.metis2024.profile import parse_metis_profile
from amp_ray.planners.metis2024.profile_export import metis_sizes
from amp_ray.strategies.candidate import Candidate, GroupsCandidate
from amp_ray.strategies.recompute import FULL
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from support.checked import as_estimate, grid_of, required
from support.experiments import experiment_from, small_experiment
from support.metis import metis_profile_files
from support.metis_cases import metis_setting
from support.metis_oracle import cheapest_plan

TEXT = """\
name: mixed
model: {family: gpt2, num_layers: 2, hidden_size: 64, num_heads: 4, sequence_length: 32,
        vocab_size: 128}
cluster:
  nodes:
    - {device: A100-80, slots: 2, intra_gbit_per_s: 80, inter_gbit_per_s: 8}
    - {device: T4, slots: 2, intra_gbit_per_s: 40, inter_gbit_per_s: 8}
profile: {source: metis, path: p}
global_batch_size: 8
"""


def planner(*changes: tuple[str, str]) -> Metis2024Planner:
    """Plan for two A100 and two T4."""
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    files = {f"p/{name}": file for name, file in metis_profile_files().items()}
    return Metis2024Planner(experiment=experiment_from(text, files))


def limited(line: str) -> Metis2024Planner:
    """Plan with one more line of the experiment."""
    return planner(("global_batch_size: 8", f"global_batch_size: 8\n{line}"))


def estimate(metis: Metis2024Planner, num_micro_batches: int = 4) -> Estimate:
    """Plan where there is a plan."""
    return as_estimate(metis.plan(candidate(metis, num_micro_batches)))


def candidate(metis: Metis2024Planner, num_micro_batches: int) -> GroupsCandidate:
    """Return how a batch is cut."""
    size = metis.experiment.global_batch_size // num_micro_batches
    return GroupsCandidate(micro_batch_size=size, num_micro_batches=num_micro_batches)


def chosen(micro_batch_size: int, num_micro_batches: int) -> Candidate:
    """Return two stages with a replica on each device."""
    return grid_of(
        dp=2, micro_batch_size=micro_batch_size, pp=2, num_micro_batches=num_micro_batches
    )


def test_a_candidate_gets_its_best_plan_with_a_proof() -> None:
    metis = planner()
    expected = required(cheapest_plan(metis.setting, metis.search.limits, 4))
    result = estimate(metis)
    assert result.iteration_time_s == pytest.approx(expected[0], rel=1e-12)
    assert result.lower_bound_s == pytest.approx(result.iteration_time_s, rel=1e-12)
    assert result.strategy.num_micro_batches == 4
    assert result.feasible
    assert result.breakdown is not None
    assert result.breakdown.total_s == pytest.approx(result.iteration_time_s, rel=1e-12)
    for needed, limit in zip(result.peak_memory_bytes, result.memory_limit_bytes, strict=True):
        assert 0 < needed <= limit


def test_what_was_not_measured_is_infeasible() -> None:
    metis = planner()
    result = metis.plan(candidate(metis, 1))
    assert isinstance(result, Infeasible)
    assert result.reason.kind == "no plan"


def test_stages_of_their_own_are_not_launched() -> None:
    assert not estimate(
        planner(("slots: 2, intra_gbit_per_s: 40", "slots: 3, intra_gbit_per_s: 40"))
    ).launchable


def test_limits_of_the_experiment_hold() -> None:
    assert limited("search: {max_tp: 1}").search.limits.max_tp == 1
    assert limited("search: {micro_batch_sizes: [1, 2]}").search.limits.max_size == 2
    assert planner().search.limits.max_tp == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("recompute: full", "needs recompute: none"),
        ("zero_stage: 1", "needs zero_stage: 0"),
        ("search: {max_pp: 2}", "needs no limits but search.max_tp"),
    ],
)
def test_what_the_formulas_do_not_cover_is_refused(line: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        limited(line)


def test_a_profile_of_another_model_is_refused() -> None:
    experiment = small_experiment()
    published = parse_metis_profile(metis_profile_files(), folder="p")
    profile = replace(experiment.profile, published=published)
    with pytest.raises(InputError, match="needs a model of 4 layers"):
        Metis2024Planner(experiment=replace(experiment, profile=profile))


def test_a_model_without_an_end_has_no_such_profile() -> None:
    experiment = small_experiment()
    model = replace(experiment.model, layers=experiment.model.layers[1:])
    with pytest.raises(InputError, match="Metis knows one input layer"):
        Metis2024Planner(experiment=replace(experiment, model=model))


def test_a_candidate_whose_degrees_are_chosen_is_refused() -> None:
    with pytest.raises(InputError, match="name a whole strategy"):
        planner().plan(chosen(1, 4))


def test_a_uniform_strategy_is_scored() -> None:
    metis = planner()
    strategy = Strategy.uniform(chosen(1, 4), (0, 2, metis.experiment.model.num_layers))
    result = as_estimate(metis.score(strategy))
    assert result.strategy == strategy
    assert result.iteration_time_s >= estimate(metis).iteration_time_s


def test_a_strategy_that_needs_what_was_not_measured_is_infeasible() -> None:
    metis = planner()
    num_layers = metis.experiment.model.num_layers
    result = metis.score(Strategy.uniform(chosen(4, 1), (0, 2, num_layers)))
    assert isinstance(result, Infeasible)
    assert result.reason.kind == "not in the profile"


def test_types_can_be_those_of_the_published_rule() -> None:
    unequal = ("device: T4, slots: 2", "count: 2, device: T4, slots: 1")
    rule = ("global_batch_size: 8", "global_batch_size: 8\nsearch: {first_node_counts: true}")
    metis = planner(unequal, rule)
    expected = required(cheapest_plan(metis.setting, metis.search.limits, 4))
    result = estimate(metis)
    assert result.iteration_time_s == pytest.approx(expected[0], rel=1e-12)
    assert result.iteration_time_s != estimate(planner(unequal)).iteration_time_s
    scored = as_estimate(metis.score(result.strategy))
    assert scored.iteration_time_s == result.iteration_time_s


def check_all(metis: Metis2024Planner) -> None:
    """Plan every candidate; the best uses all devices for all layers and samples."""
    experiment = metis.experiment
    results = [metis.plan(cut) for cut in metis.candidates().required]
    best = min(
        (result for result in results if isinstance(result, Estimate)),
        key=lambda result: result.iteration_time_s,
    )
    assert best.feasible
    assert sorted(best.strategy.placement) == list(range(experiment.cluster.num_devices))
    assert best.strategy.global_batch_size == experiment.global_batch_size
    assert best.strategy.stages[-1].end_layer == experiment.model.num_layers
    assert metis.score(best.strategy) == replace(best, lower_bound_s=None)


LINKS: Final = "intra_gbit_per_s: 50, inter_gbit_per_s: 10}"
NODES: Final = f"    - {{count: 2, device: T4, slots: 2, {LINKS}"

CRASHES: Final = {
    "12 devices": (f"    - {{count: 3, device: T4, slots: 4, {LINKS}", 24),
    "unequal nodes": (
        f"    - {{device: T4, slots: 4, {LINKS}\n    - {{device: V100, slots: 8, {LINKS}",
        8,
    ),
    "nodes that the first one does not divide": (
        f"    - {{device: T4, slots: 4, {LINKS}\n    - {{device: V100, slots: 3, {LINKS}",
        12,
    ),
    "batch 96": (f"    - {{count: 2, device: T4, slots: 4, {LINKS}", 96),
    "an H100": (f"    - {{device: H100, slots: 4, {LINKS}\n{NODES}", 8),
    "16 slots": (f"    - {{device: A100-80, slots: 16, {LINKS}", 16),
}
"""Clusters on which the published planner crashes, planned by counted work."""


@pytest.mark.parametrize(("nodes", "batch"), CRASHES.values(), ids=CRASHES)
def test_any_cluster_is_planned(nodes: str, batch: int) -> None:
    experiment = small_experiment(
        (NODES, nodes), ("global_batch_size: 8", f"global_batch_size: {batch}")
    )
    check_all(Metis2024Planner(experiment=experiment))


def test_sizes_are_divisors_of_the_batch_and_powers_of_two() -> None:
    assert metis_sizes(1) == (1,)
    assert metis_sizes(9) == (1, 2, 3, 4, 8, 9)


GROUPS: Final = (range(1), range(1, 2), range(2, 3), range(3, 5))
"""A model of five layers, the last two of which are Metis's last."""

BOTH: Final = MetisTranslation(setting=metis_setting(), groups=GROUPS)
"""For two A100, devices 0 and 1, and two T4."""

UNIFORM: Final = MetisPlan(
    type_order=("T4", "A100"), degrees=((2, 1), (2, 1)), num_micro_batches=2, bounds=(0, 1, 4)
)

MIXED: Final = MetisPlan(
    type_order=("A100", "T4"), degrees=((1, 1), (3, 1)), num_micro_batches=1, bounds=(0, 2, 4)
)


def test_stages_that_share_evenly_need_no_shares() -> None:
    strategy = BOTH.strategy(UNIFORM)
    assert strategy.is_uniform
    assert strategy.micro_batch_size == 2
    assert strategy.global_batch_size == 8
    assert strategy.bounds == (0, 1, 5), "layers of ours"
    assert strategy.placement == (2, 3, 0, 1), "type after type"
    assert BOTH.plan(strategy) == UNIFORM


def test_mixed_stages_tell_their_shares() -> None:
    strategy = BOTH.strategy(MIXED)
    assert [stage.shares for stage in strategy.stages] == [(8,), (5, 2, 1)]
    assert strategy.micro_batch_size == 8
    assert strategy.global_batch_size == 8
    assert BOTH.plan(strategy) == MIXED


def changed(plan: MetisPlan, first: Mapping[str, Any], second: Mapping[str, Any]) -> Strategy:
    """Return a plan's strategy with fields of its two stages changed."""
    strategy = BOTH.strategy(plan)
    stages = zip(strategy.stages, (first, second), strict=True)
    return replace(
        strategy,
        stages=tuple(replace(stage, **change) for stage, change in stages),
    )


IDLE: Final = Strategy(
    stages=(Stage(first_layer=0, end_layer=5, options=StageOptions(tp=1, dp=2)),),
    micro_batch_size=4,
    num_micro_batches=1,
    placement=(0, 1),
)
CONTEXT: Final = Strategy(
    stages=(Stage(first_layer=0, end_layer=5, options=StageOptions(tp=1, dp=2, cp=2)),),
    micro_batch_size=4,
    num_micro_batches=1,
    placement=(0, 1, 2, 3),
)
AGAIN: Final = {"options": StageOptions(tp=1, dp=2, recompute=FULL)}


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            changed(UNIFORM, {"end_layer": 4}, {"first_layer": 4}),
            r"cuts at \[0, 1, 2, 3, 5\], not at 4",
        ),
        (IDLE, "uses every device"),
        (CONTEXT, "dp 2 x tp 1 must be the 4 devices of the stage"),
        (
            replace(BOTH.strategy(UNIFORM), placement=(0, 2, 1, 3)),
            "all of one type after the other",
        ),
        (changed(MIXED, {}, {"shares": (4, 2, 2)}), r"stage 1 shares samples as \(4, 2, 2\)"),
        (changed(UNIFORM, AGAIN, AGAIN), "knows no recompute"),
    ],
)
def test_a_strategy_that_is_none_of_its_plans_is_refused(strategy: Strategy, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BOTH.plan(strategy)
