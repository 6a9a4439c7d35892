import json
import os
from pathlib import Path

from support.programs import python

# Solves random problems and prints the answers; run compiled and as plain Python.
ANSWERS = """
import json
import numpy as np
from amp_ray.partition.exact import solve
from amp_ray.partition.problem import PartitionSolution
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


def test_compiled_kernels_do_what_their_source_says(repository: Path) -> None:
    # Plain Python also checks every index, which compiled code does not.
    answers = []
    for disabled in ("", "1"):
        variables = {**os.environ, "AMP_RAY_UNCOMPILED": disabled}
        answers.append(json.loads(python("-c", ANSWERS, env=variables, cwd=repository).stdout))
    assert len(answers[0]) > 50
    assert answers[0] == answers[1]
