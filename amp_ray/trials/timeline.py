"""Timeline of all ranks in one step, parsed from an untrusted file of rank 0's host."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from amp_ray.errors import printable
from amp_ray.trials.launch import TIMELINE_FILE
from amp_ray.trials.result import check_trial, parse_object, read_count
from amp_ray.trials.steps import LONGEST_STEP_S

Span = tuple[str, float, float]
"""An instruction such as ``2F0.1``, its begin and end in seconds since the first instruction."""

_SCHEMA: Final = 1
_KEYS: Final = "trial_id (text), ranks (list of objects)"
_MOST_BYTES: Final = 16 * 2**20  # half a million instructions
_MOST_VALUES: Final = 2**21  # values per file; each takes some hundred bytes of memory
_MOST_NAME: Final = 255  # characters of a host's name
_INSTRUCTION: Final = re.compile(r"[0-9]{1,9}[A-Z][A-Z_]{0,19}[0-9]{0,9}(?:\.[0-9]{1,9})?")
_INDICES: Final = ("dp_rank", "cp_rank", "tp_rank")
_SPAN_VALUES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """The instructions that one rank executed in a step."""

    rank: int
    host: str  # host name as the rank reports it
    stage: int
    is_first: bool  # whether the rank is the first of its stage
    spans: tuple[Span, ...]


def read_timeline(
    data: bytes, *, num_ranks: int, trial_id: str | None = None
) -> tuple[RankTimeline, ...]:
    """Parse and validate ``timeline.json``.

    Args:
        data: Content of the file.
        num_ranks: Maximum number of ranks.
        trial_id: Expected trial; None if it was checked before.

    Raises:
        ValueError: Names the first error in the file.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise ValueError(f"{TIMELINE_FILE} has more than {_MOST_VALUES} values")
    record = parse_object(TIMELINE_FILE, data, _KEYS, max_bytes=_MOST_BYTES)
    if trial_id is not None:
        check_trial(TIMELINE_FILE, record, trial_id)
    if record.get("schema", _SCHEMA) != _SCHEMA:
        raise ValueError(f"{TIMELINE_FILE} has schema {_shown(record['schema'])}, not {_SCHEMA}")
    entries = record.get("ranks")
    if not isinstance(entries, list) or len(entries) > num_ranks:
        shown = f"{len(entries)} ranks" if isinstance(entries, list) else _shown(entries)
        raise ValueError(f"{TIMELINE_FILE} has as ranks {shown}; expected at most {num_ranks}")
    ranks = tuple(_read_rank(f"ranks.{at}", entry, num_ranks) for at, entry in enumerate(entries))
    if len({rank.rank for rank in ranks}) < len(ranks):
        raise ValueError(f"{TIMELINE_FILE} has a rank twice")
    return ranks


def _read_rank(place: str, entry: object, num_ranks: int) -> RankTimeline:
    if not isinstance(entry, dict):
        raise _wrong(place, entry, "an object")
    host, spans = entry.get("host"), entry.get("instructions")
    if not isinstance(host, str) or len(host) > _MOST_NAME:
        raise _wrong(f"{place}.host", host, f"a text of at most {_MOST_NAME} characters")
    if not isinstance(spans, list):
        raise _wrong(f"{place}.instructions", spans, "a list")
    indices = [_index(place, {key: 0, **entry}, key, num_ranks) for key in _INDICES]
    return RankTimeline(
        rank=_index(place, entry, "rank", num_ranks),
        host=printable(host).replace("\n", " "),
        stage=_index(place, entry, "stage", num_ranks),
        is_first=not any(indices),
        spans=tuple(
            _read_span(f"{place}.instructions.{at}", span) for at, span in enumerate(spans)
        ),
    )


def _index(place: str, entry: Mapping[str, Any], key: str, num_ranks: int) -> int:
    """Read the index of a rank or a stage; both are less than ``num_ranks``."""
    index = read_count(TIMELINE_FILE, f"{place}.{key}", entry.get(key), most=num_ranks - 1)
    if index is None:
        raise _wrong(f"{place}.{key}", None, "a number")
    return index


def _read_span(place: str, span: object) -> Span:
    if not isinstance(span, list) or len(span) != _SPAN_VALUES:
        raise _wrong(place, span, "[instruction, begin, end]")
    name, begin_s, end_s = span
    if not isinstance(name, str) or not _INSTRUCTION.fullmatch(name):
        raise _wrong(place, name, "an instruction such as '2F0'")
    if not _is_time(begin_s) or not _is_time(end_s) or begin_s > end_s:
        raise _wrong(place, span[1:], f"begin and end in seconds, up to {LONGEST_STEP_S:g}")
    return name, float(begin_s), float(end_s)


def _is_time(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= LONGEST_STEP_S  # False for nan, infinity and huge integers


def _wrong(place: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{TIMELINE_FILE}: {place} is {_shown(value)}; expected {expected}")


def _shown(value: object) -> str:
    return printable(reprlib.repr(value))
