"""Logs of nccl-tests: times of one collective by size, with the ranks that ran it."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Literal, get_args

from amp_ray.clusters.device import CATALOGUE
from amp_ray.errors import InputError, Where, shown
from amp_ray.inputs.not_read import NotRead, not_read
from amp_ray.units import GIGA, MICROSECONDS_PER_SECOND

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv"]
"""What ``NAME_perf`` runs."""

COLLECTIVES: Final[tuple[Collective, ...]] = get_args(Collective)

_SENT: Final[Mapping[Collective, Callable[[int], float]]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "alltoall": lambda ranks: (ranks - 1) / ranks,
    "sendrecv": lambda ranks: 1.0,  # noqa: ARG005 - whatever their number
}
"""Bus bandwidth over algorithm bandwidth (nccl-tests, ``doc/PERFORMANCE.md``)."""

_RESULT: Final = ("time", "algbw", "busbw", "#wrong")

_PREFIX: Final = re.compile(r"^\s*(\[[0-9,]+\](<stdout>)?:?|[0-9]+:(?=\s))\s?")
"""What mpirun and srun put before a line."""

_RANK: Final = re.compile(r"#\s+Rank\s+([0-9]{1,6})\s.*?\son\s+(\S+)\s+device\s+[0-9]+")
_NAME: Final = re.compile(r"(?:test starting:|^#? ?\S*/|^)\s*([a-z]+(?:_[a-z]+)*)_perf\b")
_TYPE: Final = re.compile(r"u?int(8|32|64)|half|float|double|bfloat16|f8e4m3|f8e5m2|fp8_e[45]m[23]")

_BEFORE: Final = ("size", "count", "type", "redop")
_COLUMNS: Final[Mapping[int, tuple[str, ...]]] = {
    12: (*_BEFORE, *_RESULT, *_RESULT),
    13: (*_BEFORE, "root", *_RESULT, *_RESULT),
}
"""Columns of a table without a heading, by their number: releases before 2.11 have no root."""

_KNOWN: Final = (*_COLUMNS[13], "error")
_IN_PLACE: Final = "time, algbw and busbw in place"

_MOST_ERROR: Final = {"half": 1e-2, "bfloat16": 1e-2, "float": 1e-5, "double": 1e-12}
"""Largest difference that releases with a column ``error`` take for right; integers must be equal
(``DeltaMaxValue`` in ``src/common.cu`` of nccl-tests 2.10)."""

_MOST_BYTES_PER_S: Final = 4 * max(device.link_bytes_per_s or 0.0 for device in CATALOGUE.values())
"""Bus bandwidth that no link has: sums in the switch (NVLS) double a link's rate, and faster links
than those of the catalogue come every two years, each twice as fast (`amp_ray.clusters.device`)."""

_LONGEST_LINE: Final = 1000

_LEAST_ALGBW: Final = 1.0
"""GB/s from which the two decimals of the bandwidths tell the collective."""

_MOST_OFF: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTest:
    """One log."""

    collective: Collective
    num_ranks: int
    num_nodes: int
    times: tuple[tuple[int, float], ...]  # size in bytes, and seconds; ascending
    not_read: tuple[NotRead, ...] = ()


def parse_nccl_tests(
    text: str, *, file: str, collective: str | None = None
) -> tuple[NcclTest, ...]:
    """Read the output of programs of nccl-tests, one after the other.

    Lines of MPI, Slurm and NCCL in between do not matter. Old releases do not log which
    ``collective`` was run.

    Raises:
        InputError: With file and line, if ranks, times or the name are missing, a row is cut short
            or tells wrong values, or the bandwidths are those of another collective or of no link.
    """
    runs = [_Lines()]
    for number, line in enumerate(text.splitlines(), start=1):
        words = _PREFIX.sub("", line[:_LONGEST_LINE]).strip()
        if runs[-1].times and runs[-1].is_head(words):
            runs.append(_Lines())
        runs[-1].add(words, Where(file=file, line=number))
    return tuple(_test_of(lines, file, collective) for lines in runs)


def _test_of(lines: "_Lines", file: str, collective: str | None) -> NcclTest:
    hosts, where = lines.hosts, Where(file=file)
    _check_ranks(hosts, where)
    if len(lines.times) < 2:  # noqa: PLR2004 - latency and rate
        message = f"has rows of {len(lines.times)} sizes; expected an nccl-tests program's table"
        raise InputError(message, where=where)
    named = collective or lines.name
    if named not in COLLECTIVES:
        problem = "the log does not name its program" if named is None else f"found {shown(named)}"
        message = f"{problem}; say --collective {' | '.join(COLLECTIVES)}"
        raise InputError(message, where=where)
    _check_rates(lines.rows, named, len(hosts))
    return NcclTest(
        collective=named,
        num_ranks=len(hosts),
        num_nodes=len(set(hosts.values())),
        times=tuple((size, median(times)) for size, times in sorted(lines.times.items())),
        not_read=not_read([_IN_PLACE, *lines.columns], file, known=_KNOWN),
    )


def _check_rates(rows: Sequence["_Row"], collective: Collective, num_ranks: int) -> None:
    """Refuse bandwidths of another collective, or of no link."""
    expected = _SENT[collective](num_ranks)
    for row in rows:
        ratio = expected if row.ratio is None else row.ratio
        if abs(ratio / expected - 1) > _MOST_OFF:
            message = (
                f"bus over algorithm bandwidth is {ratio:.3g}; {collective} of {num_ranks} ranks "
                f"has {expected:.3g}: another collective, or lines of other ranks are missing"
            )
            raise InputError(message, where=row.where)
        rate = expected * row.num_bytes / row.seconds
        if rate > _MOST_BYTES_PER_S:
            message = (
                f"{row.num_bytes} bytes in {row.seconds:.3g} s are {rate / GIGA:.4g} GB/s; no link "
                f"has more than {_MOST_BYTES_PER_S / GIGA:,.0f}"
            )
            raise InputError(message, where=row.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    num_bytes: int
    seconds: float
    ratio: float | None  # bus over algorithm bandwidth, if their two decimals tell it
    where: Where


@dataclass(slots=True, kw_only=True)
class _Lines:
    """What the lines of a program say."""

    hosts: dict[int, str] = field(default_factory=dict)  # by rank
    # Seconds by size, of each cycle of -N
    times: dict[int, list[float]] = field(default_factory=dict)
    rows: list[_Row] = field(default_factory=list)
    columns: tuple[str, ...] = ()  # of the heading
    name: str | None = None

    @staticmethod
    def is_head(line: str) -> bool:
        """Return whether a line begins another program's output, once there are rows."""
        return _RANK.match(line) is not None or _NAME.search(line) is not None

    def add(self, line: str, where: Where) -> None:
        """Take in one line; lines of other programs do not matter."""
        cells = line.split()
        if rank := _RANK.match(line):
            self.hosts[int(rank[1])] = rank[2]
        elif _is_row(cells):
            row = _row(cells, self.columns, where)
            self.rows.append(row)
            if row.num_bytes:
                self.times.setdefault(row.num_bytes, []).append(row.seconds)
        elif line.startswith("#") and {"size", "count", "type"} < {*cells}:
            self.columns = tuple(line[1:].split())
        elif name := _NAME.search(line):
            self.name = self.name or name[1]


