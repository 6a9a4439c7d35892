from dataclasses import replace

import pytest

from amp_ray.cost.weights import TiedWeight, Weights
from amp_ray.models.model import Layer, Model


@pytest.fixture
def tied(model: Model, block: Layer) -> Model:
    """Four layers of 100 sharded parameters; the first and the third hold one weight of 60."""
    holder = replace(block, tied_parameters=60)
    return replace(model, layers=(holder, block, holder, block))


def test_sharded_parameters_are_divided_by_tp_and_others_are_not(
    model: Model, block: Layer
) -> None:
    (work,) = block.elementwise
    both = replace(block, operators=(replace(work, replicated_parameters=10),))
    weights = Weights(model=replace(model, layers=(both, block)), tp=2)
    assert weights.prefix.tolist() == [0.0, 60.0, 110.0]


def test_stages_hold_the_parameters_of_their_layers(model: Model) -> None:
    weights = Weights(model=model, tp=1)
    assert weights.of_stages((0, 1, 4)).tolist() == [100.0, 300.0]
    assert weights.tied is None


def test_a_tied_weight_counts_once_where_one_stage_holds_it_twice(tied: Model) -> None:
    weights = Weights(model=tied, tp=2)
    assert weights.tied == TiedWeight(first=0, last=2, parameters=30.0)
    assert weights.of_stages((0, 4)).tolist() == [200.0 - 30.0]
    assert weights.of_stages((0, 2, 4)).tolist() == [100.0, 100.0]
    assert weights.of_stages((0, 3, 4)).tolist() == [150.0 - 30.0, 50.0]


@pytest.mark.parametrize(
    ("bounds", "stages"),
    [((0, 4), (0, 0)), ((0, 2, 4), (0, 1)), ((0, 2, 3, 4), (0, 1)), ((0, 1, 2, 4), (0, 2))],
)
def test_holders_are_found_by_their_layers(
    bounds: tuple[int, ...], stages: tuple[int, int], tied: Model
) -> None:
    weight = Weights(model=tied, tp=1).tied
    assert weight is not None
    assert weight.stages(bounds) == stages


def test_a_weight_of_a_single_layer_is_not_shared(tied: Model) -> None:
    assert Weights(model=replace(tied, layers=tied.layers[:2]), tp=1).tied is None
