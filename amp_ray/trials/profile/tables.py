"""From records to the files of a profile: text only, in the form that plans read."""

import json
from collections.abc import Iterable, Sequence
from typing import Final

from amp_ray.spec.model import Model
from amp_ray.trials.profile.grid import LayerPoint, equal_layers, first_positions, loss_position
from amp_ray.trials.profile.records import STEP_KEYS, ProfileRecords

DESCRIPTION_FILE: Final = "profile.yaml"
LINKS_FILE: Final = "details/links.csv"
STEP_FILE: Final = "details/step.csv"
LAYERS_FILE: Final = "details/layers.csv"
MEMORY_FILE: Final = "details/memory.csv"
RECORDS_FILE: Final = "details/records.jsonl"
"""Not beside the tables, where every CSV is one of a device."""

_POINT_COLUMNS: Final = ("device", "layer", "tp", "micro_batch_size")
_LAYER_COLUMNS: Final = (
    *("forward_s", "backward_s", "forward_launch_s", "backward_launch_s"),
    *("all_reduce_s", "spread_s", "repeats"),
)
_MEMORY_COLUMNS: Final = ("kept_bytes", "temporary_bytes")

_SIGNIFICANT_DIGITS: Final = 6


def profile_files(records: ProfileRecords, model: Model, precision: str) -> dict[str, str]:
    """Return the text of every file of a profile folder, by name.

    A device has a table as soon as all layers were measured at one tp and micro-batch size;
    what was measured incompletely stands in the details only.
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
    """Describe a model in a line.

    Its figures that do not speak for themselves are left to the experiment file.
    """
    shape = model.shape
    size = (
        f"depth {' '.join(map(str, shape.depth))}, bottom width {shape.bottom_width}"
        if shape.family == "transgan"
        else f"sequence {shape.sequence_length}, vocabulary {shape.vocab_size}"
    )
    blocks = len(model.indices("block"))
    return f"{shape.family}, {blocks} blocks, hidden {shape.hidden_size}, {size}"


def _description(records: ProfileRecords, model: Model, precision: str) -> str:
    """Write ``profile.yaml``."""
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
    """Write ``DEVICE.csv``: what was measured of a layer stands at all its equals."""
    rows = []
    for tp, size in pairs:
        for layer, first in enumerate(equal_layers(model)):
            point = LayerPoint(micro_batch_size=size, tp=tp, layer=first)
            times = records.layers[device, point]
            seconds = (_number(times[key]) for key in ("forward_s", "backward_s"))
            rows.append((layer, tp, size, *seconds))
    return _csv(("layer", "tp", "micro_batch_size", "forward_s", "backward_s"), rows)


def _point_table(records: ProfileRecords, model: Model, columns: Sequence[str]) -> str:
    """Write one row per distinct layer, tp and micro-batch size of every device."""
    loss = loss_position(model)
    rows = []
    for (device, point), values in sorted(records.layers.items(), key=lambda entry: entry[0]):
        layer = "loss" if point.layer == loss else point.layer
        head = (device, layer, point.tp, point.micro_batch_size)
        rows.append((*head, *(_number(values[column]) for column in columns)))
    return _csv((*_POINT_COLUMNS, *columns), rows)


def _link_table(records: ProfileRecords) -> str:
    """Write one row per message."""
    rows = sorted(
        (point.what, place.scope, place.devices, point.num_ranks, point.num_bytes, _number(seconds))
        for (place, point), seconds in records.links.items()
    )
    return _csv(("what", "scope", "devices", "num_ranks", "bytes", "seconds"), rows)


def _number(value: float) -> str:
    """Write a number; times have no more digits than they deserve."""
    whole = float(value).is_integer()
    return str(int(value)) if whole else f"{value:.{_SIGNIFICANT_DIGITS}g}"


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table; no cell has commas."""
    lines = [",".join(header), *(",".join(map(str, row)) for row in rows)]
    return "\n".join(lines) + "\n"
