"""The search by the published formulas, against random plans of its space and published ones."""

import csv
import random
from itertools import pairwise
from pathlib import Path

import pytest

from amp_ray.baselines.aceso2024.planner import Aceso2024Planner
from amp_ray.cost.estimate import Estimate, Infeasible
from amp_ray.errors import InputError
from amp_ray.spec.candidate import Candidate, StageOptions
from amp_ray.spec.operator_run import OperatorUse
from amp_ray.spec.operator_strategy import operator_strategy
from support.aceso import EXPERIMENT, aceso_experiment

DEVICES = "slots: 2,"


def planner(memory_gib: float, text: str = EXPERIMENT) -> Aceso2024Planner:
    """Make a planner for devices of so much memory."""
    small = text.replace(DEVICES, f"{DEVICES} memory_gib: {memory_gib},")
    return Aceso2024Planner(experiment=aceso_experiment(small))


def best(planner: Aceso2024Planner) -> list[Estimate]:
    """Plan all micro-batches."""
    results = [planner.plan(candidate) for candidate in planner.candidates()]
    return [result for result in results if isinstance(result, Estimate)]


def random_stages(chance: random.Random, size: int, num_operators: int) -> list[list[OperatorUse]]:
    """Cut at random, and use each stage in a random way."""
    devices = chance.choice([(1, 1, 1, 1), (2, 2), (1, 1, 2), (2, 1, 1)])
    cuts = [0, *sorted(chance.sample(range(1, num_operators), len(devices) - 1)), num_operators]
    stages = []
    for number, (start, end) in zip(devices, pairwise(cuts), strict=True):
        tp = chance.choice([tp for tp in (1, 2) if tp <= number and size % (number // tp) == 0])
        again = chance.choice([0.0, 0.5, 0.9])
        algorithm = chance.randrange(2) if tp > 1 else 0
        stages.append(
            [(tp, number // tp, algorithm, chance.random() < again) for _ in range(start, end)]
        )
    return stages


@pytest.mark.parametrize("memory_gib", [0.6, 0.8, 2.0])
def test_no_random_plan_of_the_space_is_better(memory_gib: float) -> None:
    ours = planner(memory_gib)
    found = {result.strategy.samples_per_micro_batch: result for result in best(ours)}
    chance, tried = random.Random(int(memory_gib * 10)), 0
    for _ in range(400):
        size = chance.choice([1, 2, 4])
        strategy = operator_strategy(
            random_stages(chance, size, ours.profile.num_operators),
            samples_per_micro_batch=size,
            num_micro_batches=16 // size,
        )
        result = ours.score(strategy)
        if isinstance(result, Estimate) and result.feasible:
            tried += 1
            least_s = found[size].iteration_time_s
            assert result.iteration_time_s >= least_s * (1 - 1e-9)
            assert found[size].lower_bound_s == pytest.approx(least_s, rel=1e-9)
    assert tried > 5


@pytest.mark.parametrize("memory_gib", [0.35, 0.5, 1.0])
def test_plans_are_legal_and_fit_by_the_published_formulas(memory_gib: float) -> None:
    for result in best(planner(memory_gib)):
        assert result.feasible, result.reasons
        for used, limit in zip(result.peak_memory_bytes, result.memory_limit_bytes, strict=True):
            assert used <= limit


def test_tight_memory_makes_operators_recompute() -> None:
    def recomputed(memory_gib: float) -> int:
        fastest = min(best(planner(memory_gib)), key=lambda result: result.iteration_time_s)
        runs = [run for stage in fastest.strategy.stages for run in stage.operators]
        return sum(run.num_operators for run in runs if run.recompute)

    assert recomputed(0.4) > 0 == recomputed(16)


def test_without_memory_the_micro_batch_is_told() -> None:
    ours = planner(0.05)
    result = ours.plan(ours.candidates()[0])
    assert isinstance(result, Infeasible)
    assert str(result.reason) == (
        "out of memory: micro-batch 1: no stages fit, whatever is recomputed"
    )


def test_limits_of_the_user_hold() -> None:
    text = f"{EXPERIMENT}search: {{space: operator, min_tp: 2, max_pp: 2}}\n"
    for result in best(planner(16, text)):
        assert len(result.strategy.stages) <= 2
        assert {stage.options.tp for stage in result.strategy.stages} == {2}


def test_limits_that_leave_nothing_are_told() -> None:
    ours = planner(16, f"{EXPERIMENT}search: {{space: operator, min_tp: 4}}\n")
    result = ours.plan(ours.candidates()[0])
    assert isinstance(result, Infeasible)
    assert "not in the profile" in str(result.reason)


def test_micro_batches_are_measured_sizes_that_divide_the_batch() -> None:
    sizes = [candidate.micro_batch_size for candidate in planner(16).candidates()]
    assert sizes == [1, 2, 4]
    odd = planner(16, EXPERIMENT.replace("global_batch_size: 16", "global_batch_size: 6"))
    assert [candidate.micro_batch_size for candidate in odd.candidates()] == [1, 2]


def test_a_candidate_of_another_space_is_refused() -> None:
    grid = Candidate(
        micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=4, num_micro_batches=16
    )
    with pytest.raises(InputError, match="chooses tp, dp and cuts itself"):
        planner(16).plan(grid)


CASES = (
    ("gpt_1_3B", "miniset", 57.82, "num_layers: 24, slots: 4, gib: 12000, batch: 512"),
    ("gpt_1_3B", "eurosys", 99.70, "num_layers: 24, slots: 4, gib: 28000, batch: 1024"),
    ("gpt_2_6B", "eurosys", 86.43, "num_layers: 32, slots: 8, gib: 28000, batch: 1024"),
)


@pytest.mark.parametrize(("model", "folder", "most_s", "given"), CASES)
def test_published_cases_are_better_than_the_published_plans(
    aceso_data: Path, model: str, folder: str, most_s: float, given: str
) -> None:
    files = {path.name: path.read_text() for path in (aceso_data / folder).iterdir()}
    layers, slots, mib, batch = (int(part.split(": ")[1]) for part in given.split(", "))
    text = (
        EXPERIMENT.replace("gpt_tiny", model)
        .replace("num_layers: 2", f"num_layers: {layers}")
        .replace("count: 2", "count: 1")
        .replace(DEVICES, f"slots: {slots}, memory_gib: {mib / 1024!r},")
        .replace("global_batch_size: 16", f"global_batch_size: {batch}")
    )
    ours = Aceso2024Planner(experiment=aceso_experiment(text, files))
    fastest = min(best(ours), key=lambda result: result.iteration_time_s)
    assert fastest.feasible
    assert fastest.iteration_time_s <= most_s
    with (aceso_data / "known_points.csv").open() as file:
        known = [row for row in csv.DictReader(file) if row["size"] in model]
    published = [
        float(row["aceso_model_predicted_s"]) for row in known if row["profile_db"] == folder
    ]
    assert fastest.iteration_time_s < min(published)