def _is_row(cells: list[str]) -> bool:
    return len(cells) > 2 and cells[0].isdecimal() and _TYPE.fullmatch(cells[2]) is not None  # noqa: PLR2004


def _row(cells: list[str], columns: tuple[str, ...], where: Where) -> _Row:
    """Read a row; its heading tells the columns, if it has one for each cell."""
    if len(columns) != len(cells):
        if len(cells) not in _COLUMNS:
            numbers = " or ".join(map(str, sorted(_COLUMNS)))
            message = f"found {len(cells)} columns; expected {numbers}"
            raise InputError(message, where=where)
        columns = _COLUMNS[len(cells)]
    if not {*_RESULT[:3]} <= {*columns}:
        message = f"expected the columns time, algbw and busbw; found {shown(' '.join(columns))}"
        raise InputError(message, where=where)
    first = columns.index("time")
    try:
        size = int(cells[0][:16])
        microseconds, algorithm, bus = (float(cell) for cell in cells[first : first + 3])
    except ValueError:
        message = f"expected time and bandwidths, found {shown(' '.join(cells))}"
        raise InputError(message, where=where) from None
    if not 0 < microseconds < 1e9:  # noqa: PLR2004 - a quarter of an hour
        raise InputError(f"expected a time in us, found {shown(cells[first])}", where=where)
    for name, cell in zip(columns, cells, strict=True):
        if name in {"#wrong", "error"} and not _is_right(cell, cells[2]):
            message = f"the test found wrong values ({shown(cell)}): these links do not work"
            raise InputError(message, where=where)
    ratio = bus / algorithm if algorithm >= _LEAST_ALGBW else None
    seconds = microseconds / MICROSECONDS_PER_SECOND
    return _Row(num_bytes=size, seconds=seconds, ratio=ratio, where=where)


def _is_right(cell: str, data_type: str) -> bool:
    """Return whether a check found no wrong value, or was switched off."""
    try:
        return cell == "N/A" or 0 <= float(cell) <= _MOST_ERROR.get(data_type, 0.0)
    except ValueError:
        return False


def _check_ranks(hosts: Mapping[int, str], where: Where) -> None:
    """Refuse a log without the ranks' lines, or with some of them."""
    if len(hosts) < 2 or sorted(hosts) != list(range(len(hosts))):  # noqa: PLR2004
        message = (
            f"found lines '# Rank N ... on HOST device N' of {len(hosts)} ranks; expected those of "
            "all ranks, two or more"
        )
        raise InputError(message, where=where)
    counts = {*Counter(hosts.values()).values()}
    if len(counts) > 1:
        message = (
            f"hosts have {' and '.join(map(str, sorted(counts)))} ranks; expected as many each"
        )
        raise InputError(message, where=where)
