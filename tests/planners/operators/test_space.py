"""Plans of operators by our own cost model: as good as the best of all of them."""

import json
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from amp_ray.cost.estimate import Estimate, Infeasible
from amp_ray.cost.verdict import NOT_SEARCHED
from amp_ray.inputs.experiment import Experiment
from amp_ray.planners.aceso2024.plan_file import aceso_plan_text, read_aceso_plan
from amp_ray.planners.aceso2024.planner import Aceso2024Planner
from amp_ray.planners.operators.cost import SLOWER
from amp_ray.planners.operators.partition.mixed import MOST_MIXES
from amp_ray.planners.operators.partition.several import KEPT_WITHIN
from amp_ray.planners.operators.planner import OperatorPlanner
from amp_ray.search.space import group_candidates
from amp_ray.strategies.candidate import GroupsCandidate
from amp_ray.strategies.strategy import Strategy
from amp_ray.units import GIB
from support.block_plans import block_experiment, block_plans
from support.checked import as_estimate
from support.mixed_operators import AcesoMixedOracle, MixedOracle, OwnMixedOracle, mixed_experiment
from support.operator_space import tiny_experiment, with_memory

SEEDS = st.integers(0, 2**32 - 1)


def best_plan(experiment: Experiment) -> Estimate | None:
    """Return the fastest plan of all micro-batch sizes."""
    planner = OperatorPlanner(experiment=experiment)
    results = [planner.plan(candidate) for candidate in group_candidates(experiment)]
    plans = [result for result in results if isinstance(result, Estimate)]
    return min(plans, key=lambda plan: plan.iteration_time_s, default=None)


def check_best(experiment: Experiment) -> None:
    """Check that a plan is found that fits and takes the least, and that its bound says so."""
    oracles = (
        OwnMixedOracle(experiment=experiment, candidate=candidate)
        for candidate in group_candidates(experiment)
    )
    best_s = min(oracle.best()[0] for oracle in oracles)
    best_s += experiment.constants.host_s_per_iteration
    plan = best_plan(experiment)
    if plan is None:
        assert best_s == math.inf
        return
    assert plan.feasible
    assert plan.iteration_time_s == pytest.approx(best_s, rel=1e-9)
    assert plan.lower_bound_s == pytest.approx(best_s, rel=1e-9)


@settings(max_examples=25)
@given(seed=SEEDS)
def test_no_plan_of_operators_is_better(seed: int) -> None:
    check_best(tiny_experiment(seed))


@settings(max_examples=30)
@given(
    seed=SEEDS,
    recompute=st.sampled_from(["full", "full", "selective", "none", "auto"]),
    memory_gib=st.floats(2.5, 3.0),
    short=st.integers(0, 1),
)
def test_a_plan_that_just_fits_is_found(
    seed: int, recompute: str, memory_gib: float, short: int
) -> None:
    """Memory that the best plan of some memory takes to the byte, or a byte less."""
    most_operators = 4 if recompute == "auto" else 9
    experiment = tiny_experiment(seed, most_operators, recompute=recompute)
    plan = best_plan(with_memory(experiment, int(memory_gib * GIB)))
    assume(plan is not None)
    assert plan is not None
    check_best(with_memory(experiment, math.ceil(max(plan.peak_memory_bytes)) - short))


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
    """All plans, more mixes than are looked at where there are many; by either cost model."""
    experiment = mixed_experiment(seed, published=published)
    planner: Aceso2024Planner | OperatorPlanner = OperatorPlanner(experiment=experiment)
    oracle_of: type[MixedOracle] = OwnMixedOracle
    host_s = experiment.constants.host_s_per_iteration
    if published:
        planner, oracle_of = Aceso2024Planner(experiment=experiment), AcesoMixedOracle
        host_s = 0.0
    candidates = planner.candidates().required
    least_s, bounds_s, slower_s, all_searched = math.inf, [], [], True
    for candidate in candidates:
        assert isinstance(candidate, GroupsCandidate)
        oracle = oracle_of(experiment=experiment, candidate=candidate)
        best_s, best = oracle.best()
        best_s += host_s
        least_s = min(least_s, best_s)
        if best is not None:
            scored = as_estimate(planner.score(best))
            assert scored.feasible
            assert scored.iteration_time_s == pytest.approx(best_s, rel=1e-9)
            check_file(best, experiment)
        result = planner.plan(candidate)
        all_offered = oracle.num_mixes <= MOST_MIXES
        if isinstance(result, Infeasible):
            proven = result.reason.kind != NOT_SEARCHED
            assert best is None or not proven or result.reason.kind == SLOWER
            assert proven or not all_offered
            all_searched &= proven
            if result.reason.kind == SLOWER:
                slower_s.append(best_s)
            continue
        assert result.feasible
        assert result.lower_bound_s is not None
        assert result.lower_bound_s <= best_s * (1 + 1e-9)
        assert result.iteration_time_s >= best_s * (1 - 1e-9)
        assert not all_offered or result.iteration_time_s == pytest.approx(best_s, rel=1e-9)
        bounds_s.append(result.lower_bound_s)
        check_file(result.strategy, experiment)
    assert not all_searched or min(bounds_s, default=0.0) <= least_s * (1 + 1e-9)
    assert all(best_s - host_s > KEPT_WITHIN * (least_s - host_s) for best_s in slower_s)


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
                scored = as_estimate(planner.score(plan))
                best_s = min(best_s, scored.iteration_time_s if scored.feasible else math.inf)
        result = planner.plan(candidate)
        if best_s < math.inf:
            assert isinstance(result, Estimate)
            assert result.feasible
            assert result.iteration_time_s <= best_s * (1 + 1e-9)
            assert result.lower_bound_s == result.iteration_time_s
