from dataclasses import replace

import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import Path, all_reduce_s
from amp_ray.cost.layers import COLLECTIVE_RATIO_LIMIT, LayerAnchors, LayerWork, Measured
from amp_ray.cost.roofline import Rank, device_phases
from amp_ray.models.model import Layer
from amp_ray.models.operator import Elementwise
from amp_ray.runtimes.traits import RuntimeTraits

RING = Path(bytes_per_s=100.0, step_s=0.0)


@pytest.fixture
def work(block: Layer, traits: RuntimeTraits, constants: Constants) -> LayerWork:
    """The block, not measured: 1 s forward, 2 s backward on the device."""
    return LayerWork(layer=block, anchors=LayerAnchors(), traits=traits, constants=constants)


@pytest.fixture
def talking(work: LayerWork) -> LayerWork:
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


def test_all_reduce_takes_the_ring(talking: LayerWork, rank: Rank) -> None:
    two = replace(rank, tp=2, micro_batch_size=3)
    # 50 elements x 3 samples x 2 bytes, once around two ranks, at 100 bytes/s
    assert talking.collectives_s(all_reduce_s, "forward", two, RING) == 3.0
    assert talking.collectives_s(all_reduce_s, "backward", two, RING) == 0.0
    assert talking.collectives_s(all_reduce_s, "forward", rank, RING) == 0.0


def test_queue_is_filled_again_after_every_blocking_all_reduce(
    talking: LayerWork, rank: Rank, traits: RuntimeTraits, constants: Constants
) -> None:
    blocking = replace(
        talking,
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
    talking: LayerWork, rank: Rank
) -> None:
    # counted: 1 s to compute (nothing is sharded) and 1 s to talk; measured 2.5 s
    two = replace(rank, tp=2)
    assert anchored_at_two(talking, 2.5).collective_ratio(two, RING) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("forward_s", "ratio"), [(0.5, 1 / COLLECTIVE_RATIO_LIMIT), (99.0, COLLECTIVE_RATIO_LIMIT)]
)
def test_measured_all_reduce_stays_within_limits(
    forward_s: float, ratio: float, talking: LayerWork, rank: Rank
) -> None:
    two = replace(rank, tp=2)
    assert anchored_at_two(talking, forward_s).collective_ratio(two, RING) == pytest.approx(ratio)


def test_profile_says_nothing_about_a_ring_that_leaves_the_node(
    talking: LayerWork, rank: Rank
) -> None:
    far = replace(RING, num_nodes=2)
    assert anchored_at_two(talking, 2.5).collective_ratio(replace(rank, tp=2), far) == 1.0


def test_links_alone_count_where_measured_times_hold_no_all_reduce(
    talking: LayerWork, work: LayerWork, rank: Rank
) -> None:
    two = replace(rank, tp=2)
    without = replace(anchored_at_two(talking, 2.5).anchors, alone_tp=2)
    assert replace(talking, anchors=without).collective_ratio(two, RING) == 1.0
    assert talking.collective_ratio(two, RING) == 1.0
    assert anchored_at_two(work, 2.5).collective_ratio(two, RING) == 1.0  # it never talks


def test_device_and_host_take_turns_where_launches_block(work: LayerWork, rank: Rank) -> None:
    blocking = replace(work, traits=replace(work.traits, blocking_launches=True))
    device = device_phases(work.layer.measurable, rank, work.constants)
    backward_host_s = work.constants.host_backward_ratio * work.host_s
    phases = blocking.compute(rank)
    assert phases.forward_s == pytest.approx(device.forward_s + work.host_s)
    assert phases.backward_s == pytest.approx(device.backward_s + backward_host_s)
    assert (phases.forward_idle_s, phases.backward_idle_s) == (0.0, 0.0)
