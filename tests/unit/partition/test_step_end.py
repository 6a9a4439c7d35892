import math

import numpy as np

from amp_ray.partition.problem import (
    PartitionProblem,
    chain_problem,
)
from amp_ray.partition.step_end import (
    StepEndProblem,
    StepEndTerm,
)
from amp_ray.partition.tables import StageTables


def chain(num_stages: int = 2, **tables: np.ndarray) -> PartitionProblem:
    """Build four layers of one second on stages in a row, for one micro-batch."""
    prefix = np.array([[0.0, 1.0, 2.0, 3.0, 4.0]])
    row = np.zeros(num_stages, np.int64)
    memory_row = row if "earliest_start" in tables else None
    return chain_problem(
        StageTables(time_prefix_s=prefix, **tables), 1, time_row=row, memory_row=memory_row
    )


def term(*s_per_weight: float, fixed_s: tuple[float, ...] = (0.0, 0.0)) -> StepEndTerm:
    """Return a term over four layers that weigh 1, 1, 1 and 3."""
    return StepEndTerm(
        weight_prefix=np.array([0.0, 1.0, 2.0, 3.0, 6.0]),
        s_per_weight=np.array(s_per_weight),
        fixed_s=np.array(fixed_s),
    )


def test_a_term_is_affine_in_what_a_stage_holds() -> None:
    assert term(2.0, 0.5, fixed_s=(0.0, 7.0)).stage_s(1, 4, 0) == 10.0
    assert term(2.0, 0.5, fixed_s=(0.0, 7.0)).stage_s(1, 4, 1) == 9.5


def test_a_term_of_a_partition_is_that_of_its_slowest_stage() -> None:
    problem = StepEndProblem(problem=chain(), terms=(term(1.0, 1.0), term(2.0, 0.5)))
    assert problem.terms_s((0, 3, 4), (0, 1)) == (3.0, 6.0)


def test_some_stage_holds_the_heaviest_layer() -> None:
    assert term(2.0, 0.5, fixed_s=(0.0, 1.0)).least_s == 2.5


def test_a_cap_is_a_limit_on_starts() -> None:
    starts = term(1.0, 1.0).earliest_starts(2.0)
    assert starts.tolist() == [[0, 0, 0, 1, 4]]


def test_caps_and_memory_limit_together() -> None:
    memory = np.array([[0, 0, 0, 0, 2]])
    problem = StepEndProblem(problem=chain(earliest_start=memory), terms=(term(1.0, 0.1),))
    capped = problem.capped((2.0,))
    rows = capped.earliest_start[capped.option_memory]
    assert rows.tolist() == [[0, 0, 0, 1, 4], [0, 0, 0, 0, 2]]


def test_an_infinite_cap_keeps_only_memory() -> None:
    memory = np.array([[0, 0, 0, 0, 2]])
    problem = StepEndProblem(problem=chain(earliest_start=memory), terms=(term(1.0, 0.1),))
    capped = problem.capped((math.inf,))
    assert (capped.earliest_start[capped.option_memory] == memory).all()
