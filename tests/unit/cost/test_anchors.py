from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from amp_ray.cost.layers import Measured, interpolate, layer_anchors
from amp_ray.cost.roofline import Rank
from amp_ray.inputs.profile import ANALYTIC, Anchor, Profile
from amp_ray.models.model import Layer, Model
from amp_ray.runtimes.traits import RuntimeTraits

Table = dict[tuple[int, int], list[float]]


@pytest.fixture
def profile() -> Callable[..., Profile]:
    """Make a profile of the toy device from forward seconds by (tp, micro-batch size)."""

    def make(table: Table, **settings: object) -> Profile:
        anchors = {key: Anchor(forward_s=np.array(times)) for key, times in table.items()}
        return Profile(source="test", tables={"toy": anchors}, **settings)  # type: ignore[arg-type]

    return make


def test_analytic_profile_gives_no_anchors(model: Model, rank: Rank, traits: RuntimeTraits) -> None:
    (anchors,) = layer_anchors(ANALYTIC, model, rank, traits)
    assert not anchors.at_tp
    assert not anchors.alone
    assert not anchors.extrapolated


def test_equal_layers_share_the_median_of_their_later_half(
    profile: Callable[..., Profile], model: Model, rank: Rank, traits: RuntimeTraits
) -> None:
    (anchors,) = layer_anchors(profile({(1, 1): [9.0, 9.0, 2.0, 4.0]}), model, rank, traits)
    assert anchors.at_tp == {1: Measured(forward_s=3.0, backward_s=None)}


def test_a_doubled_forward_pass_is_halved(
    profile: Callable[..., Profile], model: Model, rank: Rank, traits: RuntimeTraits
) -> None:
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
    profile: Callable[..., Profile],
    model: Model,
    rank: Rank,
    traits: RuntimeTraits,
) -> None:
    measured = profile({(1, 2): [1.0] * 4, (1, 4): [1.0] * 4})
    at_size = replace(rank, micro_batch_size=size)
    (anchors,) = layer_anchors(measured, model, at_size, traits)
    assert anchors.extrapolated is outside


def test_layer_that_talks_is_anchored_alone_at_tp_1(
    profile: Callable[..., Profile], model: Model, block: Layer, rank: Rank, traits: RuntimeTraits
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
    profile: Callable[..., Profile], model: Model, block: Layer, rank: Rank, traits: RuntimeTraits
) -> None:
    (work,) = block.elementwise
    many = replace(block, operators=(replace(work, num_kernels=10),))
    mixed = replace(model, layers=(block, block, many, many))
    measured = profile({(1, 1): [1.0, 1.0, 6.0, 6.0]})
    unfused = replace(traits, launches_per_kernel=2.0)
    for anchors in layer_anchors(measured, mixed, rank, unfused):
        assert anchors.launch_s == pytest.approx(0.3)  # 6 s / (10 kernels x 2)


def test_model_without_kernels_has_no_price_of_a_launch(
    profile: Callable[..., Profile], model: Model, block: Layer, rank: Rank, traits: RuntimeTraits
) -> None:
    idle = replace(model, layers=(replace(block, operators=()),) * 4)
    (anchors,) = layer_anchors(profile({(1, 1): [1.0] * 4}), idle, rank, traits)
    assert anchors.launch_s == 0.0


def test_ratio_between_sizes_follows_their_logarithm() -> None:
    assert interpolate({1: 1.0, 16: 5.0}, 4) == pytest.approx(3.0)


def test_outside_of_the_sizes_the_nearest_ratio_counts() -> None:
    assert interpolate({2: 1.0, 4: 2.0}, 1) == 1.0
    assert interpolate({2: 1.0, 4: 2.0}, 64) == 2.0
