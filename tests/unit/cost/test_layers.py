from dataclasses import replace

import numpy as np
import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import NO_RING, Path, all_reduce_s
from amp_ray.cost.layers import (
    COLLECTIVE_RATIO_LIMIT,
    LayerAnchors,
    LayerCosts,
    LayerWork,
    Measured,
    interpolate,
    layer_anchors,
    slowest_wait_s,
)
from amp_ray.cost.roofline import Rank, device_phases
from amp_ray.inputs.profile import ANALYTIC, Anchor, Profile
from amp_ray.models.model import Layer, Model
from amp_ray.models.operator import Elementwise, Gemm
from amp_ray.runtimes.traits import RuntimeTraits

RING = Path(bytes_per_s=100.0, step_s=0.0)


@pytest.fixture
def costs(model: Model, traits: RuntimeTraits, constants: Constants) -> LayerCosts:
    return LayerCosts(model=model, profile=ANALYTIC, traits=traits, constants=constants)


@pytest.fixture
def talking(costs: LayerCosts, block: Layer, model: Model) -> LayerCosts:
    """Blocks with an all-reduce of 50 elements after the forward pass: 1 s at tp 2."""
    (quiet,) = block.elementwise
    talker = replace(quiet, all_reduce="forward", all_reduce_elements=50.0)
    layer = replace(block, operators=(talker,))
    return replace(costs, model=replace(model, layers=(layer,) * 4))


def times(
    costs: LayerCosts, rank: Rank, ring: Path = NO_RING, recompute: str = "none"
) -> tuple[float, float, float]:
    """Return forward, backward and all-reduce seconds of the first layer."""
    table, _ = costs.table(rank, ring, recompute)  # type: ignore[arg-type]
    forward_s, backward_s, talk_s = table[:, 0].tolist()
    return forward_s, backward_s, talk_s


def test_every_layer_has_its_times(costs: LayerCosts, rank: Rank) -> None:
    table, extrapolated = costs.table(rank, NO_RING, "none")
    assert table.tolist() == [[1.0] * 4, [2.0] * 4, [0.0] * 4]
    assert not extrapolated


def test_all_reduces_are_part_of_a_pass_and_told_apart(talking: LayerCosts, rank: Rank) -> None:
    assert times(talking, replace(rank, tp=2), RING) == (2.0, 2.0, 1.0)


def test_recompute_runs_the_forward_pass_again(talking: LayerCosts, rank: Rank) -> None:
    assert times(talking, replace(rank, tp=2), RING, "full") == (2.0, 4.0, 2.0)


def test_selective_recompute_runs_the_attention_core_again(
    talking: LayerCosts, block: Layer, rank: Rank
) -> None:
    (work,) = block.elementwise
    core = replace(work, core="inner", forward_elements=3 * work.forward_elements)
    layer = replace(block, operators=(core, *talking.model.layers[0].operators))
    costs = replace(talking, model=replace(talking.model, layers=(layer,) * 4))
    plain = times(costs, replace(rank, tp=2), RING)
    again = times(costs, replace(rank, tp=2), RING, "selective")
    assert again == (plain[0], plain[1] + 3.0, plain[2])


def test_only_blocks_are_computed_again(
    costs: LayerCosts, block: Layer, model: Model, rank: Rank
) -> None:
    head = replace(costs, model=replace(model, layers=(replace(block, kind="head"),)))
    assert times(head, rank, recompute="full") == (1.0, 2.0, 0.0)


def test_a_pass_takes_at_least_as_long_as_its_share_of_the_transfers_to_the_host(
    costs: LayerCosts, rank: Rank, block: Layer, model: Model
) -> None:
    (work,) = block.elementwise
    heavy = replace(block, operators=(replace(work, saved_elements=3000.0),))
    offloads = replace(
        costs,
        model=replace(model, layers=(heavy,) * 4),
        traits=replace(costs.traits, offloads_activations=True, offloaded_blocks=2),
    )
    for rate, expected in ((1e30, (1.0, 2.0)), (2000.0, (1.5, 2.0)), (1000.0, (3.0, 3.0))):
        device = replace(rank.device, host_bytes_per_s=rate)
        assert times(offloads, replace(rank, device=device))[:2] == expected


