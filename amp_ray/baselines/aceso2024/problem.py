"""The published planner's space and formulas as a problem of operators, for the exact solver."""

from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np

from amp_ray.baselines.aceso2024.cost import MISSING_COLLECTIVE_S, collective_s, transfer_s
from amp_ray.baselines.aceso2024.memory import state_copies
from amp_ray.cost.resharding import stage_exchanges
from amp_ray.partition.operators import OperatorProblem, OperatorSolution, OperatorStage
from amp_ray.spec.candidate import GroupsCandidate
from amp_ray.spec.experiment import Experiment, SearchLimits
from amp_ray.spec.operator_profile import FloatArray, OperatorKey, OperatorProfile, OperatorTable
from amp_ray.spec.operator_run import OperatorUse
from amp_ray.spec.operator_strategy import operator_strategy
from amp_ray.spec.strategy import Strategy
from amp_ray.units import MIB

STAGE_DEVICES: Final = (1, 2, 4, 8)
"""Devices of a stage that the published planner knows."""

MOST_STAGES: Final = 16

_UNITS_PER_MIB: Final = 2000
"""Its files have thousandths of a MiB, and masks half as much again: whole numbers of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOption:
    """One way to use all operators of a stage."""

    tp: int
    dp: int
    algorithm: int


def operator_candidates(
    experiment: Experiment, profile: OperatorProfile
) -> tuple[GroupsCandidate, ...]:
    """Enumerate the micro-batches, over all replicas, that the published planner can express.

    Returns:
        Candidates by micro-batch size, ascending: measured sizes that divide the batch.

    Raises:
        ValueError: If there is none.
    """
    batch = experiment.global_batch_size
    sizes = [size for size in profile.micro_batch_sizes if batch % size == 0]
    if not sizes:
        known = ", ".join(map(str, profile.micro_batch_sizes))
        message = f"no measured micro-batch size ({known}) divides global_batch_size {batch}"
        raise ValueError(message)
    return tuple(
        GroupsCandidate(micro_batch_size=size, num_micro_batches=batch // size) for size in sizes
    )


def operator_options(
    profile: OperatorProfile, limits: SearchLimits, micro_batch_size: int, devices_per_node: int
) -> tuple[OperatorOption, ...]:
    """List the ways to use a stage whose operators were all measured, by devices, tp, algorithm.

    Args:
        profile: What was measured.
        limits: Of the user.
        micro_batch_size: Samples over all replicas.
        devices_per_node: A stage lies within a node.
    """
    found = []
    for num_devices, tp, algorithm in product(STAGE_DEVICES, profile.tps, profile.algorithms):
        dp, rest = divmod(num_devices, tp)
        twice = tp == 1 and algorithm > 0  # undivided operators are the same by any algorithm
        if rest or twice or num_devices > devices_per_node or micro_batch_size % dp:
            continue
        size = micro_batch_size // dp
        sizes = limits.micro_batch_sizes
        within_tp = limits.min_tp <= tp <= (limits.max_tp or tp)
        if not within_tp or dp > (limits.max_dp or dp) or size not in (sizes or (size,)):
            continue
        table = profile.tables.get(OperatorKey(size, tp, algorithm))
        if table is not None and table.measured.all():
            found.append(OperatorOption(tp=tp, dp=dp, algorithm=algorithm))
    return tuple(found)


def operator_problem(
    experiment: Experiment,
    profile: OperatorProfile,
    candidate: GroupsCandidate,
    options: tuple[OperatorOption, ...],
) -> OperatorProblem:
    """Pose the problem of the published formulas.

    Args:
        experiment: Its nodes have as many devices each, of one type.
        profile: Has a table for every option.
        candidate: How the batch is cut.
        options: At least one.
    """
    size, cluster = candidate.micro_batch_size, experiment.cluster
    per_node, num_devices = cluster.nodes[0].num_slots, cluster.num_devices
    tables = [
        profile.tables[OperatorKey(size // each.dp, each.tp, each.algorithm)] for each in options
    ]
    devices = np.array([each.tp * each.dp for each in options])
    weight = _units([table.weight_bytes for table in tables])
    places = np.arange(num_devices)
    ends = places[None, :] + devices[:, None]
    within = (places // per_node == (ends - 1) // per_node) & (ends <= num_devices)
    edges = np.arange(num_devices + 1)
    inner = (edges > 0) & (edges < num_devices)
    starts_s, ends_s = _transfers(profile, tables)
    most = min(num_devices, MOST_STAGES, experiment.limits.max_pp or MOST_STAGES)
    return OperatorProblem(
        time_s=np.array([table.forward_s + table.backward_s for table in tables]),
        join_s=np.array([_joins(profile, *pair) for pair in zip(options, tables, strict=True)]),
        recompute_s=np.array([table.forward_s for table in tables]),
        state_bytes=state_copies(profile) * weight,
        weight_bytes=weight,
        held_bytes=_units([table.activation_bytes * profile.kept_share for table in tables]),
        input_bytes=_units([table.input_bytes for table in tables]),
        forward_reserved_bytes=_units([table.forward_reserved_bytes for table in tables]),
        backward_reserved_bytes=_units([table.backward_reserved_bytes for table in tables]),
        start_s=starts_s,
        end_s=ends_s,
        starts_layer=np.array(profile.starts_block),
        free_end=np.append(False, profile.kept_share[:-1] != 1.0),
        counts_last=True,
        devices=devices,
        allowed=within,
        edge_kind=np.where(inner & (edges % per_node == 0), 1, 0),
        limit_bytes=float(cluster.device_types[0].memory_bytes / MIB * _UNITS_PER_MIB),
        num_micro_batches=candidate.num_micro_batches,
        most_stages=most,
    )


def solution_strategy(
    solution: OperatorSolution,
    options: tuple[OperatorOption, ...],
    candidate: GroupsCandidate,
) -> Strategy:
    """Return the strategy of a solution."""
    return operator_strategy(
        [_uses(stage, options[stage.option]) for stage in solution.stages],
        samples_per_micro_batch=candidate.micro_batch_size,
        num_micro_batches=candidate.num_micro_batches,
    )


def _uses(stage: OperatorStage, option: OperatorOption) -> list[OperatorUse]:
    """Return how each operator of a stage is used."""
    again = set(stage.recomputed)
    return [
        (option.tp, option.dp, option.algorithm, operator in again)
        for operator in range(stage.start, stage.end)
    ]


def _units(rows: list[FloatArray]) -> FloatArray:
    """Return bytes as whole numbers of the units of the profile's files."""
    units: FloatArray = np.rint(np.array(rows) / MIB * _UNITS_PER_MIB)
    return units


