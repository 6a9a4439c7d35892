"""Plans of operators by our own cost model: as good as the best of all of them."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ray.cost.estimate import Estimate, Infeasible
from amp_ray.cost.verdict import NOT_SEARCHED
from amp_ray.inputs.experiment import Experiment
from amp_ray.planners.aceso2024.plan_file import aceso_plan_text, read_aceso_plan
from amp_ray.planners.aceso2024.planner import Aceso2024Planner
from amp_ray.planners.operators.cost import SLOWER, OperatorCostModel
from amp_ray.planners.operators.partition.mixed import MOST_MIXES
from amp_ray.planners.operators.planner import OperatorPlanner
from amp_ray.search.space import group_candidates
from amp_ray.strategies.candidate import GroupsCandidate
from amp_ray.strategies.strategy import Strategy
from support.block_plans import block_experiment, block_plans
from support.mixed_operators import AcesoMixedOracle, MixedOracle, OwnMixedOracle, mixed_experiment
from support.operator_space import OperatorOracle, tiny_experiment, with_memory

SEEDS = st.integers(0, 2**32 - 1)


def best_plan(experiment: Experiment) -> Estimate | None:
    """Return the fastest plan of all micro-batch sizes."""
    planner = OperatorPlanner(experiment=experiment)
    results = [planner.plan(candidate) for candidate in group_candidates(experiment)]
    found = [result for result in results if isinstance(result, Estimate)]
    return min(found, key=lambda own: own.iteration_time_s, default=None)


Fronts = dict[int, list[tuple[float, float]]]
"""Peak and seconds of plans, by micro-batch."""


def fronts_of(experiment: Experiment) -> Fronts:
    """Return what all plans need and take, as far as no other undercuts both."""
    oracle = OperatorOracle(cost_model=OperatorCostModel(experiment=experiment))
    candidates = group_candidates(experiment)
    return {own.micro_batch_size: oracle.front(own) for own in candidates}


def check_best(experiment: Experiment, fronts: Fronts) -> None:
    """Check that a plan is found that fits and takes the least, and that its bound says so."""
    limit = experiment.cluster.nodes[0].device.memory_bytes
    points = (point for front in fronts.values() for point in front)
    best_s = min((seconds for peak, seconds in points if peak <= limit), default=math.inf)
    found = best_plan(experiment)
    if found is None:
        assert best_s == math.inf
        return
    assert found.feasible
    assert found.iteration_time_s == pytest.approx(best_s, rel=1e-9)
    assert found.lower_bound_s == pytest.approx(best_s, rel=1e-9)


@settings(max_examples=25)
@given(seed=SEEDS)
def test_no_plan_of_operators_is_better(seed: int) -> None:
    experiment = tiny_experiment(seed)
    check_best(experiment, fronts_of(experiment))


@settings(max_examples=30)
@given(
    seed=SEEDS,
    recompute=st.sampled_from(["full", "full", "selective", "none", "auto"]),
    which=st.floats(0, 1),
    short=st.integers(0, 1),
)
def test_a_plan_that_just_fits_is_found(
    seed: int, recompute: str, which: float, short: int
) -> None:
    """Memory that one of the plans takes to the byte, or a byte less."""
    most_operators = 4 if recompute == "auto" else 9
    experiment = tiny_experiment(seed, most_operators, recompute=recompute)
    fronts = fronts_of(experiment)
    peaks = sorted({math.ceil(peak) for front in fronts.values() for peak, _ in front})
    limit = peaks[round(which * (len(peaks) - 1))] - short
    check_best(with_memory(experiment, limit), fronts)


def check_file(plan: Strategy, experiment: Experiment) -> None:
    """Check that Aceso's file of a plan is legal by its rules and reads as the same plan."""
    record = json.loads(aceso_plan_text(plan, experiment))
    sizes, degrees = record["num_gpus"], ("model_parallel_size", "data_parallel_size")
    assert sum(sizes) == experiment.cluster.num_devices
    tps, dps = (record[f"{name}_of_each_op"] for name in degrees)
    bits = record["algo_of_each_op"], record["recompute_ops"]
    for stage, own in enumerate(zip(tps, dps, *bits, strict=True)):
        assert {len(column) for column in own} == {record["num_ops_in_each_stage"][stage]}
        for tp, dp, *flags in zip(*own, strict=True):
            assert tp * dp == sizes[stage]
            assert record["micro_batch_size"] % dp == 0
            assert set(flags) <= {0, 1}
    assert read_aceso_plan(record, file="plan.json", experiment=experiment) == plan


