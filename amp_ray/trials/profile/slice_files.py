"""From measured slices to the tables that ``slices --table`` and plans read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from amp_ray.spec.experiment import Experiment
from amp_ray.spec.profile_file import SLICES_SUFFIX
from amp_ray.trials.profile.grid import LayerPoint
from amp_ray.trials.profile.records import ProfileRecords
from amp_ray.units import BYTES_PER_ELEMENT

_MEGABYTE: Final = 1e6


def slice_files(
    records: ProfileRecords,
    experiment: Experiment,
    granularity: int,
    wanted: Mapping[str, Sequence[LayerPoint]],
) -> dict[str, str]:
    """Return a table per device and tp, by file name.

    A slice without a point cannot run. So there is a table only where each was measured or found
    too large. ``wanted`` are points by device; whole sequences among them do not count.
    """
    files = {}
    for device, points in wanted.items():
        for tp in sorted({point.tp for point in points if point.tokens}):
            own = [point for point in points if point.tokens and point.tp == tp]
            if not records.missing_layers(device, own):
                table = {"granularity": granularity, **_table(records, experiment, device, own)}
                files[f"{device}.tp{tp}{SLICES_SUFFIX}"] = json.dumps(table, indent=1) + "\n"
    return files


def _table(
    records: ProfileRecords,
    experiment: Experiment,
    device: str,
    points: Sequence[LayerPoint],
) -> dict[str, Any]:
    """Return a table for the whole batch on as many stages as there can be; users change that."""
    num_blocks = len(experiment.model.indices("block"))
    num_devices = sum(
        node.num_slots for node in experiment.cluster.nodes if node.device.name == device
    )
    stages = max(1, min(num_blocks, num_devices // points[0].tp))
    measured = {
        f"{point.micro_batch_size}_{point.tokens}_{point.context}": {
            "forward_mean": values["forward_s"],
            "backward_mean": values["backward_s"],
            "memory_mb": (values["kept_bytes"] + values["temporary_bytes"]) / _MEGABYTE,
        }
        for point in points
        if (values := records.slices.get((device, point))) is not None
    }
    table: dict[str, Any] = {
        "batch": experiment.global_batch_size,
        "tokens": experiment.model.shape.sequence_length,
        "stages": stages,
        "layers": -(-num_blocks // stages),
        "context": "fitted",
        "points": measured,
    }
    sent = _messages(records, experiment, device)
    if sent:
        table["communication"] = {"tokens": list(sent), "seconds": list(sent.values())}
    return table


def _messages(records: ProfileRecords, experiment: Experiment, device: str) -> dict[int, float]:
    """Return seconds of messages within a host of a device, by their tokens."""
    width = BYTES_PER_ELEMENT[experiment.precision] * experiment.model.shape.hidden_size
    sized = sorted(
        (point.num_bytes, seconds)
        for (place, point), seconds in records.links.items()
        if (place.scope, place.devices, point.what) == ("intra", device, "p2p")
    )
    return {size // width: seconds for size, seconds in sized if size >= width}