def test_doubled_forward_pass_talks_twice_too(
    talking: LayerCosts, rank: Rank, traits: RuntimeTraits
) -> None:
    doubled = replace(talking, traits=replace(traits, forward_runs=2))
    assert times(doubled, replace(rank, tp=2), RING) == (4.0, 2.0, 2.0)


def test_backward_all_reduce_hides_behind_the_weight_gradient_where_the_runtime_overlaps(
    costs: LayerCosts, model: Model, block: Layer, rank: Rank, traits: RuntimeTraits
) -> None:
    gemm = Gemm(
        name="g", rows=10, columns=10, inner=10, shard="columns", all_reduce="backward"
    )  # 100 elements: 2 s over the ring
    layer = replace(block, operators=(gemm,))
    plain = replace(costs, model=replace(model, layers=(layer,)))
    overlapping = replace(plain, traits=replace(traits, overlaps_backward_all_reduce=True))
    two = replace(rank, tp=2)
    # weight gradient: 10 x 10 by 10 x 5: 100 + 50 read, 50 written, 2 bytes each at 1000 B/s
    assert times(plain, two, RING)[2] == pytest.approx(2.0)
    assert times(overlapping, two, RING)[2] == pytest.approx(2.0 - 0.4)
    # The product runs beside it on the multiprocessors that the collective leaves: here on half.
    fast = replace(RING, bytes_per_s=1e9)
    assert times(overlapping, two, fast)[2] == pytest.approx(0.5 * 2e-7)
    large = replace(two, device=replace(two.device, num_multiprocessors=96))
    assert times(overlapping, large, fast)[2] == pytest.approx(0.25 * 2e-7)


def test_all_reduces_fill_the_time_in_which_the_device_waits_for_the_host(
    talking: LayerCosts, rank: Rank, traits: RuntimeTraits, constants: Constants
) -> None:
    # the device computes for 1 s and talks for 1 s, the host launches for 1.25 s
    bound = replace(talking, constants=replace(constants, host_s_per_kernel=1.25))
    two = replace(rank, tp=2)
    assert times(bound, two, RING)[::2] == (2.0, 0.75)
    slow = replace(bound, constants=replace(constants, host_s_per_kernel=5.0))
    assert times(slow, two, RING)[::2] == (5.0, 0.0)


def test_runtime_that_waits_for_all_reduces_cannot_fill_that_time(
    talking: LayerCosts, rank: Rank, traits: RuntimeTraits, constants: Constants
) -> None:
    waiting = replace(
        talking,
        constants=replace(constants, host_s_per_kernel=1.25),
        traits=replace(traits, synchronisation_s=0.5),
    )
    assert times(waiting, replace(rank, tp=2), RING)[::2] == (1.25 + 1.5, 1.5)


def test_gradients_of_every_micro_batch_are_added_up(
    costs: LayerCosts, rank: Rank, traits: RuntimeTraits, constants: Constants
) -> None:
    adding = replace(costs, traits=replace(traits, accumulation_bytes_per_parameter=None))
    assert times(adding, rank)[1] == pytest.approx(2.0 + 0.6)  # 100 parameters, 6 bytes each
    single = replace(rank, precision="fp32")
    assert times(adding, single)[1] == pytest.approx(4.0 + 1.2)
    half = replace(rank, tp=2)
    assert times(adding, half)[1] == pytest.approx(2.0 + 0.3)
    gaps = replace(adding, constants=replace(constants, kernel_gap_s=0.1))
    assert times(gaps, rank)[1] == pytest.approx(2.0 + 0.2 + 0.6 + 0.1)


def test_layer_without_work_takes_what_was_measured(
    costs: LayerCosts, block: Layer, model: Model, rank: Rank
) -> None:
    idle = replace(costs, model=replace(model, layers=(replace(block, operators=()),)))
    assert times(idle, rank) == (0.0, 0.0, 0.0)
    forward = Anchor(forward_s=np.array([0.5]))
    both = Anchor(forward_s=np.array([0.5]), backward_s=np.array([0.25]))
    for anchor, backward_s in ((forward, 0.5), (both, 0.25)):
        measured_once = Profile(source="test", tables={"toy": {(1, 1): anchor}})
        eight = replace(rank, micro_batch_size=8)
        assert times(replace(idle, profile=measured_once), eight) == (0.5, backward_s, 0.0)


