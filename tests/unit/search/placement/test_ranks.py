from itertools import pairwise

import numpy as np
import pytest

from amp_ray.search.placement.build_problem import build_problem
from amp_ray.search.placement.problem import PlacementProblem
from amp_ray.search.placement.ranks import Walk
from amp_ray.search.placement.step_end import StepEndSearch
from support.mixed_cluster import mixed_candidate, mixed_cost_model


def placement_problem(*, tp: int = 1, dp: int = 1) -> PlacementProblem:
    found = build_problem(mixed_cost_model(), mixed_candidate(tp=tp, dp=dp))
    assert found is not None
    return found.problem


def walked(problem: PlacementProblem) -> tuple[int, ...]:
    search = StepEndSearch(problem=problem)
    search.run()
    steps, rows = problem.graph.path(search.found[0].options)
    return Walk(moves=problem.moves, prices=problem.prices).placement(steps, rows)


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 2), (1, 3), (1, 6), (2, 1), (2, 3)])
def test_every_device_is_taken_once(tp: int, dp: int) -> None:
    assert sorted(walked(placement_problem(tp=tp, dp=dp))) == list(range(6))


def test_groups_take_devices_that_follow_each_other() -> None:
    placement = np.array(walked(placement_problem(tp=2, dp=3))).reshape(-1, 2)
    assert (placement[:, 1] == placement[:, 0] + 1).all()
    assert (placement[:, 0] % 2 == 0).all()


def test_replicas_keep_to_their_nodes_across_a_cut() -> None:
    problem = placement_problem(dp=2)
    nodes = (np.array(walked(problem)).reshape(3, 2) // 2).tolist()
    for left, right in pairwise(nodes):
        assert left == right or set(left) != set(right)


def test_a_walk_can_be_repeated() -> None:
    problem = placement_problem(dp=3)
    assert walked(problem) == walked(problem)
