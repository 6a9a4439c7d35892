"""Strategies in files: STRATEGY objects in JSON, and lines of CSV.

A line of CSV becomes a STRATEGY object, so `StrategyRecord` declares and checks keys, types and
ranges for both formats. Each field of `StageOptions` that is off by default is a key and a column
of the same name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetPydanticSchema,
    Tag,
    create_model,
)

from amp_ray.clusters.cluster import Cluster
from amp_ray.errors import InputError, Mistakes, Where, placed, shown
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.not_read import NotRead
from amp_ray.inputs.section import Count, Flag, Index, Section, Text, by_type, validate
from amp_ray.inputs.strict_text import (
    MOST_SECONDS,
    parse_any_json,
    parse_json,
    read_count,
    read_rows,
    read_seconds,
)
from amp_ray.inputs.yaml_text import Document
from amp_ray.strategies.candidate import OTHER_OPTIONS, Candidate, StageOptions
from amp_ray.strategies.operator_run import OperatorRun
from amp_ray.strategies.recompute import (
    AUTO,
    NO_RECOMPUTE,
    Recompute,
    RecomputeKind,
    parse_recompute,
)
from amp_ray.strategies.strategy import Stage, Strategy
from amp_ray.strategies.zero import AUTO_STAGE, MOST_ZERO_STAGE, NO_ZERO, ZERO_KEYS, Zero, zero_of

# ------------------------------------------------------------------------- STRATEGY objects


class PartRecord(Section):
    """``recompute`` of a stage that recomputes only some of its blocks."""

    kind: Literal["selective", "full"]
    layers: Count


def _recompute_of(record: RecomputeKind | PartRecord) -> Recompute:
    if isinstance(record, PartRecord):
        return Recompute(kind=record.kind, layers=record.layers)
    return Recompute(kind=record)


_by_part = by_type(dict | PartRecord, "part", "word")
_Part = Annotated[PartRecord, Tag("part")]
_Word = Annotated[Literal["none", "selective", "per-operator", "full"], Tag("word")]
_OfStage = Annotated[_Word | _Part, _by_part]
_OfAll = Annotated[Annotated[RecomputeKind, Tag("word")] | _Part, _by_part]


def _written_as(record: Any) -> GetPydanticSchema:  # noqa: ANN401 - any type expression
    """Validate a value by another type, then convert it from that type."""
    return GetPydanticSchema(lambda _, handler: handler(record))


_made = AfterValidator(_recompute_of)
StageRecompute = Annotated[Recompute, _written_as(_OfStage), _made]
CommonRecompute = Annotated[Recompute, _written_as(_OfAll), _made]


class OperatorsRecord(Section):
    """One entry of ``operators``."""

    range: tuple[Index, Count]
    tp: Count
    dp: Count
    algorithm: Index = 0
    recompute: Flag = False


class _Dimensions(Section):
    """Options of a stage that are off by default, as keys next to its degrees."""

    def dimensions(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        values = {option.name: getattr(self, option.name) for option in OTHER_OPTIONS}
        return {name: value for name, value in values.items() if value is not None}


if TYPE_CHECKING:
    DimensionsRecord = _Dimensions
else:
    DimensionsRecord = create_model(
        "DimensionsRecord",
        __base__=_Dimensions,
        **{
            option.name: ((Flag if option.type is bool else Count) | None, None)
            for option in OTHER_OPTIONS
        },
    )


def _one_tp(tp: object) -> object:
    if isinstance(tp, list):
        message = "one tp for all replicas of a stage: others need a stage of their own"
        raise ValueError(message)  # noqa: TRY004 - what pydantic tells the user
    return tp


class StageRecord(DimensionsRecord):
    """One entry of ``stages``."""

    layers: tuple[Index, Count]
    tp: Annotated[Count, BeforeValidator(_one_tp)]
    dp: Count
    devices: list[Index] | None = None
    recompute: StageRecompute = NO_RECOMPUTE
    shares: list[Count] | None = None
    operators: list[OperatorsRecord] | None = None

    def options(self, zero: Zero) -> StageOptions:
        """Return the options of the stage."""
        return StageOptions(
            tp=self.tp, dp=self.dp, recompute=self.recompute, zero=zero, **self.dimensions()
        )


class StrategyRecord(DimensionsRecord):
    """A STRATEGY object; a candidate's object has neither bounds nor stages."""

    tp: Count | None = None
    pp: Count | None = None
    dp: Count | None = None
    micro_batch_size: Count
    num_micro_batches: Count | None = None
    bounds: Annotated[list[Index], Field(min_length=2)] | None = None
    recompute: (
        Annotated[
            Annotated[CommonRecompute, Tag("one")] | Annotated[list[StageRecompute], Tag("each")],
            by_type(list, "each", "one"),
        ]
        | None
    ) = None
    zero_stage: Annotated[int, Field(ge=0, le=MOST_ZERO_STAGE, strict=True)] | None = None
    shard_ranks: Count | None = None
    reshard_after_forward: Flag | None = None
    placement: list[tuple[Text, Index]] | None = None
    stages: Annotated[list[StageRecord], Field(min_length=1)] | None = None
    token_slices: (
        tuple[tuple[Count, Annotated[tuple[Count, ...], Field(min_length=1)]], ...] | None
    ) = None
    virtual_stages: Count = 1

    @property
    def num_stages(self) -> int:
        """Number of stages by its bounds, which may be the bounds of all chunks."""
        num_parts = len(self.bounds or (0, 0)) - 1
        if self.pp is not None and num_parts == self.pp * self.virtual_stages:
            return self.pp
        return num_parts

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """The values of ``recompute``: none, one for all stages, or one per stage."""
        if self.recompute is None:
            return ()
        return tuple(self.recompute) if isinstance(self.recompute, list) else (self.recompute,)

    def zero(self, otherwise: Zero) -> Zero:
        """Return its ZeRO options, or ``otherwise`` if it sets none."""
        keeps = self.reshard_after_forward
        return zero_of(self.zero_stage, self.shard_ranks, reshard=keeps, otherwise=otherwise)


