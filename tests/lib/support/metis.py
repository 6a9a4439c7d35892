"""Small files in Metis's format, with figures that can be worked out by hand."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from amp_ray.units import MIB

LAYERS_MS: Final[Mapping[int, tuple[float, ...]]] = {1: (1, 2, 2, 1), 2: (1, 1, 1, 1)}
"""Layer times of an A100 by tp, for micro-batch size 1; twice as long for 2, thrice on a T4."""

WHOLE_MS: Final[Mapping[tuple[int, int], float]] = {(1, 1): 8, (1, 2): 15, (2, 1): 5, (2, 2): 10}
"""Times of both passes on an A100 by (tp, micro-batch size); thrice as long on a T4."""

FACTORS: Final[Mapping[str, float]] = {"A100": 1, "H100": 0.5, "T4": 3}

HOSTFILE: Final = "0.0.0.1 slots=2\n0.0.0.2 slots=2\n"

CLUSTERFILE: Final[Mapping[str, Mapping[str, Any]]] = {
    "0.0.0.1": {
        "instance_type": "A100",
        "inter_bandwidth": 1,
        "intra_bandwidth": 10,
        "memory": 80,
    },
    "0.0.0.2": {"instance_type": "T4", "inter_bandwidth": 1, "intra_bandwidth": 5, "memory": 15},
}


def metis_document(
    layers_ms: Sequence[float] = (1, 2, 2, 1), whole_ms: float | None = 8.0
) -> dict[str, Any]:
    """Return one profile file as the authors write it.

    Args:
        layers_ms: Time of each layer.
        whole_ms: Time of both passes of the model; None leaves the key out, like the README.
    """
    times: dict[str, Any] = {
        "total_time_ms": 20.0,
        "batch_generator_time_ms": 0.5,
        "optimizer_time_ms": 10.0,
        "layer_compute_total_ms": list(layers_ms),
    }
    if whole_ms is not None:
        times["forward_backward_time_ms"] = whole_ms
    middle = len(layers_ms) - 2
    return {
        "model": {
            "model_name": "tiny",
            "num_layers": len(layers_ms),
            "parameters": {
                "parameters_per_layer_bytes": [4 * MIB, *[8 * MIB] * middle, 4 * MIB],
            },
        },
        "execution_time": times,
        "execution_memory": {
            "total_memory": 53120,
            "layer_memory_total_mb": [1024, *[2048] * middle, 4096],
        },
    }


def metis_profile_files(
    kinds: Sequence[str] = ("A100", "T4"),
    tps: Sequence[int] = (1, 2),
    sizes: Sequence[int] = (1, 2),
) -> dict[str, str]:
    """Return a profile folder's files by name."""
    return {
        f"DeviceType.{kind}_tp{tp}_bs{size}.json": json.dumps(
            metis_document(
                [FACTORS[kind] * size * time_ms for time_ms in LAYERS_MS[tp]],
                FACTORS[kind] * WHOLE_MS[tp, size],
            )
        )
        for kind in kinds
        for tp in tps
        for size in sizes
    }
