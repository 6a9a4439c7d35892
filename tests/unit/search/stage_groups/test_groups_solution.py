from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Infeasible
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.effort import SearchEffort
from amp_ray.search.stage_groups import (
    NO_GROUPS,
    DeviceGroups,
    groups_solution,
    objective_s,
    plan_stage_groups,
    solve_groups,
)
from amp_ray.search.stage_groups.group_options import (
    all_shares,
    split_by_speed,
    split_into_sizes,
    within_pieces,
)
from amp_ray.search.stage_groups.groups_problem import BestGroups, GroupsProblem, best_groups
from amp_ray.strategies.candidate import GroupsCandidate, StageOptions
from amp_ray.strategies.recompute import FULL
from support.checked import as_estimate
from support.experiments import experiment_from

TWO_KINDS = """\
name: two kinds
model: {family: gpt2, num_layers: 8, hidden_size: 512, num_heads: 8, sequence_length: 256,
        vocab_size: 2048}
cluster:
  nodes:
    - {count: 2, device: A100-40, slots: 4, intra_gbit_per_s: 1600, inter_gbit_per_s: 400}
    - {count: 2, device: T4, slots: 4, intra_gbit_per_s: 50, inter_gbit_per_s: 50}
global_batch_size: 16
"""


@pytest.fixture(scope="module")
def two_kinds() -> Experiment:
    """Sixteen devices: kinds are taken one after another."""
    return experiment_from(TWO_KINDS)


def groups_of(experiment: Experiment) -> DeviceGroups:
    return DeviceGroups(cost_model=CostModel(experiment=experiment))


def with_memory(experiment: Experiment, memory_bytes: int) -> Experiment:
    nodes = tuple(
        replace(node, device=replace(node.device, memory_bytes=memory_bytes))
        for node in experiment.cluster.nodes
    )
    return replace(experiment, cluster=replace(experiment.cluster, nodes=nodes))


def candidate(experiment: Experiment, size: int) -> GroupsCandidate:
    count = experiment.global_batch_size // size
    return GroupsCandidate(micro_batch_size=size, num_micro_batches=count)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_the_best_plan_is_proven_on_sixteen_devices(two_kinds: Experiment, size: int) -> None:
    groups = groups_of(two_kinds)
    solution = solve_groups(groups, candidate(two_kinds, size))
    assert solution.value_s == pytest.approx(solution.lower_bound_s, rel=1e-9)
    assert objective_s(groups, solution.leaders[0]) == pytest.approx(solution.value_s, rel=1e-9)


@pytest.mark.parametrize("few", [1, 40])
def test_one_stage_of_all_devices_is_a_plan_however_few_groups_are_tried(
    two_kinds: Experiment, few: int
) -> None:
    limits = replace(two_kinds.limits, max_pp=1, idle_devices=False)
    experiment = replace(two_kinds, limits=limits)
    effort = SearchEffort(max_counted_choices=1, few_neighbours=few, max_groups_in_any_order=0)
    groups = DeviceGroups(cost_model=CostModel(experiment=experiment), effort=effort)
    result = as_estimate(plan_stage_groups(groups, candidate(experiment, 16)))
    assert sorted(result.strategy.placement) == list(range(16))


def test_a_plan_that_is_uniform_is_one(two_kinds: Experiment) -> None:
    groups = groups_of(two_kinds)
    result = as_estimate(plan_stage_groups(groups, candidate(two_kinds, 16)))
    launchable = groups.cost_model.with_columns(result).launchable
    assert result.strategy.is_uniform == launchable


def test_bounds_are_honest_where_not_all_plans_are_looked_at(two_kinds: Experiment) -> None:
    given = candidate(two_kinds, 4)
    best = solve_groups(groups_of(two_kinds), given)
    little = SearchEffort(few_neighbours=20, max_neighbours=40, max_boxes=2, max_relaxed_boxes=1)
    hasty = solve_groups(replace(groups_of(two_kinds), effort=little), given)
    assert best.value_s is not None
    assert hasty.value_s is not None
    assert hasty.lower_bound_s is not None
    assert hasty.lower_bound_s <= best.value_s * (1 + 1e-9)
    assert best.value_s <= hasty.value_s * (1 + 1e-9)


