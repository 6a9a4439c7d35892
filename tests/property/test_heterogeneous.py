import math
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.search.effort import EFFORT
from amp_ray.search.stage_groups import DeviceGroups, objective_s, plan_stage_groups, solve_groups
from amp_ray.search.stage_groups.group_options import all_shares, split_by_speed
from amp_ray.strategies.candidate import Candidate, GroupsCandidate, StageOptions
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE
from amp_ray.strategies.zero import Zero
from support.better_nodes import BETTER
from support.examples import examples
from support.heterogeneous_oracle import PlanOracle
from support.placement_oracle import random_experiment
from support.wide_plans import random_wide_plan, wide_plans

ROUNDING = 1e-9


@st.composite
def cases(
    draw: st.DrawFn, sizes: tuple[int, ...] = (2, 3, 4, 5)
) -> tuple[CostModel, GroupsCandidate]:
    """A small random cluster at the limit of its memory, and a micro-batch."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    drawn = random_experiment(rng, draw(st.sampled_from(sizes)))
    traits = RUNTIMES[draw(st.sampled_from(sorted(RUNTIMES)))]
    experiment = replace(
        drawn,
        traits=replace(traits, context_bytes=drawn.traits.context_bytes, launch_limit_s=None),
    )
    size = draw(st.sampled_from([1, 2, 4]))
    candidate = GroupsCandidate(
        micro_batch_size=size,
        num_micro_batches=experiment.global_batch_size // size,
        options=StageOptions(
            tp=1,
            dp=1,
            recompute=draw(st.sampled_from([NO_RECOMPUTE, FULL])),
            zero=Zero(stage=draw(st.sampled_from([0, 1]))),
        ),
    )
    return CostModel(experiment=experiment), candidate


def value_of(cost_model: CostModel, candidate: GroupsCandidate) -> float:
    """Give the best objective, infinite where nothing fits."""
    value_s = solve_groups(DeviceGroups(cost_model=cost_model), candidate).value_s
    return math.inf if value_s is None else value_s


def on(cost_model: CostModel, cluster: Cluster) -> CostModel:
    """Take the experiment to another cluster."""
    return CostModel(experiment=replace(cost_model.experiment, cluster=cluster))


@examples(40)
@given(case=cases())
def test_search_equals_brute_force(case: tuple[CostModel, GroupsCandidate]) -> None:
    cost_model, candidate = case
    solution = solve_groups(DeviceGroups(cost_model=cost_model), candidate)
    best_s, best = PlanOracle(cost_model=cost_model, candidate=candidate).best()
    if best is None:
        assert solution.value_s is None
        return
    assert solution.value_s == pytest.approx(best_s, rel=ROUNDING)
    assert solution.lower_bound_s is not None
    assert solution.lower_bound_s <= best_s * (1 + ROUNDING)
    assert objective_s(DeviceGroups(cost_model=cost_model), best) == pytest.approx(
        best_s, rel=ROUNDING
    )
    assert objective_s(DeviceGroups(cost_model=cost_model), solution.leaders[0]) == pytest.approx(
        best_s, rel=ROUNDING
    )


@examples(40)
@given(case=cases((2, 4, 6, 8, 12)))
def test_plans_fit_and_use_every_device_once_at_most(
    case: tuple[CostModel, GroupsCandidate],
) -> None:
    cost_model, candidate = case
    result = plan_stage_groups(DeviceGroups(cost_model=cost_model), candidate)
    assert isinstance(result, Estimate)
    strategy, cluster = result.strategy, cost_model.experiment.cluster
    assert strategy.global_batch_size == cost_model.experiment.global_batch_size
    assert len(set(strategy.placement)) == len(strategy.placement)
    for index, stage in enumerate(strategy.stages):
        devices = np.array(strategy.devices(index)).reshape(stage.options.dp, stage.options.tp)
        nodes = np.array(cluster.node_of_device)[devices]
        assert (nodes == nodes[:, :1]).all()
    if result.feasible:
        assert overflow(cost_model, result) == []


def overflow(cost_model: CostModel, result: Estimate) -> list[tuple[int, int]]:
    """Name the ranks that need more than their device has, each asked for on its own."""
    strategy, cluster = result.strategy, cost_model.experiment.cluster
    found = []
    for index, (stage, (first, end)) in enumerate(
        zip(strategy.stages, pairwise(strategy.bounds), strict=True)
    ):
        shares = stage.shares or (strategy.micro_batch_size,) * stage.options.dp
        for place, device in enumerate(strategy.devices(index)):
            alike = Candidate(
                micro_batch_size=shares[place // stage.options.tp],
                options=stage.options,
                pp=strategy.pp,
                num_micro_batches=strategy.num_micro_batches,
            )
            peak = cost_model.memory(alike).peak(index, first, end)
            if peak > cluster.nodes[cluster.node_of_device[device]].device.memory_bytes:
                found.append((index, place))
    return found


@examples(40)
@given(case=cases((2, 4, 6, 8)))
def test_the_lower_bound_is_below_the_objective(case: tuple[CostModel, GroupsCandidate]) -> None:
    cost_model, candidate = case
    solution = solve_groups(DeviceGroups(cost_model=cost_model), candidate)
    if solution.value_s is None or solution.lower_bound_s is None:
        assert not any(cost_model.estimate(leader).feasible for leader in solution.leaders)
        return
    assert solution.lower_bound_s <= solution.value_s
    leader = solution.leaders[0]
    assert objective_s(DeviceGroups(cost_model=cost_model), leader) == pytest.approx(
        solution.value_s, rel=ROUNDING
    )


@settings(max_examples=5)  # an oracle that enumerates plans: seconds each
@given(case=cases((2, 3)))
def test_no_plan_at_all_undercuts_the_bound_of_a_row(
    case: tuple[CostModel, GroupsCandidate],
) -> None:
    cost_model, candidate = case
    groups = DeviceGroups(cost_model=cost_model)
    bound_s = groups.least_s(candidate)
    for plan in islice(wide_plans(cost_model, candidate), 2_000):
        assert bound_s <= cost_model.estimate(plan).iteration_time_s * (1 + ROUNDING)


@examples(40)
@given(case=cases((4, 6, 8, 12)), seed=st.integers(0, 2**32 - 1))
def test_no_plan_drawn_undercuts_the_bound_of_a_row(
    case: tuple[CostModel, GroupsCandidate], seed: int
) -> None:
    cost_model, candidate = case
    groups, rng = DeviceGroups(cost_model=cost_model), np.random.default_rng(seed)
    bound_s = groups.least_s(candidate)
    for _ in range(20):
        plan = random_wide_plan(rng, cost_model, candidate)
        if plan is not None:
            took_s = min(cost_model.estimate(plan).iteration_time_s, objective_s(groups, plan))
            assert bound_s <= took_s * (1 + ROUNDING)


@examples(40)
@given(case=cases(), data=st.data())
def test_a_better_node_never_gives_a_worse_best(
    case: tuple[CostModel, GroupsCandidate], data: st.DataObject
) -> None:
    cost_model, candidate = case
    nodes = list(cost_model.experiment.cluster.nodes)
    index = data.draw(st.integers(0, len(nodes) - 1))
    better = data.draw(st.sampled_from(BETTER))
    nodes[index] = better(nodes[index])
    cluster = replace(cost_model.experiment.cluster, nodes=tuple(nodes))
    before_s = value_of(cost_model, candidate)
    assert value_of(on(cost_model, cluster), candidate) <= before_s * (1 + ROUNDING)


@examples(40)
@given(case=cases((2, 4, 6)), data=st.data())
def test_the_order_in_which_kinds_are_listed_does_not_matter(
    case: tuple[CostModel, GroupsCandidate], data: st.DataObject
) -> None:
    cost_model, candidate = case
    cluster = cost_model.experiment.cluster
    order = data.draw(st.permutations(range(len(cluster.nodes))))
    shuffled = on(cost_model, cluster.part(order))
    assert value_of(shuffled, candidate) == pytest.approx(
        value_of(cost_model, candidate), rel=ROUNDING
    )


@given(
    ranks=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    more=st.integers(0, 40),
    data=st.data(),
)
def test_samples_by_speed_are_done_first(ranks: list[int], more: int, data: st.DataObject) -> None:
    speeds = [data.draw(st.floats(0.1, 10.0)) for _ in ranks]
    samples = sum(ranks) + more
    split = split_by_speed(samples, ranks, speeds)
    assert sum(split) == samples
    done = max(
        -(-held // count) / speed for held, count, speed in zip(split, ranks, speeds, strict=True)
    )
    for shares in all_shares(samples, ranks, EFFORT.max_splits):
        fullest, first = [], 0
        for count, speed in zip(ranks, speeds, strict=True):
            fullest.append(shares[first] / speed)
            first += count
        assert done <= max(fullest) * (1 + ROUNDING)


@examples(40)
@given(case=cases((4, 6)), most=st.sampled_from([1, 2]))
def test_limits_of_the_search_hold(case: tuple[CostModel, GroupsCandidate], most: int) -> None:
    cost_model, candidate = case
    experiment = cost_model.experiment
    limits = replace(experiment.limits, max_pp=most, max_tp=2, max_dp=most)
    experiment = replace(experiment, limits=limits)
    result = plan_stage_groups(DeviceGroups(cost_model=CostModel(experiment=experiment)), candidate)
    assert isinstance(result, Estimate)
    if result.feasible:
        assert result.strategy.pp <= most
    assert max(stage.options.tp for stage in result.strategy.stages) <= 2
    assert max(stage.options.dp for stage in result.strategy.stages) <= most
