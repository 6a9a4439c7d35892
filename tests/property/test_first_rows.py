"""Large spaces: a skipped candidate would never be among the first rows of the whole ranking."""

import math
from itertools import pairwise, product

import numpy as np
import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.stages import PlacedStages
from amp_ray.cost.verdict import safe_memory_fraction
from amp_ray.inputs.experiment import Experiment
from amp_ray.partition.problem import even_bounds
from amp_ray.runtime import planning
from amp_ray.runtime.planning import Planned, plan_experiment
from amp_ray.runtime.ray.searching import ALONE
from amp_ray.search import recompute, run
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.cuts import best_bounds
from amp_ray.search.effort import SearchEffort
from amp_ray.search.planner import PlannerChoice
from amp_ray.search.ranking import is_risky, speed
from amp_ray.search.recompute import RecomputeSearch, with_recompute
from amp_ray.search.space import recompute_choices, uniform_candidates
from amp_ray.strategies.candidate import Candidate, StageOptions, with_kind, with_zero
from amp_ray.strategies.recompute import NO_RECOMPUTE, Recompute, RecomputeKind
from amp_ray.strategies.strategy import Strategy, chunk_bounds
from amp_ray.strategies.zero import NO_ZERO
from support.experiments import experiment_from

GPT = """{family: gpt2, num_layers: 12, hidden_size: 1024, num_heads: 16, sequence_length: 1024,
        vocab_size: 50304}"""
MIXTRAL = """{family: llama, num_layers: 8, hidden_size: 512, num_heads: 8,
        num_key_value_heads: 4, feed_forward_size: 1024, sequence_length: 512, vocab_size: 32000,
        num_experts: 8, experts_per_token: 2}"""
TEXT = """\
name: first
model: {model}
cluster:
  nodes:
    - {{count: 4, device: A100-40, slots: 4, memory_gib: {memory_gib}, intra_gbit_per_s: 1200,
       inter_gbit_per_s: 100}}
precision: bf16
recompute: auto
zero_stage: auto
runtime: {runtime}
global_batch_size: 64
search: {{{search}}}
"""
CHUNKS = "virtual_stages: [1, 2, 3], max_cp: 4, micro_batch_sizes: [1, 2, 4, 16]"
CASES = {
    "roomy": (GPT, 40.0, "megatron-core", CHUNKS),
    "tight": (GPT, 6.8, "megatron-core", CHUNKS),
    "tighter": (GPT, 5.6, "megatron-core", CHUNKS),
    "even": (GPT, 8.0, "megatron-lm-2022", "virtual_stages: [1, 2], micro_batch_sizes: [1, 4]"),
    "stages": (GPT, 6.0, "torch", "virtual_stages: [1, 2], micro_batch_sizes: [1, 4]"),
    "shards": (GPT, 6.0, "fsdp2", "max_pp: 2, micro_batch_sizes: [1, 2]"),
    "experts": (MIXTRAL, 7.0, "megatron-core", "virtual_stages: [1, 2], micro_batch_sizes: [1, 4]"),
}


def case(name: str) -> Experiment:
    model, memory_gib, runtime, search = CASES[name]
    text = TEXT.format(model=model, memory_gib=memory_gib, runtime=runtime, search=search)
    return experiment_from(text)


