"""Layouts of a tensor on the devices of a stage, and the exchanges between two layouts.

Operators of one stage may differ in tp, dp and algorithm. Where one writes its output in another
layout than the next one reads, the devices exchange it: forward the activation, backward its
gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from amp_ray.inputs.operator_profile import CollectiveKind, OperatorProfile
from amp_ray.strategies.operator_run import OperatorUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of a tensor on ``replicas * batch * width`` devices."""

    replicas: int  # devices that hold the same part
    batch: int  # parts along the samples
    width: int  # parts along the other dimension: heads, hidden units or channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One step from a layout to another; None where a pass exchanges nothing."""

    num_devices: int  # devices of each group that exchanges
    forward: CollectiveKind | None  # of the activation
    backward: CollectiveKind | None  # of its gradient


def layout(*, tp: int, dp: int, divided: bool) -> Layout:
    """Return the layout of a tensor that an operator reads or writes.

    Partial sums never cross operators: an all-reduce is within the operator that makes them.

    Args:
        tp: Of the operator.
        dp: Of the operator.
        divided: Whether its tp ranks hold a part each; else all of them hold all.
    """
    return Layout(replicas=1 if divided else tp, batch=dp, width=tp if divided else 1)


def exchanges(source: Layout, target: Layout) -> tuple[Exchange, ...]:
    """Return the steps from one layout to another of as many devices; empty where they are equal.

    A device that holds all keeps its part for free, and the gradient is gathered; the other way
    round the activation is gathered. Parts along one dimension become parts along the other by an
    all-to-all.

    Example:
        >>> whole, divided = layout(tp=2, dp=1, divided=False), layout(tp=2, dp=1, divided=True)
        >>> exchanges(divided, whole)
        (Exchange(num_devices=2, forward='all_gather', backward=None),)
    """
    steps = []
    if source.replicas > target.replicas:
        num = source.replicas // target.replicas
        steps.append(Exchange(num_devices=num, forward=None, backward="all_gather"))
        moved = max(source.batch // target.batch, source.width // target.width)
    else:
        if target.replicas > source.replicas:
            num = target.replicas // source.replicas
            steps.append(Exchange(num_devices=num, forward="all_gather", backward=None))
        moved = max(target.batch // source.batch, target.width // source.width)
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
        steps = _exchanges((tp, dp, divided), (next_tp, next_dp, next_divided))
        exchanges_of_stage += [(index + 1, step) for step in steps]
    return tuple(exchanges_of_stage)


@cache
def _exchanges(before: tuple[int, int, bool], after: tuple[int, int, bool]) -> tuple[Exchange, ...]:
    """Return the steps between two operators, each given by tp, dp and whether it divides."""
    source, target = (layout(tp=tp, dp=dp, divided=own) for tp, dp, own in (before, after))
    return exchanges(source, target)
