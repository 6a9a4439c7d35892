"""The published planner's space as a problem of the solver for chains of operators."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.inputs.experiment import SearchLimits
from amp_ray.inputs.operator_profile import (
    OperatorKey,
    OperatorProfile,
    OperatorTable,
    TransferTable,
)
from amp_ray.planners.aceso2024.cost import copies_of_weights, resharding_s, transfer_s
from amp_ray.planners.operators.partition import (
    OperatorProblem,
    PosedProblem,
    alike_rows,
    relaxed,
    with_mixes,
)
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.units import MIB

STAGE_DEVICES: Final = (1, 2, 4, 8)
"""Devices of a stage that it knows."""

MOST_STAGES: Final = 16

UNIT_BYTES: Final = MIB / 2000
"""Sizes stand in the files as thousandths of a MiB, and a mask counts half as much again: in this
unit all of them are whole numbers, whose sums are exact."""

_MOST_TP: Final[Mapping[str, int]] = {"gpt_350M": 4}
"""Largest tp that it takes a model for, where that is less than what was measured."""

NO_LIMITS: Final = SearchLimits()

_ROUNDING: Final = 1e-3
"""Of a unit: what may be lost when a decimal number is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcesoSetting:
    """What the published planner is given."""

    profile: OperatorProfile  # what was measured
    num_devices: int  # of all nodes
    devices_per_node: int  # of each
    limit_bytes: float  # memory of a device
    global_batch_size: int  # samples per iteration
    # What is left out; its micro-batch sizes are sums over all replicas
    limits: SearchLimits = NO_LIMITS

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Samples of a micro-batch over all replicas: measured sizes that divide the batch."""
        asked = self.limits.micro_batch_sizes
        return tuple(
            size
            for size in self.profile.micro_batch_sizes
            if self.global_batch_size % size == 0 and (asked is None or size in asked)
        )

    def allows(self, tp: int, dp: int) -> bool:
        """Tell whether a stage may have these degrees."""
        limits = self.limits
        most_tp = min(
            _MOST_TP.get(self.profile.model, tp), tp if limits.max_tp is None else limits.max_tp
        )
        return limits.min_tp <= tp <= most_tp and (limits.max_dp is None or dp <= limits.max_dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOption:
    """One way to use all operators of a stage."""

    tp: int  # tensor parallel degree
    dp: int  # data parallel degree
    algorithm: int  # how matrices are divided
    samples: int  # of a micro-batch on a data-parallel rank
    table: OperatorTable  # what was measured of each operator of the chain

    @property
    def use(self) -> OperatorUse:
        """How each operator is used, without recompute."""
        return self.tp, self.dp, self.algorithm, False


def stage_options(setting: AcesoSetting, micro_batch_size: int) -> tuple[StageOption, ...]:
    """Return every tp, dp and algorithm of a stage that was measured at a micro-batch size.

    Undivided operators are the same by any algorithm.

    Args:
        setting: What is given.
        micro_batch_size: Samples over all replicas.
    """
    found = []
    for devices in STAGE_DEVICES:
        if devices > min(setting.devices_per_node, setting.num_devices):
            continue
        for tp in setting.profile.tps:
            dp, rest = divmod(devices, tp)
            if rest or micro_batch_size % dp or not setting.allows(tp, dp):
                continue
            for algorithm in setting.profile.algorithms if tp > 1 else (0,):
                key = OperatorKey(micro_batch_size // dp, tp, algorithm)
                table = setting.profile.tables.get(key)
                if table is not None:
                    samples, *_ = key
                    found.append(
                        StageOption(tp=tp, dp=dp, algorithm=algorithm, samples=samples, table=table)
                    )
    return tuple(found)


def posed_problems(setting: AcesoSetting) -> dict[int, PosedProblem]:
    """Pose the question for every size of the micro-batch where a stage has a price."""
    found = {}
    for size in setting.micro_batch_sizes:
        options = stage_options(setting, size)
        if options:
            problem = operator_problem(setting, options, setting.global_batch_size // size)
            rows, problem = offered(setting, options, problem)
            degrees = [option.use[:3] for option in options]
            found[size] = PosedProblem(problem=problem, rows=rows, degrees=degrees)
    return found


def operator_problem(
    setting: AcesoSetting, options: tuple[StageOption, ...], num_micro_batches: int
) -> OperatorProblem:
    """Pose the published planner's question for one size of the micro-batch."""
    profile = setting.profile
    tables = [option.table for option in options]
    forward_s, backward_s = _stacked(tables, "forward_s"), _stacked(tables, "backward_s")
    time_s = forward_s + backward_s
    start_s, end_s = _edges_s(profile, options)
    time_s[:, 0] += start_s[:, 0, 0]
    time_s[:, -1] += end_s[:, 0, -1]
    weights = _units(_stacked(tables, "weight_bytes"))
    ends_free = np.append(False, profile.kept_share[:-1] != 1.0)
    edges = np.arange(setting.num_devices + 1)
    within = edges[:-1] % setting.devices_per_node
    devices = np.array([option.tp * option.dp for option in options])
    return OperatorProblem(
        time_s=time_s,
        join_s=np.array(
            [
                _joins_s(profile, [own.use] * profile.num_operators, own.table.input_bytes)
                for own in options
            ]
        ),
        recompute_s=forward_s,
        state_bytes=copies_of_weights(profile.family) * weights,
        weight_bytes=weights,
        held_bytes=_units(profile.kept_share * _stacked(tables, "activation_bytes")),
        input_bytes=_units(_stacked(tables, "input_bytes")),
        forward_reserved_bytes=_units(_stacked(tables, "forward_reserved_bytes")),
        backward_reserved_bytes=_units(_stacked(tables, "backward_reserved_bytes")),
        start_s=start_s,
        end_s=end_s,
        starts_layer=profile.starts_block.copy(),
        free_end=ends_free,
        counts_last=True,
        devices=devices,
        allowed=within[None, :] + devices[:, None] <= setting.devices_per_node,
        edge_kind=(edges % setting.devices_per_node == 0).astype(np.int64),
        limit_bytes=float(math.floor(setting.limit_bytes / UNIT_BYTES)),
        num_micro_batches=num_micro_batches,
        most_stages=min(setting.num_devices, MOST_STAGES, setting.limits.max_pp or MOST_STAGES),
    )


