import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.profiles.metis import parse_metis_profile
from amp_ray.inputs.published_profile import PublishedEntry
from amp_ray.units import MIB
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
