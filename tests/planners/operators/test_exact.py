import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ray.planners.operators.partition.problem import OperatorProblem, OperatorSolution
from amp_ray.planners.operators.partition.solve import solve_operators
from support.operator_cases import random_operators
from support.operator_oracle import least_value, stage_memory, stage_s, step_end_s

KINDS = ("plain", "repeated", "published", "ends", "forced")


@st.composite
def problems(draw: st.DrawFn, most_operators: int = 6) -> OperatorProblem:
    """Random problems; sizes shrink, and so does the seed."""
    return random_operators(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        num_operators=draw(st.integers(1, most_operators)),
        num_devices=draw(st.integers(1, 4)),
        kind=draw(st.sampled_from(KINDS)),
    )


@settings(max_examples=25)
@given(problem=problems())
def test_no_cut_devices_or_recompute_is_better(problem: OperatorProblem) -> None:
    answer = solve_operators(problem)
    least_s = least_value(problem)
    if not isinstance(answer, OperatorSolution):
        assert least_s == math.inf
        return
    assert answer.value_s == pytest.approx(least_s, rel=1e-12)
    assert answer.lower_bound_s <= least_s * (1 + 1e-12)


@settings(max_examples=25)
@given(problem=problems(most_operators=20))
def test_stages_are_what_they_say_and_fit(problem: OperatorProblem) -> None:
    answer = solve_operators(problem)
    if not isinstance(answer, OperatorSolution):
        return
    starts = [stage.start for stage in answer.stages]
    ends = [stage.end for stage in answer.stages]
    assert [*starts, problem.num_operators] == [0, *ends]
    devices = [int(problem.devices[stage.option]) for stage in answer.stages]
    assert sum(devices) == problem.num_devices
    for number, stage in enumerate(answer.stages):
        place = sum(devices[:number])
        assert problem.allowed[stage.option, place]
        span = (stage.start, stage.end, frozenset(stage.recomputed))
        behind = len(starts) - 1 - number
        assert stage.time_s == pytest.approx(stage_s(problem, stage.option, place, *span))
        assert stage_memory(problem, stage.option, behind, *span) <= problem.limit_bytes
    times = [stage.time_s for stage in answer.stages]
    last_s = max(step_end_s(problem, own.option, own.start, own.end) for own in answer.stages)
    assert answer.step_end_s == pytest.approx(last_s)
    value_s = sum(times) + (problem.num_micro_batches - 1) * max(times) + last_s
    assert answer.value_s == pytest.approx(value_s)
    assert answer.lower_bound_s <= answer.value_s


@settings(max_examples=15)
@given(problem=problems(most_operators=12), more=st.floats(1.0, 2.0))
def test_more_memory_is_never_slower(problem: OperatorProblem, more: float) -> None:
    before = solve_operators(problem)
    after = solve_operators(replace(problem, limit_bytes=math.floor(problem.limit_bytes * more)))
    if isinstance(before, OperatorSolution):
        assert isinstance(after, OperatorSolution)
        assert after.lower_bound_s <= before.value_s
        assert after.value_s <= before.value_s * (1 + 1e-12)


def test_no_index_of_a_kernel_is_out_of_range(repository: Path) -> None:
    """Plain Python checks every index, which compiled code does not."""
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__, "-k", "better or fit"],
        env={**os.environ, "AMP_RAY_UNCOMPILED": "1"},
        cwd=repository,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
