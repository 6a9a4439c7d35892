import json
from dataclasses import replace

import numpy as np
import pytest

from amp_ray.arrays import FloatArray
from amp_ray.clusters.device import find_device
from amp_ray.errors import InputError
from amp_ray.inputs.profile import Profile
from amp_ray.inputs.profiles.metis import read_metis_profile
from amp_ray.inputs.published_profile import layer_groups
from amp_ray.models.model import Model
from support.experiments import small_experiment
from support.metis import metis_document, metis_profile_files

TWO_BLOCKS = ("num_layers: 6", "num_layers: 2")
A100, T4 = find_device("A100-80"), find_device("T4")


def model_of(*replacements: tuple[str, str]) -> Model:
    """Return the small model with two blocks: embedding, two blocks, norm, head."""
    return small_experiment(TWO_BLOCKS, *replacements).model


def profile_of(files: dict[str, str], model: Model | None = None) -> Profile:
    """Read a folder for two device types."""
    return read_metis_profile(files, folder="p", model=model or model_of(), devices=(A100, T4))


def both_s(profile: Profile, device: str, tp: int, size: int) -> FloatArray:
    """Return both passes of every layer at one place of a table."""
    anchor = profile.tables[device][tp, size]
    assert anchor.backward_s is not None
    total: FloatArray = anchor.forward_s + anchor.backward_s
    return total


def test_layers_stand_for_their_groups_and_the_rest_for_the_end() -> None:
    found = both_s(profile_of(metis_profile_files()), "A100-80", 1, 1)
    assert found[:3] == pytest.approx(np.array([1e-3, 2e-3, 2e-3]))
    assert found[3:].sum() == pytest.approx((1 + 2) * 1e-3)
    assert 0 < found[3] < found[4], "a norm is less than the output embedding"


@pytest.mark.parametrize("device", ["A100-80", "T4"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_the_layers_add_up_to_both_passes_of_the_whole(device: str, tp: int, size: int) -> None:
    profile = profile_of(metis_profile_files())
    assert profile.published is not None
    entry = profile.published.entries[device.partition("-")[0], tp, size]
    assert both_s(profile, device, tp, size).sum() == pytest.approx(entry.forward_backward_s)


def test_a_whole_that_is_missing_adds_nothing() -> None:
    files = metis_profile_files()
    files["DeviceType.T4_tp1_bs1.json"] = json.dumps(metis_document([3, 6, 6, 3], None))
    assert both_s(profile_of(files), "T4", 1, 1).sum() == pytest.approx(18e-3)


def test_a_whole_below_its_layers_takes_nothing_away() -> None:
    files = metis_profile_files()
    files["DeviceType.T4_tp1_bs1.json"] = json.dumps(metis_document([3, 6, 6, 3], 4.0))
    assert both_s(profile_of(files), "T4", 1, 1).sum() == pytest.approx(18e-3)


def test_the_backward_pass_computes_twice_as_much() -> None:
    anchor = profile_of(metis_profile_files()).tables["A100-80"][1, 1]
    assert anchor.backward_s == pytest.approx(2 * anchor.forward_s)


def test_all_reduces_are_divided_as_the_layer_has_them() -> None:
    anchor = profile_of(metis_profile_files()).tables["T4"][2, 1]
    # A block takes 3 ms at tp 2, where half of its 6 ms at tp 1 is 3 ms: nothing is all-reduced.
    assert anchor.forward_s[1] == pytest.approx(1e-3)
    # The embedding takes 3 ms, where half of 3 ms is 1.5 ms: 1.5 ms of the forward pass.
    assert anchor.forward_s[0] == pytest.approx(0.5e-3 + 1.5e-3)
    assert anchor.backward_s is not None
    assert anchor.backward_s[0] == pytest.approx(1e-3)


def test_all_reduces_of_a_block_are_in_both_passes() -> None:
    files = metis_profile_files()
    files["DeviceType.T4_tp2_bs1.json"] = json.dumps(metis_document([3, 7, 7, 3], 25))
    anchor = profile_of(files).tables["T4"][2, 1]
    assert anchor.forward_s[1] == pytest.approx(1e-3 + 2e-3)
    assert anchor.backward_s is not None
    assert anchor.backward_s[1] == pytest.approx(2e-3 + 2e-3)


def test_without_a_size_at_tp_1_everything_counts_as_computed() -> None:
    files = metis_profile_files()
    del files["DeviceType.T4_tp1_bs1.json"]
    anchor = profile_of(files).tables["T4"][2, 1]
    assert anchor.forward_s[0] == pytest.approx(1e-3)


def test_a_profile_as_long_as_the_model_is_taken_layer_by_layer() -> None:
    files = {"A100_tp1_bs1.json": json.dumps(metis_document([1, 2, 3, 4, 5], 16))}
    profile = read_metis_profile(files, folder="p", model=model_of(), devices=(A100,))
    found = both_s(profile, "A100-80", 1, 1)
    assert found == pytest.approx(np.array([1e-3, 2e-3, 3e-3, 4e-3, 6e-3]))


def test_a_profile_of_another_length_is_refused() -> None:
    message = (
        r"^p: found 4 layers: an input layer, 2 in the middle and an output layer; the model has 6 "
        r"blocks, so 8 are expected\. model\.num_layers counts blocks only$"
    )
    with pytest.raises(InputError, match=message):
        profile_of(metis_profile_files(), small_experiment().model)


def test_a_type_without_profile_is_refused() -> None:
    message = "^p: no profile of 'T4' in it, only of A100$"
    with pytest.raises(InputError, match=message):
        profile_of(metis_profile_files(kinds=("A100",)))


def published_list() -> Model:
    """Return the model as a longer list, with layers that compute nothing around its blocks."""
    return model_of(("family: gpt2", "family: gpt2, layer_list: amp-2022"))


def test_a_layer_that_computes_nothing_takes_no_time_beside_one_that_does() -> None:
    model = published_list()
    groups = layer_groups(model)
    assert groups is not None
    assert [list(group) for group in groups] == [[0, 1], [2], [3], [4, 5, 6, 7]]
    found = both_s(profile_of(metis_profile_files(), model), "A100-80", 1, 1)
    assert found[:2] == pytest.approx(np.array([1e-3, 0]))


def test_an_end_that_computes_nothing_takes_what_was_measured() -> None:
    model = published_list()
    found = both_s(
        profile_of(metis_profile_files(), replace(model, layers=model.layers[1:])), "A100-80", 1, 1
    )
    assert found[0] == pytest.approx(1e-3)
