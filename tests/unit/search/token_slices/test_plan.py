from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import uniform_candidates
from amp_ray.search.token_slices import granules_of, plan_slices
from amp_ray.strategies.candidate import Candidate, StageOptions, with_kind
from amp_ray.strategies.recompute import AUTO, FULL, NO_RECOMPUTE
from support.experiments import experiment_from

TEXT = """\
name: long
model: {family: llama, num_layers: 16, hidden_size: 4096, num_heads: 32, sequence_length: 16384,
        vocab_size: 32000}
cluster:
  nodes: [{count: 1, device: A100-80, slots: 4, intra_gbit_per_s: 2400, inter_gbit_per_s: 100}]
runtime: torch
recompute: full
global_batch_size: 2
search: {token_slices: true}
"""


def candidate(*, size: int = 1, pp: int = 4) -> Candidate:
    options = StageOptions(tp=4 // pp, dp=1, recompute=experiment().recompute)
    return Candidate(micro_batch_size=size, options=options, pp=pp, num_micro_batches=2 // size)


def experiment(*replacements: tuple[str, str]) -> Experiment:
    text = TEXT
    for before, after in replacements:
        assert before in text
        text = text.replace(before, after)
    return experiment_from(text)


def planned(given: Experiment, own: Candidate) -> Estimate:
    found = AmpRayPlanner(experiment=given).plan(own)
    assert isinstance(found, Estimate)
    return found


def test_a_long_sequence_in_a_deep_pipeline_is_cut() -> None:
    whole = planned(experiment(("token_slices: true", "token_slices: false")), candidate(size=2))
    sliced = planned(experiment(), candidate(size=2))
    assert whole.strategy.token_slices == ()
    ((sequences, tokens),) = sliced.strategy.token_slices
    assert sequences == 2
    assert sum(tokens) == 16384
    assert len(tokens) > 2
    assert sliced.iteration_time_s < 0.8 * whole.iteration_time_s


def test_no_candidate_gets_slower() -> None:
    off = AmpRayPlanner(experiment=experiment(("token_slices: true", "token_slices: false")))
    on = AmpRayPlanner(experiment=experiment())
    for own in uniform_candidates(experiment()):
        before, after = off.plan(own), on.plan(own)
        if isinstance(before, Estimate):
            assert isinstance(after, Estimate)
            if before.feasible:
                assert after.feasible
                assert after.iteration_time_s <= before.iteration_time_s


def test_one_stage_keeps_its_micro_batches_whole() -> None:
    assert planned(experiment(), candidate(pp=1)).strategy.token_slices == ()


def test_what_the_runtime_cannot_launch_is_not_proposed_where_that_matters() -> None:
    text = ("search: {token_slices: true}", "search: {token_slices: true, launchable: true}")
    given = experiment(text)
    unable = replace(given, traits=replace(given.traits, token_slices=False))
    assert planned(unable, candidate(size=2)).strategy.token_slices == ()
    able = replace(given, traits=replace(given.traits, token_slices=True))
    found = planned(able, candidate(size=2))
    assert found.strategy.token_slices
    assert found.launchable


@pytest.mark.parametrize("granularity", [1000, 4096])
def test_slices_begin_at_multiples_of_the_granularity(granularity: int) -> None:
    text = ("token_slices: true", f"token_slices: true, slice_granularity: {granularity}")
    ((_, tokens),) = planned(experiment(text), candidate(size=2)).strategy.token_slices
    assert all(size % granularity == 0 for size in tokens[:-1])
    assert sum(tokens) == 16384


def test_a_thirty_second_of_a_sequence_is_a_granule_unless_told() -> None:
    assert granules_of(experiment()).granularity == 512


def test_memory_keeps_slices_short() -> None:
    longest = []
    for gib in (800, 32):
        memory = ("slots: 4,", f"slots: 4, memory_gib: {gib},")
        planner = AmpRayPlanner(experiment=experiment(("recompute: full\n", ""), memory))
        options = StageOptions(tp=1, dp=1)
        one = Candidate(micro_batch_size=1, options=options, pp=4, num_micro_batches=2)
        costs = planner.cost_model.costs(one)
        found = plan_slices(planner.cost_model, one, costs, (0, 5, 10, 15, 19))
        assert found is not None
        longest.append(max(found.strategy.token_slices[0][1]))
    assert longest[1] <= longest[0]


def test_recompute_and_slices_are_chosen_together() -> None:
    given = experiment(("recompute: full", "recompute: auto"))
    own = with_kind(candidate(size=2), AUTO)
    found = planned(given, own)
    fixed = [planned(given, with_kind(own, kind)) for kind in (FULL, NO_RECOMPUTE)]
    assert found.strategy.token_slices
    best_s = min(each.iteration_time_s for each in fixed if each.feasible)
    assert found.iteration_time_s <= best_s * (1 + 1e-9)
