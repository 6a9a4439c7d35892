"""Oracles of the partition solver: plain loops that are slow and obviously correct."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from amp_ray.partition.problem import PartitionProblem, bottleneck_s, extended_sum_s, objective

Stage = tuple[int, int]  # (first layer, option)


def is_allowed(problem: PartitionProblem, start: int, end: int, option: int) -> bool:
    """Return whether the layers ``[start, end)`` may be a stage with an option.

    Returns:
        True if they fit into its memory, or it has no limit, and include a layer that every stage
        needs.
    """
    tables, memory_row = problem.tables, problem.options.memory_row[option]
    fits = memory_row < 0 or start >= tables.earliest_start[memory_row, end]
    return bool(fits and start <= tables.latest_start[end])


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A partition: stages with all layers, whose options lead to a final state.

    Attributes:
        stages: First layer and option of each stage.
        sum_s: Sum of the stages' times, part of the objective.
        slowest_s: Time of the bottleneck.
        final_state: State after the last option.
    """

    stages: tuple[Stage, ...]
    sum_s: float
    slowest_s: float
    final_state: int


def all_chains(problem: PartitionProblem) -> Iterator[Chain]:
    """Yield every partition that fits into memory.

    Args:
        problem: A small problem: the number of partitions grows exponentially.

    Yields:
        Partitions, in no particular order.
    """
    yield from _extended(problem, Chain(stages=(), sum_s=0.0, slowest_s=0.0, final_state=0), 0)


def best_chain(problem: PartitionProblem) -> Chain | None:
    """Find the best partition by comparing all of them.

    Args:
        problem: A small problem.

    Returns:
        The partition with the smallest objective, by the solver's rules for ties; None if there
        is none.
    """
    ranks = _canonical_ranks(problem)
    num_later = problem.num_micro_batches - 1

    def key(chain: Chain) -> tuple[float, float, int, list[tuple[int, int]]]:
        backwards = [(start, ranks[option]) for start, option in reversed(chain.stages)]
        value_s = chain.sum_s + num_later * chain.slowest_s
        return value_s, chain.slowest_s, chain.final_state, backwards

    return min(all_chains(problem), key=key, default=None)


def cheapest_chain(problem: PartitionProblem, cap_s: float) -> Chain | None:
    """Compute the result of the compiled kernel, without windows, bands or queues.

    Args:
        problem: A problem small enough for four nested loops.
        cap_s: Bound on the bottleneck of every stage.

    Returns:
        The chain with the smallest sum, by the solver's rules for ties; None if there is none.
    """
    num_layers, ranks = problem.num_layers, _canonical_ranks(problem)
    cheapest: dict[tuple[int, int], tuple[float, int, int]] = {(0, 0): (0.0, 0, 0)}
    for option in sorted(range(problem.options.num_options), key=ranks.__getitem__):
        state, to_state = _states(problem, option)
        for end in range(1, num_layers + 1):
            for start in range(end):
                if (state, start) not in cheapest or not is_allowed(problem, start, end, option):
                    continue
                if bottleneck_s(problem, start, end, option) > cap_s:
                    continue
                before_s = cheapest[state, start][0]
                offer = (extended_sum_s(problem, before_s, start, end, option), start, option)
                known = cheapest.get((to_state, end), (math.inf, 0, 0))
                if offer[:2] < known[:2]:
                    cheapest[to_state, end] = offer
    finals = [state for state in problem.final_states if (state, num_layers) in cheapest]
    if not finals:
        return None
    final_state = min(finals, key=lambda state: (cheapest[state, num_layers][0], state))
    stages: list[Stage] = []
    state, end = final_state, num_layers
    while end > 0:
        _, start, option = cheapest[state, end]
        stages.insert(0, (start, option))
        state, end = _states(problem, option)[0], start
    return _costed(problem, tuple(stages), final_state)


def _extended(problem: PartitionProblem, chain: Chain, placed: int) -> Iterator[Chain]:
    """Extend a chain by every option and every number of layers."""
    if placed == problem.num_layers and chain.final_state in problem.final_states:
        yield chain
    for option in range(problem.options.num_options):
        state, to_state = _states(problem, option)
        if state != chain.final_state:
            continue
        for end in range(placed + 1, problem.num_layers + 1):
            if is_allowed(problem, placed, end, option):
                longer = Chain(
                    stages=(*chain.stages, (placed, option)),
                    sum_s=extended_sum_s(problem, chain.sum_s, placed, end, option),
                    slowest_s=max(chain.slowest_s, bottleneck_s(problem, placed, end, option)),
                    final_state=to_state,
                )
                yield from _extended(problem, longer, end)


def _costed(problem: PartitionProblem, stages: tuple[Stage, ...], final_state: int) -> Chain:
    """Compute the costs of a partition from its stages."""
    bounds = (*(start for start, _ in stages), problem.num_layers)
    cost = objective(problem, bounds, tuple(option for _, option in stages))
    return Chain(stages=stages, sum_s=cost.sum_s, slowest_s=cost.slowest_s, final_state=final_state)


def _states(problem: PartitionProblem, option: int) -> tuple[int, int]:
    """Return the states before and after an option."""
    return int(problem.options.from_state[option]), int(problem.options.to_state[option])


def _canonical_ranks(problem: PartitionProblem) -> list[int]:
    """Return each option's place in canonical order."""
    options = problem.options
    columns = (
        options.to_state,
        options.from_state,
        options.time_row,
        options.bottleneck_row,
        options.cut_row,
        options.memory_row,
        options.overhead_s,
        options.fixed_s,
    )
    keys = list(zip(*(column.tolist() for column in columns), strict=True))
    order = sorted(range(options.num_options), key=keys.__getitem__)
    return [order.index(option) for option in range(options.num_options)]
