"""The planner published as Aceso (2024), applied to an experiment: its formulas, solved exactly.

The exact solver for chains of operators searches its plans.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.estimate import Breakdown, Estimate, Infeasible, Reason, Result
from amp_ray.cost.verdict import OUT_OF_MEMORY
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment, SearchLimits
from amp_ray.inputs.operator_profile import (
    OperatorKey,
    OperatorProfile,
    OperatorTable,
    TransferTable,
)
from amp_ray.planners.aceso2024.cost import (
    NOT_EXPRESSIBLE,
    AcesoCost,
    AcesoPlan,
    aceso_cost,
    aceso_plan,
    copies_of_weights,
    resharding_s,
    transfer_s,
)
from amp_ray.planners.operators.cost import WHY_NO_STAGES
from amp_ray.planners.operators.partition.mixed import alike_rows, relaxed, with_mixes
from amp_ray.planners.operators.partition.problem import OperatorProblem
from amp_ray.planners.operators.partition.several import NoStages, PosedProblem, SolveEach
from amp_ray.planners.operators.strategy import operator_strategy
from amp_ray.planners.published import PublishedPlanner, free_groups
from amp_ray.search.planner import Candidates
from amp_ray.strategies.candidate import AnyCandidate, GroupsCandidate
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.strategies.strategy import Strategy
from amp_ray.units import MIB, counted

STAGE_DEVICES: Final = (1, 2, 4, 8)
"""Numbers of devices of a stage that the planner supports."""

MOST_STAGES: Final = 16

UNIT_BYTES: Final = MIB / 2000
"""Unit of sizes. Files give thousandths of a MiB, and a mask counts half as much again; in this
unit
all sizes are whole numbers, whose sums are exact."""

_MOST_TP: Final[Mapping[str, int]] = {"gpt_350M": 4}
"""Largest tp that the planner allows for a model, if it is below the measured ones."""

NO_LIMITS: Final = SearchLimits()

_ROUNDING: Final = 1e-3
"""Largest fraction of a unit that reading a decimal number may lose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcesoSetting:
    """Inputs of the published planner."""

    profile: OperatorProfile  # measurements
    num_devices: int  # in all nodes
    devices_per_node: int  # the same in every node
    limit_bytes: float  # memory of a device
    global_batch_size: int  # samples per iteration
    # Limits on the plans; its micro-batch sizes are sums over all replicas
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

    @property
    def mixes_operators(self) -> bool:
        """Whether operators of a stage may differ; T5 has no prices of their exchanges.

        By default they may where two algorithms were measured.
        """
        asked, profile = self.limits.per_operator, self.profile
        wanted = len(profile.algorithms) > 1 if asked is None else asked
        return wanted and profile.family != "t5"

    def allows(self, tp: int, dp: int) -> bool:
        """Return whether a stage may have these degrees."""
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
    algorithm: int  # how matrices are divided; an index of the profile
    samples: int  # samples of a micro-batch on one data-parallel rank
    table: OperatorTable  # measurements of each operator of the chain

    @property
    def use(self) -> OperatorUse:
        """The use of an operator in the stage, without recompute."""
        return self.tp, self.dp, self.algorithm, False


def stage_options(setting: AcesoSetting, micro_batch_size: int) -> tuple[StageOption, ...]:
    """Return every measured tp, dp and algorithm of a stage; sizes count all replicas' samples.

    Operators without tensor parallelism are the same in every algorithm.
    """
    options = []
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
                    options.append(
                        StageOption(tp=tp, dp=dp, algorithm=algorithm, samples=samples, table=table)
                    )
    return tuple(options)


