from dataclasses import replace

import numpy as np
import pytest

from amp_ray.partition.problem import InfeasiblePartition, InfeasibleReason, PrunedPartition
from amp_ray.planners.operators.partition.problem import OperatorProblem, OperatorSolution
from amp_ray.planners.operators.partition.several import (
    BestStages,
    NoStages,
    PosedProblem,
    SolveEach,
)
from amp_ray.planners.operators.partition.solve import solve_operators

# A layer: a cheap operator that holds much, one that reads it, a dear one that holds little.
FORWARD_S = (1.0, 1.0, 8.0)
HELD = (30.0, 10.0, 2.0)


def chain(
    *, layers: int, limit: float, micro_batches: int = 16, devices: int = 2
) -> OperatorProblem:
    """Like layers in a row, for stages of one device."""
    forward = np.tile(np.array(FORWARD_S), layers)[None, :] / 8
    held = np.tile(np.array(HELD), layers)[None, :]
    nothing = np.zeros_like(forward)
    edges = np.zeros((1, 1, forward.shape[1] + 1))
    return OperatorProblem(
        time_s=3 * forward,
        join_s=nothing,
        recompute_s=forward,
        state_bytes=nothing + 1,
        weight_bytes=nothing,
        held_bytes=held,
        input_bytes=nothing + 2,
        forward_reserved_bytes=nothing,
        backward_reserved_bytes=nothing,
        start_s=edges,
        end_s=edges,
        starts_layer=np.arange(forward.shape[1]) % len(HELD) == 0,
        free_end=np.zeros(forward.shape[1], dtype=bool),
        counts_last=False,
        devices=np.array([1]),
        allowed=np.ones((1, devices), dtype=bool),
        edge_kind=np.zeros(devices + 1, np.int64),
        limit_bytes=limit,
        num_micro_batches=micro_batches,
        most_stages=devices,
    )


def solved(problem: OperatorProblem) -> OperatorSolution:
    """Solve a problem that has a solution."""
    answer = solve_operators(problem)
    assert isinstance(answer, OperatorSolution)
    return answer


def test_without_need_nothing_is_recomputed() -> None:
    answer = solved(chain(layers=4, limit=1e6))
    assert [stage.recomputed for stage in answer.stages] == [(), ()]
    assert [stage.time_s for stage in answer.stages] == [7.5, 7.5]
    assert answer.value_s == answer.lower_bound_s == 15 + 15 * 7.5


def test_only_as_many_layers_recompute_as_memory_asks_for() -> None:
    answer = solved(chain(layers=8, limit=220, devices=1))
    layers = [operator // len(HELD) for operator in answer.stages[0].recomputed]
    # 24 of state, 2 of input, 336 held: 142 too many, 30 once more for what is computed again,
    # and a layer saves 30.
    assert len(set(layers)) == 6
    assert all(operator % len(HELD) < 2 for operator in answer.stages[0].recomputed)


def test_an_early_stage_holds_more_micro_batches_and_recomputes_more() -> None:
    first, second = solved(chain(layers=8, limit=190)).stages
    assert len(first.recomputed) > len(second.recomputed)


def test_many_layers_are_within_a_thousandth_of_the_bound() -> None:
    answer = solved(chain(layers=200, limit=4000, devices=4))
    assert answer.value_s <= answer.lower_bound_s * (1 + 1e-3)


def test_what_fits_nowhere_is_told() -> None:
    answer = solve_operators(chain(layers=8, limit=20))
    assert isinstance(answer, InfeasiblePartition)
    assert "24 operators" in answer.detail


def test_many_layers_that_fit_nowhere_are_not_cut_within_layers() -> None:
    answer = solve_operators(chain(layers=100, limit=20))
    assert isinstance(answer, InfeasiblePartition)
    assert answer.reason is InfeasibleReason.NOT_SEARCHED
    assert "cuts within them were not tried" in answer.detail


def test_beside_a_plan_they_are_and_slower_ones_are_ruled_out() -> None:
    """Micro-batches of 2 samples are promising but fit nowhere; those of 1 fit."""
    fits = chain(layers=100, limit=4000)
    promising = replace(fits, time_s=fits.time_s / 4, held_bytes=fits.held_bytes * 50)
    rows = np.zeros(fits.time_s.shape, np.int64)
    posed = {
        size: PosedProblem(problem=problem, rows=rows, degrees=[(1, 1, 0)])
        for size, problem in ((1, fits), (2, promising))
    }
    assert isinstance(SolveEach(posed=posed).best(1), BestStages)
    other = SolveEach(posed=posed).best(2)
    assert isinstance(other, NoStages)
    assert (other.kind, other.detail.split(";")[1]) == ("slower", " no plan as fast")


def test_an_upper_bound_prunes() -> None:
    problem = chain(layers=4, limit=1e6)
    answer = solve_operators(problem, upper_bound_s=100.0)
    assert isinstance(answer, PrunedPartition)
    assert answer.lower_bound_s <= 100.0
    assert solved(problem).value_s > 100.0


def test_a_layer_has_at_most_62_operators() -> None:
    problem = chain(layers=21, limit=1e6)
    with pytest.raises(ValueError, match="63 operators"):
        replace(problem, starts_layer=np.zeros(63, dtype=bool))
