import copy
import json
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.planners.metis2024.inputs import (
    BandwidthUnit,
    metis_cluster,
    parse_metis_clusterfile,
)
from amp_ray.units import GIB
from support.metis import CLUSTERFILE, HOSTFILE

README_BANDWIDTHS = {"inter_bandwidth": 312500000.0, "intra_bandwidth": 5312500000.0}


def clusterfile(change: dict[str, Any] | None = None, *, address: str = "0.0.0.1") -> str:
    """Return a cluster file with keys of one address changed; None takes a key away."""
    values: dict[str, Any] = copy.deepcopy(dict(CLUSTERFILE))
    values[address] |= change or {}
    values[address] = {key: value for key, value in values[address].items() if value is not None}
    return json.dumps(values)


def test_a_cluster_is_built_from_both_files() -> None:
    found = metis_cluster(HOSTFILE, parse_metis_clusterfile(clusterfile()))
    first, second = found.cluster.nodes
    assert (first.name, first.device.name, first.num_slots) == ("0.0.0.1", "A100-80", 2)
    assert (second.name, second.device.name) == ("0.0.0.2", "T4")
    assert (first.intra.bandwidth_bytes_per_s, first.inter.bandwidth_bytes_per_s) == (10e9, 1e9)
    assert first.intra.latency_s < first.inter.latency_s


def test_the_numbers_tell_the_unit_and_it_is_reported() -> None:
    gigabytes = parse_metis_clusterfile(clusterfile())
    text = json.dumps({at: dict(host) | README_BANDWIDTHS for at, host in CLUSTERFILE.items()})
    plain = parse_metis_clusterfile(text, file="c.json")
    assert (gigabytes.unit, plain.unit) == ("GB/s", "bytes/s")
    assert plain.notes == ("c.json: bandwidths are read as bytes/s, found 3.125e+08 to 5.3125e+09",)
    nodes = metis_cluster(HOSTFILE, plain).cluster.nodes
    assert nodes[0].inter.bandwidth_bytes_per_s == 312500000.0


def test_a_unit_that_is_told_needs_no_report() -> None:
    assert parse_metis_clusterfile(clusterfile(), unit="GB/s").notes == ()


@pytest.mark.parametrize(
    ("bandwidth", "unit", "message"),
    [
        (50_000, None, "found 50000; expected GB/s .at most 10000. or bytes/s .at least 1e.06."),
        (312500000, None, "found 3.125e.08; expected .*, here all in GB/s"),
        (312500000, "GB/s", "found 3.125e.08; expected .*, here all in GB/s"),
        (10, "bytes/s", "found 1; expected .*, here all in bytes/s"),
    ],
)
def test_a_bandwidth_in_no_unit_or_in_two_is_refused(
    bandwidth: float, unit: BandwidthUnit | None, message: str
) -> None:
    text = clusterfile({"intra_bandwidth": bandwidth}, address="0.0.0.2")
    with pytest.raises(InputError, match=rf"^c\.json: 0\.0\.0\.[12]\.int\w+_bandwidth: {message}"):
        parse_metis_clusterfile(text, file="c.json", unit=unit)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": None}, "memory: key 'memory' is missing"),
        ({"memory": "80"}, "memory: found '80'; expected a number"),
        ({"memory": 0}, "memory: found 0; expected greater than 0"),
        ({"memory": 16 * 2**30}, "memory: found 17179869184; expected less than or equal to 10000"),
        ({"intra_bandwidth": -1}, "intra_bandwidth: found -1; expected greater than 0"),
        ({"instance_type": ""}, "instance_type: found ''; expected text, not an empty one"),
    ],
)
def test_a_wrong_key_is_led_to_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"^c\.json: 0\.0\.0\.1\.{message}"):
        parse_metis_clusterfile(clusterfile(change), file="c.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", r"^c\.json: no host in it: expected entries such as"),
        ('{"a": 1}', r"^c\.json: a: found 1; expected a mapping"),
        ('{"a": {', r"^c\.json:1: not valid JSON: .* is it cut short\?"),
    ],
)
def test_a_file_without_hosts_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_metis_clusterfile(text, file="c.json")


def test_other_keys_are_left_alone() -> None:
    assert parse_metis_clusterfile(clusterfile({"rack": 7})).hosts["0.0.0.1"].memory == 80


def test_an_address_that_the_cluster_file_lacks_is_led_to_its_line() -> None:
    message = r"^hosts:2: found host '0\.0\.0\.9'; c\.json describes 0\.0\.0\.1, 0\.0\.0\.2"
    with pytest.raises(InputError, match=message):
        metis_cluster(
            "0.0.0.1 4\n0.0.0.9 4\n",
            parse_metis_clusterfile(clusterfile(), file="c.json"),
            file="hosts",
        )


def test_a_type_that_the_catalogue_lacks_is_refused() -> None:
    text = clusterfile({"instance_type": "TPUv4"})
    message = r"^c\.json: 0\.0\.0\.1\.instance_type: found 'TPUv4'; the catalogue knows T4, P100, "
    with pytest.raises(InputError, match=message):
        metis_cluster(HOSTFILE, parse_metis_clusterfile(text, file="c.json"))


@pytest.mark.parametrize(
    ("kind", "memory", "name", "gib"),
    [
        ("A100", 80, "A100-80", 79.15),
        ("a100", 40, "A100-40", 39.39),
        ("V100", 16, "V100-16", 15.78),
        ("v100", 32, "V100-32", 31.74),
        ("P100", 15, "P100-16", 15.0),
        ("T4", 80, "T4", 80.0),
        ("H100", 80, "H100", 79.10),
        ("A100-80", 80, "A100-80", 79.15),
    ],
)
def test_a_type_is_the_board_that_is_closest_in_memory(
    kind: str, memory: float, name: str, gib: float
) -> None:
    text = clusterfile({"instance_type": kind, "memory": memory})
    found = metis_cluster("0.0.0.1 1", parse_metis_clusterfile(text))
    (device,) = found.cluster.device_types
    assert (device.name, device.memory_bytes) == (name, round(gib * GIB))
    assert (device.nominal_bytes or device.memory_bytes) == memory * GIB
    assert f"0.0.0.1: {kind} with {memory} GiB is read as {name}, of which" in found.notes[-1]


def test_nodes_of_one_address_get_names_of_their_own() -> None:
    found = metis_cluster("0.0.0.1 4\n0.0.0.1 4\n", parse_metis_clusterfile(clusterfile()))
    assert [node.name for node in found.cluster.nodes] == ["0.0.0.1", "0.0.0.1-2"]
    assert "hostfile:2: 0.0.0.1 stands there again; this node is 0.0.0.1-2" in found.notes


def test_nominal_memory_is_by_type_and_the_smaller_one_counts() -> None:
    text = clusterfile({"instance_type": "a100", "memory": 40}, address="0.0.0.2")
    assert parse_metis_clusterfile(text).memory_bytes() == {"A100": 40 * GIB}
