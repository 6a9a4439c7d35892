"""What a user may get wrong about nodes, devices and links."""

from typing import Final

import pytest

from support.bad_input import NODE, Refused, edited

CLUSTERS: Final = {
    "unknown key in a node": (
        (NODE, "slots: 2, colour: red, "),
        "experiment.yaml:5: cluster.nodes.0.colour: unknown key 'colour'; known here: count, ",
    ),
    "unknown key in a described device": (
        ("device: T4", "device: {name: X, memory_gib: 8, memory_gbyte_per_s: 9, ram: 1}"),
        "experiment.yaml:5: cluster.nodes.0.device.ram: unknown key 'ram'; known here: name, ",
    ),
    "missing key in a node": (
        (NODE, ""),
        "experiment.yaml:5: cluster.nodes.0.slots: key 'slots' is missing",
    ),
    "missing key in a described device": (
        ("device: T4", "device: {name: X, memory_gib: 8}"),
        (
            "experiment.yaml:5: cluster.nodes.0.device.memory_gbyte_per_s: key "
            "'memory_gbyte_per_s' is missing"
        ),
    ),
    "count of zero": (
        (NODE, "slots: 0, "),
        "experiment.yaml:5: cluster.nodes.0.slots: found 0; expected greater than or equal to 1",
    ),
    "unit in the value": (
        ("inter_gbit_per_s: 10", "inter_gbit_per_s: 10 Gbit/s"),
        (
            "experiment.yaml:5: cluster.nodes.0.inter_gbit_per_s: found '10 Gbit/s'; "
            "expected a number alone (the key's name tells the unit)"
        ),
    ),
    "bytes instead of GiB": (
        (NODE, "slots: 2, memory_gib: 16000000000, "),
        "experiment.yaml:5: cluster.nodes.0.memory_gib: found 16000000000; expected 0.001",
    ),
    "not a number": (
        ("inter_gbit_per_s: 10", "inter_gbit_per_s: .nan"),
        "experiment.yaml:5: cluster.nodes.0.inter_gbit_per_s: found nan; expected ",
    ),
    "negative rate": (
        ("inter_gbit_per_s: 10", "inter_gbit_per_s: -10"),
        "cluster.nodes.0.inter_gbit_per_s: found -10; expected 0.001 to 100,000 Gbit/s",
    ),
    "rate that no link has": (
        ("inter_gbit_per_s: 10", "inter_gbit_per_s: 2e-7"),
        "cluster.nodes.0.inter_gbit_per_s: found 2e-07; expected 0.001 to 100,000 Gbit/s",
    ),
    "infinite memory": (
        (NODE, "slots: 2, memory_gib: .inf, "),
        "cluster.nodes.0.memory_gib: found inf; expected 0.001 to 10,000 GiB",
    ),
    "GFLOP/s instead of TFLOP/s": (
        (
            "device: T4",
            "device: {name: X, memory_gib: 8, memory_gbyte_per_s: 900, fp16_tflops: 125000}",
        ),
        "device.fp16_tflops: found 125000; expected 0.001 to 100,000 TFLOP/s",
    ),
    "MB/s instead of GB/s": (
        (
            "device: T4",
            "device: {name: X, memory_gib: 8, memory_gbyte_per_s: 900000, fp16_tflops: 125}",
        ),
        "device.memory_gbyte_per_s: found 900000; expected 0.1 to 100,000 GB/s",
    ),
    "latency in seconds": (
        (NODE, "slots: 2, intra_latency_us: 8e-6, "),
        "intra_latency_us: found 8e-06; expected 0 or 0.001 to 1,000,000 microseconds",
    ),
    "no nodes": (
        ("- {count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}", "[]"),
        "experiment.yaml:4: cluster.nodes: found []; expected a list of at least 1",
    ),
    "more devices than there are": (
        ("count: 2, device: T4, slots: 2", "count: 100000, device: T4, slots: 100000"),
        "experiment.yaml:4: cluster.nodes: found 10,000,000,000 devices; expected at most 1,000,0",
    ),
    "device whose name is a path": (
        (
            "device: T4",
            "device: {name: ../X, memory_gib: 8, memory_gbyte_per_s: 9, fp16_tflops: 1}",
        ),
        "device.name: found '../X'; expected a plain name",
    ),
    "mapping instead of a list": (
        ("    - {count", "      {count"),
        "experiment.yaml:4: cluster.nodes: found {'count': 2, ",
    ),
    "device not in the catalogue": (
        ("device: T4", "device: B9000"),
        (
            "experiment.yaml:5: cluster.nodes.0.device: device 'B9000' is not in the "
            "catalogue; known: T4, "
        ),
    ),
    "device without a rate": (
        ("device: T4", "device: {name: X, memory_gib: 8, memory_gbyte_per_s: 9}"),
        "device: device 'X' needs fp32_tflops, fp16_tflops, bf16_tflops or fp8_tflops",
    ),
    "precision that the device lacks": (
        ("precision: fp16", "precision: bf16"),
        (
            "experiment.yaml:5: cluster.nodes.0.device: device 'T4' does not compute in "
            "bf16; it can do fp32, fp16"
        ),
    ),
    "link to an unknown host": (
        ("profile:", "  links: [{between: [node0, node7], gbit_per_s: 1}]\nprofile:"),
        "experiment.yaml:6: cluster.links.0.between: host 'node7' is not one of node0, node1",
    ),
    "link from a host to itself": (
        ("profile:", "  links: [{between: [node0, node0], gbit_per_s: 1}]\nprofile:"),
        "cluster.links.0.between: found ['node0', 'node0']; expected two different hosts",
    ),
    "link given twice": (
        (
            "profile:",
            (
                "  links:\n    - {between: [node0, node1], gbit_per_s: 1}\n"
                "    - {between: [node1, node0], gbit_per_s: 2}\nprofile:"
            ),
        ),
        (
            "experiment.yaml:8: cluster.links.1.between: the link between node1 and node0 "
            "stands here a second time"
        ),
    ),
}


@pytest.mark.parametrize(("replacement", "message"), CLUSTERS.values(), ids=CLUSTERS)
def test_a_wrong_cluster_is_led_to_its_line(
    refused: Refused, replacement: tuple[str, str], message: str
) -> None:
    assert message in refused({"experiment.yaml": edited(replacement)})