def offered(
    setting: AcesoSetting, options: tuple[StageOption, ...], problem: OperatorProblem
) -> tuple[IntArray, OperatorProblem]:
    """Offer stages whose operators differ in tp, dp and algorithm, where they are asked for.

    It reads what a stage sends on at the tp of the stage's first operator: a mix is an option for
    each tp that a stage may begin with. Its T5 has no price for such stages.

    Returns:
        The option of each operator by each option of the problem, and the problem.
    """
    profile, number = setting.profile, len(options)
    if not setting.limits.per_operator or profile.family == "t5":
        return alike_rows(problem), problem
    inputs = _stacked([option.table for option in options], "input_bytes")
    operators = np.arange(profile.num_operators)

    def joins_s(row: IntArray) -> FloatArray:
        return _joins_s(profile, [options[index].use for index in row], inputs[row, operators])

    mixed, rows = with_mixes(problem, joins_s, np.arange(number))
    tps = np.array([option.tp for option in options])[rows]
    pairs = [(index, tp) for index, own in enumerate(tps) for tp in np.unique(own).tolist()]
    which = [index for index, _ in pairs]
    mixed, rows, tps = mixed.taking(which), rows[which], tps[which]
    sent_s = {tp: _sent_s(profile, options, tp) for tp in set(tps.ravel().tolist())}
    for index, (_, tp) in enumerate(pairs):
        own_s = sent_s[tp][rows[index], :, operators].T
        mixed.time_s[index, -1] += own_s[0, -1] - mixed.end_s[index, 0, -1]
        mixed.end_s[index, :, 1:] = own_s
        mixed.start_s[index, :, :-1][:, tps[index] != tp] = math.inf
        mixed.allowed[index, 0] &= tps[index, 0] == tp
    if mixed.relaxed is not None:
        mixed = replace(mixed, relaxed=relaxed(_sending_least(problem, options, sent_s)))
    return rows, mixed


def _sending_least(
    problem: OperatorProblem, options: tuple[StageOption, ...], sent_s: Mapping[int, FloatArray]
) -> OperatorProblem:
    """Let stages send on at the tp of theirs where that takes least."""
    least_s = np.array(
        [
            np.min([sent_s[own.tp][index] for own in options if own.tp * own.dp == size], axis=0)
            for index, size in enumerate(problem.devices.tolist())
        ]
    )
    time_s, end_s = problem.time_s.copy(), problem.end_s.copy()
    time_s[:, -1] += least_s[:, 0, -1] - end_s[:, 0, -1]
    end_s[:, :, 1:] = least_s
    return replace(problem, time_s=time_s, end_s=end_s)


def _sent_s(profile: OperatorProfile, options: tuple[StageOption, ...], tp: int) -> FloatArray:
    """Return what sending on takes in stages that begin at a tp, shape ``(V, 2, L)``."""
    keys = [OperatorKey(option.samples, tp, option.algorithm) for option in options]
    tables = [profile.tables.get(key, own.table) for key, own in zip(keys, options, strict=True)]
    return np.array(
        [
            [_transfers_s(link, table.output_bytes) for link in (profile.intra, profile.inter)]
            for table in tables
        ]
    )


def _units(sizes: FloatArray) -> FloatArray:
    """Return sizes in whole units, rounded up where a file has more digits than usual."""
    units: FloatArray = np.ceil(sizes / UNIT_BYTES - _ROUNDING)
    return units


def _stacked(tables: list[OperatorTable], name: str) -> FloatArray:
    """Return a value of all options, shape ``(V, L)``."""
    return np.array([getattr(table, name) for table in tables])


def _edges_s(
    profile: OperatorProfile, options: tuple[StageOption, ...]
) -> tuple[FloatArray, FloatArray]:
    """Return what comes in before and goes out behind each operator, shape ``(V, 2, L + 1)``.

    The kinds of edges are those within a node and those between nodes.
    """
    shape = (len(options), 2, profile.num_operators + 1)
    start_s, end_s = np.zeros(shape), np.zeros(shape)
    for index, option in enumerate(options):
        for kind, link in enumerate((profile.intra, profile.inter)):
            start_s[index, kind, :-1] = _transfers_s(link, option.table.input_bytes)
            end_s[index, kind, 1:] = _transfers_s(link, option.table.output_bytes)
    return start_s, end_s


def _transfers_s(link: TransferTable, sizes: FloatArray) -> FloatArray:
    distinct, index = np.unique(sizes, return_inverse=True)
    seconds = np.array([transfer_s(link, size) for size in distinct.tolist()])
    found: FloatArray = seconds[index.ravel()]
    return found


def _joins_s(
    profile: OperatorProfile, uses: Sequence[OperatorUse], input_bytes: FloatArray
) -> FloatArray:
    """Return what exchanges take between each operator and the next one, shape ``(L,)``."""
    joins = np.zeros(profile.num_operators)
    for operator, seconds, _ in resharding_s(profile, 0, uses, input_bytes):
        joins[operator - 1] += seconds
    return joins
