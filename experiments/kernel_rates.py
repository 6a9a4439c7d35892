"""Fit the rates of measured kernels: ``experiments/published/kernels.csv`` from the raw tables.

The raw tables are those of ai-dynamo/aiconfigurator (Apache-2.0), one file per kind and board with
the names of columns that `KINDS` lists:

    python experiments/kernel_rates.py FOLDER > experiments/published/kernels.csv

They time forward kernels of serving programs together with what these run around the kernel: the
cast of a product's input to 8-bit floats, the rotation and the cache of keys and values. So a
kernel's time is fitted as work over rate, plus traffic, plus a constant:

    seconds = operations / rate + elements x seconds per element + constant

by least absolute errors relative to the measured time, because some boards have two speeds for the
same shape. Grouped products of experts have no such form; they are medians by tokens per expert.
"""

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import click
import numpy as np

from amp_ray.arrays import FloatArray

BOARDS: Final = (
    *("A100-80", "H100", "H200", "B200", "B300", "GB200", "GB300", "L40S", "RTX-PRO-6000"),
)

TYPES: Final = ("bfloat16", "fp8", "fp8_block", "nvfp4")

SMALLEST: Final = 1024
"""Least size of each dimension of a product, and least number of blocks of 128 queries over all
heads and samples of attention: smaller ones do not fill a device."""

BLOCK: Final = 128

HEADER: Final = (
    *("board", "kernel", "kind", "num_rows", "tflops", "constant_us", "ps_per_element"),
    *("median_error", "p90_error", "power_fraction"),
)

Row = Mapping[str, str]


def fitted(terms: FloatArray, seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return coefficients of least relative absolute error, and the relative errors.

    Args:
        terms: Shape ``(num_rows, num_terms)``.
        seconds: Shape ``(num_rows,)``.
    """
    relative = terms / seconds[:, None]
    weights = np.ones(len(seconds))
    solution: FloatArray = np.zeros(terms.shape[1])
    for _ in range(60):  # iteratively reweighted least squares
        root = np.sqrt(weights)
        solution[:] = np.linalg.lstsq(relative * root[:, None], root, rcond=None)[0]
        weights = 1 / np.maximum(np.abs(relative @ solution - 1), 1e-3)
    return solution, np.abs(relative @ solution - 1)


def _columns(rows: Sequence[Row], *names: str) -> list[FloatArray]:
    return [np.array([float(row[name]) for row in rows]) for name in names]


def _line(
    board: str, kernel: str, kind: str, fit: tuple[FloatArray, FloatArray], power: float | None
) -> tuple[object, ...]:
    (per_teraflop, *per_element, constant_s), errors = fit
    return (
        *(board, kernel, kind, len(errors), round(1 / per_teraflop), round(1e6 * constant_s, 1)),
        " ".join(f"{value:.2f}" for value in per_element),
        *(f"{value:.3f}" for value in (np.median(errors), np.percentile(errors, 90))),
        "" if power is None else f"{power:.2f}",
    )


def products(board: str, rows: Sequence[Row]) -> Iterator[tuple[object, ...]]:
    """Fit matrix products ``m x k`` times ``k x n``; elements are those of ``m k, m n, n k``."""
    for kind in TYPES:
        large = [
            row
            for row in rows
            if row["dtype"] == kind and min(int(row[size]) for size in "mnk") >= SMALLEST
        ]
        if not large:
            continue
        m, n, k, latency_ms = _columns(large, "m", "n", "k", "latency_ms")
        terms = np.stack((2e-12 * m * n * k, 1e-12 * m * k, 1e-12 * m * n, 1e-12 * n * k), axis=1)
        terms = np.column_stack((terms, np.ones(len(large))))
        power = None
        if "power_w" in large[0]:
            watts, limits = _columns(large, "power_w", "power_limit_w")
            power = float(np.median(watts / limits))
        yield _line(board, "product", kind, fitted(terms, latency_ms * 1e-3), power)


def attention(board: str, rows: Sequence[Row]) -> Iterator[tuple[object, ...]]:
    """Fit causal attention by the size of heads; elements are queries, keys and values."""
    for head_size in sorted({int(row["head_size"]) for row in rows}):
        same = [row for row in rows if int(row["head_size"]) == head_size]
        batch, tokens, heads, pairs, latency_ms = _columns(
            same, "batch", "sequence_length", "num_heads", "num_key_value_heads", "latency_ms"
        )
        flops = 2 * batch * heads * tokens**2 * head_size
        elements = batch * tokens * (heads + 2 * pairs) * head_size
        terms = np.stack((1e-12 * flops, 1e-12 * elements, np.ones(len(same))), axis=1)
        fills = batch * heads * tokens / BLOCK >= SMALLEST
        fit = fitted(terms[fills], 1e-3 * latency_ms[fills])
        yield _line(board, "attention", str(head_size), fit, None)


def experts(board: str, rows: Sequence[Row]) -> Iterator[tuple[object, ...]]:
    """Return medians of both grouped products by tokens per expert, all experts on one board."""
    rates = defaultdict(list)
    for row in rows:
        if row["routing"] != "balanced" or (row["ep"], row["tp"]) != ("1", "1"):
            continue
        tokens, top_k, num_experts, hidden, width = (
            int(row[name])
            for name in ("tokens", "top_k", "num_experts", "hidden_size", "expert_size")
        )
        rows_of_expert = 2 ** round(np.log2(tokens * top_k / num_experts))
        flops = 6.0 * tokens * top_k * hidden * width
        rates[row["dtype"], rows_of_expert].append(flops / float(row["latency_ms"]) / 1e9)
    for (kind, rows_of_expert), values in sorted(rates.items()):
        middle = float(np.median(values))
        errors = np.abs(np.array(values) / middle - 1)
        spread = (f"{value:.3f}" for value in (np.median(errors), np.percentile(errors, 90)))
        name = f"{kind} {rows_of_expert}"
        yield (board, "experts", name, len(values), round(middle), "", "", *spread, "")


KINDS: Final = {"gemm": products, "attention": attention, "moe": experts}
"""Kinds of raw tables, ``KIND_BOARD.csv``."""


@click.command(help="Write the fitted rates of the raw kernel tables in FOLDER to stdout.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Fit every table of every board."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(HEADER)
    for board in BOARDS:
        for kind, fit in KINDS.items():
            path = folder / f"{kind}_{board}.csv"
            if path.exists():
                with path.open(encoding="utf-8", newline="") as file:
                    writer.writerows(fit(board, list(csv.DictReader(file))))


if __name__ == "__main__":
    main()
