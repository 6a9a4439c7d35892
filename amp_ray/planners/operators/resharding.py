"""Exchanges between neighbouring operators of a stage that divide a tensor otherwise.

Operators of one stage may differ in tp, dp and algorithm. Where one writes its output in another
layout than the next one reads, the devices exchange it: forward the activation, backward its
gradient. Partial sums never cross operators: an all-reduce is within the operator that makes them.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from amp_ray.inputs.operator_profile import CollectiveKind, OperatorProfile
from amp_ray.strategies.operator_run import OperatorUse


class Exchange(NamedTuple):
    """One step from a layout to another; None where a pass exchanges nothing."""

    num_devices: int  # devices of each group that exchanges
    forward: CollectiveKind | None  # of the activation
    backward: CollectiveKind | None  # of its gradient


@cache
def exchanges(before: tuple[int, int, bool], after: tuple[int, int, bool]) -> tuple[Exchange, ...]:
    """Return the steps between two operators on as many devices; none for equal layouts.

    A device that holds all keeps its part for free, and the gradient is gathered; the other way
    round the activation is gathered. Parts along one dimension become parts along the other by an
    all-to-all.

    Args:
        before: tp, dp, and whether each tp rank writes a part; else all of them hold all.
        after: The same of what the next operator reads.

    Example:
        >>> exchanges((2, 1, True), (2, 1, False))
        (Exchange(num_devices=2, forward='all_gather', backward=None),)
    """
    # Devices that hold the same part; parts along samples; parts along heads or channels
    (source_replicas, *source), (target_replicas, *target) = (
        (1, dp, tp) if divided else (tp, dp, 1) for tp, dp, divided in (before, after)
    )
    steps = []
    if source_replicas > target_replicas:
        num = source_replicas // target_replicas
        steps.append(Exchange(num_devices=num, forward=None, backward="all_gather"))
        source, target = target, source
    elif target_replicas > source_replicas:
        num = target_replicas // source_replicas
        steps.append(Exchange(num_devices=num, forward="all_gather", backward=None))
    moved = max(now // was for was, now in zip(source, target, strict=True))
    if moved > 1:
        steps.append(Exchange(num_devices=moved, forward="all_to_all", backward="all_to_all"))
    return tuple(steps)


def stage_exchanges(
    profile: OperatorProfile, first_operator: int, uses: Sequence[OperatorUse]
) -> tuple[tuple[int, Exchange], ...]:
    """Return every exchange within a stage, with the operator before which it happens."""
    exchanges_of_stage = []
    for index, (before, after) in enumerate(pairwise(uses), start=first_operator):
        if before[1] == after[1] == before[0] * before[1]:
            continue
        (tp, dp, algorithm, _), (next_tp, next_dp, next_algorithm, _) = before, after
        divided = bool(profile.writes_divided[algorithm][index])
        next_divided = bool(profile.reads_divided[next_algorithm][index + 1])
        steps = exchanges((tp, dp, divided), (next_tp, next_dp, next_divided))
        exchanges_of_stage += [(index + 1, step) for step in steps]
    return tuple(exchanges_of_stage)
