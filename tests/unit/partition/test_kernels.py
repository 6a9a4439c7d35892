import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from amp_ray.partition.kernels import Scratch, cheapest_chain
from amp_ray.partition.layout import laid_out, scratch_for
from amp_ray.partition.problem import PartitionProblem, chain_problem
from amp_ray.partition.tables import StageTables

# Solves random problems and prints the answers; run compiled and as plain Python.
ANSWERS = """
import json
import numpy as np
from amp_ray.partition import PartitionSolution, solve
from support.partition_cases import KINDS, random_problem

solutions = [
    solve(random_problem(np.random.default_rng(seed), KINDS[seed % len(KINDS)]))
    for seed in range(200)
]
answers = [
    (solution.bounds, solution.options, float(solution.value_s), solution.num_evaluations)
    for solution in solutions
    if isinstance(solution, PartitionSolution)
]
print(json.dumps(answers))
"""

Found = tuple[float, float, int, float]


def evaluated(problem: PartitionProblem, cap_s: float) -> tuple[Found, Scratch]:
    programme = laid_out(problem)
    scratch = scratch_for(programme)
    return cheapest_chain(cap_s, programme, scratch), scratch


PREFIX_S = np.array([[0.0, 3.0, 4.0, 6.0, 11.0]])


def two_stages() -> PartitionProblem:
    return chain_problem(StageTables(time_prefix_s=PREFIX_S), 2, time_row=np.array([0, 0]))


def test_without_a_cap_the_first_of_the_cheapest_chains_is_found() -> None:
    (sum_s, slowest_s, num_stages, _), scratch = evaluated(two_stages(), math.inf)
    assert (sum_s, slowest_s, num_stages) == (11.0, 8.0, 2)
    assert scratch.path_start[:2].tolist() == [1, 0]


def test_a_cap_keeps_every_stage_below_it() -> None:
    (sum_s, slowest_s, _, _), scratch = evaluated(two_stages(), 7.5)
    assert (sum_s, slowest_s) == (11.0, 7.0)
    assert scratch.path_start[:2].tolist() == [2, 0]


def test_a_cap_may_be_met_exactly() -> None:
    assert evaluated(two_stages(), 6.0)[0][:3] == (11.0, 6.0, 2)


def test_a_cap_that_is_too_low_says_what_would_admit_more() -> None:
    (sum_s, _, num_stages, next_cap_s), _ = evaluated(two_stages(), 5.5)
    assert (sum_s, num_stages) == (math.inf, 0)
    assert next_cap_s == 6.0


def test_no_cap_helps_against_memory() -> None:
    tables = StageTables(time_prefix_s=PREFIX_S, earliest_start=np.array([[0, 0, 1, 2, 3]]))
    problem = chain_problem(tables, 2, time_row=np.array([0, 0]), memory_row=np.array([0, 0]))
    assert evaluated(problem, 100.0)[0][3] == math.inf


def test_bottlenecks_that_are_not_monotone_are_asked_one_by_one() -> None:
    tables = StageTables(
        time_prefix_s=PREFIX_S,
        bottleneck_start_s=np.array([[0.0, 0.0, 9.0, 1.0, 0.0]]),
        bottleneck_end_s=np.zeros((1, 5)),
    )
    problem = chain_problem(tables, 2, time_row=np.array([0, 0]), bottleneck_row=np.array([0, 0]))
    (_, slowest_s, _, _), scratch = evaluated(problem, 7.0)
    assert slowest_s == 6.0
    assert scratch.path_start[:2].tolist() == [3, 0]


def test_compiled_kernels_do_what_their_source_says(repository: Path) -> None:
    # Plain Python also checks every index, which compiled code does not.
    answers = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", ANSWERS],
                env={**os.environ, "NUMBA_DISABLE_JIT": disabled},
                cwd=repository,
                capture_output=True,
                check=True,
                timeout=300,
            ).stdout
        )
        for disabled in ("0", "1")
    ]
    assert len(answers[0]) > 50
    assert answers[0] == answers[1]