def test_table_tells_that_it_extrapolates(costs: LayerCosts, rank: Rank) -> None:
    measured = replace(costs, profile=profile({(1, 1): [1.0] * 4}))
    two = replace(rank, micro_batch_size=2)
    assert [measured.table(each, NO_RING, "none")[1] for each in (rank, two)] == [False, True]


def test_profile_without_the_tp_is_refused(costs: LayerCosts, rank: Rank) -> None:
    measured = replace(costs, profile=profile({(1, 1): [1.0] * 4}))
    with pytest.raises(ValueError, match="no times at tp 2"):
        measured.table(replace(rank, tp=2), NO_RING, "none")


@pytest.fixture
def work(block: Layer, traits: RuntimeTraits, constants: Constants) -> LayerWork:
    """The block, not measured: 1 s forward, 2 s backward on the device."""
    return LayerWork(layer=block, anchors=LayerAnchors(), traits=traits, constants=constants)


@pytest.fixture
def talking_work(work: LayerWork) -> LayerWork:
    """The same with an all-reduce of 50 elements after its forward pass."""
    (quiet,) = work.layer.elementwise
    talker = replace(quiet, all_reduce="forward", all_reduce_elements=50.0)
    return replace(work, layer=replace(work.layer, operators=(talker,)))


def measured(forward_s: float, backward_s: float | None = None) -> Measured:
    return Measured(forward_s=forward_s, backward_s=backward_s)


def seconds(work: LayerWork, rank: Rank) -> tuple[float, float]:
    phases = work.compute(rank)
    return phases.forward_s, phases.backward_s


def test_without_measurements_the_counted_work_counts(work: LayerWork, rank: Rank) -> None:
    assert seconds(work, rank) == (1.0, 2.0)


def test_host_bounds_both_passes(work: LayerWork, rank: Rank, constants: Constants) -> None:
    slow_host = replace(constants, host_s_per_kernel=3.0, host_backward_ratio=2.0)
    assert seconds(replace(work, constants=slow_host), rank) == (3.0, 6.0)


def test_unfused_runtime_launches_more(
    work: LayerWork, rank: Rank, constants: Constants, traits: RuntimeTraits
) -> None:
    slow_host = replace(constants, host_s_per_kernel=3.0, host_scale=0.5)
    unfused = replace(traits, launches_per_kernel=4.0)
    assert seconds(replace(work, constants=slow_host, traits=unfused), rank)[0] == 6.0


def test_device_bound_anchor_corrects_the_device(work: LayerWork, rank: Rank) -> None:
    anchored = replace(work, anchors=LayerAnchors(alone={1: measured(1.5)}))
    assert seconds(anchored, rank) == (1.5, 3.0)
    assert seconds(anchored, replace(rank, micro_batch_size=2)) == (3.0, 6.0)


@pytest.mark.parametrize(("share", "forward_s"), [(0.0, 14.0), (0.5, 12.0), (1.0, 10.5)])
def test_a_measured_pass_that_began_on_an_idle_device_includes_the_wait_for_its_long_kernel(
    work: LayerWork, rank: Rank, share: float, forward_s: float
) -> None:
    """Of five kernels of 1 s each on the host, the last but one is long.

    The device takes 6 s, but it begins 3 of them after 4 s of launches; it ends after 8.
    """
    (op,) = work.layer.elementwise
    short, long = (
        replace(op, forward_elements=op.forward_elements * seconds, num_kernels=kernels)
        for seconds, kernels in ((2.0, 3), (3.0, 1))
    )
    layer = replace(work.layer, operators=(short, long, replace(op, num_kernels=1)))
    anchors = LayerAnchors(alone={1: measured(14.0)}, launch_s=1.0, idle_share=share)
    anchored = replace(work, layer=layer, anchors=anchors)
    assert seconds(anchored, rank)[0] == pytest.approx(forward_s)
    assert seconds(anchored, replace(rank, micro_batch_size=4))[0] == pytest.approx(4 * forward_s)