def strategy_to_json(strategy: Strategy, cluster: Cluster) -> dict[str, Any]:
    """Return the STRATEGY object of a strategy; ``stages`` is written only if stages differ."""
    first_stage, *other_stages = (stage.options.others for stage in strategy.stages)
    record: dict[str, Any] = {
        "tp": strategy.tp,
        "pp": strategy.pp,
        "dp": strategy.dp,
        **(first_stage if all(other == first_stage for other in other_stages) else {}),
        "micro_batch_size": strategy.micro_batch_size,
        "num_micro_batches": strategy.num_micro_batches,
        "bounds": list(strategy.given_bounds),
        "recompute": [stage.options.recompute.to_json() for stage in strategy.stages]
        if strategy.recompute is None
        else strategy.recompute.to_json(),
        **strategy.zero.to_json(),
        "placement": [list(cluster.places[device]) for device in strategy.placement],
    }
    if not strategy.is_uniform or strategy.options is None:
        record["stages"] = [
            _stage_to_json(stage, first, strategy.micro_batch_size)
            for stage, first in zip(strategy.stages, strategy.first_rank, strict=True)
        ]
    if strategy.is_interleaved:
        record["virtual_stages"] = strategy.virtual_stages
    if strategy.is_sliced:
        record["token_slices"] = [
            [sequences, list(tokens)] for sequences, tokens in strategy.token_slices
        ]
    return record


def _stage_to_json(stage: Stage, first_rank: int, micro_batch_size: int) -> dict[str, Any]:
    operators = [
        {
            "range": [run.first_operator, run.end_operator],
            "tp": run.tp,
            "dp": run.dp,
            "algorithm": run.algorithm,
            "recompute": run.recompute,
        }
        for run in stage.operators
    ]
    return {
        "layers": [stage.first_layer, stage.end_layer],
        "tp": stage.options.tp,
        "dp": stage.options.dp,
        **stage.options.others,
        "devices": list(range(first_rank, first_rank + stage.num_ranks)),
        "recompute": stage.options.recompute.to_json(),
        "shares": list(stage.shares or (micro_batch_size,) * stage.options.dp),
        **({"operators": operators} if operators else {}),
    }


def strategy_from_json(
    record: Mapping[str, Any], cluster: Cluster, *, file: str = "strategy"
) -> Strategy:
    """Read a STRATEGY object; the inverse of ``strategy_to_json`` on the same cluster.

    Without ``placement``, rank ``r`` runs on device ``r`` of the hostfile's order. Contradictory
    keys are refused.
    """
    document = Document(file=file, values=record)
    return _strategy(validate(StrategyRecord, document), cluster, Where(file=file), NO_ZERO)


