"""Lay a problem of operators out for the kernels, and choose which stages are worth pricing."""

import math

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.planners.operators.partition.kernels import fill_back, fill_front, fill_rows
from amp_ray.planners.operators.partition.layers import LayerKinds, relaxation
from amp_ray.planners.operators.partition.problem import OperatorProblem
from amp_ray.planners.operators.partition.programme import Blocks, OperatorProgramme, Reach


def laid_out(problem: OperatorProblem, kinds: LayerKinds) -> OperatorProgramme:
    """Lay out all that does not depend on a cap."""
    relaxed = relaxation(problem, kinds)
    step_end_s = np.zeros_like(problem.time_s) if problem.step_end_s is None else problem.step_end_s
    return OperatorProgramme(
        time_prefix_s=_prefix(problem.time_s),
        join_prefix_s=_prefix(problem.join_s)[:, :-1].copy(),
        start_s=problem.start_s,
        end_s=problem.end_s,
        state_prefix=_prefix(problem.state_bytes),
        held_prefix=_prefix(problem.kept_bytes),
        again_bytes=_again_bytes(problem),
        weight_prefix=_prefix(problem.weight_bytes),
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
        relaxed=relaxed.row,
        charged=relaxed.charged,
        levels=relaxed.levels,
        rest=relaxed.rest,
        layers=relaxed.layers,
        head=relaxed.head,
        hints=np.zeros(relaxed.charged.shape[1] + 1, np.int64),
        limit_bytes=float(problem.limit_bytes),
        num_devices=problem.num_devices,
        most_in_flight=problem.most_in_flight,
        spared=0 if problem.reserves_last else 1,
        step_end_prefix_s=_prefix(step_end_s),
        step_start_s=_per_option(problem.step_start_s, len(problem.time_s)),
        tied_s=_per_option(problem.tied_s, len(problem.time_s)),
        step_end_cap_s=math.inf,
    )


def _per_option(values: FloatArray | None, num_options: int) -> FloatArray:
    """Return values, none where they are left out; in one layout, or kernels compile for each."""
    return np.zeros(num_options) if values is None else np.ascontiguousarray(values)


def blocks_within(
    cap_s: float, cuts: IntArray, problem: OperatorProblem, programme: OperatorProgramme
) -> Blocks:
    """List the stages that a chain with no stage above a cap can contain.

    Args:
        cap_s: May be infinite.
        cuts: Shape ``(C,)``. Where stages may begin and end.
        problem: The problem.
        programme: It, laid out.

    Returns:
        Blocks ascending by stages behind, then devices behind, then devices.
    """
    reach = reach_within(cap_s, problem, programme)
    num_devices = programme.num_devices
    # By stages and devices behind a cut: the first and the last index of a cut that can be there.
    low = np.searchsorted(cuts, reach.back)
    high = np.searchsorted(cuts, reach.front[:, ::-1], side="right")
    rows = []
    for behind in range(problem.most_stages):
        for taken in range(num_devices) if behind else (0,):
            for size in sorted(set(programme.devices.tolist())):
                left = num_devices - taken - size
                more = max(problem.fewest_stages - behind - 1, 1 if left else 0)
                if left < more or more > problem.most_stages - behind - 1:
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
    fill_rows(cap_s, cuts, programme, blocks, np.zeros(shape, np.int64))
    return blocks


def _kinds_of_places(programme: OperatorProgramme) -> IntArray:
    """Number the places of stages by what options and edges they have there.

    Returns:
        Shape ``(G + 1, G)``, by number of devices and devices in front.
    """
    num_devices = programme.num_devices
    kinds = np.zeros((num_devices + 1, num_devices), np.int64)
    for size in sorted(set(programme.devices.tolist())):
        places = num_devices - size + 1
        edges = programme.edge_kind[:places], programme.edge_kind[size:]
        own = np.vstack([*edges, programme.allowed[programme.devices == size, :places]])
        kinds[size, :places] = np.unique(own, axis=1, return_inverse=True)[1].reshape(-1)
    return kinds


def reach_within(cap_s: float, problem: OperatorProblem, programme: OperatorProgramme) -> Reach:
    """Find how far devices get with no stage above a cap."""
    front = front_within(cap_s, problem, programme)
    back = np.empty_like(front)
    fill_back(cap_s, programme, back)
    return Reach(front=front, back=back)


def front_within(cap_s: float, problem: OperatorProblem, programme: OperatorProgramme) -> IntArray:
    """Find how far devices get from the front, as `Reach.front`."""
    front = np.empty((problem.most_stages + 1, programme.num_devices + 1), np.int64)
    fill_front(cap_s, programme, front)
    return front


def _least_reserved(problem: OperatorProblem) -> FloatArray:
    """Return what every stage with a whole layer reserves, by option; its last operator is free."""
    ends = np.append(problem.layer_begin[1:], problem.num_operators)
    layers = [
        problem.forward_reserved_bytes[:, start : end - 1].max(axis=1, initial=0.0)
        + problem.backward_reserved_bytes[:, start : end - 1].max(axis=1, initial=0.0)
        for start, end in zip(problem.layer_begin.tolist(), ends.tolist(), strict=True)
    ]
    least: FloatArray = np.min(layers, axis=0)
    return least


def _again_bytes(problem: OperatorProblem) -> FloatArray:
    """Add up each run of operators that run again, up to each of them."""
    sums = np.cumsum(problem.held_bytes - problem.kept_bytes, axis=1)
    before = sums if problem.runs_again is None else np.where(problem.runs_again, 0.0, sums)
    again: FloatArray = sums - np.maximum.accumulate(before, axis=1)
    return again


def _prefix(table: FloatArray) -> FloatArray:
    """Sum each row from its beginning."""
    sums = np.zeros((table.shape[0], table.shape[1] + 1))
    np.cumsum(table, axis=1, out=sums[:, 1:])
    return sums
