"""Text of a profile's files, made from its records, in the formats that other commands read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.profile import SLICES_SUFFIX
from amp_ray.models.model import Model
from amp_ray.trials.profile.points import LayerPoint, equal_layers, first_positions, loss_position
from amp_ray.trials.profile.records import STEP_KEYS, ProfileRecords
from amp_ray.units import BYTES_PER_ELEMENT

DESCRIPTION_FILE: Final = "profile.yaml"
LINKS_FILE: Final = "details/links.csv"
STEP_FILE: Final = "details/step.csv"
LAYERS_FILE: Final = "details/layers.csv"
MEMORY_FILE: Final = "details/memory.csv"
RECORDS_FILE: Final = "details/records.jsonl"
"""In a subfolder, like all details: each CSV file in the profile's folder is a device's table."""

_POINT_COLUMNS: Final = ("device", "layer", "tp", "micro_batch_size")
_LAYER_COLUMNS: Final = (
    *("forward_s", "backward_s", "forward_launch_s", "backward_launch_s"),
    *("all_reduce_s", "spread_s", "repeats"),
)
_MEMORY_COLUMNS: Final = ("kept_bytes", "temporary_bytes")

_SIGNIFICANT_DIGITS: Final = 6


def profile_files(records: ProfileRecords, model: Model, precision: str) -> dict[str, str]:
    """Return the text of each file of a profile folder, by name.

    A device gets a table if all layers were measured at one tp and micro-batch size; incomplete
    measurements appear only in the details.
    """
    layers = first_positions(model)
    devices = sorted({device for device, _ in records.layers})
    files = {
        f"{device}.csv": _device_table(records, model, device, pairs)
        for device in devices
        if (pairs := records.complete(device, layers))
    }
    if files:
        files[DESCRIPTION_FILE] = _description(records, model, precision)
    files[LAYERS_FILE] = _point_table(records, model, _LAYER_COLUMNS)
    files[MEMORY_FILE] = _point_table(records, model, _MEMORY_COLUMNS)
    files[LINKS_FILE] = _link_table(records)
    files[STEP_FILE] = _csv(
        ("device", *STEP_KEYS),
        [
            (device, *(_number(values[key]) for key in STEP_KEYS))
            for device, values in sorted(records.steps.items())
        ],
    )
    return files


def model_text(model: Model) -> str:
    """Describe a model in one line; less common sizes stand only in the experiment file."""
    shape = model.shape
    size = (
        f"depth {' '.join(map(str, shape.depth))}, bottom width {shape.bottom_width}"
        if shape.family == "transgan"
        else f"sequence {shape.sequence_length}, vocabulary {shape.vocab_size}"
    )
    blocks = len(model.indices("block"))
    return f"{shape.family}, {blocks} blocks, hidden {shape.hidden_size}, {size}"


def _description(records: ProfileRecords, model: Model, precision: str) -> str:
    devices = sorted(records.hardware)
    hardware = "; ".join(f"{name}: {records.hardware[name]}" for name in devices)
    versions = "; ".join(sorted(set(records.versions.values())))
    return (
        "# Measured by amp-ray profile; details/ has what a plan does not read.\n"
        f"num_layers: {model.num_layers}\n"
        f"model: {json.dumps(model_text(model))}\n"
        f"precision: {precision}\n"
        "forward_runs: 1\n"
        "includes_all_reduces: false\n"
        f"hardware: {json.dumps(hardware)}\n"
        f"versions: {json.dumps(versions)}\n"
        f"date: {json.dumps(max(records.dates.values(), default=''))}\n"
    )


def _device_table(
    records: ProfileRecords, model: Model, device: str, pairs: Sequence[tuple[int, int]]
) -> str:
    """Return the text of ``DEVICE.csv``; of equal layers, one was measured for all."""
    rows = []
    for tp, size in pairs:
        for layer, first in enumerate(equal_layers(model)):
            point = LayerPoint(micro_batch_size=size, tp=tp, layer=first)
            times = records.layers[device, point]
            seconds = (_number(times[key]) for key in ("forward_s", "backward_s"))
            rows.append((layer, tp, size, *seconds))
    return _csv(("layer", "tp", "micro_batch_size", "forward_s", "backward_s"), rows)


def _point_table(records: ProfileRecords, model: Model, columns: Sequence[str]) -> str:
    """Return a table with a row per device, distinct layer, tp and micro-batch size."""
    loss = loss_position(model)
    rows = []
    for (device, point), values in sorted(records.layers.items(), key=lambda entry: entry[0]):
        layer = "loss" if point.layer == loss else point.layer
        head = (device, layer, point.tp, point.micro_batch_size)
        rows.append((*head, *(_number(values[column]) for column in columns)))
    return _csv((*_POINT_COLUMNS, *columns), rows)


def _link_table(records: ProfileRecords) -> str:
    rows = sorted(
        (point.what, place.scope, place.devices, point.num_ranks, point.num_bytes, _number(seconds))
        for (place, point), seconds in records.links.items()
    )
    return _csv(("what", "scope", "devices", "num_ranks", "bytes", "seconds"), rows)


def _number(value: float) -> str:
    """Format a number; round it to `_SIGNIFICANT_DIGITS` unless it is a whole number."""
    whole = float(value).is_integer()
    return str(int(value)) if whole else f"{value:.{_SIGNIFICANT_DIGITS}g}"


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [",".join(header), *(",".join(map(str, row)) for row in rows)]
    return "\n".join(lines) + "\n"


_MEGABYTE: Final = 1e6


def slice_files(
    records: ProfileRecords,
    experiment: Experiment,
    granularity: int,
    wanted: Mapping[str, Sequence[LayerPoint]],
) -> dict[str, str]:
    """Return the text of one slice table per device and tp, by file name.

    A slice that a table lacks counts as impossible. So a table is written only if each slice was
    measured or is too large. ``wanted`` has points by device; those of whole sequences are ignored.
    """
    files = {}
    for device, points in wanted.items():
        for tp in sorted({point.tp for point in points if point.tokens}):
            slices = [point for point in points if point.tokens and point.tp == tp]
            if not records.missing_layers(device, slices):
                table = {
                    "granularity": granularity,
                    **_slice_table(records, experiment, device, slices),
                }
                files[f"{device}.tp{tp}{SLICES_SUFFIX}"] = json.dumps(table, indent=1) + "\n"
    return files


def _slice_table(
    records: ProfileRecords,
    experiment: Experiment,
    device: str,
    points: Sequence[LayerPoint],
) -> dict[str, Any]:
    """Return a table for the whole batch and the maximum of stages; users can edit both values."""
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
    """Return the seconds that a message takes within a host, by number of tokens."""
    width = BYTES_PER_ELEMENT[experiment.precision] * experiment.model.shape.hidden_size
    sized = sorted(
        (point.num_bytes, seconds)
        for (place, point), seconds in records.links.items()
        if (place.scope, place.devices, point.what) == ("intra", device, "p2p")
    )
    return {size // width: seconds for size, seconds in sized if size >= width}