def test_the_wait_of_an_idle_device_is_no_all_reduce(talking_work: LayerWork, rank: Rank) -> None:
    two, anchors = replace(rank, tp=2), {1: measured(1.5)}
    alone = LayerAnchors(alone=anchors, at_tp={1: measured(2.5)}, launch_s=0.5)
    ratios = [
        replace(talking_work, anchors=replace(alone, idle_share=share)).collective_ratio(two, RING)
        for share in (0.0, 1.0)
    ]
    assert ratios[0] == pytest.approx(ratios[1])


def test_host_bound_anchor_does_not_grow_until_the_device_passes_it(
    work: LayerWork, rank: Rank
) -> None:
    anchors = LayerAnchors(alone={1: measured(4.0)}, launch_s=2.0)
    anchored = replace(work, anchors=anchors)
    assert seconds(anchored, rank)[0] == 4.0
    assert seconds(anchored, replace(rank, micro_batch_size=3))[0] == 4.0
    assert seconds(anchored, replace(rank, micro_batch_size=8))[0] == 8.0


def test_other_measured_sizes_correct_what_is_left(work: LayerWork, rank: Rank) -> None:
    anchors = LayerAnchors(alone={1: measured(1.0), 4: measured(6.0)})
    anchored = replace(work, anchors=anchors)
    assert seconds(anchored, replace(rank, micro_batch_size=4)) == (6.0, 12.0)
    two_s = 2.0 * 1.25  # half way between ratios 1 and 1.5 in the logarithm
    assert seconds(anchored, replace(rank, micro_batch_size=2))[0] == pytest.approx(two_s)


def test_measured_backward_pass_counts(work: LayerWork, rank: Rank) -> None:
    anchored = replace(work, anchors=LayerAnchors(alone={1: measured(1.0, 5.0)}))
    assert seconds(anchored, rank) == (1.0, 5.0)


def test_profile_and_backward_scale_move_the_device_only(
    work: LayerWork, rank: Rank, constants: Constants
) -> None:
    slower = replace(constants, profile_scale=2.0, backward_scale=3.0)
    anchored = replace(work, anchors=LayerAnchors(alone={1: measured(1.0)}), constants=slower)
    assert seconds(anchored, rank) == (2.0, 12.0)


def test_loss_behind_the_layer_is_no_part_of_what_was_measured(work: LayerWork, rank: Rank) -> None:
    loss = Elementwise(name="loss", forward_elements=500, backward_elements=500, is_layer=False)
    layer = replace(work.layer, operators=(*work.layer.operators, loss))
    anchored = replace(work, layer=layer, anchors=LayerAnchors(alone={1: measured(3.0)}))
    assert seconds(anchored, rank) == (3.0 + 1.0, 6.0 + 1.0)


def test_all_reduce_takes_the_ring(talking_work: LayerWork, rank: Rank) -> None:
    two = replace(rank, tp=2, micro_batch_size=3)
    # 50 elements x 3 samples x 2 bytes, once around two ranks, at 100 bytes/s
    assert talking_work.collectives_s(all_reduce_s, "forward", two, RING) == 3.0
    assert talking_work.collectives_s(all_reduce_s, "backward", two, RING) == 0.0
    assert talking_work.collectives_s(all_reduce_s, "forward", rank, RING) == 0.0


def test_queue_is_filled_again_after_every_blocking_all_reduce(
    talking_work: LayerWork, rank: Rank, traits: RuntimeTraits, constants: Constants
) -> None:
    blocking = replace(
        talking_work,
        traits=replace(traits, restart_launches=5.0),
        constants=replace(constants, host_s_per_kernel=0.1),
    )
    assert blocking.restarts_s("forward", replace(rank, tp=2)) == pytest.approx(0.5)
    assert blocking.restarts_s("backward", replace(rank, tp=2)) == 0.0
    assert blocking.restarts_s("forward", rank) == 0.0


def anchored_at_two(work: LayerWork, forward_s: float) -> LayerWork:
    """Anchor: 1 s alone, ``forward_s`` at tp 2, all-reduce included."""
    anchors = LayerAnchors(alone={1: measured(1.0)}, at_tp={1: measured(forward_s)})
    return replace(work, anchors=anchors)


