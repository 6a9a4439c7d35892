"""The published planner's larger cases, from its own files, to test speed and quality of plans."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.inputs.published_profile import Key, PublishedEntry, PublishedProfile
from amp_ray.planners.metis2024.groups import MetisLimits
from amp_ray.planners.metis2024.inputs import metis_cluster, parse_metis_clusterfile
from amp_ray.planners.metis2024.plan import MetisSetting
from amp_ray.planners.metis2024.profile import parse_metis_profile
from amp_ray.planners.metis2024.search import MetisSearch, MetisSolution
from support.metis import CLUSTERFILE, HOSTFILE, metis_profile_files

NODES: Final[Mapping[str, str]] = {
    "V100": "0.0.0.1",
    "P100": "0.0.0.2",
    "T4": "0.0.0.3",
    "A100": "0.0.0.4",
}
"""Addresses in the published cluster file."""

MEASURED_LAYERS: Final = 10
"""Number of layers in the published profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisCase:
    """One case, with targets for time and quality.

    Args:
        name: Name for people.
        nodes: Device type and number of devices of every node.
        profile: Folder of the case's profile.
        listed_first: The profile file that model-level values come from.
        num_layers: Number of layers of the model; the measured middle layer is repeated.
        target_s: Maximum of process CPU seconds for a search.
        target_ms: Maximum time of a plan by the published formulas, to the millisecond; None if
            the best plan is not known.
        metis_s: Seconds of the published planner's search; None if it did not end.
    """

    name: str
    nodes: tuple[tuple[str, int], ...]
    profile: str
    listed_first: Key
    target_s: float
    num_layers: int = MEASURED_LAYERS
    target_ms: float | None = None
    metis_s: float | None = None


T4_FIRST: Final = ("T4", 4, 4)
LIMITS: Final = MetisLimits(max_tp=4, max_size=4)
"""Limits of the published planner's own runs."""

PAIRS: Final = (("A100", 8), ("A100", 8), ("T4", 8), ("T4", 8))

CASES: Final = (
    MetisCase(
        name="16 devices, 2 types",
        nodes=(("T4", 4), ("A100", 4), ("A100", 4), ("A100", 4)),
        profile="a100_t4",
        listed_first=("A100", 2, 2),
        target_s=0.05,
        target_ms=3825,
        metis_s=33.7,
    ),
    MetisCase(
        name="4 types x 4",
        nodes=tuple((kind, 4) for kind in NODES),
        profile="all4_ext",
        listed_first=T4_FIRST,
        target_s=0.3,
        target_ms=6493,
        metis_s=33.8,
    ),
    MetisCase(
        name="4 types x 8",
        nodes=tuple((kind, 8) for kind in NODES),
        profile="all4_ext",
        listed_first=T4_FIRST,
        target_s=0.5,
        target_ms=3449,
        metis_s=2.8,
    ),
    *(
        MetisCase(
            name="32 devices, 2 types",
            nodes=PAIRS,
            profile="a100_t4_ext",
            listed_first=T4_FIRST,
            num_layers=num_layers,
            target_s=target_s,
            target_ms=target_ms,
            metis_s=metis_s,
        )
        for num_layers, target_s, target_ms, metis_s in (
            (18, 0.25, 4722, 25.0),
            (26, 0.6, None, 102.5),
            (34, 1.0, None, None),
        )
    ),
    MetisCase(
        name="64 devices, 2 types",
        nodes=PAIRS * 2,
        profile="a100_t4_ext",
        listed_first=T4_FIRST,
        num_layers=66,
        target_s=10.0,
    ),
)


def read_case(folder: Path, case: MetisCase, *, global_batch_size: int = 128) -> MetisSetting:
    """Read the cluster and profile of a case.

    Args:
        folder: Folder of the published files, with ``clusters`` and ``profiles``.
        case: The case to read.
        global_batch_size: Samples per optimizer step.
    """
    hostfile = "".join(f"{NODES[kind]} slots={slots}\n" for kind, slots in case.nodes)
    clusterfile = parse_metis_clusterfile((folder / "clusters" / "clusterfile.json").read_text())
    files = (folder / "profiles" / case.profile).iterdir()
    profile = parse_metis_profile(
        {path.name: path.read_text() for path in files}, folder=case.profile
    )
    return MetisSetting(
        cluster=metis_cluster(hostfile, clusterfile).cluster,
        profile=with_layers(profile, case.num_layers),
        hidden_size=4096,
        sequence_length=1024,
        vocab_size=51200,
        global_batch_size=global_batch_size,
        listed_first=case.listed_first,
    )


def with_layers(profile: PublishedProfile, num_layers: int) -> PublishedProfile:
    """Repeat the second layer until a profile has ``num_layers`` layers."""
    entries = {key: _longer(entry, num_layers) for key, entry in profile.entries.items()}
    return replace(profile, entries=entries)


def _longer(entry: PublishedEntry, num_layers: int) -> PublishedEntry:
    """Repeat the second layer of one entry; times outside the layers stay the same."""
    layer_s = _repeated(entry.layer_s, num_layers)
    whole_s = None if entry.rest_s is None else float(layer_s.sum()) + entry.rest_s
    return replace(
        entry,
        layer_s=layer_s,
        layer_memory_bytes=_repeated(entry.layer_memory_bytes, num_layers),
        layer_parameter_bytes=_repeated(entry.layer_parameter_bytes, num_layers),
        forward_backward_s=whole_s,
    )


def _repeated(values: FloatArray, num_layers: int) -> FloatArray:
    """Repeat the second value until there are ``num_layers``."""
    return np.concatenate([values[:1], np.repeat(values[1:2], num_layers - 2), values[-1:]])


def metis_setting(
    files: Mapping[str, str] | None = None,
    *,
    listed_first: Key = ("A100", 1, 1),
    hostfile: str = HOSTFILE,
    global_batch_size: int = 8,
) -> MetisSetting:
    """Return the published planner's input for two A100, two T4 and four layers.

    The planner assumes one MiB per two samples for an activation, and four for logits.

    Args:
        files: Profile files; all of `metis_profile_files` by default.
        listed_first: The profile file that model-level values come from.
        hostfile: Nodes ``0.0.0.1`` (A100) and ``0.0.0.2`` (T4).
        global_batch_size: Samples per optimizer step.
    """
    clusterfile = parse_metis_clusterfile(json.dumps(CLUSTERFILE))
    return MetisSetting(
        cluster=metis_cluster(hostfile, clusterfile).cluster,
        profile=parse_metis_profile(metis_profile_files() if files is None else files, folder="p"),
        hidden_size=512,
        sequence_length=1024,
        vocab_size=2048,
        global_batch_size=global_batch_size,
        listed_first=listed_first,
    )


def divisors(batch: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches that divide a batch, ascending."""
    return tuple(number for number in range(1, batch + 1) if batch % number == 0)


def best_of(search: MetisSearch) -> MetisSolution | None:
    """Return the best plan for any number of micro-batches, with a bound for all; None if none."""
    results = map(search.solve, divisors(search.setting.global_batch_size))
    solutions = [result for result in results if isinstance(result, MetisSolution)]
    if not solutions:
        return None
    bound_s = min(solution.lower_bound_s for solution in solutions)
    best = min(solutions, key=lambda solution: solution.cost.total_s)
    return replace(best, lower_bound_s=bound_s)
