from amp_ray.partition.problem import PartitionSolution


def solution(lower_bound_s: float) -> PartitionSolution:
    return PartitionSolution(
        bounds=(0, 2),
        options=(0,),
        value_s=5.0,
        slowest_s=2.0,
        lower_bound_s=lower_bound_s,
        num_evaluations=1,
    )


def test_a_solution_that_meets_its_lower_bound_is_proven() -> None:
    assert solution(5.0).proven


def test_a_solution_above_its_lower_bound_is_not_proven() -> None:
    assert not solution(4.5).proven
