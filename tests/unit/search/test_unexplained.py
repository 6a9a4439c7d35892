"""Pipelines whose measured times nothing explains are not the first choice."""

import pytest

from amp_ray.cost.columns import UNEXPLAINED
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.planning import plan_experiment
from amp_ray.search.ranking import is_risky
from support.experiments import small_experiment
from support.planted import small_strategies

ON_A100 = ("device: T4", "device: A100-80")


def in_nanotron(stage: str) -> Experiment:
    """The small experiment in nanotron, on two nodes."""
    keys = f"runtime: nanotron\nprecision: bf16\nzero_stage: {stage}\nglobal"
    return small_experiment(ON_A100, ("global", keys))


@pytest.fixture(scope="module")
def nanotron() -> Experiment:
    """The same without ZeRO."""
    return in_nanotron("0")


def planned(experiment: Experiment) -> list[Estimate]:
    """All feasible rows, as they are shown."""
    results = plan_experiment(experiment, progress=lambda _done, _all: None).ranking.results
    return [result for result in results if isinstance(result, Estimate) and result.feasible]


def test_they_come_after_all_others_and_say_so(nanotron: Experiment) -> None:
    rows = planned(nanotron)
    flags = [row.unexplained for row in rows]
    assert flags == sorted(flags)
    assert set(flags) == {False, True}
    assert all((UNEXPLAINED in row.warnings) == row.unexplained for row in rows)
    assert all(is_risky(row) for row in rows if row.unexplained)


def test_their_times_stay_as_predicted(nanotron: Experiment) -> None:
    """No factor is applied: what is missing from them is unknown."""
    rows = [row for row in planned(nanotron) if row.unexplained]
    fastest = planned(nanotron)[0]
    assert min(row.iteration_time_s for row in rows) < 1.5 * fastest.iteration_time_s


def test_pipelines_of_one_micro_batch_or_one_replica_are_explained(nanotron: Experiment) -> None:
    model = CostModel(experiment=nanotron)
    for strategy in small_strategies(nanotron):
        dp = max(stage.options.dp for stage in strategy.stages)
        piped = strategy.pp > 1 and dp > 1 and strategy.num_micro_batches > 1
        assert model.estimate(strategy).unexplained == piped


def test_the_search_takes_pipelines_with_zero_instead() -> None:
    rows = planned(in_nanotron("auto"))
    assert not any(row.unexplained for row in rows)
    assert any(row.strategy.pp > 1 and row.strategy.zero.stage for row in rows)


def test_other_programs_have_none() -> None:
    rows = planned(small_experiment(ON_A100, ("global", "runtime: megatron\nglobal")))
    assert not any(row.unexplained for row in rows)
