"""Metis's profiles: what its files say, and the times of our layers that follow."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from amp_ray.arrays import FloatArray
from amp_ray.clusters.device import find_device
from amp_ray.errors import InputError
from amp_ray.inputs.profile import Profile
from amp_ray.inputs.published_profile import PublishedEntry, layer_groups
from amp_ray.models.model import Model
from amp_ray.planners.metis2024.profile import parse_metis_profile, read_metis_profile
from amp_ray.units import MIB
from support.experiments import small_experiment
from support.metis import metis_document, metis_profile_files

NAME = "DeviceType.A100_tp2_bs4.json"
ASKED = "is it in microseconds?"


def read_one(document: dict[str, Any]) -> PublishedEntry:
    """Read a folder with one file."""
    return parse_metis_profile({NAME: json.dumps(document)}, folder="p").entries["A100", 2, 4]


def test_every_value_is_read_in_si_units() -> None:
    entry = read_one(metis_document())
    assert entry.layer_s == pytest.approx(np.array([1e-3, 2e-3, 2e-3, 1e-3]))
    assert entry.layer_memory_bytes.tolist() == [1024 * MIB, 2048 * MIB, 2048 * MIB, 4096 * MIB]
    assert entry.layer_parameter_bytes.tolist() == [4 * MIB, 8 * MIB, 8 * MIB, 4 * MIB]
    assert (entry.optimizer_s, entry.batch_generator_s) == pytest.approx((10e-3, 0.5e-3))
    assert (entry.forward_backward_s, entry.rest_s) == pytest.approx((8e-3, 2e-3))


def test_values_belong_to_their_own_file() -> None:
    profile = parse_metis_profile(metis_profile_files(), folder="p")
    assert profile.types == ("A100", "T4")
    assert {key: entry.rest_s for key, entry in profile.entries.items()} == pytest.approx(
        {
            ("A100", 1, 1): 2e-3,
            ("A100", 1, 2): 3e-3,
            ("A100", 2, 1): 1e-3,
            ("A100", 2, 2): 2e-3,
            ("T4", 1, 1): 6e-3,
            ("T4", 1, 2): 9e-3,
            ("T4", 2, 1): 3e-3,
            ("T4", 2, 2): 6e-3,
        }
    )


def test_the_order_of_files_does_not_matter() -> None:
    files = metis_profile_files()
    forward = parse_metis_profile(files, folder="p")
    backward = parse_metis_profile(dict(reversed(files.items())), folder="p")
    assert list(forward.entries) == list(backward.entries)


@pytest.mark.parametrize(
    "name", ["A100_tp2_bs4.json", "devicetype.a100_TP2_bs4.JSON", "DeviceType.a100_tp2_bs4.json"]
)
def test_names_are_read_in_every_spelling(name: str) -> None:
    profile = parse_metis_profile({name: json.dumps(metis_document())}, folder="p")
    assert list(profile.entries) == [("A100", 2, 4)]


def readme_example(document: dict[str, Any]) -> None:
    """Turn a document into the README's example: no whole time, other totals."""
    del document["execution_time"]["forward_backward_time_ms"]
    document["execution_memory"]["total_memory_mb"] = 1.0
    document["model"]["parameters"]["activation_parameters_bytes"] = [1, 2, 3, 4]


def section_of_layers(document: dict[str, Any]) -> None:
    """Put the layers' times into a section of their own, as the README's text has them."""
    times = document["execution_time"].pop("layer_compute_total_ms")
    document["layers"] = {"layer_compute_total_ms": times}


def section_within(document: dict[str, Any]) -> None:
    """Put the layers' times into a section of the execution times."""
    times = document["execution_time"].pop("layer_compute_total_ms")
    document["execution_time"]["layers"] = {"layer_compute_total_ms": times}


def misspelt(document: dict[str, Any]) -> None:
    """Misspell parameters as the README's text does."""
    held = document["model"].pop("parameters")
    held["paramters_per_layer_bytes"] = held.pop("parameters_per_layer_bytes")
    document["model"]["paramters"] = held


def flat(document: dict[str, Any]) -> None:
    """Put the parameters one level higher."""
    document["model"] |= document["model"].pop("parameters")


