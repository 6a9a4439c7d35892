"""Bounds in the published lists of layers, and the same cuts in the training program's list."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.models.families import build_model
from amp_ray.models.model import Model
from amp_ray.trials.runtime_strategy import runtime_bounds
from support.examples import examples
from support.published import GPT2, TRANSGAN

PUBLISHED = {shape.family: build_model(shape, layer_list="amp-2022") for shape in (GPT2, TRANSGAN)}
OWN = {shape.family: build_model(shape, layer_list="runtime") for shape in (GPT2, TRANSGAN)}
FAMILIES = pytest.mark.parametrize("family", ["gpt2", "transgan"])


def cuts(num_layers: int) -> st.SearchStrategy[tuple[int, ...]]:
    chosen = st.sets(st.integers(1, num_layers - 1), max_size=7)
    return chosen.map(lambda found: (0, *sorted(found), num_layers))


def parameters(model: Model, bounds: tuple[int, ...]) -> list[int]:
    return [
        sum(layer.num_parameters for layer in model.layers[first:end])
        for first, end in pairwise(bounds)
    ]


@FAMILIES
@examples(40)
@given(data=st.data())
def test_every_stage_keeps_its_parameters(family: str, data: st.DataObject) -> None:
    published, own = PUBLISHED[family], OWN[family]
    bounds = data.draw(cuts(published.num_layers))
    found = parameters(own, runtime_bounds(published, bounds))
    expected = parameters(published, bounds)
    if family == "transgan":
        # The published list has no head; the head goes with the last entry that has parameters.
        last = max(index for index, count in enumerate(expected) if count)
        expected[last] += own.layers[-1].num_parameters
    assert found == expected


@FAMILIES
@examples(40)
@given(data=st.data())
def test_there_and_back_again(family: str, data: st.DataObject) -> None:
    """Every cut of our list has published cuts, each of which is converted back to it."""
    published, own = PUBLISHED[family], OWN[family]
    each = {
        entry: runtime_bounds(published, (0, entry, published.num_layers))[1]
        for entry in range(1, published.num_layers)
    }
    reachable = sorted(set(each.values()) - {own.num_layers})
    wanted = sorted(data.draw(st.sets(st.sampled_from(reachable), max_size=7)))
    entries = [
        data.draw(st.sampled_from([entry for entry, bound in each.items() if bound == wish]))
        for wish in wanted
    ]
    bounds = (0, *entries, published.num_layers)
    assert runtime_bounds(published, bounds) == (0, *wanted, own.num_layers)


def test_only_the_cut_before_the_missing_head_cannot_be_reached() -> None:
    for family, missing in (("gpt2", set()), ("transgan", {25})):
        published, own = PUBLISHED[family], OWN[family]
        reached = set(runtime_bounds(published, range(published.num_layers + 1)))
        assert set(range(own.num_layers + 1)) - reached == missing


@given(bounds=cuts(27))
def test_bounds_of_the_own_list_stay_as_they_are(bounds: tuple[int, ...]) -> None:
    assert runtime_bounds(OWN["gpt2"], bounds) == bounds
