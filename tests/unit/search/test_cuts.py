from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from amp_ray.arrays import IntArray
from amp_ray.cost.model import CostModel, StageCosts
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.cuts import latest_starts, roomiest_bounds
from support.checked import grid_of, required
from support.experiments import small_experiment

MIXED = (
    "    - {count: 2, device: T4, slots: 2,",
    (
        "    - {count: 1, device: A100-80, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}\n"
        "    - {count: 1, device: T4, slots: 2,"
    ),
)


def costs_of(pp: int, *replacements: tuple[str, str]) -> StageCosts:
    candidate = grid_of(dp=4 // pp, pp=pp, num_micro_batches=2 * pp)
    return CostModel(experiment=small_experiment(*replacements)).costs(candidate)


def needy(*, with_parameters: bool) -> Experiment:
    """An experiment whose runtime fails, or not, where a stage has no parameters."""
    experiment = small_experiment()
    traits = replace(experiment.traits, fails_without_parameters=with_parameters)
    return replace(experiment, traits=traits)


def need(costs: StageCosts, bounds: tuple[int, ...]) -> float:
    """The stage that needs most of its device, in parts of what that has."""
    return max(peak / device.memory_bytes for peak, device in costs.memory.peaks(bounds))


def least_need(costs: StageCosts, num_layers: int, latest: IntArray) -> float:
    """The least need of all cuts, one after the other."""
    chains = (
        (0, *inner, num_layers) for inner in combinations(range(1, num_layers), costs.stages.pp - 1)
    )
    allowed = [
        bounds
        for bounds in chains
        if not len(latest) or all(start <= latest[end] for start, end in pairwise(bounds))
    ]
    return min(need(costs, bounds) for bounds in allowed)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("replacements", [(), (MIXED,)])
@pytest.mark.parametrize("with_parameters", [False, True])
def test_no_cuts_need_less_memory(
    pp: int, replacements: tuple[tuple[str, str], ...], *, with_parameters: bool
) -> None:
    costs = costs_of(pp, *replacements)
    experiment = needy(with_parameters=with_parameters)
    latest = latest_starts(experiment)
    bounds = required(roomiest_bounds(experiment, costs))
    assert len(bounds) == pp + 1
    assert need(costs, bounds) == pytest.approx(
        least_need(costs, experiment.model.num_layers, latest), rel=1e-4
    )


def test_cuts_that_need_more_than_wanted_are_none() -> None:
    costs, experiment = costs_of(2), needy(with_parameters=False)
    bounds = required(roomiest_bounds(experiment, costs))
    least = need(costs, bounds)
    assert roomiest_bounds(experiment, costs, within=least * 1.001) == bounds
    assert roomiest_bounds(experiment, costs, within=least * 0.999) is None


def test_stages_that_cannot_have_what_they_need_have_no_cuts() -> None:
    experiment = needy(with_parameters=True)
    layers = tuple(replace(layer, operators=()) for layer in experiment.model.layers)
    bare = replace(experiment, model=replace(experiment.model, layers=layers))
    assert roomiest_bounds(bare, costs_of(2)) is None


def test_a_stage_needs_parameters_where_the_runtime_says_so() -> None:
    assert latest_starts(needy(with_parameters=True)).tolist()[1:3] == [0, 1]
    assert not latest_starts(needy(with_parameters=False)).size
