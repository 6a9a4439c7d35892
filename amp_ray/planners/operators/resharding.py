"""Exchanges between neighbouring operators of a stage that divide a tensor differently.

Operators of one stage may differ in tp, dp and algorithm. If an operator writes its output in
another layout than its successor reads, the devices exchange the activation in the forward pass and
its gradient in the backward pass. Partial sums never cross operators: the operator that makes them
all-reduces them itself.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from amp_ray.inputs.operator_profile import CollectiveKind, OperatorProfile
from amp_ray.strategies.operator_run import OperatorUse


class Exchange(NamedTuple):
    """One step from one layout to another."""

    num_devices: int  # in each group that exchanges
    forward: CollectiveKind | None  # of the activation; None if nothing is exchanged
    backward: CollectiveKind | None  # of its gradient; None if nothing is exchanged


@cache
def exchanges(before: tuple[int, int, bool], after: tuple[int, int, bool]) -> tuple[Exchange, ...]:
    """Return the exchanges between two operators on the same devices; none for equal layouts.

    From a whole tensor to parts, a device takes its part for free and the gradient is gathered;
    from parts to a whole tensor, the activation is gathered. Parts along one dimension become parts
    along the other by an all-to-all.

    Args:
        before: tp, dp, and whether each tp rank writes a part instead of the whole tensor.
        after: The same for the input of the next operator.

    Example:
        >>> exchanges((2, 1, True), (2, 1, False))
        (Exchange(num_devices=2, forward='all_gather', backward=None),)
    """
    # Number of devices with the same part; of parts along samples; of parts along heads or channels
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
    """Return every exchange within a stage, with the index of the operator that follows it."""
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
