from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.stage_groups import DeviceGroups, plan_stage_groups
from amp_ray.strategies.candidate import GroupsCandidate, StageOptions
from amp_ray.strategies.strategy import Stage, Strategy
from support.experiments import experiment_from

ALIKE = """\
name: alike
model: {family: gpt2, num_layers: 8, hidden_size: 1024, num_heads: 8, sequence_length: 256,
        vocab_size: 2048}
cluster:
  nodes:
    - {count: 2, device: A100-40, slots: 4, intra_gbit_per_s: 1600, inter_gbit_per_s: 20}
global_batch_size: 64
"""


def least_s(experiment: Experiment, size: int) -> float:
    groups = DeviceGroups(cost_model=CostModel(experiment=experiment))
    count = experiment.global_batch_size // size
    given = GroupsCandidate(micro_batch_size=size, num_micro_batches=count)
    return groups.least_s(given)


@pytest.fixture(scope="module")
def alike() -> Experiment:
    """Eight equal devices."""
    return experiment_from(ALIKE)


def test_one_device_is_bounded_by_what_it_takes(alike: Experiment) -> None:
    node = replace(alike.cluster.nodes[0], num_slots=1)
    alone = replace(alike, cluster=replace(alike.cluster, nodes=(node,)))
    stage = Stage(first_layer=0, end_layer=alike.model.num_layers, options=StageOptions(tp=1, dp=1))
    plan = Strategy(stages=(stage,), micro_batch_size=8, num_micro_batches=8, placement=(0,))
    took_s = CostModel(experiment=alone).estimate(plan).iteration_time_s
    assert 0.9 * took_s < least_s(alone, 8) <= took_s


def test_fewer_devices_take_longer(alike: Experiment) -> None:
    node = replace(alike.cluster.nodes[0], num_slots=2)
    fewer = replace(alike, cluster=replace(alike.cluster, nodes=(node,)))
    assert least_s(alike, 32) < least_s(fewer, 32) < 5 * least_s(alike, 32)


def test_gradients_between_nodes_count(alike: Experiment) -> None:
    nodes = tuple(
        replace(node, inter=replace(node.inter, bandwidth_bytes_per_s=1e12))
        for node in alike.cluster.nodes
    )
    quick = replace(alike, cluster=replace(alike.cluster, nodes=nodes))
    assert least_s(quick, 64) < least_s(alike, 64)


def test_fewer_stages_never_lower_the_bound(alike: Experiment) -> None:
    given = replace(alike, limits=replace(alike.limits, max_pp=2))
    assert least_s(alike, 8) <= least_s(given, 8)


def test_rows_have_the_bound_and_plans_that_do_not_fit_none(alike: Experiment) -> None:
    groups = DeviceGroups(cost_model=CostModel(experiment=alike))
    given = GroupsCandidate(micro_batch_size=8, num_micro_batches=8)
    result = plan_stage_groups(groups, given)
    assert isinstance(result, Estimate)
    assert result.lower_bound_s == least_s(alike, 8)
    nodes = tuple(
        replace(node, device=replace(node.device, memory_bytes=10**9))
        for node in alike.cluster.nodes
    )
    small = CostModel(experiment=replace(alike, cluster=replace(alike.cluster, nodes=nodes)))
    nothing = plan_stage_groups(DeviceGroups(cost_model=small), given)
    assert isinstance(nothing, Estimate)
    assert nothing.lower_bound_s is None
