"""Oracle: every way to cut a short chain of operators, to divide devices and to recompute."""

import math
from itertools import product

import numpy as np

from amp_ray.planners.operators.partition.problem import OperatorProblem


def stage_memory(
    problem: OperatorProblem,
    option: int,
    behind: int,
    start: int,
    end: int,
    recomputed: frozenset[int],
) -> float:
    """Add up the bytes of a stage, operator by operator."""
    inside = range(start, end)
    held = problem.held_bytes[option]
    layer = set(problem.layer_begin.tolist())
    saved = peak = run = 0.0
    if problem.runs_again is not None:
        again = np.flatnonzero(problem.runs_again)
        recomputed = frozenset((*again.tolist(), *(again + 1).tolist()))
        layer -= set((again + 1).tolist())
    for operator in inside:
        goes_on = operator in recomputed and operator + 1 in recomputed and operator + 1 < end
        if goes_on:
            saved += 0.0 if operator + 1 in layer else held[operator]
            counted = problem.counts_last or operator + 1 not in layer
            run += held[operator] if counted else 0.0
        if not goes_on or operator + 1 in layer:
            free = operator == end - 1 and problem.free_end[operator] and operator in recomputed
            peak = peak if free else max(peak, run)
            run = 0.0
    kept = problem.input_bytes[option, start] + sum(held[i] for i in inside) - saved
    before_last = range(start, end if problem.reserves_last else end - 1)
    reserved = max((problem.forward_reserved_bytes[option, i] for i in before_last), default=0.0)
    reserved += max((problem.backward_reserved_bytes[option, i] for i in before_last), default=0.0)
    weight = sum(problem.weight_bytes[option, i] for i in inside)
    state = sum(problem.state_bytes[option, i] for i in inside)
    flying = min(behind + 1, problem.most_in_flight)
    return float(state + flying * kept + peak + max(reserved, weight))


def stage_s(
    problem: OperatorProblem,
    option: int,
    place: int,
    start: int,
    end: int,
    recomputed: frozenset[int],
) -> float:
    """Add up the time of a stage, operator by operator."""
    seconds = sum(problem.time_s[option, i] for i in range(start, end))
    seconds += sum(problem.join_s[option, i] for i in range(start, end - 1))
    seconds += sum(problem.recompute_s[option, i] for i in recomputed)
    if start > 0:
        seconds += problem.start_s[option, problem.edge_kind[place], start]
    if end < problem.num_operators:
        behind_it = place + problem.devices[option]
        seconds += problem.end_s[option, problem.edge_kind[behind_it], end]
    return float(seconds)


def step_end_s(problem: OperatorProblem, option: int, start: int, end: int) -> float:
    """Add up the times of a stage's work after the pipeline."""
    if problem.step_end_s is None or problem.step_start_s is None or problem.tied_s is None:
        return 0.0
    seconds = problem.step_start_s[option] + sum(
        problem.step_end_s[option, i] for i in range(start, end)
    )
    at_one_end = (start == 0) != (end == problem.num_operators)
    return float(seconds + at_one_end * problem.tied_s[option])


def least_value(problem: OperatorProblem) -> float:
    """Return the smallest objective of all strategies; infinite if none fits."""
    stages = _stages(problem)
    best = math.inf

    def extend(
        end: int, taken: int, behind: int, sum_s: float, slowest_s: float, last_s: float
    ) -> None:
        nonlocal best
        if end == 0 and taken == problem.num_devices:
            best = min(best, sum_s + (problem.num_micro_batches - 1) * slowest_s + last_s)
        if behind == problem.most_stages:
            return
        for start, option in product(range(end), range(len(problem.devices))):
            size = int(problem.devices[option])
            key = (start, end, problem.num_devices - taken - size, option, behind)
            seconds = stages.get(key, math.inf)
            if seconds < math.inf:
                extend(
                    start,
                    taken + size,
                    behind + 1,
                    sum_s + seconds,
                    max(slowest_s, seconds),
                    max(last_s, step_end_s(problem, option, start, end)),
                )

    extend(problem.num_operators, 0, 0, 0.0, 0.0, 0.0)
    return best


def _stages(problem: OperatorProblem) -> dict[tuple[int, int, int, int, int], float]:
    """Return the time of every stage with every option and its best set of recomputed operators."""
    seconds_of: dict[tuple[int, int, int, int, int], float] = {}
    for option, end in product(range(len(problem.devices)), range(1, problem.num_operators + 1)):
        size = int(problem.devices[option])
        for start, behind in product(range(end), range(problem.most_stages)):
            extra_s = _least_recompute(problem, option, behind, start, end)
            for place in np.flatnonzero(problem.allowed[option]).tolist():
                if place + size <= problem.num_devices:
                    seconds = extra_s + stage_s(problem, option, place, start, end, frozenset())
                    seconds_of[start, end, place, option, behind] = seconds
    return seconds_of


def _least_recompute(
    problem: OperatorProblem, option: int, behind: int, start: int, end: int
) -> float:
    """Return the least time of recomputation with which a stage fits, over all its sets."""
    least_s = math.inf
    for bits in product((False, True), repeat=end - start):
        recomputed = frozenset(start + i for i, bit in enumerate(bits) if bit)
        seconds = float(sum(problem.recompute_s[option, i] for i in recomputed))
        if seconds < least_s:
            memory = stage_memory(problem, option, behind, start, end, recomputed)
            if memory <= problem.limit_bytes:
                least_s = seconds
    return least_s
