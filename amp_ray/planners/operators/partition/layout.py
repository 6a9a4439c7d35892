"""Lay a problem of operators out for the kernels, and choose the stages to price.

This includes the kinds of layers of a chain, and the relaxed choice of recompute in each kind.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.stages import prefix_sums
from amp_ray.planners.operators.partition.kernels import fill_back, fill_front, fill_rows
from amp_ray.planners.operators.partition.problem import OperatorProblem
from amp_ray.planners.operators.partition.programme import Blocks, OperatorProgramme
from amp_ray.planners.operators.recompute.kernels import Relaxation, fill_levels, fill_relaxation

MOST_PEAKS = 16
MOST_LEVELS = 40


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerKinds:
    """Kinds of layers: layers with equal figures are of one kind."""

    kind: IntArray  # shape ``(Y,)``. Kind of each layer.
    begin: IntArray  # shape ``(K + 1,)``. First operator of each kind; kinds lie in a row.
    member: IntArray  # shape ``(O,)``. An operator of the chain for each operator of a kind.
    layer_of: IntArray  # shape ``(L,)``
    place: IntArray  # shape ``(L,)``. Index of each operator among the operators of all kinds.


def layer_kinds(problem: OperatorProblem) -> LayerKinds:
    """Group layers whose operators agree in every figure that recompute depends on."""
    columns = np.vstack([problem.recompute_s, problem.held_bytes, problem.free_end[None, :]])
    ends = np.append(problem.layer_begin[1:], problem.num_operators)
    numbers: dict[bytes, int] = {}
    kind: list[int] = []
    members: list[int] = []
    sizes: list[int] = []
    for start, end in zip(problem.layer_begin.tolist(), ends.tolist(), strict=True):
        number = numbers.setdefault(columns[:, start:end].tobytes(), len(numbers))
        kind.append(number)
        if number == len(sizes):
            sizes.append(end - start)
            members.extend(range(start, end))
    begin = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    layer_of = np.repeat(np.arange(len(kind)), ends - problem.layer_begin)
    offset = np.arange(problem.num_operators) - problem.layer_begin[layer_of]
    return LayerKinds(
        kind=np.array(kind),
        begin=begin,
        member=np.array(members),
        layer_of=layer_of,
        place=begin[np.array(kind)[layer_of]] + offset,
    )


def _relaxation(problem: OperatorProblem, kinds: LayerKinds) -> dict[str, Any]:
    """Fill the tables for `recompute.kernels.relaxed_s`, which are fields of a programme.

    Options with equal recompute times and held bytes share a row.
    """
    costs = [problem.recompute_s[:, kinds.member], problem.held_bytes[:, kinds.member]]
    both, row = np.unique(np.stack(costs, axis=1), axis=0, return_inverse=True)
    num_places, num_layers = len(kinds.member), len(kinds.kind)
    peaks = [_peaks(held, kinds.begin) for _, held in both]
    charged = np.full((len(both), MOST_PEAKS), np.inf)
    levels = np.full((len(both), MOST_PEAKS, MOST_LEVELS), np.inf)
    for number, ((cost_s, held), (smallest, largest)) in enumerate(zip(both, peaks, strict=True)):
        charged[number, : len(smallest)] = smallest
        fill_levels(cost_s, held, kinds.begin, largest, levels[number, : len(largest)])
    # Keep all finite levels and one infinite level at the end.
    levels = levels[:, :, : np.isfinite(levels).sum(axis=2).max() + 1].copy()
    rest = np.zeros((*levels.shape, num_places, 2))
    layers = np.zeros((*levels.shape, num_layers + 1, 2))
    head = np.zeros_like(rest)
    free_end = problem.free_end[kinds.member]
    for number, ((cost_s, held), (_, largest)) in enumerate(zip(both, peaks, strict=True)):
        fill_relaxation(
            cost_s,
            held,
            kinds.begin,
            free_end,
            largest,
            levels[number],
            rest[number],
            head[number],
        )
        whole = rest[number][:, :, kinds.begin[kinds.kind]]
        np.cumsum(whole, axis=2, out=layers[number][:, :, 1:])
    tables = Relaxation(
        hints=np.zeros(charged.shape[1] + 1, np.int64),
        charged=charged,
        levels=levels,
        rest=rest,
        layers=layers,
        head=head,
    )
    return {"relaxed": row.reshape(-1), "relaxation": tables}


def _peaks(held: FloatArray, begin: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the smallest and the largest peak, ascending, of groups of similar peaks of runs."""
    sums = [np.zeros(1)]
    for start, end in zip(begin[:-1].tolist(), begin[1:].tolist(), strict=True):
        prefix = np.concatenate(([0.0], np.cumsum(held[start : end - 1])))
        sums.append((prefix[None, :] - prefix[:, None])[np.triu_indices(len(prefix), 1)])
    peaks = np.unique(np.concatenate(sums))
    if len(peaks) <= MOST_PEAKS:
        return peaks, peaks
    # Zero is a group of its own; other groups are cut where neighbours differ most.
    gaps = np.argsort(-np.diff(peaks[1:]), kind="stable")[: MOST_PEAKS - 2] + 2
    cuts = np.concatenate(([0, 1], np.sort(gaps)))
    return peaks[cuts], peaks[np.append(cuts[1:], len(peaks)) - 1]


