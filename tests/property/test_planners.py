"""Properties of every planner, ours and guests alike, in each space that it accepts.

Each planner plans a few tiny experiments once; all tests use these rankings.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, get_args

import pytest

from amp_ray.cost.estimate import Estimate, Result
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment, Space
from amp_ray.runtime.files import load_experiment
from amp_ray.search.candidate_queue import CandidateQueue
from amp_ray.search.placement import objective_s
from amp_ray.search.planner import (
    AMP_RAY,
    Candidates,
    Planner,
    load_planner,
    make_planner,
    planner_names,
)
from amp_ray.search.ranking import Ranking, rank
from amp_ray.search.run import _least_bound_s
from amp_ray.strategies.candidate import AnyCandidate
from amp_ray.strategies.strategy import candidate_of
from support.experiments import SMALL, experiment_from
from support.programs import python

TOP: Final = Path(__file__).parents[2]
FILES: Final = TOP / "tests" / "net" / "files"

TWO_KINDS: Final = """\
name: two kinds
model: {family: gpt2, num_layers: 4, hidden_size: 256, num_heads: 8, sequence_length: 128,
        vocab_size: 1024}
cluster:
  nodes:
    - {count: 1, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
    - {count: 1, device: V100-16, slots: 1, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
global_batch_size: 4
"""

NESTED: Final[tuple[Space, ...]] = ("uniform", "placement", "heterogeneous")
"""Spaces, each of which contains the strategies of the previous one."""

ROUNDING: Final = 1e-9


class Case(NamedTuple):
    """A planner that accepts an experiment in a space."""

    name: str
    base: str
    space: Space


@cache
def experiment_of(base: str) -> Experiment:
    """Return a tiny experiment; published planners get the profiles that they need."""
    if base in TEXTS:
        return experiment_from(TEXTS[base])
    experiment = load_experiment(FILES / f"{base}.yaml")
    return replace(experiment, global_batch_size=8)


TEXTS: Final = {"equal": SMALL, "two-kinds": TWO_KINDS}
BASES: Final = (*TEXTS, "amp", "metis", "aceso")


def started(case: Case, max_tp: int | None = None) -> tuple[Planner, Candidates]:
    """Return a new planner and its candidates.

    Raises:
        ValueError: If the planner does not accept the experiment.
    """
    base = experiment_of(case.base)
    experiment = replace(base, limits=replace(base.limits, space=case.space, max_tp=max_tp))
    planner = make_planner(experiment, case.name)
    return planner, planner.candidates()


def is_there(name: str) -> bool:
    """Return whether a planner is installed; a guest's folder may have been removed."""
    try:
        load_planner(name)
    except (ValueError, ModuleNotFoundError):
        return False
    return True


def accepted() -> Iterator[Case]:
    """Yield every planner with each experiment and space that it accepts.

    Our planner plans all spaces; guests plan the space that the file names.
    """
    for name in filter(is_there, planner_names()):
        for base in BASES:
            spaces = get_args(Space) if name == AMP_RAY else (experiment_of(base).space,)
            for space in spaces:
                case = Case(name, base, space)
                try:
                    started(case)
                except (ValueError, ModuleNotFoundError):
                    continue
                yield case


CASES: Final = tuple(accepted())


@cache
def planned(case: Case) -> tuple[Planner, Candidates, Ranking]:
    """Plan the candidates one after the other, in order."""
    planner, candidates = started(case)
    queue = CandidateQueue(candidates.required, candidates.optional)
    return planner, candidates, rank(queue.run(planner.plan), relative_error=planner.relative_error)


def planned_otherwise(case: Case) -> Ranking:
    """Plan the candidates in reverse order with two alternating planners, which share no tables."""
    planner, candidates = started(case)
    workers = [planner, started(case)[0]]

    def plan(candidate: AnyCandidate) -> Result:
        workers.reverse()
        return workers[0].plan(candidate)

    required = tuple(reversed(candidates.required))
    queue = CandidateQueue(required, candidates.optional)
    return rank(queue.run(plan), relative_error=planner.relative_error)


def fastest_s(results: Ranking) -> float:
    """Return the time of the fastest strategy; infinite if nothing fits."""
    feasible = results.results[: results.num_feasible]
    times_s = (result.iteration_time_s for result in feasible if isinstance(result, Estimate))
    return min(times_s, default=math.inf)


def estimates(case: Case) -> list[Estimate]:
    """Return the estimates of a ranking."""
    return [result for result in planned(case)[2].results if isinstance(result, Estimate)]


by_case = pytest.mark.parametrize("case", CASES, ids="/".join)


def test_every_planner_plans_something() -> None:
    assert {case.name for case in CASES} == set(filter(is_there, planner_names()))
    assert {case.space for case in CASES if case.name == AMP_RAY} >= set(NESTED)
    assert all(planned(case)[2].num_feasible for case in CASES)


def test_rankings_do_not_depend_on_order_workers_or_hash_seed() -> None:
    script = (
        "from test_planners import CASES, planned_otherwise\n"
        "for case in CASES:\n"
        "    print(repr(planned_otherwise(case)))\n"
    )
    folders = (TOP, TOP / "tests" / "lib", Path(__file__).parent)
    variables = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(map(str, folders))}
    other = python("-c", script, env=os.environ | variables)
    for case, line in zip(CASES, other.stdout.splitlines(), strict=True):
        assert repr(planned(case)[2]) == line, case


def closed_form_s(case: Case, plan: Estimate) -> float:
    """Return a placement's closed form, for which its lower bound holds; 0 for other spaces.

    The closed form may be above the simulated time.
    """
    strategy = plan.strategy
    if case.name != AMP_RAY or strategy.has_operators or not strategy.is_uniform:
        return 0.0
    cost_model = CostModel(experiment=experiment_of(case.base))
    return objective_s(cost_model, strategy) * (1 + ROUNDING)


@by_case
def test_a_plan_is_scored_as_it_was_planned(case: Case) -> None:
    planner = planned(case)[0]
    for result in estimates(case):
        assert planner.score(result.strategy) == replace(result, lower_bound_s=None)


@by_case
def test_no_plan_undercuts_a_bound(case: Case) -> None:
    _, candidates, ranking = planned(case)
    for result in estimates(case):
        longest_s = result.iteration_time_s * (1 + ROUNDING)
        if result.lower_bound_s is not None:
            assert result.lower_bound_s <= max(longest_s, closed_form_s(case, result))
        strategy = result.strategy
        if candidates.optional.candidates and strategy.is_uniform and result.feasible:
            assert candidates.optional.least_s(candidate_of(strategy), math.inf) <= longest_s
    bound_s = _least_bound_s(ranking)
    if candidates.are_whole_space and bound_s is not None:
        assert bound_s <= fastest_s(ranking) * (1 + ROUNDING)


@by_case
def test_narrower_limits_are_never_faster(case: Case) -> None:
    try:
        planner, candidates = started(case, max_tp=1)
    except ValueError:  # no candidate is left
        return
    queue = CandidateQueue(candidates.required, candidates.optional)
    narrower = rank(queue.run(planner.plan))
    assert fastest_s(narrower) >= fastest_s(planned(case)[2]) * (1 - ROUNDING)


@pytest.mark.parametrize(("name", "base"), sorted({case[:2] for case in CASES}))
def test_a_wider_space_is_never_slower(name: str, base: str) -> None:
    nested = [Case(name, base, space) for space in NESTED]
    times_s = [fastest_s(planned(case)[2]) for case in nested if case in CASES]
    for wider_s, narrower_s in zip(times_s[1:], times_s, strict=False):
        assert wider_s <= narrower_s * (1 + ROUNDING)
