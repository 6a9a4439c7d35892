"""One device's layer times as CSV: ``layer,tp,micro_batch_size,forward_s[,backward_s]``."""

import csv
import math
from collections.abc import Mapping

import numpy as np

from amp_ray.errors import InputError, Where
from amp_ray.spec.profile import Anchor, DeviceTable, FloatArray

_COLUMNS = ("layer", "tp", "micro_batch_size", "forward_s")
_OPTIONAL = ("backward_s",)


def parse_device_table(text: str, *, num_layers: int, file: str) -> DeviceTable:
    """Read one device's CSV.

    Args:
        text: The file's text.
        num_layers: Layers that every (tp, micro-batch size) must have.
        file: Name for messages.

    Raises:
        InputError: With file and line, for a wrong header, a number that is not one, NaN or
            negative times, a layer that is missing or stands there twice.
    """
    reader = csv.reader(text.splitlines())
    header = tuple(name.strip() for name in next(reader, []))
    if header not in {_COLUMNS, _COLUMNS + _OPTIONAL}:
        message = (
            f"expected the header {','.join(_COLUMNS)}[,{_OPTIONAL[0]}], found {','.join(header)!r}"
        )
        raise InputError(message, where=Where(file=file, line=1))
    width = len(header) - 3
    cells: dict[tuple[int, int], FloatArray] = {}
    for row in reader:
        where = Where(file=file, line=reader.line_num)
        if not row:
            continue
        layer, key, times = _parse_row(row, header, where)
        if layer >= num_layers:
            message = f"layer {layer} does not exist: the model has layers 0..{num_layers - 1}"
            raise InputError(message, where=where)
        table = cells.setdefault(key, np.full((width, num_layers), np.nan))
        if not np.isnan(table[0, layer]):
            message = (
                f"layer {layer} at tp {key[0]}, micro_batch_size {key[1]} stands here a second time"
            )
            raise InputError(message, where=where)
        table[:, layer] = times
    _check_complete(cells, file)
    return {
        key: Anchor(forward_s=table[0], backward_s=table[1] if width > 1 else None)
        for key, table in sorted(cells.items())
    }


def _parse_row(
    row: list[str], header: tuple[str, ...], where: Where
) -> tuple[int, tuple[int, int], list[float]]:
    """Read one line into layer, (tp, micro-batch size) and times."""
    if len(row) != len(header):
        message = f"expected {len(header)} columns ({', '.join(header)}), found {len(row)}"
        raise InputError(message, where=where)
    layer = _number(row[0], header[0], where, kind=int, low=0)
    tp = _number(row[1], header[1], where, kind=int, low=1)
    size = _number(row[2], header[2], where, kind=int, low=1)
    times = [
        _number(cell, name, where, kind=float, low=0)
        for cell, name in zip(row[3:], header[3:], strict=True)
    ]
    return int(layer), (int(tp), int(size)), times


def _number(
    cell: str, column: str, where: Where, *, kind: type[int] | type[float], low: int
) -> float:
    """Read one cell as a number of at least ``low``."""
    try:
        value = kind(cell)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= low):
        expected = "an integer" if kind is int else "seconds, a finite number"
        message = f"found {cell.strip()!r}; expected {expected} of at least {low}"
        raise InputError(message, where=Where(file=where.file, line=where.line, key=column))
    return value


def _check_complete(cells: Mapping[tuple[int, int], FloatArray], file: str) -> None:
    """Refuse a table without rows or with layers missing."""
    if not cells:
        message = "the file has a header and no rows"
        raise InputError(message, where=Where(file=file))
    for (tp, size), table in cells.items():
        missing = np.flatnonzero(np.isnan(table[0]))
        if len(missing):
            message = (
                f"tp {tp}, micro_batch_size {size}: no row for layer "
                f"{', '.join(map(str, missing))} of 0..{table.shape[1] - 1}"
            )
            raise InputError(message, where=Where(file=file))