@pytest.mark.parametrize("name", CASES)
def test_no_strategy_undercuts_the_bound_of_its_candidate(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = case(name)
    planner = AmpRayPlanner(experiment=experiment)
    shares = []
    # Bounds hold for every strategy that fits: for safe ones, and for faster ones at any risk.
    for fraction in (safe_memory_fraction(experiment.constants), 1.0):
        monkeypatch.setattr(recompute, "safe_memory_fraction", lambda _, given=fraction: given)
        for candidate in uniform_candidates(experiment)[::3]:
            result = planner.plan(candidate)
            if isinstance(result, Estimate) and result.feasible:
                least_s = planner.chooser.least_s(candidate, math.inf)
                assert least_s <= result.iteration_time_s
                shares.append(least_s / result.iteration_time_s)
    assert max(shares) > 0.5


@pytest.mark.parametrize("name", CASES)
def test_first_rows_are_those_of_all_candidates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = case(name)

    def planned(num_rows: int | None) -> Planned:
        return plan_experiment(
            experiment, num_rows=num_rows, workers=ALONE, progress=lambda _done, _all: None
        )

    few = SearchEffort(max_uniform_candidates=1)
    monkeypatch.setattr(
        PlannerChoice, "make", lambda _, given: AmpRayPlanner(experiment=given, effort=few)
    )
    monkeypatch.setattr(run, "NUM_INTERVALS", 3)
    monkeypatch.setattr(planning, "NUM_INTERVALS", 3)
    every = planned(None).ranking
    assert planned(1).ranking.results[0] == every.results[0]  # the plainest near the fastest
    first = planned(3).ranking
    assert 3 <= first.num_feasible < every.num_feasible
    assert first.num_left_out == len(every.results) - len(first.results)
    assert first.num_tied == min(every.num_tied, first.num_feasible)
    shown = [result.strategy for result in first.results if isinstance(result, Estimate)]
    assert shown == [
        result.strategy for result in every.results[: len(shown)] if isinstance(result, Estimate)
    ]


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize("model", [GPT, MIXTRAL, MIXTRAL.replace("}", ", first_dense_layers: 2}")])
def test_no_stage_has_more_blocks_than_its_peak_allows(model: str, kind: RecomputeKind) -> None:
    text = TEXT.format(model=model, memory_gib=40.0, runtime="megatron-core", search="")
    experiment = experiment_from(text)
    cost_model = AmpRayPlanner(experiment=experiment).cost_model
    _, positions = experiment.model.distinct_layers
    places = np.flatnonzero(np.array(positions) == np.argmax(np.bincount(positions)))
    tightest = []
    for pp, chunks, batches, num_again in product((2, 4), (1, 2, 3), (1, 2, 4, 8), (None, 1, 2)):
        bounds = even_bounds(experiment.model.num_layers, pp)
        if (kind != "full" and num_again) or pp * chunks > 8:
            continue
        candidate = Candidate(
            micro_batch_size=1,
            options=StageOptions(tp=1, dp=1, recompute=Recompute(kind=kind, layers=num_again)),
            pp=pp,
            num_micro_batches=batches,
            virtual_stages=chunks,
        )
        memory = cost_model.memory(candidate)
        cuts = chunk_bounds(experiment.model, bounds, chunks) if chunks > 1 else bounds
        each = list(pairwise(cuts))
        for stage in range(pp):
            own = each[stage::pp]
            if chunks > 1 and any(first == end for first, end in own):
                continue  # no such strategy can run
            number = sum(int(((places >= first) & (places < end)).sum()) for first, end in own)
            peak = memory.peak_of(stage, own) * (1 + 1e-12)
            again = (num_again or experiment.model.num_layers) * (kind != "none")
            most = int(memory.most_blocks(peak, tuple(places.tolist()), again)[stage])
            assert most >= number, (candidate, stage)
            tightest.append(most - number)
    assert min(tightest) <= 1


@pytest.mark.parametrize("name", ["tight", "tighter", "even"])
def test_no_number_of_blocks_for_all_stages_is_better_than_the_one_chosen(name: str) -> None:
    experiment = case(name)
    cost_model = AmpRayPlanner(experiment=experiment).cost_model
    more = safer = 0
    for given in uniform_candidates(experiment):
        stages_have_two = given.pp <= experiment.model.num_layers // 2
        if given.options.cp > 1 or given.virtual_stages > 1 or not stages_have_two:
            continue
        candidate = with_kind(with_zero(given, NO_ZERO), NO_RECOMPUTE)
        plain = Strategy.uniform(candidate, even_bounds(experiment.model.num_layers, given.pp))
        found = with_recompute(cost_model, plain)
        each = []
        for own in recompute_choices(experiment):
            costs = cost_model.costs(with_kind(candidate, own))
            for memory_scale in (safe_memory_fraction(experiment.constants), 1.0):
                bounds = best_bounds(experiment, costs, memory_scale=memory_scale)
                strategy = Strategy.uniform(with_kind(candidate, own), bounds)
                each.append(cost_model.estimate_from(costs, strategy))
        able = [estimate for estimate in each if estimate.feasible]
        assert found.feasible == bool(able)
        if able:
            best = min(able, key=speed)
            assert is_risky(found) == is_risky(best)
            assert found.iteration_time_s <= best.iteration_time_s * (1 + 1e-9)
            fewest = next(estimate for estimate in able if is_risky(estimate) == is_risky(best))
            more += fewest.iteration_time_s > best.iteration_time_s * (1 + 1e-9)
            safer += is_risky(able[0]) and not is_risky(best)
    assert more or name == "even"
    assert safer


@pytest.mark.parametrize("name", ["tight", "tighter", "even"])
@pytest.mark.parametrize("memory_scale", [1.0, 0.97])
def test_fewest_blocks_are_found_as_if_each_number_were_tried(
    name: str, memory_scale: float
) -> None:
    planner = AmpRayPlanner(experiment=case(name))
    found = []
    for given in uniform_candidates(planner.experiment)[::5]:
        if given.options.cp > 1 or given.pp > planner.experiment.model.num_layers // 2:
            continue
        candidate = with_zero(given, NO_ZERO)
        search = RecomputeSearch(
            cost_model=planner.cost_model,
            stages=PlacedStages.of_candidate(candidate, range(candidate.num_devices)),
            memory_scale=memory_scale,
        )
        settings = recompute_choices(planner.experiment)
        among = [setting for setting in settings if setting.kind == "full"]
        memory = search.memory(Recompute(kind="full"))
        wanted = next((own for own in among if search.fits(memory, own)), None)
        assert search.first_that_fits(among) == wanted
        found.append(wanted and wanted.layers)
    assert len(set(found)) > 2
