"""Strategies in a user's file: CSV with a header, or JSON."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal, Self

from amp_ray.clusters.cluster import Cluster
from amp_ray.errors import InputError, Mistakes, Where, placed, shown
from amp_ray.inputs.csv_text import MOST_SECONDS, read_count, read_rows, read_seconds
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.json_text import parse_any_json
from amp_ray.inputs.section import validate
from amp_ray.inputs.strategy_json import (
    OptionsRecord,
    StrategyRecord,
    recompute_of_stages,
    strategy_from_json,
)
from amp_ray.inputs.yaml_text import Document
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import AUTO, Recompute, parse_recompute
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.strategies.zero import AUTO_STAGE, NO_ZERO, ZERO_KEYS, Zero, zero_of

Failure = Literal["oom", "failed"]

_DEGREES = ("tp", "pp", "dp", "micro_batch_size")
_OTHERS = tuple(OptionsRecord.model_fields)
"""Dimensions of a stage that a strategy may leave out."""

_OPTIONAL = (
    *("bounds", "measured_s", "mean_s", "recompute", "spread_s", "peak_memory_bytes"),
    *("virtual_stages", *ZERO_KEYS, *_OTHERS),
)
_FLAGS: Final[Mapping[str, bool]] = {"true": True, "false": False}
_FAILURES: Final[Mapping[str, Failure]] = {"oom": "oom", "failed": "failed"}
_LEAST_SECONDS: Final = 1e-6
"""Shortest iteration: no device launches a kernel faster."""

_BYTES: Final = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One strategy of a user's file."""

    where: Where
    candidate: Candidate | None  # its degrees; None for a strategy that JSON spells out
    strategy: Strategy | None  # the complete strategy; None where cuts are left to the solver
    measured_s: float | None = None  # seconds per iteration that somebody measured: the median
    mean_s: float | None = None  # mean of the same steps; ``measured_s`` where it is not given
    failure: Failure | None = None
    spread_s: float | None = None  # interquartile range of the measured steps, if known
    # Measured peak of each stage, or one figure for the largest of all; empty if not measured
    peak_memory_bytes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The figures of an experiment that its strategies must fit, and its defaults."""

    cluster: Cluster  # its devices; a strategy uses each once
    num_layers: int
    global_batch_size: int
    recompute: Recompute  # default where a strategy does not set it
    sequence_length: int = 0  # tokens that token slices make together; 0 where there are none
    # Operators of the profile, which bounds count in strategies that name operators; 0 without any
    num_operators: int = 0
    sequence_parallel: bool = False  # default where a strategy does not set it and can have it
    # Tells whether so many ranks can divide the tokens of a sample
    divides_tokens: Callable[[int], bool] = bool
    zero: Callable[[int], Zero] = lambda _: NO_ZERO  # default ZeRO by the number of stages
    virtual_stages: int = 1  # default chunks per stage of a CSV line

    @classmethod
    def of(cls, experiment: Experiment) -> Self:
        """Return the context of an experiment."""
        operators, shape = experiment.profile.operators, experiment.model.shape
        return cls(
            cluster=experiment.cluster,
            num_layers=experiment.model.num_layers,
            sequence_length=shape.sequence_length,
            global_batch_size=experiment.global_batch_size,
            recompute=experiment.recompute,
            num_operators=0 if operators is None else operators.num_operators,
            sequence_parallel=experiment.sequence_parallel,
            divides_tokens=shape.divides_tokens,
            zero=experiment.zero,
            virtual_stages=experiment.virtual_stages[0],
        )

    def default_zero(self, pp: int, *, is_cut: bool) -> Zero:
        """Return the default ZeRO of a strategy; with cuts the search has no choice."""
        zero = self.zero(pp)
        return NO_ZERO if is_cut and zero.stage == AUTO_STAGE else zero

    def options(self, record: StrategyRecord, recompute: Recompute, zero: Zero) -> StageOptions:
        """Return the options of all stages; the experiment supplies missing values."""
        tp, dp = record.tp or 1, record.dp or 1
        ranks = tp * (record.cp or 1)
        divides = self.sequence_parallel and tp > 1 and self.divides_tokens(ranks)
        dimensions = {"sequence_parallel": divides, **record.others()}
        return StageOptions(tp=tp, dp=dp, recompute=recompute, zero=zero, **dimensions)


def parse_strategies(text: str, *, file: str, context: Context) -> tuple[Given, ...]:
    """Read strategies that fit the experiment from CSV or from a JSON list of STRATEGY objects."""
    is_json = text.lstrip()[:1] in {"[", "{"}
    strategies = _from_json(text, file, context) if is_json else _from_csv(text, file, context)
    if not strategies:
        raise InputError("no strategy found in it", where=Where(file=file))
    return strategies


def _from_csv(text: str, file: str, context: Context) -> tuple[Given, ...]:
    rows = read_rows(text, file)
    where, header = next(rows, (Where(file=file, line=1), []))
    problems = {
        "missing": [name for name in _DEGREES if name not in header],
        "unknown": [name for name in header if name not in _DEGREES + _OPTIONAL],
        "twice": [name for name in _DEGREES + _OPTIONAL if header.count(name) > 1],
    }
    if any(problems.values()):
        expected = f"{','.join(_DEGREES)}[,{'][,'.join(_OPTIONAL)}]"
        mistake = "; ".join(
            f"{word}: {', '.join(names)}" for word, names in problems.items() if names
        )
        message = f"expected the header {expected}, found {','.join(header)!r}: {mistake}"
        raise InputError(message, where=where)
    strategies = []
    mistakes = Mistakes()
    for place, row in rows:
        with mistakes.collect():
            if len(row) > len(header):
                message = f"expected {len(header)} columns ({', '.join(header)}), found {len(row)}"
                raise InputError(message, where=place)
            cells = dict.fromkeys(header, "") | dict(zip(header, row, strict=False))
            strategies.append(_from_cells(cells, place, context))
    mistakes.check()
    return tuple(strategies)


def _from_cells(cells: Mapping[str, str], where: Where, context: Context) -> Given:
    values = {
        name: read(cells.get(name, ""), where.at(name))
        for name, read in _CELLS.items()
        if name in _DEGREES or cells.get(name)
    }
    if not values.get("virtual_stages"):
        values["virtual_stages"] = 1 if values["pp"] == 1 else context.virtual_stages
    lines: dict[tuple[str | int, ...], int] = {(name,): where.line or 1 for name in values}
    record = validate(StrategyRecord, Document(file=where.file, values=values, lines=lines))
    candidate = _candidate(record, where, context)
    strategy = None
    if record.bounds is not None:
        per_stage = recompute_of_stages(record) or (candidate.options.recompute,)
        with placed(where.at("bounds"), ValueError):
            strategy = Strategy.uniform(
                candidate,
                tuple(record.bounds),
                recompute=per_stage * (1 if per_stage[1:] else candidate.pp),
            )
        _check_fit(strategy, where, context)
    measured_s, failure = _measurement(cells.get("measured_s", ""), where.at("measured_s"))
    mean_s = _beside(
        cells.get("mean_s", ""), measured_s, where.at("mean_s"), least_s=_LEAST_SECONDS
    )
    return Given(
        where=where,
        candidate=candidate,
        strategy=strategy,
        measured_s=measured_s,
        failure=failure,
        mean_s=measured_s if mean_s is None else mean_s,
        spread_s=_beside(cells.get("spread_s", ""), measured_s, where.at("spread_s")),
        peak_memory_bytes=_peaks(
            cells.get("peak_memory_bytes", ""), candidate.pp, where.at("peak_memory_bytes")
        ),
    )


def _flag(word: str, where: Where) -> bool:
    if word not in _FLAGS:
        raise InputError(f"found {shown(word)}; expected true or false", where=where)
    return _FLAGS[word]


def _index(word: str, where: Where) -> int:
    return read_count(word, where, low=0)


def _indices(text: str, where: Where) -> list[int]:
    return [read_count(cell, where, low=0) for cell in text.split()]


def _recompute(text: str, where: Where) -> object:
    """Read one value for all stages, or one for each of them, as the STRATEGY object has them."""
    with placed(where, ValueError):
        per_stage = [parse_recompute(word).to_json() for word in text.split()]
    return per_stage if per_stage[1:] else per_stage[0]


_CELLS: Final[Mapping[str, Callable[[str, Where], Any]]] = {
    **dict.fromkeys((*_DEGREES, "shard_ranks", *_OTHERS), read_count),
    **dict.fromkeys(("zero_stage", "virtual_stages"), _index),
    **dict.fromkeys(("reshard_after_forward", "sequence_parallel"), _flag),
    "recompute": _recompute,
    "bounds": _indices,
}
"""How the cell of a column becomes the value of that key of a STRATEGY object."""


def _candidate(record: StrategyRecord, where: Where, context: Context) -> Candidate:
    """Return the candidate of a STRATEGY object; the experiment supplies missing values."""
    degrees: dict[str, int] = {}
    for name in _DEGREES:
        value = getattr(record, name)
        if value is None:
            message = "key is missing; a strategy without bounds and stages needs it"
            raise InputError(message, where=where.at(name))
        degrees[name] = value
    recompute = _one_recompute(record, degrees["pp"], where, context)
    with placed(where.at("zero_stage"), ValueError):
        zero = zero_of(
            record.zero_stage,
            record.shard_ranks,
            reshard=record.reshard_after_forward,
            otherwise=context.default_zero(degrees["pp"], is_cut=record.bounds is not None),
        )
    num_micro_batches = _num_micro_batches(record, degrees, where, context)
    with placed(where, ValueError):
        options = context.options(record, recompute, zero)
    _check_tokens(options, where, context)
    with placed(where.at("virtual_stages"), ValueError):
        return Candidate(
            micro_batch_size=record.micro_batch_size,
            options=options,
            pp=degrees["pp"],
            num_micro_batches=num_micro_batches,
            virtual_stages=record.virtual_stages,
        )


def _one_recompute(record: StrategyRecord, pp: int, where: Where, context: Context) -> Recompute:
    """Return the recompute of all stages, or of the first stage if they are cut."""
    at_recompute, is_cut = where.at("recompute"), record.bounds is not None
    values = recompute_of_stages(record) or (
        _default_recompute(context, at_recompute, is_cut=is_cut),
    )
    if len(values) not in ({1, pp} if is_cut else {1}):
        expected = f"or one for each of the {pp}" if is_cut else "as it has no bounds"
        message = f"found {len(values)} values; expected one for all stages, {expected}"
        raise InputError(message, where=at_recompute)
    if values[0].layers is not None and not is_cut:
        message = f"found {values[0]}; a strategy that recomputes part of a stage needs its bounds"
        raise InputError(message, where=at_recompute)
    return values[0]


def _default_recompute(context: Context, where: Where, *, is_cut: bool) -> Recompute:
    """Return the recompute of a strategy that does not set it."""
    if is_cut and context.recompute == AUTO:
        message = (
            "missing; the experiment's recompute is auto, so a strategy with bounds has to say "
            "which stages compute what again"
        )
        raise InputError(message, where=where)
    return context.recompute


def _num_micro_batches(
    record: StrategyRecord, degrees: Mapping[str, int], where: Where, context: Context
) -> int:
    """Return the micro-batches of a step; refuse degrees that do not fit devices and batch."""
    product = {"tp": degrees["tp"], "cp": record.cp, "pp": degrees["pp"], "dp": degrees["dp"]}
    factors = {name: value for name, value in product.items() if value is not None}
    devices = prod(factors.values())
    if devices != context.cluster.num_devices:
        message = (
            f"{' x '.join(f'{name} {value}' for name, value in factors.items())} = {devices} "
            f"devices; the cluster has {context.cluster.num_devices}"
        )
        raise InputError(message, where=where)
    samples = degrees["dp"] * record.micro_batch_size
    number, rest = divmod(context.global_batch_size, samples)
    if rest:
        message = (
            f"dp {degrees['dp']} x micro_batch_size {record.micro_batch_size} = {samples} does "
            f"not divide global_batch_size {context.global_batch_size}"
        )
        raise InputError(message, where=where)
    if record.num_micro_batches not in {None, number}:
        message = (
            f"found {record.num_micro_batches}; global_batch_size {context.global_batch_size} "
            f"makes it {number}"
        )
        raise InputError(message, where=where.at("num_micro_batches"))
    return number


def _check_tokens(options: StageOptions, where: Where, context: Context) -> None:
    if options.cp > 1 and not context.divides_tokens(2 * options.cp):
        message = (
            f"found {options.cp}; 2 x cp must divide the tokens of a sequence, "
            f"{context.sequence_length}: every rank has a piece from the front and one from the end"
        )
        raise InputError(message, where=where.at("cp"))
    if options.sequence_parallel and not context.divides_tokens(options.tp * options.cp):
        ranks = f"tp {options.tp}" + (f" x cp {options.cp}" if options.cp > 1 else "")
        message = (
            f"found true; {ranks} must divide the tokens of a sequence, {context.sequence_length}"
        )
        raise InputError(message, where=where.at("sequence_parallel"))


def _measurement(word: str, where: Where) -> tuple[float | None, Failure | None]:
    """Read seconds, a word for a failure, or nothing."""
    if not word:
        return None, None
    if word in _FAILURES:
        return None, _FAILURES[word]
    seconds = read_seconds(word)
    if seconds is None or seconds < _LEAST_SECONDS:
        message = (
            f"found {shown(word)}; expected seconds, from {_LEAST_SECONDS:g} to "
            f"{MOST_SECONDS:,.0f}, or one of {', '.join(_FAILURES)}"
        )
        raise InputError(message, where=where)
    return seconds, None


def _beside(
    word: str, measured_s: float | None, where: Where, *, least_s: float = 0.0
) -> float | None:
    """Read another time of a measurement, or nothing."""
    if not word:
        return None
    seconds = read_seconds(word)
    if seconds is None or measured_s is None or seconds < least_s:
        message = (
            f"found {shown(word)}; expected seconds from {least_s:g} beside a measured_s in seconds"
        )
        raise InputError(message, where=where)
    return seconds


def _peaks(text: str, pp: int, where: Where) -> tuple[float, ...]:
    """Read measured peaks: one per stage, one for all, or none."""
    cells = text.split()
    peaks = tuple(float(cell) for cell in cells if _BYTES.fullmatch(cell))
    if len(peaks) < len(cells):
        message = f"found {shown(text)}; expected bytes as whole numbers, separated by spaces"
        raise InputError(message, where=where)
    if peaks and len(peaks) not in {1, pp}:
        message = f"found {len(peaks)} figures; expected one, or one per stage ({pp})"
        raise InputError(message, where=where)
    return peaks


def _from_json(text: str, file: str, context: Context) -> tuple[Given, ...]:
    """Read a list of STRATEGY objects or rows, or the result of ``plan``, ``score`` or ``tune``."""
    records = parse_any_json(text, file=file)
    if isinstance(records, dict):
        records = records.get("ranking", records.get("rows"))
    if not isinstance(records, list):
        message = (
            "expected a list of strategies, or what plan, score or tune write with --json: "
            "an object with 'ranking' or 'rows'"
        )
        raise InputError(message, where=Where(file=file))
    return strategies_of(records, file=file, context=context)


def strategies_of(records: Sequence[object], *, file: str, context: Context) -> tuple[Given, ...]:
    """Read STRATEGY objects, or rows of a ranking that stand for their strategies.

    Raises:
        InputError: If an object is invalid, or does not fit the experiment.
    """
    strategies = []
    mistakes = Mistakes()
    for index, record in enumerate(records):
        where = Where(file=f"{file}: [{index}]")
        strategy = record.get("strategy", record) if isinstance(record, dict) else record
        with mistakes.collect():
            if not isinstance(strategy, dict):
                message = f"expected a strategy object, found {type(strategy).__name__}"
                raise InputError(message, where=where)
            strategies.append(_from_record(strategy, where, context))
    mistakes.check()
    return tuple(strategies)


def _from_record(record: Mapping[str, Any], where: Where, context: Context) -> Given:
    checked = validate(StrategyRecord, Document(file=where.file, values=record))
    if checked.bounds is None and checked.stages is None:
        candidate = _candidate(checked, where, context)
        return Given(where=where, candidate=candidate, strategy=None)
    if checked.recompute is None and checked.stages is None:
        recompute = _default_recompute(context, where.at("recompute"), is_cut=True)
        record = {**record, "recompute": recompute.to_json()}
    pp = len(checked.stages or (checked.bounds or ())[1:])
    zero = context.default_zero(pp, is_cut=True)
    strategy = strategy_from_json(record, context.cluster, file=where.file, zero=zero)
    _check_fit(strategy, where, context, some_idle=checked.placement is not None)
    return Given(where=where, candidate=None, strategy=strategy)


def _check_fit(
    strategy: Strategy, where: Where, context: Context, *, some_idle: bool = False
) -> None:
    """Refuse a strategy that does not cover the model, the batch or the devices.

    Devices may stay idle where a placement leaves them out.
    """
    for stage in strategy.stages:
        _check_tokens(stage.options, where, context)
    if strategy.has_operators:
        _check_operators(strategy, where, context)
    elif strategy.bounds[-1] != context.num_layers:
        message = (
            f"found {' '.join(map(str, strategy.bounds))}; expected 0 to {context.num_layers}, the "
            "number of the model's layers (embedding, head and others count too)"
        )
        raise InputError(message, where=where.at("bounds"))
    if strategy.is_sliced and sum(strategy.token_slices[0][1]) != context.sequence_length:
        message = (
            f"found slices of {sum(strategy.token_slices[0][1])} tokens together; the experiment's "
            f"sequences have {context.sequence_length}"
        )
        raise InputError(message, where=where.at("token_slices"))
    if strategy.global_batch_size != context.global_batch_size:
        message = (
            f"makes {strategy.global_batch_size} samples per step; the experiment has "
            f"global_batch_size {context.global_batch_size}"
        )
        raise InputError(message, where=where)
    if not some_idle and len(strategy.placement) != context.cluster.num_devices:
        message = (
            f"uses {len(strategy.placement)} devices; the cluster has "
            f"{context.cluster.num_devices}, and a strategy uses each of them once, unless a "
            "placement says which"
        )
        raise InputError(message, where=where)


def _check_operators(strategy: Strategy, where: Where, context: Context) -> None:
    """Refuse a strategy whose stages do not cover the profile's operators."""
    expected = context.num_operators
    if not all(stage.operators for stage in strategy.stages):
        message = "expected operators in every stage, found some without"
    elif not expected:
        message = "operators need a profile that knows some: profile.source aceso"
    elif strategy.bounds[-1] != expected:
        message = f"found operators 0 to {strategy.bounds[-1]}; the profile has 0 to {expected}"
    else:
        return
    raise InputError(message, where=where.at("stages"))
