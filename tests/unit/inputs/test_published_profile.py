from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from amp_ray.clusters.device import find_device
from amp_ray.inputs.published_profile import Key, PublishedEntry, PublishedProfile, layer_groups
from support.experiments import small_experiment


def entry(*layer_s: float, whole_s: float | None = None, **given: Any) -> PublishedEntry:  # noqa: ANN401
    """Return an entry with these layer times and a memory of ten times as many bytes."""
    values: dict[str, Any] = {
        "layer_s": np.array(layer_s),
        "layer_memory_bytes": 10 * np.array(layer_s),
        "layer_parameter_bytes": np.ones(len(layer_s)),
        "forward_backward_s": whole_s,
        "optimizer_s": 1.0,
        "batch_generator_s": 2.0,
    }
    return PublishedEntry(**values | given)


def profile(*keys: Key) -> PublishedProfile:
    """Return a profile whose layers take as many seconds as there are samples, over tp."""
    return PublishedProfile(
        source="p",
        entries={
            key: entry(key[2] / key[1], key[2] / key[1], whole_s=9.0 * key[2]) for key in keys
        },
    )


def test_the_rest_is_what_the_layers_do_not_explain() -> None:
    assert entry(1.0, 2.0, whole_s=5.0).rest_s == 2.0
    assert entry(1.0, 2.0).rest_s is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer_memory_bytes": np.ones(3)}, r"one value per layer, found \[2, 3, 2\]"),
        ({"layer_s": np.array([1.0, -1.0])}, r"finite and not negative, found \[-1\.0\]"),
        ({"layer_memory_bytes": np.array([1.0, np.nan])}, r"found \[nan\]"),
        ({"optimizer_s": -2.0}, r"found \[-2\.0\]"),
        ({"forward_backward_s": np.inf}, r"found \[inf\]"),
    ],
)
def test_values_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entry(1.0, 2.0, **given)


def test_an_entry_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found \[0, 0, 0\]"):
        entry()


def test_arrays_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        entry(1.0).layer_s[0] = 2.0


@pytest.mark.parametrize("entries", [{}, {("A", 1, 1): entry(1.0), ("A", 1, 2): entry(1.0, 2.0)}])
def test_a_profile_is_of_one_chain(entries: dict[Key, PublishedEntry]) -> None:
    with pytest.raises(ValueError, match="p: a profile is of one chain of layers, found "):
        PublishedProfile(source="p", entries=entries)


def test_what_was_measured_is_listed_in_order() -> None:
    found = profile(("T4", 2, 4), ("A100", 1, 1), ("T4", 1, 1), ("T4", 2, 1))
    assert (found.types, found.num_layers) == (("A100", "T4"), 2)
    assert (found.tps("T4"), found.sizes("T4", 2), found.sizes("A100", 2)) == ((1, 2), (1, 4), ())


@pytest.mark.parametrize(
    ("name", "kind"), [("A100-80", "A100"), ("T4", "T4"), ("A100-40", "A100-40"), ("H100", None)]
)
def test_a_type_covers_boards_of_any_memory(name: str, kind: str | None) -> None:
    found = profile(("A100", 1, 1), ("T4", 1, 1), ("A100-40", 1, 1))
    assert found.type_of(find_device(name)) == kind


def test_case_does_not_tell_types_apart() -> None:
    assert profile(("t4", 1, 1)).type_of(replace(find_device("T4"), name="T4")) == "t4"


def test_a_published_chain_has_an_end_each_and_blocks() -> None:
    model = small_experiment().model
    groups = layer_groups(model)
    assert groups is not None
    assert [list(group) for group in groups] == [[0], [1], [2], [3], [4], [5], [6], [7, 8]]
    assert layer_groups(model, len(groups)) == groups


def test_a_published_chain_of_as_many_layers_is_taken_as_it_is() -> None:
    model = small_experiment().model
    groups = layer_groups(model, model.num_layers)
    assert groups == tuple(range(layer, layer + 1) for layer in range(model.num_layers))
    assert layer_groups(model, model.num_layers + 1) is None


def test_blocks_that_are_not_in_a_row_are_no_published_chain() -> None:
    model = small_experiment().model
    layers = model.layers
    gap = replace(model, layers=(*layers[:2], layers[-2], *layers[2:]))
    assert layer_groups(gap) is None
    assert layer_groups(replace(model, layers=layers[1:])) is None
    assert layer_groups(replace(model, layers=layers[:1])) is None
