"""Oracle of the planner for Metis (2024): compares all plans, one after the other."""

import json
from collections.abc import Iterator
from itertools import combinations, pairwise, permutations, product
from typing import Final

import numpy as np

from amp_ray.planners.metis2024.groups import MetisLimits
from amp_ray.planners.metis2024.inputs import metis_cluster, parse_metis_clusterfile
from amp_ray.planners.metis2024.plan import (
    MetisCost,
    MetisPlan,
    MetisSetting,
    metis_cost,
    metis_defects,
)
from amp_ray.planners.metis2024.profile import parse_metis_profile

KINDS: Final = ("A100", "T4", "V100")
SIZES: Final = (1, 2, 4)

MOST_DEVICES: Final = 6
"""Maximum devices of a random cluster; each device doubles the number of plans."""


def cheapest_plan(
    setting: MetisSetting, limits: MetisLimits, num_micro_batches: int
) -> tuple[float, MetisPlan] | None:
    """Find the cheapest plan by comparing all of them.

    Args:
        setting: A small cluster and model.
        limits: Limits of the published planner.
        num_micro_batches: Number of micro-batches of every plan.

    Returns:
        The least cost, and a plan with this cost; None if no plan can run.
    """
    best: tuple[float, MetisPlan] | None = None
    for plan in all_plans(setting, num_micro_batches):
        cost = metis_cost(setting, plan)
        if not isinstance(cost, MetisCost) or (best is not None and cost.total_s >= best[0]):
            continue
        if _allowed(setting, limits, plan) and not metis_defects(setting, plan):
            best = cost.total_s, plan
    return best


def all_plans(setting: MetisSetting, num_micro_batches: int) -> Iterator[MetisPlan]:
    """Yield all plans without an empty stage, including those that cannot run."""
    num_devices, num_layers = setting.cluster.num_devices, setting.profile.num_layers
    for order in permutations(sorted(set(setting.node_types))):
        for pp in range(1, min(num_devices, num_layers) + 1):
            for groups in _compositions(num_devices, pp):
                for degrees in product(*(_degrees(size) for size in groups)):
                    for lengths in _compositions(num_layers, pp):
                        yield MetisPlan(
                            type_order=order,
                            degrees=degrees,
                            num_micro_batches=num_micro_batches,
                            bounds=(0, *np.cumsum(lengths).tolist()),
                        )


def random_setting(rng: np.random.Generator, kind: str) -> MetisSetting:
    """Draw a cluster of up to six devices and a profile of up to four layers.

    Args:
        rng: Source of randomness.
        kind: ``integers`` for times of a few whole milliseconds, ``floats`` for any times.
    """
    num_layers = int(rng.integers(2, 5))
    hosts = [
        (f"0.0.0.{host}", str(rng.choice(KINDS)), int(rng.integers(1, 4)))
        for host in range(int(rng.integers(1, 4)))
    ]
    while sum(slots for _, _, slots in hosts) > MOST_DEVICES:
        hosts.pop()
    described = {
        address: {
            "instance_type": of,
            "inter_bandwidth": 1,
            "intra_bandwidth": int(rng.integers(1, 4)) * 0.001,
            "memory": int(rng.integers(8, 25)),
        }
        for address, of, _ in hosts
    }
    clusterfile = parse_metis_clusterfile(json.dumps(described), unit="GB/s")
    hostfile = "".join(f"{address} slots={slots}\n" for address, _, slots in hosts)
    files = {
        f"DeviceType.{of}_tp{tp}_bs{size}.json": json.dumps(_document(rng, kind, num_layers, size))
        for of in sorted({of for _, of, _ in hosts})
        for tp in (1, 2)
        for size in SIZES
        if (tp, size) == (1, 1) or rng.random() < 0.9
    }
    profile = parse_metis_profile(files, folder="p")
    return MetisSetting(
        cluster=metis_cluster(hostfile, clusterfile).cluster,
        profile=profile,
        hidden_size=256,
        sequence_length=64,
        vocab_size=1024,
        global_batch_size=int(rng.choice([4, 6, 8, 12])),
        listed_first=min(profile.entries),
    )


def _document(rng: np.random.Generator, kind: str, num_layers: int, size: int) -> dict[str, object]:
    """Draw one profile file."""
    times = rng.integers(1, 5, num_layers) if kind == "integers" else rng.random(num_layers)
    layer_ms = (size * times.astype(np.float64)).tolist()
    values: dict[str, object] = {
        "batch_generator_time_ms": float(rng.random()),
        "optimizer_time_ms": float(rng.integers(0, 9)),
        "layer_compute_total_ms": layer_ms,
    }
    if rng.random() < 0.95:
        values["forward_backward_time_ms"] = max(0.1, sum(layer_ms) + float(rng.integers(-1, 4)))
    megabyte = 2**20
    return {
        "model": {
            "parameters": {
                "parameters_per_layer_bytes": (megabyte * rng.integers(1, 9, num_layers)).tolist()
            }
        },
        "execution_time": values,
        "execution_memory": {
            "layer_memory_total_mb": (1024.0 * rng.integers(1, 8, num_layers) + 256 * size).tolist()
        },
    }


def _allowed(setting: MetisSetting, limits: MetisLimits, plan: MetisPlan) -> bool:
    """Return whether the limits allow a plan, and every device of it gets samples."""
    for stage, (_, tp) in enumerate(plan.degrees):
        samples, ranks = setting.samples(plan, stage), setting.data_ranks(plan, stage)
        if tp > limits.max_tp or not 1 <= samples <= limits.max_size or ranks is None:
            return False
        if min(rank.samples for rank in ranks) < 1:
            return False
    return True


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write ``total`` as an ordered sum of ``parts`` positive numbers."""
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(end - first for first, end in pairwise((0, *cuts, total)))


def _degrees(size: int) -> list[tuple[int, int]]:
    """Return every (dp, tp) of a group of ``size`` devices."""
    return [(size // tp, tp) for tp in range(1, size + 1) if size % tp == 0]
