"""Stages whose operators use different options: mixes of options, added as options of their own.

A mix gives every operator of the chain an option. If a chain has few mixes, all are added.
Otherwise the added mixes are shortest paths through the chain, exchanges included, for several
prices of a byte: by time alone, by time and memory, and by recompute. The solver treats a mix as an
option like any other, so its answer is the best with these mixes and never worse than without.

Other mixes of longer chains are left out, and so are shortest paths of a part of the chain. No plan
with any of them costs less than the lower bound, which gives each operator the least of each table.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.planners.operators.partition.problem import OperatorProblem

MOST_MIXES: Final = 256
"""Up to this number of mixes of a chain, all are added."""

MOST_OFFERED: Final = 64
"""Most mixes added for stages on the same devices, if a chain has more than `MOST_MIXES`."""

IN_FLIGHT: Final = (1, 2, 4, 8)
"""Micro-batches in flight for which shortest paths are computed."""

WORTHS: Final = (0.0, *np.geomspace(0.001, 100.0, 30).tolist())
"""Prices of a byte, as multiples of the least time of the chain over its bytes."""

GATHERED: Final = (
    "time_s",
    "recompute_s",
    "state_bytes",
    "weight_bytes",
    "held_bytes",
    "input_bytes",
    "forward_reserved_bytes",
    "backward_reserved_bytes",
)
"""Tables in which each operator of a mix has the value of its own option."""

_EDGES: Final = ("start_s", "end_s", "step_end_s", "step_start_s", "tied_s")

Joins = Callable[[IntArray], FloatArray]
"""Seconds of the exchange after each operator, given the option of each operator."""


def with_mixes(
    problem: OperatorProblem, joins: Joins, synchronised: IntArray
) -> tuple[OperatorProblem, IntArray]:
    """Add mixes of options that are allowed at the same places, and bound all other mixes.

    Every option of ``problem`` gives all operators the same degrees. Options with the same number
    in ``synchronised``, shape ``(V,)``, synchronise gradients together, so the part of their step
    end that does not depend on the operators counts once. Return also the option of each operator
    under each option, shape ``(V + mixes, L)``.
    """
    size = problem.num_operators
    rows = list(alike_rows(problem))
    allowed = list(problem.allowed)
    mixes: dict[bytes, list[IntArray]] = {}
    menus = list(_menus(problem))
    for menu, places in menus:
        key = b"".join(table[menu].tobytes() for table in (problem.time_s, problem.held_bytes))
        if key not in mixes:
            mixes[key] = [mix for mix in _mixes(problem, menu, joins) if (mix != mix[0]).any()]
        for mix in mixes[key]:
            rows.append(menu[mix])
            allowed.append(places)
    chosen = np.array(rows)
    mixed = _extended(problem, chosen, np.array(allowed), joins, synchronised)
    every = all(len(menu) ** size <= MOST_MIXES for menu, _ in menus)
    return replace(mixed, relaxed=None if every else relaxed(problem)), chosen


def alike_rows(problem: OperatorProblem) -> IntArray:
    """Return the option of each operator under options without mixes, shape ``(V, L)``."""
    return np.repeat(np.arange(len(problem.devices))[:, None], problem.num_operators, axis=1)


def relaxed(problem: OperatorProblem) -> OperatorProblem:
    """Return a problem whose best stages cost no more than any stages with mixes of its options.

    It has one option per menu, with the least value of each table and no exchanges.
    """
    menus = list(_menus(problem))
    tables = {name: getattr(problem, name) for name in (*GATHERED, *_EDGES)}
    least: dict[str, Any] = {
        name: np.array([table[menu].min(axis=0) for menu, _ in menus])
        for name, table in tables.items()
        if table is not None
    }
    return replace(
        problem,
        **least,
        join_s=np.zeros_like(least["time_s"]),
        devices=np.array([problem.devices[menu[0]] for menu, _ in menus]),
        allowed=np.array([places for _, places in menus]),
    )


def _menus(problem: OperatorProblem) -> Iterator[tuple[IntArray, BoolArray]]:
    """Yield menus: options on equally many devices, with the places that allow exactly these."""
    for devices in sorted(set(problem.devices.tolist())):
        options = np.flatnonzero(problem.devices == devices)
        kinds, kind = np.unique(problem.allowed[options], axis=1, return_inverse=True)
        for number, shared in enumerate(kinds.T):
            if shared.any():
                yield options[shared], kind.reshape(-1) == number


def _mixes(problem: OperatorProblem, menu: IntArray, joins: Joins) -> list[IntArray]:
    size = problem.num_operators
    if len(menu) ** size <= MOST_MIXES:
        return [np.array(mix) for mix in product(range(len(menu)), repeat=size)]
    paths = _shortest_paths(problem, menu, _exchanges(menu, size, joins))
    distinct = np.unique(paths, axis=0)
    if len(distinct) <= MOST_OFFERED:
        return list(distinct)
    return list(distinct[np.linspace(0, len(distinct) - 1, MOST_OFFERED).astype(int)])


def _exchanges(menu: IntArray, size: int, joins: Joins) -> FloatArray:
    """Return exchange times before each operator, shape ``(N, N, L)``: from, to, operator."""
    exchange_s = np.zeros((len(menu), len(menu), size))
    for first, second in product(range(len(menu)), repeat=2):
        for begin in range(2):
            # A chain that alternates between two options has the exchange at every other operator.
            row = np.where(np.arange(size) % 2 == begin, menu[first], menu[second])
            exchange_s[first, second, 1 + begin :: 2] = joins(row)[begin:-1:2]
    return exchange_s


def _shortest_paths(problem: OperatorProblem, menu: IntArray, exchange_s: FloatArray) -> IntArray:
    """Find the best option of each operator for each price of a byte and number in flight.

    States of a path are options, with and without recompute. An operator that recomputes with its
    successor in a layer saves its held bytes, of all micro-batches in flight or of all but one.
    Return indices into the menu, shape ``(paths, L)``.
    """
    time_s, again_s = problem.time_s[menu], problem.recompute_s[menu]
    held, state = problem.kept_bytes[menu], problem.state_bytes[menu]
    peak = problem.held_bytes[menu] - held  # bytes of operators recomputed in every stage
    scale = float(time_s.sum(axis=1).min() / max((held + state).sum(axis=1).max(), 1.0))
    grids = np.meshgrid(IN_FLIGHT, np.array(WORTHS) * scale, (0.0, 1.0))
    flying, worth, once = (grid.ravel() for grid in grids)
    kinds, size = len(menu), problem.num_operators
    begins = np.zeros(size, np.bool_)
    begins[problem.layer_begin] = True

    def operator_s(operator: int) -> FloatArray:
        own_bytes = state[:, operator] + flying[:, None] * held[:, operator] + peak[:, operator]
        byte_s = worth[:, None] * own_bytes
        own_s = time_s[:, operator] + byte_s
        both: FloatArray = np.concatenate([own_s, own_s + again_s[:, operator]], axis=1)
        return both

    best_s, origins = operator_s(0), []
    for operator in range(1, size):
        step_s = np.tile(exchange_s[:, :, operator], (len(worth), 2, 2))
        if not begins[operator]:
            saved_s = (worth * (flying - once))[:, None] * held[:, operator - 1]
            step_s[:, kinds:, kinds:] -= saved_s[:, :, None]
        total_s = best_s[:, :, None] + step_s
        origins.append(total_s.argmin(axis=1))
        best_s = total_s.min(axis=1) + operator_s(operator)
    path = [best_s.argmin(axis=1)]
    for origin in reversed(origins):
        path.append(np.take_along_axis(origin, path[-1][:, None], axis=1)[:, 0])
    return np.array(path[::-1]).T % kinds


def _extended(
    problem: OperatorProblem,
    rows: IntArray,
    allowed: BoolArray,
    joins: Joins,
    synchronised: IntArray,
) -> OperatorProblem:
    """Build the tables of all mixes, with the value of each operator's own option."""
    operators = np.arange(problem.num_operators)
    gathered: dict[str, Any] = {name: getattr(problem, name)[rows, operators] for name in GATHERED}
    start_s, end_s = np.zeros((2, len(rows), *problem.start_s.shape[1:]))
    start_s[:, :, :-1] = problem.start_s.transpose(0, 2, 1)[rows, operators].transpose(0, 2, 1)
    end_s[:, :, 1:] = problem.end_s.transpose(0, 2, 1)[rows, operators + 1].transpose(0, 2, 1)
    join_s = [problem.join_s, *(joins(row)[None] for row in rows[len(problem.join_s) :])]
    return replace(
        problem,
        **gathered,
        **_step_ends(problem, rows, synchronised),
        join_s=np.concatenate(join_s),
        start_s=start_s,
        end_s=end_s,
        devices=problem.devices[rows[:, 0]],
        allowed=allowed,
    )


def _step_ends(problem: OperatorProblem, rows: IntArray, synchronised: IntArray) -> dict[str, Any]:
    step_ends: dict[str, Any] = {}
    if problem.step_end_s is not None:
        step_ends["step_end_s"] = problem.step_end_s[rows, np.arange(problem.num_operators)]
    if problem.step_start_s is not None:
        start_s = problem.step_start_s
        counted = [row[np.unique(synchronised[row], return_index=True)[1]] for row in rows]
        step_ends["step_start_s"] = np.array([start_s[indices].sum() for indices in counted])
    if problem.tied_s is not None:
        step_ends["tied_s"] = np.maximum(problem.tied_s[rows[:, 0]], problem.tied_s[rows[:, -1]])
    return step_ends
