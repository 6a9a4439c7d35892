"""Strategies that a user hands over: CSV with a header, or JSON."""

import csv
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from amp_ray.errors import InputError, Where
from amp_ray.spec.cluster import Cluster
from amp_ray.spec.strategy import Candidate, Recompute, Strategy
from amp_ray.spec.strategy_json import strategy_from_json

Failure = Literal["oom", "failed"]

_DEGREES = ("tp", "pp", "dp", "micro_batch_size")
_OPTIONAL = ("bounds", "measured_s", "recompute")
_FAILURES: Final[Mapping[str, Failure]] = {"oom": "oom", "failed": "failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One strategy that a user named.

    Args:
        where: Its place in the file.
        candidate: Its degrees; None for a strategy whose stages differ.
        strategy: The complete strategy; None where cuts are left to the solver.
        measured_s: Seconds per iteration that somebody measured.
        failure: What happened instead of a measurement.
    """

    where: Where
    candidate: Candidate | None
    strategy: Strategy | None
    measured_s: float | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What strategies must fit: the experiment's own figures."""

    cluster: Cluster
    num_layers: int
    global_batch_size: int
    recompute: Recompute


def parse_strategies(text: str, *, file: str, context: Context) -> tuple[Given, ...]:
    """Read strategies from CSV text, or from JSON text (a list of STRATEGY objects).

    Args:
        text: The file's text.
        file: Its name, for messages.
        context: What the strategies must fit.

    Raises:
        InputError: With file and line, for a strategy that the experiment cannot have or a
            value that is none.
    """
    given = (
        _from_json(text, file, context)
        if text.lstrip().startswith("[")
        else _from_csv(text, file, context)
    )
    if not given:
        message = "no strategy found in it"
        raise InputError(message, where=Where(file=file))
    return given


def _from_csv(text: str, file: str, context: Context) -> tuple[Given, ...]:
    """Read one strategy per line."""
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    header = tuple(reader.fieldnames or ())
    missing = [name for name in _DEGREES if name not in header]
    unknown = [name for name in header if name not in _DEGREES + _OPTIONAL]
    if missing or unknown:
        expected = f"{','.join(_DEGREES)}[,{'][,'.join(_OPTIONAL)}]"
        message = f"expected the header {expected}, found {','.join(header)!r}: " + (
            "; ".join(filter(None, (_listing("missing", missing), _listing("unknown", unknown))))
        )
        raise InputError(message, where=Where(file=file, line=1))
    return tuple(
        _from_cells(cells, Where(file=file, line=reader.line_num), context) for cells in reader
    )


def _listing(word: str, names: list[str]) -> str:
    """Render names after a word, or nothing."""
    return f"{word}: {', '.join(names)}" if names else ""


def _from_cells(cells: Mapping[str, str], where: Where, context: Context) -> Given:
    """Read one CSV line."""
    numbers = {name: _count(cells[name], name, where) for name in _DEGREES}
    recompute = (cells.get("recompute") or context.recompute).strip()
    if recompute not in {"none", "full"}:
        message = f"found {recompute!r}; expected none or full"
        raise InputError(message, where=_at(where, "recompute"))
    candidate = _candidate(numbers, "full" if recompute == "full" else "none", where, context)
    bounds = (cells.get("bounds") or "").split()
    strategy = None
    if bounds:
        cuts = tuple(_count(cell, "bounds", where, low=0) for cell in bounds)
        strategy = _checked(lambda: Strategy.uniform(candidate, cuts), where, context)
    measured_s, failure = _measurement(cells.get("measured_s"), where)
    return Given(
        where=where, candidate=candidate, strategy=strategy, measured_s=measured_s, failure=failure
    )


def _candidate(
    numbers: Mapping[str, int], recompute: Recompute, where: Where, context: Context
) -> Candidate:
    """Complete the degrees with the number of micro-batches."""
    devices = numbers["tp"] * numbers["pp"] * numbers["dp"]
    if devices != context.cluster.num_devices:
        message = (
            f"tp {numbers['tp']} x pp {numbers['pp']} x dp {numbers['dp']} = {devices} devices; "
            f"the cluster has {context.cluster.num_devices}"
        )
        raise InputError(message, where=where)
    samples = numbers["dp"] * numbers["micro_batch_size"]
    if context.global_batch_size % samples:
        message = (
            f"dp {numbers['dp']} x micro_batch_size {numbers['micro_batch_size']} = {samples} does "
            f"not divide global_batch_size {context.global_batch_size}"
        )
        raise InputError(message, where=where)
    return Candidate(
        **numbers, num_micro_batches=context.global_batch_size // samples, recompute=recompute
    )


def _measurement(cell: str | None, where: Where) -> tuple[float | None, Failure | None]:
    """Read seconds, a word for a failure, or nothing."""
    word = (cell or "").strip()
    if not word:
        return None, None
    if word in _FAILURES:
        return None, _FAILURES[word]
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        message = f"found {word!r}; expected positive seconds, or one of {', '.join(_FAILURES)}"
        raise InputError(message, where=_at(where, "measured_s"))
    return seconds, None


def _from_json(text: str, file: str, context: Context) -> tuple[Given, ...]:
    """Read a list of STRATEGY objects; a row of a ranking may stand for its strategy."""
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg}"
        raise InputError(message, where=Where(file=file, line=error.lineno)) from None
    given = []
    for index, record in enumerate(records):
        where = Where(file=file, key=f"[{index}]")
        if not isinstance(record, dict):
            message = f"expected a strategy object, found {type(record).__name__}"
            raise InputError(message, where=where)
        given.append(_from_record(record.get("strategy", record), where, context))
    return tuple(given)


