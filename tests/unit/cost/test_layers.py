from dataclasses import replace

import numpy as np
import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import NO_RING, Path
from amp_ray.cost.layers import LayerCosts
from amp_ray.cost.roofline import Rank
from amp_ray.inputs.profile import ANALYTIC, Anchor, Profile
from amp_ray.models.model import Layer, Model
from amp_ray.models.operator import Gemm
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
    fast = replace(RING, bytes_per_s=1e9)
    assert times(overlapping, two, fast)[2] == 0.0


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
        profile = Profile(source="test", tables={"toy": {(1, 1): anchor}})
        eight = replace(rank, micro_batch_size=8)
        assert times(replace(idle, profile=profile), eight) == (0.5, backward_s, 0.0)


def test_table_tells_that_it_extrapolates(costs: LayerCosts, rank: Rank) -> None:
    anchor = Anchor(forward_s=np.ones(4))
    profile = Profile(source="test", tables={"toy": {(1, 1): anchor}})
    measured = replace(costs, profile=profile)
    two = replace(rank, micro_batch_size=2)
    assert [measured.table(each, NO_RING, "none")[1] for each in (rank, two)] == [False, True]


def test_profile_without_the_tp_is_refused(costs: LayerCosts, rank: Rank) -> None:
    anchor = Anchor(forward_s=np.ones(4))
    profile = Profile(source="test", tables={"toy": {(1, 1): anchor}})
    with pytest.raises(ValueError, match="no times at tp 2"):
        replace(costs, profile=profile).table(replace(rank, tp=2), NO_RING, "none")