def _transfers(
    profile: OperatorProfile, tables: list[OperatorTable]
) -> tuple[FloatArray, FloatArray]:
    """Price what comes in and what goes out at every cut, within a node and between nodes.

    Returns:
        Both of shape ``(V, 2, L + 1)``.
    """
    shape = (len(tables), 2, profile.num_operators + 1)
    starts_s, ends_s = np.zeros(shape), np.zeros(shape)
    for option, table in enumerate(tables):
        for kind, link in enumerate((profile.intra, profile.inter)):
            known = {
                size: transfer_s(link, size)
                for size in {*table.input_bytes.tolist(), *table.output_bytes.tolist()}
            }
            starts_s[option, kind, :-1] = [known[size] for size in table.input_bytes.tolist()]
            ends_s[option, kind, 1:] = [known[size] for size in table.output_bytes.tolist()]
    return starts_s, ends_s


def _joins(profile: OperatorProfile, option: OperatorOption, table: OperatorTable) -> FloatArray:
    """Price the exchanges behind every operator of a stage; T5 has none."""
    joins_s = np.zeros(profile.num_operators)
    if profile.family == "t5":
        return joins_s
    uses = [(option.tp, option.dp, option.algorithm, False)] * profile.num_operators
    for operator, step in stage_exchanges(profile, 0, uses):
        for kind in (step.forward, step.backward):
            if kind is not None:
                size_bytes = float(table.input_bytes[operator])
                price_s = collective_s(profile, kind, step.num_devices, size_bytes)
                joins_s[operator - 1] += MISSING_COLLECTIVE_S if price_s is None else price_s
    return joins_s