def laid_out(problem: OperatorProblem, kinds: LayerKinds) -> OperatorProgramme:
    """Lay out everything that does not depend on a cap."""
    step_end_s = np.zeros_like(problem.time_s) if problem.step_end_s is None else problem.step_end_s
    return OperatorProgramme(
        time_prefix_s=prefix_sums(problem.time_s),
        join_prefix_s=prefix_sums(problem.join_s)[:, :-1].copy(),
        start_s=problem.start_s,
        end_s=problem.end_s,
        state_prefix=prefix_sums(problem.state_bytes),
        held_prefix=prefix_sums(problem.kept_bytes),
        again_bytes=_again_bytes(problem),
        weight_prefix=prefix_sums(problem.weight_bytes),
        input_bytes=problem.input_bytes,
        forward_reserved=problem.forward_reserved_bytes,
        backward_reserved=problem.backward_reserved_bytes,
        devices=problem.devices,
        allowed=problem.allowed,
        edge_kind=problem.edge_kind,
        least_reserved=_least_reserved(problem),
        free_end=problem.free_end,
        layer_begin=np.append(problem.layer_begin, problem.num_operators),
        layer_of=kinds.layer_of,
        operator_place=kinds.place,
        **_relaxation(problem, kinds),
        limit_bytes=float(problem.limit_bytes),
        num_devices=problem.num_devices,
        most_in_flight=problem.most_in_flight,
        spared=0 if problem.reserves_last else 1,
        step_end_prefix_s=prefix_sums(step_end_s),
        step_start_s=_per_option(problem.step_start_s, len(problem.time_s)),
        tied_s=_per_option(problem.tied_s, len(problem.time_s)),
        step_end_cap_s=math.inf,
    )


def _per_option(values: FloatArray | None, num_options: int) -> FloatArray:
    return np.zeros(num_options) if values is None else np.ascontiguousarray(values)


def blocks_within(
    cap_s: float, cuts: IntArray, problem: OperatorProblem, programme: OperatorProgramme
) -> Blocks:
    """List the stages that a chain with no stage above a cap can contain.

    Stages may begin and end at ``cuts``. Blocks ascend by stages behind, then devices behind, then
    devices.
    """
    front, num_devices = front_within(cap_s, problem, programme), programme.num_devices
    # By stages and devices behind: first operator from which they can hold the rest of the chain
    back = np.empty_like(front)
    fill_back(cap_s, programme.views, back)
    # By stages and devices behind a cut: first and last index of the cuts that are possible there
    low = np.searchsorted(cuts, back)
    high = np.searchsorted(cuts, front[:, ::-1], side="right")
    rows = []
    for behind in range(problem.most_stages):
        for taken in range(num_devices) if behind else (0,):
            for size in sorted(set(programme.devices.tolist())):
                behind_devices = num_devices - taken - size
                more = 1 if behind_devices else 0
                if behind_devices < more or more > problem.most_stages - behind - 1:
                    continue
                starts = low[behind + 1, taken + size], high[behind + 1, taken + size]
                ends = low[behind, taken], high[behind, taken]
                rows.append((behind, taken, size, *starts, *ends))
    block = np.array(rows, np.int64).reshape(-1, 7)
    block = block[(block[:, 3] < block[:, 4]) & (block[:, 5] < block[:, 6])]
    behind, taken, size, low_start, high_start, low_end, high_end = np.ascontiguousarray(block.T)
    alike = np.stack([behind, size, _kinds_of_places(programme)[size, num_devices - taken - size]])
    _, example, table = np.unique(alike, axis=1, return_index=True, return_inverse=True)
    shape = len(example), len(cuts)
    blocks = Blocks(
        behind=behind,
        taken=taken,
        size=size,
        low_start=low_start,
        high_start=high_start,
        low_end=low_end,
        high_end=high_end,
        table=table.reshape(-1),
        example=example,
        row_low=np.empty(shape, np.int64),
        row_begin=np.empty((shape[0], shape[1] + 1), np.int64),
    )
    fill_rows(cap_s, cuts, programme.views, blocks.views, np.zeros(shape, np.int64))
    return blocks


def _kinds_of_places(programme: OperatorProgramme) -> IntArray:
    """Number the places of stages: equal numbers mean the same options and edges.

    Returns:
        Shape ``(G + 1, G)``, by number of devices and number of devices in front.
    """
    num_devices = programme.num_devices
    kinds = np.zeros((num_devices + 1, num_devices), np.int64)
    for size in sorted(set(programme.devices.tolist())):
        places = num_devices - size + 1
        edges = programme.edge_kind[:places], programme.edge_kind[size:]
        columns = np.vstack([*edges, programme.allowed[programme.devices == size, :places]])
        kinds[size, :places] = np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1)
    return kinds


def front_within(cap_s: float, problem: OperatorProblem, programme: OperatorProgramme) -> IntArray:
    """Compute how many operators stages can hold from the front with no stage above a cap.

    Returns:
        Shape ``(S + 1, G + 1)``, by the number of stages behind and the number of devices: the most
        operators that the stages in front can hold.
    """
    front = np.empty((problem.most_stages + 1, programme.num_devices + 1), np.int64)
    fill_front(cap_s, programme.views, front)
    return front


def _least_reserved(problem: OperatorProblem) -> FloatArray:
    """Return, per option, the least reserve of any whole layer without its last operator."""
    ends = np.append(problem.layer_begin[1:], problem.num_operators)
    layers = [
        problem.forward_reserved_bytes[:, start : end - 1].max(axis=1, initial=0.0)
        + problem.backward_reserved_bytes[:, start : end - 1].max(axis=1, initial=0.0)
        for start, end in zip(problem.layer_begin.tolist(), ends.tolist(), strict=True)
    ]
    least: FloatArray = np.min(layers, axis=0)
    return least


def _again_bytes(problem: OperatorProblem) -> FloatArray:
    """Return the bytes of each run of always recomputed operators, summed up to each of them."""
    sums = np.cumsum(problem.held_bytes - problem.kept_bytes, axis=1)
    before = sums if problem.runs_again is None else np.where(problem.runs_again, 0.0, sums)
    again: FloatArray = sums - np.maximum.accumulate(before, axis=1)
    return again