def test_few_choices_are_tried_first_only_where_states_count_stages(
    two_kinds: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved = []

    def spy(problem: GroupsProblem, *, upper_bound_s: float) -> BestGroups:
        solved.append((problem.counted, len(problem.choices.edge)))
        return best_groups(problem, upper_bound_s=upper_bound_s)

    monkeypatch.setattr(groups_solution, "best_groups", spy)
    # so little memory that the best plan of the problem that counts no stages does not fit
    tight = with_memory(two_kinds, 2_800_000_000)
    hasty = replace(groups_of(tight), effort=SearchEffort(max_counted_choices=0))
    solution = solve_groups(hasty, candidate(tight, 4))
    assert [counted for counted, _ in solved] == [False, True, True]
    *_, (_, num_first), (_, num_remaining) = solved
    assert num_remaining < num_first
    assert solution.value_s == solve_groups(groups_of(tight), candidate(tight, 4)).value_s


TWO_DEVICES = """\
name: two devices
model: {family: gpt2, num_layers: 4, hidden_size: 512, num_heads: 8, sequence_length: 256,
        vocab_size: 256}
cluster:
  nodes:
    - {count: 1, device: A100-40, slots: 1, intra_gbit_per_s: 8000, inter_gbit_per_s: 8000}
    - {count: 1, device: T4, slots: 1, intra_gbit_per_s: 8000, inter_gbit_per_s: 8000}
global_batch_size: 16
"""


def test_stages_that_only_fit_with_more_layers_are_left_out() -> None:
    plain = experiment_from(TWO_DEVICES)
    # what leaves the third layer fills a device; a stage with the next one sends little
    layers = list(plain.model.layers)
    layers[2] = replace(layers[2], output_elements=40 * layers[2].output_elements)
    large = replace(plain, model=replace(plain.model, layers=tuple(layers)))
    groups = groups_of(with_memory(large, 3_100_000_000))
    again = replace(candidate(plain, 8), options=StageOptions(tp=1, dp=1, recompute=FULL))
    solution = solve_groups(groups, again)
    first = groups.cost_model.estimate(solution.leaders[0])
    cuts = [
        groups.cost_model.estimate(first.strategy.with_bounds((0, end, 7))) for end in range(1, 7)
    ]
    assert [plan.feasible for plan in cuts] == [True, True, False, True, False, False]
    fastest = min((plan for plan in cuts if plan.feasible), key=lambda plan: plan.iteration_time_s)
    assert first == fastest


def test_a_candidate_that_fits_nowhere_tells_what_it_needs(two_kinds: Experiment) -> None:
    small = with_memory(two_kinds, 10**9)
    result = as_estimate(plan_stage_groups(groups_of(small), candidate(small, 4)))
    assert [reason.kind for reason in result.reasons] == ["out of memory"]
    assert result.lower_bound_s is None


def test_limits_that_leave_no_group_are_told(two_kinds: Experiment) -> None:
    limits = replace(two_kinds.limits, micro_batch_sizes=(3,))
    given = replace(two_kinds, limits=limits)
    result = plan_stage_groups(groups_of(given), candidate(given, 4))
    assert isinstance(result, Infeasible)
    assert result.reason.kind == NO_GROUPS


def test_tensor_parallel_groups_span_nodes_only_where_allowed(two_kinds: Experiment) -> None:
    limits = replace(two_kinds.limits, min_tp=8, tp_across_nodes=True)
    given = replace(two_kinds, limits=limits)
    result = as_estimate(plan_stage_groups(groups_of(given), candidate(given, 4)))
    assert {stage.options.tp for stage in result.strategy.stages} == {8}
    inside = replace(given, limits=replace(given.limits, min_tp=8, tp_across_nodes=False))
    refused = plan_stage_groups(groups_of(inside), candidate(inside, 4))
    assert isinstance(refused, Infeasible)


def test_without_a_size_that_is_small_enough_there_are_no_shares() -> None:
    assert split_into_sizes(2, [], [[], []]) == ()
    assert split_into_sizes(2, [4], [[1.0], [1.0]]) == ()


def test_a_rank_gets_one_sample_however_slow_it_is() -> None:
    assert split_by_speed(4, [1, 2], [1000.0, 1.0]) == (2, 2)


def test_ranks_of_a_piece_share_evenly() -> None:
    assert within_pieces((7, 2), [3, 1]) == (3, 2, 2, 2)


def test_all_splits_leave_every_rank_a_sample() -> None:
    assert all_shares(4, [2, 1], 16) == [(1, 1, 2), (2, 1, 1)]


def test_too_many_splits_are_not_offered() -> None:
    assert all_shares(18, [1, 1], 16) == []
    assert len(all_shares(17, [1, 1], 16)) == 16