def test_what_a_measured_pass_takes_longer_is_its_all_reduce(
    talking_work: LayerWork, rank: Rank
) -> None:
    # counted: 1 s to compute (nothing is sharded) and 1 s to talk; measured 2.5 s
    two = replace(rank, tp=2)
    assert anchored_at_two(talking_work, 2.5).collective_ratio(two, RING) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("forward_s", "ratio"), [(0.5, 1 / COLLECTIVE_RATIO_LIMIT), (99.0, COLLECTIVE_RATIO_LIMIT)]
)
def test_measured_all_reduce_stays_within_limits(
    forward_s: float, ratio: float, talking_work: LayerWork, rank: Rank
) -> None:
    two = replace(rank, tp=2)
    assert anchored_at_two(talking_work, forward_s).collective_ratio(two, RING) == pytest.approx(
        ratio
    )


def test_profile_says_nothing_about_a_ring_that_leaves_the_node(
    talking_work: LayerWork, rank: Rank
) -> None:
    far = replace(RING, num_nodes=2)
    assert anchored_at_two(talking_work, 2.5).collective_ratio(replace(rank, tp=2), far) == 1.0


def test_links_alone_count_where_measured_times_hold_no_all_reduce(
    talking_work: LayerWork, work: LayerWork, rank: Rank
) -> None:
    two = replace(rank, tp=2)
    without = replace(anchored_at_two(talking_work, 2.5).anchors, alone_tp=2)
    assert replace(talking_work, anchors=without).collective_ratio(two, RING) == 1.0
    assert talking_work.collective_ratio(two, RING) == 1.0
    assert anchored_at_two(work, 2.5).collective_ratio(two, RING) == 1.0  # it never talks


def test_device_and_host_take_turns_where_launches_block(work: LayerWork, rank: Rank) -> None:
    blocking = replace(work, traits=replace(work.traits, blocking_launches=True))
    device = device_phases(work.layer.measurable, rank, work.constants)
    backward_host_s = work.constants.host_backward_ratio * work.host_s
    phases = blocking.compute(rank)
    assert phases.forward_s == pytest.approx(device.forward_s + work.host_s)
    assert phases.backward_s == pytest.approx(device.backward_s + backward_host_s)
    assert (phases.forward_idle_s, phases.backward_idle_s) == (0.0, 0.0)


def test_ranks_wait_for_the_slowest_host_where_launches_block(
    talking_work: LayerWork, rank: Rank
) -> None:
    constants = replace(talking_work.constants, host_s_per_kernel=3.0)
    traits = replace(talking_work.traits, blocking_launches=True)
    blocking = replace(talking_work, constants=constants, traits=traits)
    alone, eight = (blocking.compute(replace(rank, tp=tp)) for tp in (1, 8))
    wait_s = slowest_wait_s(8, 1, 3.0, 3.0)  # one launch, then an all-reduce
    assert wait_s > 0
    assert eight.forward_s == pytest.approx(alone.forward_s + wait_s)
    assert eight.backward_s == alone.backward_s  # has no all-reduce


def test_the_largest_of_random_sums_of_launches_is_as_late_as_stated() -> None:
    launch_s, num_launches, num_ranks = 1.0, 30, 8
    launches = np.random.default_rng(0).exponential(launch_s, (4000, num_ranks, num_launches))
    late_s = launches.sum(axis=2).max(axis=1).mean() - num_launches * launch_s
    wait_s = slowest_wait_s(num_ranks, 1, num_launches * launch_s, launch_s)
    assert wait_s == pytest.approx(late_s, rel=0.1)


def profile(table: dict[tuple[int, int], list[float]], **settings: object) -> Profile:
    """Make a profile of the toy device from forward seconds by (tp, micro-batch size)."""
    anchors = {key: Anchor(forward_s=np.array(times)) for key, times in table.items()}
    return Profile(source="test", tables={"toy": anchors}, **settings)  # type: ignore[arg-type]


def test_analytic_profile_gives_no_anchors(model: Model, rank: Rank, traits: RuntimeTraits) -> None:
    (anchors,) = layer_anchors(ANALYTIC, model, rank, traits)
    assert not anchors.at_tp
    assert not anchors.alone
    assert not anchors.extrapolated


