"""Files of slice latencies: times of a sequence's slices on one stage."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.errors import InputError, Mistakes, Where, shown
from amp_ray.inputs.section import Count, Positive, Section, validate
from amp_ray.inputs.strict_text import parse_json
from amp_ray.inputs.yaml_text import Document

MOST_CELLS: Final = 20_000_000  # most slices of a batch in a table; more would fill the memory
MOST_CHARACTERS: Final = 2**29  # most characters of a table: four million points

_KEY: Final = re.compile(r"([1-9][0-9]{0,8})_([1-9][0-9]{0,8})_(0|[1-9][0-9]{0,8})")
_TIMES: Final = ("forward_mean", "backward_mean")
_MEMORY: Final = "memory_mb"
_MOST_S: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlicePoints:
    """Slices with measured times."""

    places: IntArray  # shape ``(P, 3)``. Sequences, tokens, and tokens of context before them.
    times_s: FloatArray  # shape ``(P, 2)``. Forward and backward.
    memory_mb: FloatArray  # shape ``(P,)``; NaN if not measured


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SliceTable:
    """The content of a file of slice latencies."""

    batch: int  # sequences to divide, per replica
    tokens: int  # per sequence
    granularity: int  # token slices begin at its multiples
    num_stages: int  # stages of the pipeline
    points: SlicePoints
    # Factor on the times of each stage; empty if all stages are equal
    factors: tuple[float, ...] = ()
    memory_cap_mb: float | None = None  # for every slice; None means no limit
    # Whether slices with context use a fit, because only few of them were measured
    fitted: bool = False
    num_layers: int = 1  # layers of a stage; the points are times of one layer
    # Tokens of the measured messages, ascending; empty if messages are free
    message_tokens: tuple[float, ...] = ()
    message_s: tuple[float, ...] = ()  # one-way time of each measured message


Seconds = Annotated[float, Field(ge=0, le=_MOST_S, allow_inf_nan=False, strict=True)]


class CommunicationSection(Section):
    """Times of messages in one direction."""

    tokens: Annotated[list[Count], Field(min_length=1)]
    seconds: Annotated[list[Seconds], Field(min_length=1)]


class TableSection(Section):
    """The keys of a table."""

    batch: Count
    tokens: Count
    granularity: Count
    stages: Count
    points: dict[str, dict[str, Any]]
    speeds: list[Positive] | None = None
    memory_cap_mb: Positive | None = None
    context: Literal["measured", "fitted"] = "measured"
    layers: Count = 1
    communication: CommunicationSection | None = None


def parse_slice_table(text: str, *, file: str) -> SliceTable:
    """Read a table of slice latencies.

    Raises:
        InputError: If it is not a valid table; the message names the key.
    """
    document = Document(file=file, values=parse_json(text, file=file))
    checked = validate(TableSection, document)
    _check(checked, document)
    talk = checked.communication
    return SliceTable(
        batch=checked.batch,
        tokens=checked.tokens,
        granularity=checked.granularity,
        num_stages=checked.stages,
        points=_points(checked, document),
        factors=tuple(checked.speeds or ()),
        memory_cap_mb=checked.memory_cap_mb,
        fitted=checked.context == "fitted",
        num_layers=checked.layers,
        message_tokens=() if talk is None else tuple(map(float, talk.tokens)),
        message_s=() if talk is None else tuple(talk.seconds),
    )


def _check(table: TableSection, document: Document) -> None:
    if table.speeds is not None and len(table.speeds) != table.stages:
        message = f"found {len(table.speeds)} factors for {table.stages} stages; give one for each"
        raise InputError(message, where=document.where("speeds"))
    num_granules = -(-table.tokens // table.granularity)
    num_cells = table.batch * num_granules * (num_granules + 1) // 2
    if num_cells > MOST_CELLS:
        message = (
            f"found {table.granularity}: {table.batch} x {num_granules} granules have "
            f"{num_cells:,} slices, more than {MOST_CELLS:,}; choose a larger one"
        )
        raise InputError(message, where=document.where("granularity"))
    talk = table.communication
    if talk is not None and (
        len(talk.tokens) != len(talk.seconds)
        or any(after <= before for before, after in zip(talk.tokens, talk.tokens[1:], strict=False))
    ):
        message = "expected ascending tokens and as many seconds"
        raise InputError(message, where=document.where("communication"))


def _points(table: TableSection, document: Document) -> SlicePoints:
    """Read the points; if there are any, one must be without context."""
    mistakes = Mistakes()
    places, values = [], []
    for key, point in table.points.items():
        match = _KEY.fullmatch(key)
        where = document.where("points", key)
        if match is None:
            message = (
                "malformed key; expected SEQUENCES_TOKENS_CONTEXT, three integers such as 1_128_0"
            )
            mistakes.add(InputError(message, where=where))
            continue
        numbers = [_number(point, name, where, mistakes) for name in _TIMES]
        memory = _number(point, _MEMORY, where, mistakes, needed=table.memory_cap_mb is not None)
        places.append([int(word) for word in match.groups()])
        values.append([*numbers, memory])
    mistakes.check()
    if places and all(context for *_, context in places):
        message = (
            "no point without context (1_128_0 and the like), with which every sequence begins"
        )
        raise InputError(message, where=document.where("points"))
    table_s = np.array(values, dtype=np.float64).reshape(-1, 3)
    return SlicePoints(
        places=np.array(places, dtype=np.int64).reshape(-1, 3),
        times_s=table_s[:, :2],
        memory_mb=table_s[:, 2],
    )


def _number(
    point: Mapping[str, object],
    name: str,
    where: Where,
    mistakes: Mistakes,
    *,
    needed: bool = True,
) -> float:
    """Return a non-negative number of a point; NaN if it is missing and not needed."""
    value = point.get(name)
    if value is None and not needed:
        return float("nan")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= value <= _MOST_S:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    word = "nothing" if value is None else shown(value)
    message = f"found {word}; expected a number from 0 to {_MOST_S:,.0f}"
    mistakes.add(InputError(message, where=where.at(f"{where.key}.{name}")))
    return float("nan")
