import pickle
from dataclasses import replace

import numpy as np
import pytest

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.columns import EXTRAPOLATED
from amp_ray.cost.estimate import Breakdown
from amp_ray.cost.model import CostModel
from amp_ray.cost.stages import PlacedStages
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.profile import Anchor, Profile
from amp_ray.runtimes.traits import NO_RUNTIME
from amp_ray.strategies.recompute import FULL
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from support.checked import grid_of, required
from support.experiments import small_experiment


def strategy(
    bounds: tuple[int, ...], placement: tuple[int, ...] | None = None, *, dp: int = 1, m: int = 4
) -> Strategy:
    candidate = grid_of(dp=dp, pp=len(bounds) - 1, num_micro_batches=m)
    return Strategy.uniform(candidate, bounds, placement)


def test_one_device_computes_and_updates(experiment: Experiment) -> None:
    model = CostModel(experiment=experiment)
    estimate = model.with_columns(model.estimate(strategy((0, 4))))
    # 4 micro-batches x 4 blocks x 3 s; 400 parameters x 12 bytes at 1000 B/s
    assert estimate.breakdown == Breakdown(compute_s=48.0, optimizer_s=4.8)
    assert estimate.iteration_time_s == pytest.approx(52.8)
    # 400 x 4 bytes of states, 400 kept, 300 at work
    assert estimate.peak_memory_bytes == (2300.0,)
    assert estimate.memory_limit_bytes == (10_000.0,)
    assert estimate.feasible
    assert estimate.warnings == ()


def test_a_model_that_has_priced_can_be_sent_to_another_process(experiment: Experiment) -> None:
    model = CostModel(experiment=experiment)
    estimate = model.estimate(strategy((0, 4)))
    sent = pickle.loads(pickle.dumps(model))  # noqa: S301 - to a worker
    assert sent.estimate(strategy((0, 4))) == estimate


def test_stages_on_two_nodes_send_between_them(experiment: Experiment) -> None:
    estimate = CostModel(experiment=experiment).estimate(strategy((0, 2, 4), (0, 2)))
    found = required(estimate.breakdown)
    assert found.compute_s == pytest.approx(24.0)
    assert found.bubble_s == pytest.approx(6.0)
    assert found.pipeline_p2p_s > 0
    assert found.optimizer_s == pytest.approx(2.4)
    assert estimate.iteration_time_s == pytest.approx(found.total_s)


def test_replicas_add_their_gradients(experiment: Experiment) -> None:
    inside = CostModel(experiment=experiment).estimate(strategy((0, 4), (0, 1), dp=2))
    assert inside.breakdown is not None
    assert inside.breakdown.gradient_sync_s == pytest.approx(1.0)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_iteration_may_take_what_it_is_estimated_to_and_no_less(
    experiment: Experiment, cut: int, dp: int
) -> None:
    model, cuts = CostModel(experiment=experiment), strategy((0, cut, 4), dp=dp)
    costs = model.stage_costs(PlacedStages.of_strategy(cuts))
    estimate = model.estimate_from(costs, cuts)
    time_s, found = estimate.iteration_time_s, estimate.breakdown
    assert found is not None
    assert model.may_take(costs, cuts.bounds, time_s)
    # by the step end, by the bubble, and by the busiest stage alone
    for lacking_s in (found.optimizer_s / 2, found.optimizer_s + found.bubble_s / 2, time_s / 2):
        assert not model.may_take(costs, cuts.bounds, time_s - lacking_s)


def test_host_time_counts_per_micro_batch_and_per_iteration(experiment: Experiment) -> None:
    constants = replace(experiment.constants, host_s_per_micro_batch=0.5, host_s_per_iteration=0.25)
    slow_host = replace(experiment, constants=constants)
    estimate = CostModel(experiment=slow_host).estimate(strategy((0, 4)))
    assert estimate.iteration_time_s == pytest.approx(52.8 + 4 * 0.5 + 0.25)


def test_default_placement_is_rank_order(experiment: Experiment) -> None:
    model = CostModel(experiment=experiment)
    candidate = grid_of(tp=2, pp=2, num_micro_batches=4)
    assert model.costs(candidate).stages.groups == [[0, 1], [2, 3]]


def test_a_model_with_other_input_starts_without_tables(experiment: Experiment) -> None:
    model = CostModel(experiment=experiment)
    before = model.estimate(strategy((0, 4)))
    slower = replace(experiment.constants, memory_efficiency=0.5)
    after = replace(model, experiment=replace(experiment, constants=slower))
    estimate = after.estimate(strategy((0, 4)))
    assert estimate.iteration_time_s == pytest.approx(2 * before.iteration_time_s)


def test_smallest_device_of_a_stage_limits_it(experiment: Experiment) -> None:
    first, second = experiment.cluster.nodes
    small = replace(second.device, name="small", memory_bytes=2_000)
    cluster = replace(experiment.cluster, nodes=(first, replace(second, device=small)))
    model = CostModel(experiment=replace(experiment, cluster=cluster))
    estimate = model.estimate(strategy((0, 4), (0, 2), dp=2))
    assert estimate.memory_limit_bytes == (2_000.0,)
    assert [reason.kind for reason in estimate.reasons] == ["out of memory"]
    assert estimate.failure_probability > 0.5