def test_equal_layers_share_the_median_of_their_later_half(
    model: Model, rank: Rank, traits: RuntimeTraits
) -> None:
    (anchors,) = layer_anchors(profile({(1, 1): [9.0, 9.0, 2.0, 4.0]}), model, rank, traits)
    assert anchors.at_tp == {1: Measured(forward_s=3.0, backward_s=None)}


def test_a_doubled_forward_pass_is_halved(model: Model, rank: Rank, traits: RuntimeTraits) -> None:
    doubled = profile({(1, 1): [4.0] * 4}, forward_runs=2)
    (anchors,) = layer_anchors(doubled, model, rank, traits)
    assert anchors.at_tp[1].forward_s == 2.0


def test_measured_backward_pass_is_kept(model: Model, rank: Rank, traits: RuntimeTraits) -> None:
    anchor = Anchor(forward_s=np.ones(4), backward_s=np.full(4, 3.0))
    both = Profile(source="test", tables={"toy": {(1, 1): anchor}}, forward_runs=2)
    (anchors,) = layer_anchors(both, model, rank, traits)
    assert anchors.at_tp[1] == Measured(forward_s=0.5, backward_s=3.0)


@pytest.mark.parametrize(("size", "outside"), [(1, True), (2, False), (3, False), (5, True)])
def test_micro_batches_outside_of_the_measured_ones_are_extrapolated(
    size: int,
    outside: bool,  # noqa: FBT001 - a parameter of the test
    model: Model,
    rank: Rank,
    traits: RuntimeTraits,
) -> None:
    measured = profile({(1, 2): [1.0] * 4, (1, 4): [1.0] * 4})
    at_size = replace(rank, micro_batch_size=size)
    (anchors,) = layer_anchors(measured, model, at_size, traits)
    assert anchors.extrapolated is outside


def test_layer_that_talks_is_anchored_alone_at_tp_1(
    model: Model, block: Layer, rank: Rank, traits: RuntimeTraits
) -> None:
    (quiet,) = block.elementwise
    talker = replace(quiet, all_reduce="forward", all_reduce_elements=10.0)
    talking = replace(model, layers=(replace(block, operators=(talker,)), block, block, block))
    measured = profile(
        {(1, 1): [4.0, 1, 1, 1], (2, 1): [3.0, 0.5, 0.5, 0.5]}, includes_all_reduces=True
    )
    two = replace(rank, tp=2)
    first, second = layer_anchors(measured, talking, two, traits)
    assert (first.alone_tp, first.alone[1].forward_s, first.at_tp[1].forward_s) == (1, 4.0, 3.0)
    assert (second.alone_tp, second.alone[1].forward_s) == (2, 0.5)


def test_cheapest_launch_of_all_layers_is_the_hosts_price(
    model: Model, block: Layer, rank: Rank, traits: RuntimeTraits
) -> None:
    (work,) = block.elementwise
    many = replace(block, operators=(replace(work, num_kernels=10),))
    mixed = replace(model, layers=(block, block, many, many))
    measured = profile({(1, 1): [1.0, 1.0, 6.0, 6.0]})
    unfused = replace(traits, launches_per_kernel=2.0)
    for anchors in layer_anchors(measured, mixed, rank, unfused):
        assert anchors.launch_s == pytest.approx(0.3)  # 6 s / (10 kernels x 2)


def test_model_without_kernels_has_no_price_of_a_launch(
    model: Model, block: Layer, rank: Rank, traits: RuntimeTraits
) -> None:
    idle = replace(model, layers=(replace(block, operators=()),) * 4)
    (anchors,) = layer_anchors(profile({(1, 1): [1.0] * 4}), idle, rank, traits)
    assert anchors.launch_s == 0.0


def test_ratio_between_sizes_follows_their_logarithm() -> None:
    assert interpolate({1: 1.0, 16: 5.0}, 4) == pytest.approx(3.0)


def test_outside_of_the_sizes_the_nearest_ratio_counts() -> None:
    assert interpolate({2: 1.0, 4: 2.0}, 1) == 1.0
    assert interpolate({2: 1.0, 4: 2.0}, 64) == 2.0