def posed_problems(setting: AcesoSetting) -> dict[int, PosedProblem]:
    """Build one problem per micro-batch size that has measurements for at least one stage."""
    problems = {}
    for size in setting.micro_batch_sizes:
        options = stage_options(setting, size)
        if options:
            problem = operator_problem(setting, options, setting.global_batch_size // size)
            rows, problem = offered(setting, options, problem)
            degrees = [option.use[:3] for option in options]
            problems[size] = PosedProblem(problem=problem, rows=rows, degrees=degrees)
    return problems


def operator_problem(
    setting: AcesoSetting, options: tuple[StageOption, ...], num_micro_batches: int
) -> OperatorProblem:
    """Build the published planner's problem for one micro-batch size."""
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
    """Add options with operators that differ in tp, dp and algorithm, if the setting has them.

    The published planner computes what a stage sends at the tp of the stage's first operator, so a
    mix of options is one option for each tp at which a stage may begin. T5 has no prices for mixes.
    The result is the option of each operator under each option of the problem, and the problem.
    """
    profile, number = setting.profile, len(options)
    if not setting.mixes_operators:
        return alike_rows(problem), problem
    inputs = _stacked([option.table for option in options], "input_bytes")
    operators = np.arange(profile.num_operators)

    def joins_s(row: IntArray) -> FloatArray:
        return _joins_s(profile, [options[index].use for index in row], inputs[row, operators])

    mixed, rows = with_mixes(problem, joins_s, np.arange(number))
    tps = np.array([option.tp for option in options])[rows]
    pairs = [(index, tp) for index, row_tps in enumerate(tps) for tp in np.unique(row_tps).tolist()]
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
    """Let stages send at the one of their tps that takes the least time."""
    least_s = np.array(
        [
            np.min(
                [sent_s[option.tp][index] for option in options if option.tp * option.dp == size],
                axis=0,
            )
            for index, size in enumerate(problem.devices.tolist())
        ]
    )
    time_s, end_s = problem.time_s.copy(), problem.end_s.copy()
    time_s[:, -1] += least_s[:, 0, -1] - end_s[:, 0, -1]
    end_s[:, :, 1:] = least_s
    return replace(problem, time_s=time_s, end_s=end_s)


def _sent_s(profile: OperatorProfile, options: tuple[StageOption, ...], tp: int) -> FloatArray:
    """Return the send times of stages that begin with a given tp, shape ``(V, 2, L)``."""
    keys = [OperatorKey(option.samples, tp, option.algorithm) for option in options]
    tables = [profile.tables.get(key, own.table) for key, own in zip(keys, options, strict=True)]
    return np.array(
        [
            [_transfers_s(link, table.output_bytes) for link in (profile.intra, profile.inter)]
            for table in tables
        ]
    )


def _units(sizes: FloatArray) -> FloatArray:
    """Return sizes in whole units, rounded up if a file has more digits than usual."""
    units: FloatArray = np.ceil(sizes / UNIT_BYTES - _ROUNDING)
    return units


def _stacked(tables: list[OperatorTable], name: str) -> FloatArray:
    return np.array([getattr(table, name) for table in tables])


def _edges_s(
    profile: OperatorProfile, options: tuple[StageOption, ...]
) -> tuple[FloatArray, FloatArray]:
    """Return receive times before and send times after each operator, shape ``(V, 2, L + 1)``.

    The second axis is the kind of edge: within a node, then between nodes.
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
    return seconds[index.ravel()]


def _joins_s(
    profile: OperatorProfile, uses: Sequence[OperatorUse], input_bytes: FloatArray
) -> FloatArray:
    joins = np.zeros(profile.num_operators)
    for operator, seconds, _ in resharding_s(profile, 0, uses, input_bytes):
        joins[operator - 1] += seconds
    return joins


@dataclass(frozen=True, kw_only=True, eq=False)
class Aceso2024Planner(PublishedPlanner):
    """Plans and scores an experiment by the published formulas.

    Raises:
        InputError: If the published formulas do not cover the experiment.
    """

    experiment: Experiment

    def __post_init__(self) -> None:
        """Raise if the published formulas do not cover the experiment."""
        experiment = self.experiment
        slots = {node.num_slots for node in experiment.cluster.nodes}
        wrong = (
            "profile.source aceso"
            if experiment.profile.operators is None
            else "nodes with as many devices each"
            if len(slots) > 1
            else "one type of devices"
            if len(experiment.cluster.device_types) > 1
            else "zero_stage: 0"
            if experiment.zero_stage
            else None
        )
        if wrong:
            message = f"cost model aceso-2024 needs {wrong}; experiment {experiment.name!r} differs"
            raise InputError(message)

    @property
    def profile(self) -> OperatorProfile:
        """The measured times of operators."""
        profile = self.experiment.profile.operators
        assert profile is not None, "refused at the start"
        return profile

    def plan(self, candidate: AnyCandidate) -> Result:
        """Return the best plan with a candidate's micro-batch, with a lower bound.

        Raises:
            InputError: If tp, dp and pp are chosen already.
        """
        groups = free_groups(candidate, "aceso-2024")
        best = self._each.best(groups.micro_batch_size)
        if isinstance(best, NoStages):
            reason = Reason(kind=WHY_NO_STAGES[best.kind], detail=best.detail)
            return Infeasible(candidate=candidate, reason=reason)
        strategy = operator_strategy(
            best.stages,
            samples_per_micro_batch=groups.micro_batch_size,
            num_micro_batches=groups.num_micro_batches,
        )
        result = self.score(strategy)
        if isinstance(result, Infeasible):
            return result
        return replace(result, lower_bound_s=best.lower_bound_s)

    def candidates(self, _num_rows: int | None = None) -> Candidates:
        """Return every micro-batch size that the published planner tries.

        Raises:
            ValueError: If there is none.
        """
        experiment, setting = self.experiment, self._setting
        batch = experiment.global_batch_size
        if not setting.micro_batch_sizes:
            sizes = ", ".join(map(str, self.profile.micro_batch_sizes))
            asked = experiment.limits.micro_batch_sizes
            raise ValueError(
                f"cost model aceso-2024 takes micro-batches of a measured size ({sizes}) that "
                f"divides global_batch_size {batch}"
                + (f" and is one of micro_batch_sizes {list(asked)}" if asked else "")
            )
        return Candidates(
            required=tuple(
                GroupsCandidate(micro_batch_size=size, num_micro_batches=batch // size)
                for size in setting.micro_batch_sizes
            ),
            are_whole_space=True,
        )

    def score(self, strategy: Strategy) -> Result:
        """Estimate a strategy.

        Raises:
            InputError: If its layers do not match the profile, or it does not use the devices in
                order.
        """
        cluster = self.experiment.cluster
        if strategy.placement != tuple(range(cluster.num_devices)):
            raise InputError(
                f"cost model aceso-2024 uses all {cluster.num_devices} devices in their order; "
                "found another placement"
            )
        try:
            plan = aceso_plan(strategy, self.profile)
        except ValueError as error:
            raise InputError(str(error)) from None
        cost = aceso_cost(self.profile, plan, devices_per_node=cluster.nodes[0].num_slots)
        if isinstance(cost, Reason):
            return self._infeasible(plan, cost)
        return self._estimate(strategy, plan, cost)

    @cached_property
    def _each(self) -> SolveEach:
        return SolveEach(posed=posed_problems(self._setting))

    @cached_property
    def _setting(self) -> AcesoSetting:
        """Inputs of the published planner, within the limits of the experiment."""
        experiment = self.experiment
        return AcesoSetting(
            profile=self.profile,
            num_devices=experiment.cluster.num_devices,
            devices_per_node=experiment.cluster.nodes[0].num_slots,
            limit_bytes=float(experiment.cluster.device_types[0].memory_bytes),
            global_batch_size=experiment.global_batch_size,
            limits=experiment.limits,
        )

    def _infeasible(self, plan: AcesoPlan, reason: Reason) -> Infeasible:
        candidate = GroupsCandidate(
            micro_batch_size=plan.micro_batch_size, num_micro_batches=plan.num_micro_batches
        )
        return Infeasible(candidate=candidate, reason=reason)

    def _estimate(self, strategy: Strategy, plan: AcesoPlan, cost: AcesoCost) -> Estimate:
        device = self.experiment.cluster.device_types[0]
        return Estimate(
            strategy=strategy,
            iteration_time_s=cost.iteration_s,
            breakdown=_breakdown(cost),
            peak_memory_bytes=tuple(memory.total_bytes for memory in cost.memory),
            memory_limit_bytes=(float(device.memory_bytes),) * len(cost.memory),
            reasons=(
                *not_expressible(plan, self.experiment.cluster.nodes[0].num_slots),
                *_out_of_memory(cost, float(device.memory_bytes)),
            ),
            warnings=tuple(_warnings(cost)),
            launchable=False,
        )


def _breakdown(cost: AcesoCost) -> Breakdown:
    """Divide the iteration time into the slowest stage's compute and the remaining time."""
    slowest = max(cost.times, key=lambda time: time.total_s)
    number = cost.num_micro_batches
    return Breakdown(
        compute_s=number * (slowest.forward_s + slowest.backward_s + slowest.recompute_s),
        tensor_parallel_s=number * slowest.resharding_s,
        pipeline_p2p_s=number * slowest.transfer_s,
        bubble_s=sum(time.total_s for time in cost.times) - slowest.total_s,
    )


def not_expressible(plan: AcesoPlan, devices_per_node: int) -> Iterator[Reason]:
    """Name the part of a plan that the published planner cannot express, if any."""
    if len(plan.stages) > MOST_STAGES:
        detail = f"{len(plan.stages)} stages, at most {MOST_STAGES}"
        yield Reason(kind=NOT_EXPRESSIBLE, detail=detail)
    first = 0
    for index, uses in enumerate(plan.stages):
        number = uses[0][0] * uses[0][1]
        if number not in STAGE_DEVICES:
            detail = f"stage {index} has {number} devices; it knows 1, 2, 4 and 8"
            yield Reason(kind=NOT_EXPRESSIBLE, detail=detail)
        elif first % devices_per_node + number > devices_per_node:
            detail = f"stage {index} lies on two nodes"
            yield Reason(kind=NOT_EXPRESSIBLE, detail=detail)
        first += number


def _out_of_memory(cost: AcesoCost, limit_bytes: float) -> Iterator[Reason]:
    """Name the stage that exceeds its device's memory most, if any does."""
    needs = [memory.total_bytes for memory in cost.memory]
    worst = max(range(len(needs)), key=needs.__getitem__)
    if needs[worst] > limit_bytes:
        detail = f"stage {worst} needs {needs[worst] / MIB:,.0f} MiB of {limit_bytes / MIB:,.0f}"
        yield Reason(kind=OUT_OF_MEMORY, detail=detail)


def _warnings(cost: AcesoCost) -> Iterator[str]:
    """Yield warnings about known errors of the published formulas that affect this plan."""
    for index, (time, memory) in enumerate(zip(cost.times, cost.memory, strict=True)):
        if time.num_missing:
            yield (
                f"stage {index}: {counted(time.num_missing, 'exchange')} of a size that was not "
                "measured, at 100 s each"
            )
        if memory.omitted_bytes:
            yield (
                f"stage {index}: the published formula forgets {memory.omitted_bytes / MIB:,.0f} "
                "MiB that are recomputed at its end"
            )