def _strategy(record: StrategyRecord, cluster: Cluster, where: Where, zero: Zero) -> Strategy:
    with placed(where, ValueError):
        num_devices = _num_devices(record)
        if num_devices > cluster.num_devices:
            raise ValueError(f"uses {num_devices} devices; the cluster has {cluster.num_devices}")
        zero = record.zero(zero)
        placement = None if record.placement is None else _placement(cluster, record.placement)
        if record.stages is None:
            strategy = _uniform(record, placement, zero)
        else:
            strategy = _of_stages(record, record.stages, placement, zero)
        if record.token_slices:
            strategy = replace(strategy, token_slices=record.token_slices)
        _check_agreement(record, strategy)
    return strategy


def _num_devices(record: StrategyRecord) -> int:
    if record.stages is not None:
        return sum(stage.options(NO_ZERO).num_ranks for stage in record.stages)
    options = StageOptions(tp=record.tp or 1, dp=record.dp or 1, **record.dimensions())
    return options.num_ranks * record.num_stages


def _uniform(record: StrategyRecord, placement: tuple[int, ...] | None, zero: Zero) -> Strategy:
    """Return the strategy of an object with bounds and degrees."""
    if record.tp is None or record.dp is None or record.bounds is None:
        message = "a strategy needs tp, dp and bounds, or stages with layers, tp and dp each"
        raise ValueError(message)
    if record.bounds[0] != 0:
        raise ValueError(f"bounds run from 0 to the number of layers, found {record.bounds}")
    pp, per_stage = record.num_stages, record.recomputes or (NO_RECOMPUTE,)
    if not isinstance(record.recompute, list):
        per_stage *= pp
    if len(per_stage) != pp:
        raise ValueError(f"found {len(per_stage)} values of recompute for {pp} stages")
    options = StageOptions(tp=record.tp, dp=record.dp, zero=zero, **record.dimensions())
    candidate = Candidate(
        micro_batch_size=record.micro_batch_size,
        options=options,
        pp=pp,
        num_micro_batches=_micro_batches(record),
        virtual_stages=record.virtual_stages,
    )
    return Strategy.uniform(candidate, record.bounds, placement, per_stage)


def _of_stages(
    record: StrategyRecord,
    records: Sequence[StageRecord],
    placement: tuple[int, ...] | None,
    zero: Zero,
) -> Strategy:
    share = (record.micro_batch_size,)
    even = all(stage.shares in (None, [*share * stage.dp]) for stage in records)
    stages = tuple(
        Stage(
            first_layer=stage.layers[0],
            end_layer=stage.layers[1],
            options=stage.options(zero),
            shares=None if even else tuple(stage.shares or share * stage.dp),
            operators=tuple(map(_operator_run, stage.operators or ())),
        )
        for stage in records
    )
    bounds, number = record.bounds or (), record.virtual_stages
    is_chunked = number > 1 and len(bounds) == len(stages) * number + 1
    return Strategy(
        stages=stages,
        micro_batch_size=record.micro_batch_size,
        num_micro_batches=_micro_batches(record),
        placement=tuple(range(sum(stage.num_ranks for stage in stages)))
        if placement is None
        else placement,
        virtual_stages=number,
        chunk_bounds=tuple(bounds) if is_chunked else (),
    )


def _operator_run(record: OperatorsRecord) -> OperatorRun:
    figures = record.model_dump(exclude={"range"})
    return OperatorRun(first_operator=record.range[0], end_operator=record.range[1], **figures)


def _micro_batches(record: StrategyRecord) -> int:
    if record.num_micro_batches is None:
        raise ValueError("key 'num_micro_batches' is missing")
    return record.num_micro_batches