@settings(max_examples=40)
@given(seed=SEEDS, published=st.booleans())
def test_no_mix_of_operators_undercuts_the_bound(seed: int, *, published: bool) -> None:
    """All mixes, more than are looked at where there are many; by either cost model."""
    experiment = mixed_experiment(seed, published=published)
    planner: Aceso2024Planner | OperatorPlanner = OperatorPlanner(experiment=experiment)
    oracle_of: type[MixedOracle] = OwnMixedOracle
    host_s = experiment.constants.host_s_per_iteration
    if published:
        planner, oracle_of = Aceso2024Planner(experiment=experiment), AcesoMixedOracle
        host_s = 0.0
    candidates = planner.candidates().required
    least_s, bounds_s, all_searched = math.inf, [], True
    for candidate in candidates:
        assert isinstance(candidate, GroupsCandidate)
        oracle = oracle_of(experiment=experiment, candidate=candidate)
        best_s, best = oracle.best()
        best_s += host_s
        least_s = min(least_s, best_s)
        if best is not None:
            scored = planner.score(best)
            assert isinstance(scored, Estimate)
            assert scored.feasible
            assert scored.iteration_time_s == pytest.approx(best_s, rel=1e-9)
            check_file(best, experiment)
        found = planner.plan(candidate)
        all_offered = oracle.num_mixes <= MOST_MIXES
        if isinstance(found, Infeasible):
            proven = found.reason.kind != NOT_SEARCHED
            assert best is None or not proven or found.reason.kind == SLOWER
            assert proven or not all_offered
            all_searched &= proven
            continue
        assert found.feasible
        assert found.lower_bound_s is not None
        assert found.lower_bound_s <= best_s * (1 + 1e-9)
        assert found.iteration_time_s >= best_s * (1 - 1e-9)
        assert not all_offered or found.iteration_time_s == pytest.approx(best_s, rel=1e-9)
        bounds_s.append(found.lower_bound_s)
        check_file(found.strategy, experiment)
    assert not all_searched or min(bounds_s, default=0.0) <= least_s * (1 + 1e-9)


@settings(max_examples=8)
@given(seed=SEEDS, per_operator=st.booleans())
def test_candidates_are_planned_alike_in_any_order(seed: int, *, per_operator: bool) -> None:
    experiment = tiny_experiment(seed, per_operator=per_operator)
    candidates = group_candidates(experiment)
    planner = OperatorPlanner(experiment=experiment)
    together = [planner.plan(candidate) for candidate in candidates]
    for candidate, expected in reversed(list(zip(candidates, together, strict=True))):
        alone = OperatorPlanner(experiment=experiment).plan(candidate)
        assert repr(alone) == repr(expected)


@settings(max_examples=15)
@given(seed=SEEDS, more=st.floats(1.0, 1.3))
def test_more_memory_is_never_slower(seed: int, more: float) -> None:
    experiment = tiny_experiment(seed)
    roomy = with_memory(experiment, int(experiment.cluster.nodes[0].device.memory_bytes * more))
    before, after = best_plan(experiment), best_plan(roomy)
    if before is not None:
        assert after is not None
        assert after.iteration_time_s <= before.iteration_time_s * (1 + 1e-12)


@settings(max_examples=20)
@given(seed=SEEDS)
def test_no_plan_of_blocks_is_better(seed: int) -> None:
    experiment = block_experiment(seed, most_blocks=4)
    planner = OperatorPlanner(experiment=experiment)
    nodes = np.array(experiment.cluster.node_of_device)
    for candidate in group_candidates(experiment):
        best_s = math.inf
        for plan in block_plans(experiment, candidate):
            grids = [
                nodes[list(plan.devices(index))].reshape(stage.options.dp, stage.options.tp)
                for index, stage in enumerate(plan.stages)
            ]
            if all((grid == grid[:, :1]).all() for grid in grids):
                result = planner.score(plan)
                assert isinstance(result, Estimate)
                best_s = min(best_s, result.iteration_time_s if result.feasible else math.inf)
        found = planner.plan(candidate)
        if best_s < math.inf:
            assert isinstance(found, Estimate)
            assert found.feasible
            assert found.iteration_time_s <= best_s * (1 + 1e-9)
            assert found.lower_bound_s == found.iteration_time_s
