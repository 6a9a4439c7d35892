from dataclasses import replace

import pytest

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtimes.traits import NO_RUNTIME
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy

FORWARD_AND_BACKWARD = 3.0
"""Seconds of one toy block and sample."""


def strategy(*stages: Stage, placement: tuple[int, ...], samples: int, count: int = 1) -> Strategy:
    return Strategy(
        stages=stages, micro_batch_size=samples, num_micro_batches=count, placement=placement
    )


def test_a_stage_waits_for_the_rank_with_the_most_samples(experiment: Experiment) -> None:
    stage = Stage(first_layer=0, end_layer=4, options=StageOptions(tp=1, dp=2), shares=(3, 1))
    estimate = CostModel(experiment=experiment).estimate(
        strategy(stage, placement=(0, 1), samples=4)
    )
    assert estimate.breakdown is not None
    assert estimate.breakdown.compute_s == pytest.approx(4 * 3 * FORWARD_AND_BACKWARD)


def test_a_slow_device_with_fewer_samples_does_not_hold_the_stage_up(
    experiment: Experiment,
) -> None:
    first, second = experiment.cluster.nodes
    quick = replace(second.device, name="quick", memory_bytes_per_s=3000)
    nodes = (first, replace(second, device=quick))
    mixed = replace(experiment, cluster=Cluster(nodes=nodes))
    stage = Stage(first_layer=0, end_layer=4, options=StageOptions(tp=1, dp=2), shares=(1, 3))
    even = replace(stage, shares=(2, 2))
    model = CostModel(experiment=mixed)
    by_speed, alike = (
        model.estimate(strategy(own, placement=(0, 2), samples=4)).breakdown
        for own in (stage, even)
    )
    assert by_speed is not None
    assert alike is not None
    assert by_speed.compute_s == pytest.approx(alike.compute_s / 2)


def test_memory_is_judged_by_the_rank_that_is_closest_to_its_limit(
    experiment: Experiment,
) -> None:
    first, second = experiment.cluster.nodes
    small = replace(second.device, name="small", memory_bytes=first.device.memory_bytes // 4)
    nodes = (first, replace(second, device=small))
    mixed = replace(experiment, cluster=Cluster(nodes=nodes))
    model = CostModel(experiment=mixed)
    stage = Stage(first_layer=0, end_layer=4, options=StageOptions(tp=1, dp=2), shares=(1, 3))
    estimate = model.estimate(strategy(stage, placement=(0, 2), samples=4))
    assert list(estimate.memory_limit_bytes) == [small.memory_bytes]
    turned = replace(stage, shares=(3, 1))
    other = model.estimate(strategy(turned, placement=(0, 2), samples=4))
    assert other.peak_memory_bytes[0] != estimate.peak_memory_bytes[0]


def test_more_micro_batches_in_flight_need_more_memory(experiment: Experiment) -> None:
    stages = (
        Stage(first_layer=0, end_layer=2, options=StageOptions(tp=1, dp=2), shares=(1, 1)),
        Stage(first_layer=2, end_layer=4, options=StageOptions(tp=1, dp=1), shares=(2,)),
    )
    model = CostModel(experiment=experiment)
    one, two = (
        model.estimate(strategy(*stages, placement=(0, 1, 2), samples=2, count=count))
        for count in (1, 2)
    )
    assert one.peak_memory_bytes[0] < two.peak_memory_bytes[0]
    assert one.peak_memory_bytes[1] == two.peak_memory_bytes[1]


def test_stages_of_different_dp_are_not_launchable_and_say_why(experiment: Experiment) -> None:
    stages = (
        Stage(first_layer=0, end_layer=2, options=StageOptions(tp=1, dp=2), shares=(1, 1)),
        Stage(first_layer=2, end_layer=4, options=StageOptions(tp=2, dp=1), shares=(2,)),
    )
    model = CostModel(experiment=experiment)
    plan = strategy(*stages, placement=(0, 1, 2, 3), samples=2)
    estimate = model.with_columns(model.estimate(plan))
    assert estimate.feasible
    assert not estimate.launchable
    assert NO_RUNTIME in estimate.warnings


def test_a_rank_on_a_device_that_does_not_exist_is_refused(experiment: Experiment) -> None:
    stage = Stage(first_layer=0, end_layer=4, options=StageOptions(tp=1, dp=2), shares=(3, 1))
    with pytest.raises(ValueError, match="the cluster has 4 devices"):
        CostModel(experiment=experiment).estimate(strategy(stage, placement=(0, 4), samples=4))
