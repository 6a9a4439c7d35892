"""Conversion between strategies and the STRATEGY object of the JSON contract."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from amp_ray.clusters.cluster import Cluster
from amp_ray.inputs.section import Count, Flag, Index, Section, Text, by_type, validate
from amp_ray.inputs.yaml_text import Document
from amp_ray.strategies.operator_run import OperatorRun
from amp_ray.strategies.recompute import NO_RECOMPUTE, Recompute, RecomputeKind
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy, stage_bounds
from amp_ray.strategies.zero import MOST_ZERO_STAGE, NO_ZERO, Zero, zero_of

Words = Literal["none", "selective", "full"]


class PartRecord(Section):
    """``recompute`` of a stage that computes part of its blocks again."""

    kind: Literal["selective", "full"]
    layers: Count


_by_part = by_type(dict | PartRecord, "part", "word")
StageRecompute = Annotated[
    Annotated[Words, Tag("word")] | Annotated[PartRecord, Tag("part")], _by_part
]
CommonRecompute = Annotated[
    Annotated[RecomputeKind, Tag("word")] | Annotated[PartRecord, Tag("part")], _by_part
]


def recompute_of(record: RecomputeKind | PartRecord) -> Recompute:
    """Return the value of a word or a mapping."""
    if isinstance(record, PartRecord):
        return Recompute(kind=record.kind, layers=record.layers)
    return Recompute(kind=record)


class OperatorsRecord(Section):
    """One entry of ``operators``."""

    range: tuple[Index, Count]
    tp: Count
    dp: Count
    algorithm: Index = 0
    recompute: Flag = False


class OptionsRecord(Section):
    """Dimensions of a stage that are off by default and may stand beside its degrees."""

    ep: Count | None = None
    etp: Count | None = None
    sequence_parallel: Flag | None = None
    cp: Count | None = None

    def others(self) -> dict[str, Any]:
        """Return those that are given."""
        values = {name: getattr(self, name) for name in OptionsRecord.model_fields}
        return {name: value for name, value in values.items() if value is not None}


def _one_tp(tp: object) -> object:
    if isinstance(tp, list):
        message = "one tp for all replicas of a stage: others need a stage of their own"
        raise ValueError(message)  # noqa: TRY004 - what pydantic tells the user
    return tp


class StageRecord(OptionsRecord):
    """One entry of ``stages``."""

    layers: tuple[Index, Count]
    tp: Annotated[Count, BeforeValidator(_one_tp)]
    dp: Count
    devices: list[Index] | None = None
    recompute: StageRecompute = "none"
    shares: list[Count] | None = None
    operators: list[OperatorsRecord] | None = None


class StrategyRecord(OptionsRecord):
    """A STRATEGY object; that of a candidate has neither bounds nor stages."""

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
    token_slices: list[tuple[Count, Annotated[list[Count], Field(min_length=1)]]] | None = None
    virtual_stages: Count = 1


def strategy_to_json(strategy: Strategy, cluster: Cluster) -> dict[str, Any]:
    """Return the STRATEGY object of a strategy; stages are spelled out only where they differ."""
    dimensions = strategy.stages[0].options.others
    record: dict[str, Any] = {
        "tp": strategy.tp,
        "pp": strategy.pp,
        "dp": strategy.dp,
        **(
            dimensions
            if all(stage.options.others == dimensions for stage in strategy.stages)
            else {}
        ),
        "micro_batch_size": strategy.micro_batch_size,
        "num_micro_batches": strategy.num_micro_batches,
        "bounds": list(strategy.given_bounds),
        "recompute": [stage.options.recompute.to_json() for stage in strategy.stages]
        if strategy.recompute is None
        else strategy.recompute.to_json(),
        **strategy.zero.to_json(),
        "placement": [
            [cluster.nodes[cluster.node_of_device[device]].name, cluster.slot_of_device[device]]
            for device in strategy.placement
        ],
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


def strategy_from_json(
    record: Mapping[str, Any], cluster: Cluster, *, file: str = "strategy", zero: Zero = NO_ZERO
) -> Strategy:
    """Read a STRATEGY object; the inverse of ``strategy_to_json`` on the same cluster.

    Without ``placement``, rank ``r`` runs on device ``r`` of the hostfile's order; without
    ``zero_stage``, ``zero`` holds. Keys that contradict each other are refused.
    """
    document = Document(file=file, values=record)
    checked = validate(StrategyRecord, document)
    with document.at():
        _check_size(checked, cluster)
        stages = _stages(
            checked,
            zero_of(
                checked.zero_stage,
                checked.shard_ranks,
                reshard=checked.reshard_after_forward,
                otherwise=zero,
            ),
        )
        placement = tuple(range(sum(stage.num_ranks for stage in stages)))
        if checked.placement is not None:
            placement = _placement(cluster, checked.placement)
        if checked.num_micro_batches is None:
            raise ValueError("key 'num_micro_batches' is missing")
        strategy = Strategy(
            stages=stages,
            micro_batch_size=checked.micro_batch_size,
            num_micro_batches=checked.num_micro_batches,
            placement=placement,
            token_slices=tuple(
                (count, tuple(tokens)) for count, tokens in checked.token_slices or ()
            ),
            virtual_stages=checked.virtual_stages,
            chunk_bounds=_chunk_bounds(checked),
        )
        _check_agreement(checked, strategy)
    return strategy


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


def _operators(records: list[OperatorsRecord] | None) -> tuple[OperatorRun, ...]:
    return tuple(
        OperatorRun(
            first_operator=record.range[0],
            end_operator=record.range[1],
            tp=record.tp,
            dp=record.dp,
            algorithm=record.algorithm,
            recompute=record.recompute,
        )
        for record in records or ()
    )


def _check_size(record: StrategyRecord, cluster: Cluster) -> None:
    """Refuse more devices than the cluster has, before allocating anything per device."""
    if record.stages is not None:
        num_devices = sum(stage.tp * (stage.cp or 1) * stage.dp for stage in record.stages)
    else:
        num_ranks = (record.tp or 1) * (record.cp or 1) * (record.dp or 1)
        num_devices = num_ranks * (len(_stage_bounds(record)) - 1)
    if num_devices > cluster.num_devices:
        raise ValueError(f"uses {num_devices} devices; the cluster has {cluster.num_devices}")


def _stages(record: StrategyRecord, zero: Zero) -> tuple[Stage, ...]:
    """Return ``stages`` if given, else the stages of ``bounds`` and the degrees."""
    if record.stages is not None:
        share = (record.micro_batch_size,)
        even = all(stage.shares in (None, [*share * stage.dp]) for stage in record.stages)
        return tuple(
            Stage(
                first_layer=stage.layers[0],
                end_layer=stage.layers[1],
                options=StageOptions(
                    tp=stage.tp,
                    dp=stage.dp,
                    recompute=recompute_of(stage.recompute),
                    zero=zero,
                    **stage.others(),
                ),
                shares=None if even else tuple(stage.shares or share * stage.dp),
                operators=_operators(stage.operators),
            )
            for stage in record.stages
        )
    if record.tp is None or record.dp is None or record.bounds is None:
        message = "a strategy needs tp, dp and bounds, or stages with layers, tp and dp each"
        raise ValueError(message)
    if record.bounds[0] != 0:
        raise ValueError(f"bounds run from 0 to the number of layers, found {record.bounds}")
    cuts = list(pairwise(_stage_bounds(record)))
    per_stage = recompute_of_stages(record) or (NO_RECOMPUTE,)
    if not isinstance(record.recompute, list):
        per_stage *= len(cuts)
    if len(per_stage) != len(cuts):
        raise ValueError(f"found {len(per_stage)} values of recompute for {len(cuts)} stages")
    return tuple(
        Stage(
            first_layer=first,
            end_layer=end,
            options=StageOptions(
                tp=record.tp, dp=record.dp, recompute=chosen, zero=zero, **record.others()
            ),
        )
        for (first, end), chosen in zip(cuts, per_stage, strict=True)
    )


def _chunk_bounds(record: StrategyRecord) -> tuple[int, ...]:
    """Return ``bounds`` if they describe chunks, that is, more parts than stages."""
    bounds, number = record.bounds or (), record.virtual_stages
    num_stages = record.pp if record.stages is None else len(record.stages)
    if number == 1 or num_stages is None or len(bounds) != num_stages * number + 1:
        return ()
    return tuple(bounds)


def _stage_bounds(record: StrategyRecord) -> tuple[int, ...]:
    chunks = _chunk_bounds(record)
    return (
        stage_bounds(chunks, (len(chunks) - 1) // record.virtual_stages)
        if chunks
        else tuple(record.bounds or (0, 0))
    )


def recompute_of_stages(record: StrategyRecord) -> tuple[Recompute, ...]:
    """Return the values of ``recompute``: none, one for all stages, or one for each."""
    recompute = record.recompute
    if recompute is None:
        return ()
    return tuple(map(recompute_of, recompute if isinstance(recompute, list) else (recompute,)))


def _check_agreement(record: StrategyRecord, strategy: Strategy) -> None:
    """Refuse an object whose keys contradict each other."""
    pairs: dict[str, tuple[object, object]] = {
        "tp": (record.tp, strategy.tp),
        "pp": (record.pp, strategy.pp),
        "dp": (record.dp, strategy.dp),
        "bounds": (record.bounds, list(strategy.given_bounds)),
        "recompute": _both_recomputes(record, strategy),
        **{name: (value, _made(name, strategy)) for name, value in record.others().items()},
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


def _made(name: str, strategy: Strategy) -> object:
    """Return a dimension of all stages; None where they differ."""
    values = {getattr(stage.options, name) for stage in strategy.stages}
    return values.pop() if len(values) == 1 else None


def _both_recomputes(record: StrategyRecord, strategy: Strategy) -> tuple[object, object]:
    """Return the recompute of the key and that of the stages, in one form."""
    named = [str(value) for value in recompute_of_stages(record)]
    if isinstance(record.recompute, list):
        return named, [str(stage.options.recompute) for stage in strategy.stages]
    made = strategy.recompute
    return (named[0] if named else None), (None if made is None else str(made))


def _placement(cluster: Cluster, slots: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """Return the device in each slot of a host."""
    hosts = (cluster.nodes[node].name for node in cluster.node_of_device)
    places = zip(hosts, cluster.slot_of_device, strict=True)
    device_at = {place: device for device, place in enumerate(places)}
    for host, slot in slots:
        if (host, slot) not in device_at:
            message = f"slot {slot} of host {host!r}, which the cluster does not have"
            raise ValueError(f"placement names {message}")
    return tuple(device_at[place] for place in slots)