@pytest.mark.parametrize(
    "change", [readme_example, section_of_layers, section_within, misspelt, flat]
)
def test_files_are_read_in_every_spelling(change: Callable[[dict[str, Any]], None]) -> None:
    document = metis_document()
    change(document)
    entry = read_one(document)
    assert entry.layer_s.tolist() == [1e-3, 2e-3, 2e-3, 1e-3]
    assert entry.layer_parameter_bytes.tolist() == [4 * MIB, 8 * MIB, 8 * MIB, 4 * MIB]
    assert (entry.rest_s is None) == (change is readme_example)


def set_at(*path: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    """Return a change of one value; None takes the key away."""

    def change(document: dict[str, Any]) -> None:
        inner: Any = document
        for part in path[:-1]:
            inner = inner[part]
        if to is None:
            del inner[path[-1]]
        else:
            inner[path[-1]] = to

    return change


TIMES = ("execution_time", "layer_compute_total_ms")
WRONG = {
    "missing times": (
        set_at(*TIMES, to=None),
        "execution_time.layer_compute_total_ms: key 'layer_compute_total_ms' is missing; found ",
    ),
    "missing memory": (
        set_at("execution_memory", to=None),
        (
            "execution_memory.layer_memory_total_mb: key 'layer_memory_total_mb' is missing; found "
            "no such section"
        ),
    ),
    "missing parameters": (
        set_at("model", "parameters", to={}),
        "model.parameters.parameters_per_layer_bytes: key 'parameters_per_layer_bytes' is missing",
    ),
    "missing optimizer": (
        set_at("execution_time", "optimizer_time_ms", to=None),
        "execution_time.optimizer_time_ms: key 'optimizer_time_ms' is missing; found total_time_ms",
    ),
    "no list": (
        set_at(*TIMES, to=3),
        "execution_time.layer_compute_total_ms: found 3; expected a list with one number per layer",
    ),
    "empty list": (set_at(*TIMES, to=[]), "execution_time.layer_compute_total_ms: found []; exp"),
    "a word in a list": (
        set_at(*TIMES, 1, to="fast"),
        "execution_time.layer_compute_total_ms.1: found 'fast'; expected a number from 0 to",
    ),
    "true in a list": (set_at(*TIMES, 1, to=True), "layer_compute_total_ms.1: found true; expecte"),
    "negative": (set_at(*TIMES, 0, to=-1), "layer_compute_total_ms.0: found -1; expected a number"),
    "too large": (set_at(*TIMES, 0, to=10**250), "layer_compute_total_ms.0: found 1000"),
    "a wrong whole": (
        set_at("execution_time", "forward_backward_time_ms", to=[1]),
        "execution_time.forward_backward_time_ms: found [1]; expected a number from 0 to",
    ),
    "fewer layers in one list": (
        set_at("execution_memory", "layer_memory_total_mb", to=[1, 2, 3]),
        (
            "execution_memory.layer_memory_total_mb: found 3 values; "
            "execution_time.layer_compute_total_ms has 4"
        ),
    ),
    "another number of layers": (
        set_at("model", "num_layers", to=24),
        (
            "model.num_layers: found 24; execution_time.layer_compute_total_ms has 4 layers, input "
            "and output layer included"
        ),
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_value_is_led_to_its_place(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    document = metis_document()
    change(document)
    with pytest.raises(InputError) as raised:
        read_one(document)
    assert str(raised.value).startswith(f"p/{NAME}: ")
    assert message in str(raised.value)


def test_a_file_that_is_cut_short_is_named() -> None:
    files = metis_profile_files()
    files["DeviceType.T4_tp1_bs2.json"] = files["DeviceType.T4_tp1_bs2.json"][:300]
    with pytest.raises(InputError, match=r"^p/DeviceType\.T4_tp1_bs2\.json:1: .* is it cut short"):
        parse_metis_profile(files, folder="p")


def test_files_of_different_models_are_told_apart() -> None:
    files = metis_profile_files()
    files["DeviceType.A100_tp1_bs1.json"] = json.dumps(metis_document([1, 2, 1]))
    message = (
        r"^p/DeviceType\.A100_tp1_bs1\.json: execution_time\.layer_compute_total_ms: found 3 "
        r"layers; DeviceType\.A100_tp1_bs2\.json has 4, and a profile is of one model"
    )
    with pytest.raises(InputError, match=message):
        parse_metis_profile(files, folder="p")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("notes.json", r"^p/notes\.json: expected a name such as DeviceType\.A100_tp1_bs1\.json"),
        ("DeviceType.A100_tp0_bs1.json", "expected a name such as"),
        ("DeviceType.A100_tp1.json", "expected a name such as"),
        ("A100_tp1_bs1.json", r"the same device type, tp and micro-batch size as A100_tp1_bs1"),
    ],
)
def test_a_wrong_name_is_refused(name: str, message: str) -> None:
    files = metis_profile_files() | {name: json.dumps(metis_document())}
    with pytest.raises(InputError, match=message):
        parse_metis_profile(files, folder="p")


def test_an_empty_folder_is_refused() -> None:
    with pytest.raises(InputError, match=r"^p: no profile in it: expected files such as Device"):
        parse_metis_profile({}, folder="p")


def test_what_is_hard_to_believe_is_noted() -> None:
    files = metis_profile_files(kinds=("T4",), tps=(1,))
    odd = metis_document(whole_ms=None)
    odd["execution_time"] |= {"batch_generator_time_ms": 934.6, "optimizer_time_ms": 10814.0}
    files["DeviceType.T4_tp1_bs1.json"] = json.dumps(odd)
    files["DeviceType.T4_tp1_bs2.json"] = json.dumps(metis_document(whole_ms=1.0))
    del files["DeviceType.T4_tp1_bs1.json"]
    files["DeviceType.T4_tp2_bs1.json"] = json.dumps(odd)
    one, two = "p/DeviceType.T4_tp1_bs2.json", "p/DeviceType.T4_tp2_bs1.json"
    assert parse_metis_profile(files, folder="p").notes == (
        f"{one}: forward_backward_time_ms is less than its layers together; the layers count",
        f"{two}: no forward_backward_time_ms, so what output embedding and loss take is not known",
        f"{two}: batch_generator_time_ms is 155.8 times what all layers take: {ASKED}",
        f"{two}: optimizer_time_ms is 1802.3 times what all layers take: {ASKED}",
        "p: T4 at tp 1 lacks micro-batch size 1, which others have",
        "p: T4 at tp 2 lacks micro-batch size 2, which others have",
    )


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
    seconds = both_s(profile_of(metis_profile_files()), "A100-80", 1, 1)
    assert seconds[:3] == pytest.approx(np.array([1e-3, 2e-3, 2e-3]))
    assert seconds[3:].sum() == pytest.approx((1 + 2) * 1e-3)
    assert 0 < seconds[3] < seconds[4], "a norm is less than the output embedding"


def test_the_layers_add_up_to_both_passes_of_the_whole() -> None:
    profile = profile_of(metis_profile_files())
    assert profile.published is not None
    for device, tp, size in product(("A100-80", "T4"), (1, 2), (1, 2)):
        entry = profile.published.entries[device.partition("-")[0], tp, size]
        assert both_s(profile, device, tp, size).sum() == pytest.approx(entry.forward_backward_s)


@pytest.mark.parametrize("whole_ms", [None, 4.0])
def test_a_whole_that_is_missing_or_below_its_layers_adds_nothing(whole_ms: float | None) -> None:
    files = metis_profile_files()
    files["DeviceType.T4_tp1_bs1.json"] = json.dumps(metis_document([3, 6, 6, 3], whole_ms))
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
    seconds = both_s(profile, "A100-80", 1, 1)
    assert seconds == pytest.approx(np.array([1e-3, 2e-3, 3e-3, 4e-3, 6e-3]))


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
    seconds = both_s(profile_of(metis_profile_files(), model), "A100-80", 1, 1)
    assert seconds[:2] == pytest.approx(np.array([1e-3, 0]))


def test_an_end_that_computes_nothing_takes_what_was_measured() -> None:
    model = published_list()
    seconds = both_s(
        profile_of(metis_profile_files(), replace(model, layers=model.layers[1:])), "A100-80", 1, 1
    )
    assert seconds[0] == pytest.approx(1e-3)
