"""Names and figures of a calibration's experiment, to compare with another experiment."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any, Final

from amp_ray.clusters.cluster import Cluster, Link, Node
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtimes.releases import RELEASES

Fingerprint = Mapping[str, Any]
# Parts of an experiment that a calibration depends on. Names of hosts, limits of the search and the
# batch are left out, because constants do not depend on them.
PARTS: Final = ("model", "cluster", "runtime", "profile")
_MAX_NAMED: Final = 4  # differences that a message spells out


def fingerprint(experiment: Experiment) -> Fingerprint:
    """Return names and figures of model, cluster, runtime and profile as plain JSON values."""
    profile = experiment.profile
    record = {
        "model": {
            **experiment.model.shape.figures(),
            "layers_in_chain": experiment.model.num_layers,
            "parameters": experiment.model.num_parameters,
        },
        "cluster": {
            "nodes": [
                {"count": len(list(group)), **figures}
                for figures, group in groupby(map(_node, experiment.cluster.nodes))
            ],
            "pair_links": [
                {"nodes": list(pair), **_link(link)}
                for pair, link in sorted(experiment.cluster.pair_links.items())
            ],
            **_zones(experiment.cluster),
        },
        "runtime": {**_traits(experiment), **experiment.program_settings},
        "profile": {
            "source": profile.source,
            "forward_s": {
                device: sum(float(anchor.forward_s.sum()) for anchor in table.values())
                for device, table in profile.tables.items()
            },
        },
    }
    plain: Fingerprint = json.loads(json.dumps(record))
    return plain


_LATER_TRAITS: Final = (
    *("fuses_older_attention", "native_attention", "frees_outputs", "has_pat", "keeps", "formats"),
    *("remainder_bytes_per_parameter", "overlaps_exchanges", "dispatcher", "fp8_recipe"),
    *("waiting_elements", "fused_experts", "overlaps_shared_experts", "cuda_graphs"),
    *("fused_router", "expert_streams", "recompute_modules", "unused_gradients", "release"),
    *("frees_gradients", "rounds_gathered", "offloads_activations", "offloaded_blocks"),
    *("weighs_activations", "exchange_multiprocessors", "needs_flash_attention"),
    *("reduces_sharded_at_once", "gather_slice_s", "wraps_optimizer", "host_s_per_iteration"),
    *(
        "divides_biased_experts",
        "nvfp4",
        "fused_formats",
        "attention_format",
        "has_unaligned_kernels",
    ),
    *("chunks_loss", "loss_chunks", "rotates_complex", "separate_norms"),
    *("unexplained_pipelines", "defers_gradient_sync", "switched", "compiled_attention"),
)
"""Traits that older calibrations lack. They follow from the runtime's name, from
``fused_attention``, or from the program's settings, which are compared."""


def _traits(experiment: Experiment) -> dict[str, object]:
    """Return the figures of the runtime that decide on times and memory."""
    traits = asdict(experiment.traits)
    several = len(RELEASES.get(experiment.traits.name, {})) > 1
    release = {"release": traits["release"]} if several else {}
    for name in ("description", "status", *_LATER_TRAITS):
        del traits[name]
    return {**traits, "sends_tokens_once": experiment.traits.sends_tokens_once, **release}


def differing_parts(recorded: Fingerprint, expected: Fingerprint) -> tuple[str, ...]:
    """Return the parts in which two fingerprints differ."""
    return tuple(part for part in PARTS if recorded.get(part) != expected.get(part))


def describe_differences(recorded: Fingerprint, expected: Fingerprint) -> str:
    """List the differences between a calibration and an experiment, with both figures."""
    lines = [
        line for part in PARTS for line in differences(part, recorded.get(part), expected.get(part))
    ]
    more = len(lines) - _MAX_NAMED
    rest = [f"{more} more differences"] if more > 0 else []
    return "; ".join(lines[:_MAX_NAMED] + rest)


def differences(key: str, recorded: object, expected: object) -> Iterator[str]:
    """Yield one line per leaf that differs."""
    if isinstance(recorded, dict) and isinstance(expected, dict):
        for name in dict.fromkeys((*recorded, *expected)):
            yield from differences(f"{key}.{name}", recorded.get(name), expected.get(name))
    elif (
        isinstance(recorded, list) and isinstance(expected, list) and len(recorded) == len(expected)
    ):
        for index, (ours, theirs) in enumerate(zip(recorded, expected, strict=True)):
            yield from differences(f"{key}.{index}", ours, theirs)
    elif isinstance(recorded, list) and isinstance(expected, list):
        yield f"{key} has {len(recorded)} entries in the calibration, {len(expected)} here"
    elif recorded != expected:
        yield f"{key} is {recorded!r} in the calibration, {expected!r} here"


def _node(node: Node) -> dict[str, Any]:
    """Return a node's figures without its name."""
    device = asdict(node.device)
    del device["source"]
    del device["nominal_bytes"]
    later = ("host_bytes_per_s", "nvfp4_flops", "nvfp4_fraction", "board_power_w")
    for name in later:
        del device[name]  # older calibrations lack it; it follows from the board's name
    for key in ("context_bytes", "power_limit_w"):
        if device[key] is None:
            del device[key]
    return {
        "slots": node.num_slots,
        "device": device,
        "intra": _link(node.intra),
        "inter": _link(node.inter),
        **({"hosts": node.num_hosts} if node.hosts else {}),
        **({"first_slot": node.first_slot} if node.first_slot else {}),
        **({"host_link": _link(node.host_link)} if node.host_link else {}),
    }


def _zones(cluster: Cluster) -> dict[str, Any]:
    """Return the zones of nodes and the links between them; empty without such links."""
    if not cluster.zone_links:
        return {}
    links = sorted(cluster.zone_links.items())
    return {
        "zones": [node.zone for node in cluster.nodes],
        "zone_links": [{"zones": list(zones), **_link(joined.link)} for zones, joined in links],
    }


def _link(link: Link) -> dict[str, float]:
    """Return a link's figures, without unset ones, which older calibrations lack."""
    figures = asdict(link)
    if link.collective_latency_s is None:
        del figures["collective_latency_s"]
    for name in ("rates", "fabric", "board", "assumed"):
        if not figures[name]:
            del figures[name]
    return figures