def _from_record(record: Mapping[str, Any], where: Where, context: Context) -> Given:
    """Read one STRATEGY object."""
    if record.get("bounds") is None and "stages" not in record:
        numbers = {name: _count(str(record.get(name)), name, where) for name in _DEGREES}
        recompute: Recompute = (
            "full" if record.get("recompute", context.recompute) == "full" else "none"
        )
        return Given(
            where=where, candidate=_candidate(numbers, recompute, where, context), strategy=None
        )
    strategy = _checked(lambda: strategy_from_json(record, context.cluster), where, context)
    return Given(where=where, candidate=None, strategy=strategy)


def _checked(make: Callable[[], Strategy], where: Where, context: Context) -> Strategy:
    """Make a strategy and check that it covers the model, the batch and existing devices."""
    try:
        strategy = make()
    except (ValueError, TypeError) as error:
        raise InputError(str(error), where=where) from error
    if strategy.bounds[-1] != context.num_layers:
        message = (
            f"bounds end at {strategy.bounds[-1]}; the model has {context.num_layers} layers "
            "(embedding, head and others count too)"
        )
        raise InputError(message, where=_at(where, "bounds"))
    if strategy.global_batch_size != context.global_batch_size:
        message = (
            f"makes {strategy.global_batch_size} samples per step; the experiment has "
            f"global_batch_size {context.global_batch_size}"
        )
        raise InputError(message, where=where)
    if max(strategy.placement) >= context.cluster.num_devices:
        needed, found = len(strategy.placement), context.cluster.num_devices
        message = f"needs {needed} devices; the cluster has {found}"
        raise InputError(message, where=where)
    return strategy


def _count(cell: str | None, name: str, where: Where, low: int = 1) -> int:
    """Read an integer of at least ``low``."""
    word = (cell or "").strip()
    if not word.isdecimal() or int(word) < low:
        message = f"found {word!r}; expected an integer of at least {low}"
        raise InputError(message, where=_at(where, name))
    return int(word)


def _at(where: Where, key: str) -> Where:
    """Narrow a place down to a column."""
    return Where(file=where.file, line=where.line, key=key)