def test_warning_where_the_profile_is_extrapolated(experiment: Experiment) -> None:
    profile = Profile(source="test", tables={"toy": {(1, 2): Anchor(forward_s=np.ones(4))}})
    model = CostModel(experiment=replace(experiment, profile=profile))
    assert model.with_columns(model.estimate(strategy((0, 4)))).warnings == (EXTRAPOLATED,)


def test_adam_needs_more_than_sgd(experiment: Experiment) -> None:
    sgd = CostModel(experiment=experiment).estimate(strategy((0, 4)))
    adam = CostModel(experiment=replace(experiment, optimizer="adam")).estimate(strategy((0, 4)))
    assert adam.peak_memory_bytes[0] - sgd.peak_memory_bytes[0] == 400 * 8
    assert adam.iteration_time_s - sgd.iteration_time_s == pytest.approx(400 * 16 / 1000)


def test_bounds_must_cover_the_model(experiment: Experiment) -> None:
    model = CostModel(experiment=experiment)
    for bounds in ((0, 3), (0, 5)):
        with pytest.raises(ValueError, match=r"the model has 4 layers.*found \[0, "):
            model.estimate(strategy(bounds))


def test_devices_must_exist(experiment: Experiment) -> None:
    model = CostModel(experiment=experiment)
    with pytest.raises(ValueError, match="4 devices, numbered from 0; found a rank on device 9"):
        model.estimate(strategy((0, 4), (9,)))


def test_activations_meet_the_rate_of_their_size_and_gradients_the_largest() -> None:
    def estimate(rate: str) -> Breakdown:
        experiment = small_experiment(("inter_gbit_per_s: 10", f"inter_gbit_per_s: {rate}"))
        stages = strategy((0, 4, 9), (0, 2, 3, 1), dp=2, m=4)
        return required(CostModel(experiment=experiment).estimate(stages).breakdown)

    num_bytes = 128 * 256 * 2  # of a sample between blocks, in fp16
    by_size = estimate(f"[[{num_bytes}, 2], [{64 * num_bytes}, 10]]")
    slow, fast = estimate("2"), estimate("10")
    assert by_size.gradient_sync_s == fast.gradient_sync_s
    assert by_size.pipeline_p2p_s == pytest.approx(slow.pipeline_p2p_s)
    assert slow.pipeline_p2p_s > fast.pipeline_p2p_s


def test_what_a_runtime_cannot_recompute_is_not_launchable(experiment: Experiment) -> None:
    plain = strategy((0, 2, 4), (0, 1))
    stages = (
        plain.stages[0],
        replace(plain.stages[1], options=replace(plain.stages[1].options, recompute=FULL)),
    )
    model = CostModel(experiment=experiment)
    estimate = model.with_columns(model.estimate(replace(plain, stages=stages)))
    assert not estimate.launchable
    assert estimate.warnings == (
        "runtime 'plain' recomputes alike in all stages, found none, full",
    )


FORWARD_AND_BACKWARD = 3.0
"""Seconds of one toy block and sample."""


def staged(*stages: Stage, placement: tuple[int, ...], samples: int, count: int = 1) -> Strategy:
    return Strategy(
        stages=stages, micro_batch_size=samples, num_micro_batches=count, placement=placement
    )


def test_a_stage_waits_for_the_rank_with_the_most_samples(experiment: Experiment) -> None:
    stage = Stage(first_layer=0, end_layer=4, options=StageOptions(tp=1, dp=2), shares=(3, 1))
    estimate = CostModel(experiment=experiment).estimate(staged(stage, placement=(0, 1), samples=4))
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
        model.estimate(staged(own, placement=(0, 2), samples=4)).breakdown for own in (stage, even)
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
    estimate = model.estimate(staged(stage, placement=(0, 2), samples=4))
    assert list(estimate.memory_limit_bytes) == [small.memory_bytes]
    turned = replace(stage, shares=(3, 1))
    other = model.estimate(staged(turned, placement=(0, 2), samples=4))
    assert other.peak_memory_bytes[0] != estimate.peak_memory_bytes[0]


def test_more_micro_batches_in_flight_need_more_memory(experiment: Experiment) -> None:
    stages = (
        Stage(first_layer=0, end_layer=2, options=StageOptions(tp=1, dp=2), shares=(1, 1)),
        Stage(first_layer=2, end_layer=4, options=StageOptions(tp=1, dp=1), shares=(2,)),
    )
    model = CostModel(experiment=experiment)
    one, two = (
        model.estimate(staged(*stages, placement=(0, 1, 2), samples=2, count=count))
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
    plan = staged(*stages, placement=(0, 1, 2, 3), samples=2)
    estimate = model.with_columns(model.estimate(plan))
    assert estimate.feasible
    assert not estimate.launchable
    assert NO_RUNTIME in estimate.warnings
