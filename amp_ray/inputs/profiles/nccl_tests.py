"""Logs of nccl-tests: times of one collective by size, with the ranks that ran it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from amp_ray.errors import InputError, Where, shown
from amp_ray.units import MICROSECONDS_PER_SECOND

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

_PREFIX: Final = re.compile(r"^\s*(\[[0-9,]+\](<stdout>)?:?|[0-9]+:(?=\s))\s?")
"""What mpirun and srun put before a line."""

_RANK: Final = re.compile(r"#\s+Rank\s+([0-9]{1,6})\s.*?\son\s+(\S+)\s+device\s+[0-9]+")
_NAME: Final = re.compile(r"(?:test starting:|^#? ?\S*/|^)\s*([a-z]+(?:_[a-z]+)*)_perf\b")
_TYPE: Final = re.compile(r"u?int(8|32|64)|half|float|double|bfloat16|f8e4m3|f8e5m2|fp8_e[45]m[23]")

_COLUMNS: Final = {13: 5, 12: 4}
"""Column of the time out of place, by the number of columns: releases before 2.11 have no root."""

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


def parse_nccl_test(text: str, *, file: str, collective: str | None = None) -> NcclTest:
    """Read the output of one program of nccl-tests.

    Args:
        text: The log; lines of MPI, Slurm and NCCL in between do not matter.
        file: Its name in messages.
        collective: What was run; by default what the log says, which old releases do not.

    Raises:
        InputError: With file and line, if ranks, times or the name are missing, a row is cut short
            or tells wrong values, or the bandwidths are those of another collective.
    """
    lines = _Lines()
    for number, line in enumerate(text.splitlines(), start=1):
        lines.add(_PREFIX.sub("", line).strip(), Where(file=file, line=number))
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
    expected = _SENT[named](len(hosts))
    for ratio, row in lines.ratios:
        if abs(ratio / expected - 1) > _MOST_OFF:
            message = (
                f"bus over algorithm bandwidth is {ratio:.3g}; {named} of {len(hosts)} ranks has "
                f"{expected:.3g}: another collective, or lines of other ranks are missing"
            )
            raise InputError(message, where=row)
    return NcclTest(
        collective=named,
        num_ranks=len(hosts),
        num_nodes=len(set(hosts.values())),
        times=tuple(sorted(lines.times.items())),
    )


@dataclass(slots=True, kw_only=True)
class _Lines:
    """What the lines of a log say."""

    hosts: dict[int, str] = field(default_factory=dict)  # by rank
    times: dict[int, float] = field(default_factory=dict)  # seconds by size
    ratios: list[tuple[float, Where]] = field(default_factory=list)
    name: str | None = None

    def add(self, line: str, where: Where) -> None:
        """Take in one line; lines of other programs do not matter."""
        cells = line.split()
        if rank := _RANK.match(line):
            self.hosts[int(rank[1])] = rank[2]
        elif _is_row(cells):
            size, seconds, ratio = _row(cells, where)
            if size:
                self.times[size] = seconds
            if ratio is not None:
                self.ratios.append((ratio, where))
        elif name := _NAME.search(line):
            self.name = self.name or name[1]


def _is_row(cells: list[str]) -> bool:
    return len(cells) > 2 and cells[0].isdecimal() and _TYPE.fullmatch(cells[2]) is not None  # noqa: PLR2004


def _row(cells: list[str], where: Where) -> tuple[int, float, float | None]:
    """Return size, seconds, and bus over algorithm bandwidth if it can be told."""
    if len(cells) not in _COLUMNS:
        message = f"found {len(cells)} columns; expected {' or '.join(map(str, sorted(_COLUMNS)))}"
        raise InputError(message, where=where)
    first = _COLUMNS[len(cells)]
    try:
        size = int(cells[0][:16])
        microseconds, algorithm, bus = map(float, cells[first : first + 3])
    except ValueError:
        message = f"expected time and bandwidths, found {shown(' '.join(cells))}"
        raise InputError(message, where=where) from None
    if not 0 < microseconds < 1e9:  # noqa: PLR2004 - a quarter of an hour
        raise InputError(f"expected a time in us, found {shown(cells[first])}", where=where)
    if cells[first + 3] not in {"0", "N/A", "0e+00"}:
        message = (
            f"the test found wrong values ({shown(cells[first + 3])}): these links do not work"
        )
        raise InputError(message, where=where)
    ratio = bus / algorithm if algorithm >= _LEAST_ALGBW else None
    return size, microseconds / MICROSECONDS_PER_SECOND, ratio


def _check_ranks(hosts: Mapping[int, str], where: Where) -> None:
    """Refuse a log without the ranks' lines, or with some of them."""
    if len(hosts) < 2 or sorted(hosts) != list(range(len(hosts))):  # noqa: PLR2004
        message = (
            f"found lines '# Rank N ... on HOST device N' of {len(hosts)} ranks; expected those of "
            "all ranks, two or more"
        )
        raise InputError(message, where=where)
    counts = {list(hosts.values()).count(host) for host in hosts.values()}
    if len(counts) > 1:
        message = (
            f"hosts have {' and '.join(map(str, sorted(counts)))} ranks; expected as many each"
        )
        raise InputError(message, where=where)
