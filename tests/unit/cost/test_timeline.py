"""A predicted timeline ends when the estimate does, and does what the lists say."""

from dataclasses import replace
from itertools import pairwise

import pytest

from amp_ray.cost.instructions import Schedule
from amp_ray.cost.model import CostModel
from amp_ray.cost.timeline import predicted_timeline
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.search.rows import link_records, stage_records
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.strategy import Strategy
from support.experiments import small_experiment
from support.pipelines import passes_of


def strategy(pp: int, *, tp: int = 1, dp: int = 1, **others: object) -> Strategy:
    candidate = Candidate(
        micro_batch_size=2,
        options=StageOptions(tp=tp, dp=dp),
        pp=pp,
        num_micro_batches=4,
        **others,  # type: ignore[arg-type]
    )
    num_chunks = pp * candidate.virtual_stages
    bounds = tuple(9 * index // num_chunks for index in range(num_chunks + 1))
    return Strategy.uniform(candidate, bounds)


@pytest.mark.parametrize("runtime", ["deepspeed", "torch"])
@pytest.mark.parametrize(("pp", "tp", "dp"), [(1, 2, 2), (2, 2, 1), (4, 1, 1), (2, 1, 2)])
def test_it_ends_when_the_estimate_does(runtime: str, pp: int, tp: int, dp: int) -> None:
    experiment = replace(small_experiment(), traits=RUNTIMES[runtime])
    model, given = CostModel(experiment=experiment), strategy(pp, tp=tp, dp=dp)
    timeline = predicted_timeline(model, given)
    end_s = max(each.end_s for order in timeline for each in order)
    assert end_s == pytest.approx(model.estimate(given).iteration_time_s, rel=1e-9)
    lists = Schedule(pp=pp, num_slices=(1,) * 4).lists()
    assert passes_of([tuple(each.instruction for each in order) for order in timeline]) == (
        passes_of(lists)
    )
    for order in timeline:
        passes = [each for each in order if each.instruction.peer is None]
        assert all(one.end_s <= two.begin_s + 1e-12 for one, two in pairwise(passes))


def test_chunks_and_slices_have_timelines_too() -> None:
    experiment = replace(small_experiment(), traits=RUNTIMES["torch"])
    model = CostModel(experiment=experiment)
    sliced = replace(strategy(2), token_slices=((2, (64, 64)),))
    for given in (strategy(2, virtual_stages=2), sliced):
        timeline = predicted_timeline(model, given)
        end_s = max(each.end_s for order in timeline for each in order)
        assert end_s == pytest.approx(model.estimate(given).iteration_time_s, rel=1e-9)


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_ranks_that_divide_sequences_have_a_timeline(virtual_stages: int) -> None:
    experiment = replace(small_experiment(), traits=RUNTIMES["megatron-core"])
    model, given = CostModel(experiment=experiment), strategy(2, virtual_stages=virtual_stages)
    options = replace(given.stages[0].options, cp=2)
    stages = tuple(replace(stage, options=options) for stage in given.stages)
    given = replace(given, stages=stages, placement=(0, 1, 2, 3))
    estimate, timeline = model.estimate(given), predicted_timeline(model, given)
    end_s = max(each.end_s for order in timeline for each in order)
    # With chunks, messages of both directions that cross together count one after the other.
    assert end_s >= estimate.iteration_time_s * (1 - 1e-9)
    assert end_s <= estimate.iteration_time_s * (1.0 + 0.5 * (virtual_stages - 1) + 1e-9)
    records = stage_records(model, estimate)
    assert [record["nodes"] for record in records] == [["node0"], ["node1"]]
    assert sum(record["is_bottleneck"] for record in records) == 1
    whats = [record["what"] for record in link_records(model, given)]
    assert whats == ["activations and gradients", "data parallel groups"]