def _placement(cluster: Cluster, slots: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    device_at = {place: device for device, place in enumerate(cluster.places)}
    for host, slot in slots:
        if (host, slot) not in device_at:
            message = f"slot {slot} of host {host!r}, which the cluster does not have"
            raise ValueError(f"placement names {message}")
    return tuple(device_at[place] for place in slots)


def _check_agreement(record: StrategyRecord, strategy: Strategy) -> None:
    per_stage = [stage.options for stage in strategy.stages]
    recomputes = [options.recompute for options in per_stage]
    pairs: dict[str, tuple[object, object]] = {
        "tp": (record.tp, strategy.tp),
        "pp": (record.pp, strategy.pp),
        "dp": (record.dp, strategy.dp),
        "bounds": (record.bounds, list(strategy.given_bounds)),
        "recompute": (
            _words(record.recompute),
            _words(recomputes if isinstance(record.recompute, list) else strategy.recompute),
        ),
        **{
            name: (value, _common({getattr(options, name) for options in per_stage}))
            for name, value in record.dimensions().items()
        },
    }
    for key, (named, made) in pairs.items():
        if named is not None and named != made:
            raise ValueError(f"{key} is {named}, but the stages make it {made}")
    for index, stage in enumerate(record.stages or ()):
        first = strategy.first_rank[index]
        ranks = list(range(first, first + strategy.stages[index].num_ranks))
        if stage.devices is not None and stage.devices != ranks:
            message = f"devices of stage {index} are its ranks {ranks}, found {stage.devices}"
            raise ValueError(message)


def _words(recompute: Recompute | list[Recompute] | None) -> object:
    if isinstance(recompute, list):
        return [str(value) for value in recompute]
    return None if recompute is None else str(recompute)


_T = TypeVar("_T")


def _common(values: set[_T]) -> _T | None:
    return values.pop() if len(values) == 1 else None


# -------------------------------------------------------------------- strategies of a user

Failure = Literal["oom", "failed"]

_DEGREES = ("tp", "pp", "dp", "micro_batch_size")
_DIMENSIONS = tuple(option.name for option in OTHER_OPTIONS)

OPTIONAL_COLUMNS: Final = (
    *("bounds", "measured_s", "mean_s", "recompute", "spread_s", "peak_memory_bytes"),
    *("virtual_stages", *ZERO_KEYS, *_DIMENSIONS),
)
"""Optional columns of a CSV file of strategies, besides the degrees."""

_WHOLE: Final = "strategy"
_OUTCOME: Final = "outcome"
_OF_EXPORTS: Final = ("num_micro_batches", _WHOLE, _OUTCOME)
"""Further columns that are read, of tables of plans and studies; ``strategy`` is a STRATEGY object
whose stages, placement or token slices have no column."""

_PREDICTED: Final = "iteration_time_s"  # stands in tables of plans
_RESULTS: Final = (
    *("position", "number", _PREDICTED, "interval_s", "breakdown*", "memory*", "feasible"),
    *("reason", "launchable", "failure_probability", "lower_bound_s", "tokens_per_s*", "mfu"),
    *("warnings", "cost*", "training*", "idle_devices", "remedies", "predicted_*", "repeats"),
    *("chosen", "wall_s", "step_time_s", "num_warmup_steps", "remarks", "rank", "host", "lines"),
    *("timeout_s", "kind"),
)
"""Columns of such tables that say nothing of a strategy, and are not read."""

STRATEGY_COLUMNS: Final = (*_DEGREES, "bounds", "recompute")
"""Columns that every table of strategies has."""

DIMENSION_COLUMNS: Final = (*_DIMENSIONS, "virtual_stages", *ZERO_KEYS)
"""Columns that a table has only if some strategy uses them."""

_FLAGS: Final[Mapping[str, bool]] = {"true": True, "false": False}
_FAILURES: Final[Mapping[str, Failure]] = {"oom": "oom", "failed": "failed"}
_FAILED_OUTCOMES: Final = {"oom": "oom", "crashed": "failed", "timeout": "failed"}
_LEAST_SECONDS: Final = 1e-6
"""Shortest iteration: no device can launch a kernel faster."""

_BYTES: Final = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One strategy of a user's file, with its measurement if there is one."""

    where: Where
    candidate: Candidate | None  # its degrees; None for a strategy with explicit stages
    strategy: Strategy | None  # the complete strategy; None if the solver is to choose the cuts
    measured_s: float | None = None  # measured median seconds per iteration
    mean_s: float | None = None  # mean seconds of the same steps; by default ``measured_s``
    failure: Failure | None = None
    spread_s: float | None = None  # interquartile range of the measured steps, if known
    # Measured peak of each stage, or one figure for the largest of all; empty if not measured
    peak_memory_bytes: tuple[float, ...] = ()
    has_ended: bool = True  # False for a trial of a study that a host failed, or that still runs
    not_read: tuple[NotRead, ...] = ()  # what its file sets beyond it


def parse_strategies(text: str, *, file: str, experiment: Experiment) -> tuple[Entry, ...]:
    """Read strategies that fit the experiment from CSV or from a JSON list of STRATEGY objects."""
    is_json = text.lstrip()[:1] in {"[", "{"} or file.endswith(".json")
    parse = _from_json if is_json else _from_csv
    strategies = parse(text, file, experiment)
    if not strategies:
        raise InputError("no strategy found in it", where=Where(file=file))
    return strategies


def _from_json(text: str, file: str, experiment: Experiment) -> tuple[Entry, ...]:
    """Read a list of STRATEGY objects or rows, or the output of ``plan``, ``score`` or ``tune``."""
    records = parse_any_json(text, file=file)
    if isinstance(records, dict):
        records = records.get("ranking", records.get("rows"))
    if not isinstance(records, list):
        message = (
            "expected a list of strategies, or what plan, score or tune write with --json: "
            "an object with 'ranking' or 'rows'"
        )
        raise InputError(message, where=Where(file=file))
    return strategies_of(records, file=file, experiment=experiment)


def strategies_of(
    records: Sequence[object], *, file: str, experiment: Experiment
) -> tuple[Entry, ...]:
    """Read STRATEGY objects, or rows of a ranking that contain them.

    Raises:
        InputError: If an object is invalid, or does not fit the experiment.
    """
    strategies, num_unmade = [], 0
    mistakes = Mistakes()
    for index, record in enumerate(records):
        where = Where(file=f"{file}: [{index}]")
        strategy = record.get("strategy", record) if isinstance(record, dict) else record
        with mistakes.collect():
            if not isinstance(strategy, dict):
                message = f"expected a strategy object, found {shown(strategy)}"
                raise InputError(message, where=where)
            if strategy is not record and not (strategy.get("tp") or strategy.get("stages")):
                num_unmade += 1
                continue
            strategies.append(_from_record(strategy, where, experiment))
    mistakes.check()
    return _noted(strategies, num_unmade, file)


def _noted(strategies: Sequence[Entry], num_unmade: int, file: str) -> tuple[Entry, ...]:
    """Say with the first strategy how many rows are candidates from which none was made."""
    if not num_unmade or not strategies:
        return tuple(strategies)
    names = (f"{num_unmade} rows without degrees and stages",)
    note = NotRead(file=file, names=names, why="no strategy was made from these candidates")
    first, *others = strategies
    return (replace(first, not_read=(*first.not_read, note)), *others)


def _from_record(values: Mapping[str, Any], where: Where, experiment: Experiment) -> Entry:
    record = validate(StrategyRecord, Document(file=where.file, values=values))
    if record.bounds is None and record.stages is None:
        candidate = _candidate(record, where, experiment)
        return Entry(where=where, candidate=candidate, strategy=None)
    if record.recompute is None and record.stages is None:
        recompute = _default_recompute(experiment, is_cut=True)
        record = record.model_copy(update={"recompute": recompute})
    if record.num_micro_batches is None:
        dp = record.stages[0].dp if record.stages else record.dp or 1
        number = _steps(dp, record.micro_batch_size, where, experiment)
        record = record.model_copy(update={"num_micro_batches": number})
    pp = len(record.stages or (record.bounds or ())[1:])
    zero = _default_zero(experiment, pp, is_cut=True)
    strategy = _strategy(record, experiment.cluster, where, zero)
    _check_fit(strategy, where, experiment, some_idle=record.placement is not None)
    return Entry(where=where, candidate=None, strategy=strategy)


def _from_csv(text: str, file: str, experiment: Experiment) -> tuple[Entry, ...]:
    rows = read_rows(text, file)
    where, header = next(rows, (Where(file=file, line=1), []))
    columns = _DEGREES + OPTIONAL_COLUMNS + _OF_EXPORTS
    problems = {
        "missing": [name for name in _DEGREES if name not in header],
        "unknown": [
            name
            for name in header
            if name not in columns and not any(fnmatchcase(name, one) for one in _RESULTS)
        ],
        "twice": [name for name in columns if header.count(name) > 1],
    }
    if any(problems.values()):
        expected = f"{','.join(_DEGREES)}[,{'][,'.join(OPTIONAL_COLUMNS)}]"
        mistake = "; ".join(
            f"{word}: {', '.join(names)}" for word, names in problems.items() if names
        )
        message = f"expected the header {expected}, found {','.join(header)!r}: {mistake}"
        raise InputError(message, where=where)
    strategies, num_unmade = [], 0
    mistakes = Mistakes()
    for place, row in rows:
        with mistakes.collect():
            if len(row) > len(header):
                message = f"expected {len(header)} columns ({', '.join(header)}), found {len(row)}"
                raise InputError(message, where=place)
            cells = dict.fromkeys(header, "") | dict(zip(header, row, strict=False))
            if _PREDICTED in header:
                cells["peak_memory_bytes"] = ""  # a prediction
                if not (cells["tp"] or cells.get(_WHOLE)):
                    num_unmade += 1
                    continue
            strategies.append(_from_cells(cells, place, experiment))
    mistakes.check()
    return _noted(strategies, num_unmade, file)


def _from_cells(cells: Mapping[str, str], where: Where, experiment: Experiment) -> Entry:
    whole = cells.get(_WHOLE)
    values = {
        name: read(cells.get(name, ""), where.at(name))
        for name, read in _CELLS.items()
        if (name in _DEGREES and not whole) or cells.get(name)
    }
    if whole:
        values = parse_json(whole, file=str(where.at(_WHOLE))) | values
        entry = _from_record(values, Where(file=f"{where.file}:{where.line}"), experiment)
        return _with_measurement(entry, cells, values.get("pp", 1))
    if not values.get("virtual_stages"):
        values["virtual_stages"] = 1 if values["pp"] == 1 else experiment.default_virtual_stages
    lines: dict[tuple[str | int, ...], int] = {(name,): where.line or 1 for name in values}
    record = validate(StrategyRecord, Document(file=where.file, values=values, lines=lines))
    candidate = _candidate(record, where, experiment)
    strategy = None
    if record.bounds is not None:
        per_stage = record.recomputes or (candidate.options.recompute,)
        with placed(where.at("bounds"), ValueError):
            strategy = Strategy.uniform(
                candidate,
                tuple(record.bounds),
                recompute=per_stage * (1 if per_stage[1:] else candidate.pp),
            )
        _check_fit(strategy, where, experiment)
    return _with_measurement(
        Entry(where=where, candidate=candidate, strategy=strategy), cells, candidate.pp
    )


def _flag(word: str, where: Where) -> bool:
    if word.lower() not in _FLAGS:
        raise InputError(f"found {shown(word)}; expected true or false", where=where)
    return _FLAGS[word.lower()]


def _index(word: str, where: Where) -> int:
    return read_count(word, where, low=0)


def _indices(text: str, where: Where) -> list[int]:
    return [read_count(cell, where, low=0) for cell in text.split()]


def _recompute(text: str, where: Where) -> object:
    """Read one value for all stages, or one per stage, as in a STRATEGY object."""
    with placed(where, ValueError):
        per_stage = [parse_recompute(word).to_json() for word in text.split()]
    return per_stage if per_stage[1:] else per_stage[0]


_CELLS: Final[Mapping[str, Callable[[str, Where], Any]]] = {
    **dict.fromkeys((*_DEGREES, "num_micro_batches", "shard_ranks"), read_count),
    **{option.name: _flag if option.type is bool else read_count for option in OTHER_OPTIONS},
    **dict.fromkeys(("zero_stage", "virtual_stages"), _index),
    "reshard_after_forward": _flag,
    "recompute": _recompute,
    "bounds": _indices,
}
"""How to read the cell of a column as the value of the STRATEGY key of that name."""


def strategy_cells(strategy: Strategy) -> dict[str, Any]:
    """Return the cells of a uniform strategy in a CSV file."""
    recomputes = dict.fromkeys(stage.options.recompute for stage in strategy.stages)
    per_stage = [stage.options.recompute for stage in strategy.stages]
    chunks = {"virtual_stages": strategy.virtual_stages} if strategy.is_interleaved else {}
    dimensions = {**strategy.stages[0].options.others, **strategy.zero.to_json(), **chunks}
    return {
        "tp": strategy.tp,
        "pp": strategy.pp,
        "dp": strategy.dp,
        "micro_batch_size": strategy.micro_batch_size,
        "bounds": " ".join(map(str, strategy.given_bounds)),
        "recompute": " ".join(map(str, recomputes if len(recomputes) == 1 else per_stage)),
        **{name: str(value).lower() for name, value in dimensions.items()},
    }


def _candidate(record: StrategyRecord, where: Where, experiment: Experiment) -> Candidate:
    """Return the candidate of a STRATEGY object; the experiment supplies missing values."""
    degrees: dict[str, int] = {}
    for name in _DEGREES:
        value = getattr(record, name)
        if value is None:
            message = "key is missing; a strategy without bounds and stages needs it"
            raise InputError(message, where=where.at(name))
        degrees[name] = value
    pp, is_cut = degrees["pp"], record.bounds is not None
    for key in ("token_slices", "placement"):
        if getattr(record, key) and not is_cut:
            raise InputError("needs cuts; add bounds", where=where.at(key))
    recompute = _one_recompute(record, pp, where, experiment)
    with placed(where.at("zero_stage"), ValueError):
        zero = record.zero(_default_zero(experiment, pp, is_cut=is_cut))
    with placed(where, ValueError):
        options = experiment.stage_options(
            degrees["tp"], degrees["dp"], recompute=recompute, zero=zero, **record.dimensions()
        )
    num_micro_batches = _num_micro_batches(record, options, pp, where, experiment)
    _check_tokens(options, where, experiment)
    with placed(where.at("virtual_stages"), ValueError):
        return Candidate(
            micro_batch_size=record.micro_batch_size,
            options=options,
            pp=pp,
            num_micro_batches=num_micro_batches,
            virtual_stages=record.virtual_stages,
        )


def _default_zero(experiment: Experiment, pp: int, *, is_cut: bool) -> Zero:
    """Return the default ZeRO of a strategy; for given cuts the search has no choice."""
    zero = experiment.zero(pp)
    return NO_ZERO if is_cut and zero.stage == AUTO_STAGE else zero


def _one_recompute(
    record: StrategyRecord, pp: int, where: Where, experiment: Experiment
) -> Recompute:
    """Return the recompute of all stages, or of the first stage if they are cut."""
    at_recompute, is_cut = where.at("recompute"), record.bounds is not None
    values = record.recomputes or (_default_recompute(experiment, is_cut=is_cut),)
    if len(values) not in ({1, pp} if is_cut else {1}):
        expected = f"or one for each of the {pp}" if is_cut else "as it has no bounds"
        message = f"found {len(values)} values; expected one for all stages, {expected}"
        raise InputError(message, where=at_recompute)
    if values[0].layers is not None and not is_cut:
        message = f"found {values[0]}; a strategy that recomputes part of a stage needs its bounds"
        raise InputError(message, where=at_recompute)
    return values[0]


def _default_recompute(experiment: Experiment, *, is_cut: bool) -> Recompute:
    """Return the default recompute of a strategy; for given cuts the search has no choice."""
    return NO_RECOMPUTE if is_cut and experiment.recompute == AUTO else experiment.recompute


def _num_micro_batches(
    record: StrategyRecord, options: StageOptions, pp: int, where: Where, experiment: Experiment
) -> int:
    """Return the micro-batches of a step; refuse degrees that do not fit devices and batch."""
    batch, num_devices = experiment.global_batch_size, experiment.cluster.num_devices
    *inner, outer = options.degrees.items()
    factors = (*inner, ("pp", pp), outer)
    if options.num_ranks * pp != num_devices:
        message = (
            f"{' x '.join(f'{name} {value}' for name, value in factors)} = "
            f"{options.num_ranks * pp} devices; the cluster has {num_devices}"
        )
        raise InputError(message, where=where)
    number = _steps(options.dp, record.micro_batch_size, where, experiment)
    if record.num_micro_batches not in {None, number}:
        message = f"found {record.num_micro_batches}; global_batch_size {batch} makes it {number}"
        raise InputError(message, where=where.at("num_micro_batches"))
    return number


def _steps(dp: int, micro_batch_size: int, where: Where, experiment: Experiment) -> int:
    """Return the number of micro-batches of a step; refuse a share that does not divide it."""
    batch, samples = experiment.global_batch_size, dp * micro_batch_size
    if batch % samples:
        message = (
            f"dp {dp} x micro_batch_size {micro_batch_size} = {samples} does "
            f"not divide global_batch_size {batch}"
        )
        raise InputError(message, where=where)
    return batch // samples


def _check_tokens(options: StageOptions, where: Where, experiment: Experiment) -> None:
    """Refuse degrees that do not divide the tokens of a sequence."""
    shape = experiment.model.shape
    for key, reason in options.undivided(shape.sequence_length, shape.divides_tokens):
        raise InputError(reason, where=where.at(key))


def _check_fit(
    strategy: Strategy, where: Where, experiment: Experiment, *, some_idle: bool = False
) -> None:
    """Refuse a strategy that does not cover the model, the batch or the devices.

    With ``some_idle``, devices may stay idle if the placement leaves them out.
    """
    model, num_devices = experiment.model, experiment.cluster.num_devices
    for stage in strategy.stages:
        _check_tokens(stage.options, where, experiment)
    if strategy.has_operators:
        _check_operators(strategy, where, experiment)
    elif strategy.bounds[-1] != model.num_layers:
        message = (
            f"found {' '.join(map(str, strategy.bounds))}; expected 0 to {model.num_layers}, the "
            "number of the model's layers (embedding, head and others count too)"
        )
        raise InputError(message, where=where.at("bounds"))
    if strategy.num_tokens not in {None, model.shape.sequence_length}:
        message = (
            f"found slices of {strategy.num_tokens} tokens together; the experiment's "
            f"sequences have {model.shape.sequence_length}"
        )
        raise InputError(message, where=where.at("token_slices"))
    if strategy.global_batch_size != experiment.global_batch_size:
        message = (
            f"makes {strategy.global_batch_size} samples per step; the experiment has "
            f"global_batch_size {experiment.global_batch_size}"
        )
        raise InputError(message, where=where)
    if not some_idle and len(strategy.placement) != num_devices:
        message = (
            f"uses {len(strategy.placement)} devices; the cluster has "
            f"{num_devices}, and a strategy uses each of them once, unless a placement says which"
        )
        raise InputError(message, where=where)


def _check_operators(strategy: Strategy, where: Where, experiment: Experiment) -> None:
    """Refuse a strategy whose stages do not cover the profile's operators."""
    operators = experiment.profile.operators
    if not all(stage.operators for stage in strategy.stages):
        message = "expected operators in every stage, found some without"
    elif operators is None:
        message = "operators need a profile that knows some: profile.source aceso"
    elif strategy.bounds[-1] != operators.num_operators:
        message = (
            f"found operators 0 to {strategy.bounds[-1]}; the profile has 0 to "
            f"{operators.num_operators}"
        )
    else:
        return
    raise InputError(message, where=where.at("stages"))


# ------------------------------------------------------------------------- measurements


def _with_measurement(entry: Entry, cells: Mapping[str, str], pp: int) -> Entry:
    """Add the measurement of a CSV line to an entry."""
    where, outcome = entry.where, cells.get(_OUTCOME, "")
    word = cells.get("measured_s") or _FAILED_OUTCOMES.get(outcome, "")
    measured_s, failure = _measurement(word, where.at("measured_s"))
    mean_s = _beside(
        cells.get("mean_s", ""), measured_s, where.at("mean_s"), least_s=_LEAST_SECONDS
    )
    peaks = cells.get("peak_memory_bytes", "")
    return replace(
        entry,
        measured_s=measured_s,
        failure=failure,
        has_ended=bool(word) or _OUTCOME not in cells,
        mean_s=measured_s if mean_s is None else mean_s,
        spread_s=_beside(cells.get("spread_s", ""), measured_s, where.at("spread_s")),
        peak_memory_bytes=_peaks(peaks, pp, where.at("peak_memory_bytes")),
    )


def _measurement(word: str, where: Where) -> tuple[float | None, Failure | None]:
    """Read seconds or the word for a failure; an empty cell gives neither."""
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
    """Read a further time of a measurement; None if the cell is empty."""
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
    """Read measured peaks in bytes: one per stage, one for all, or none."""
    cells = text.split()
    peaks = tuple(float(cell) for cell in cells if _BYTES.fullmatch(cell))
    if len(peaks) < len(cells):
        message = f"found {shown(text)}; expected bytes as whole numbers, separated by spaces"
        raise InputError(message, where=where)
    if peaks and len(peaks) not in {1, pp}:
        message = f"found {len(peaks)} figures; expected one, or one per stage ({pp})"
        raise InputError(message, where=where)
    return peaks
