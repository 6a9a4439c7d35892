"""What the spaces owe each other: a wider one, or more nodes, never make the answer slower."""

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment, Space
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.ray.searching import ALONE
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.placement import solve_placement
from amp_ray.search.space import idle_candidates, optional_candidates, uniform_candidates
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy
from support.examples import examples
from support.placement_oracle import all_placements, random_experiment

ROUNDING = 1e-9
MOST_WORSE = 1.05
SIZES = (2, 3, 4, 5, 6)


@st.composite
def experiments(draw: st.DrawFn, sizes: tuple[int, ...] = SIZES) -> Experiment:
    """Small random clusters, any of whose devices may stay idle."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = random_experiment(rng, draw(st.sampled_from(sizes)))
    return replace(found, limits=replace(found.limits, idle_devices=True))


def answer_s(experiment: Experiment, space: Space) -> float:
    """Return what the fastest strategy takes, safe or not; infinite where nothing fits."""
    chosen = replace(experiment, limits=replace(experiment.limits, space=space))
    found = plan_experiment(chosen, "amp-ray", workers=ALONE, progress=lambda _, __: None)
    feasible = found.ranking.results[: found.ranking.num_feasible]
    times_s = [each.iteration_time_s for each in feasible if isinstance(each, Estimate)]
    return min(times_s, default=math.inf)


def is_tied(experiment: Experiment) -> bool:
    """Tell whether a weight is tied: the order of replicas then counts, beyond the objective."""
    return CostModel(experiment=experiment).weights(1).tied is not None


def grids(experiment: Experiment) -> tuple[Candidate, ...]:
    """Return the candidates that use all devices, if there are any."""
    with suppress(ValueError):
        return uniform_candidates(experiment)
    return ()


def value_of(cost_model: CostModel, candidate: Candidate) -> float:
    """Return the best objective; infinite where nothing fits."""
    value_s = solve_placement(cost_model, candidate).value_s
    return math.inf if value_s is None else value_s


@examples(10)
@given(experiment=experiments())
def test_a_wider_space_is_never_worse(experiment: Experiment) -> None:
    spaces: tuple[Space, ...] = ("uniform", "placement", "heterogeneous")
    uniform_s, placement_s, heterogeneous_s = (answer_s(experiment, space) for space in spaces)
    assert placement_s <= uniform_s * (1 + ROUNDING)
    assert heterogeneous_s <= placement_s * (1 + ROUNDING)


@examples(10)
@given(experiment=experiments((3, 4, 5, 6)), data=st.data())
def test_more_nodes_are_hardly_ever_worse_for_placements(
    experiment: Experiment, data: st.DataObject
) -> None:
    """Placements are compared by a closed form, which may differ a little from the simulation."""
    nodes = experiment.cluster.nodes
    assume(len(nodes) > 1)
    lost = data.draw(st.integers(0, len(nodes) - 1))
    kept = [index for index in range(len(nodes)) if index != lost]
    fewer = replace(experiment, cluster=experiment.cluster.part(kept))
    assert answer_s(experiment, "placement") <= answer_s(fewer, "placement") * MOST_WORSE


@examples(100)
@given(experiment=experiments((3, 4, 5, 6)), data=st.data())
def test_more_nodes_never_make_the_objective_of_a_placement_worse(
    experiment: Experiment, data: st.DataObject
) -> None:
    nodes = experiment.cluster.nodes
    assume(len(nodes) > 1 and not is_tied(experiment))
    lost = data.draw(st.integers(0, len(nodes) - 1))
    kept = [index for index in range(len(nodes)) if index != lost]
    fewer = replace(
        experiment,
        limits=replace(experiment.limits, space="placement"),
        cluster=experiment.cluster.part(kept),
    )
    heads = experiment.model.shape.num_heads
    fitting = [
        own
        for own in (*grids(fewer), *idle_candidates(fewer))
        if heads % own.options.tp == 0 and own.pp <= experiment.model.num_layers
    ]
    candidate = data.draw(st.sampled_from(fitting))
    value_s = value_of(CostModel(experiment=experiment), candidate)
    assert value_s <= value_of(CostModel(experiment=fewer), candidate) * (1 + ROUNDING)


@examples(40)
@given(experiment=experiments((2, 3, 4)), data=st.data())
def test_no_strategy_undercuts_the_bound_of_its_candidate(
    experiment: Experiment, data: st.DataObject
) -> None:
    traits = replace(
        experiment.traits,
        blocking_transfers=data.draw(st.booleans()),
        duplex_transfers=data.draw(st.booleans()),
    )
    experiment = replace(
        experiment, limits=replace(experiment.limits, space="heterogeneous"), traits=traits
    )
    planner = AmpRayPlanner(experiment=experiment)
    candidate = data.draw(st.sampled_from(optional_candidates(experiment)))
    if candidate.pp > 1:
        candidate = replace(candidate, virtual_stages=data.draw(st.sampled_from((1, 1, 2))))
    least_s = planner.chooser.least_s(candidate, math.inf)
    num_layers = experiment.model.num_layers
    for placement in all_placements(experiment.cluster, candidate):
        inner = data.draw(st.permutations(range(1, num_layers)))[: candidate.pp - 1]
        strategy = Strategy.uniform(candidate, (0, *sorted(inner), num_layers), placement)
        found = planner.score(strategy)
        assert isinstance(found, Estimate)
        assert not found.feasible or least_s <= found.iteration_time_s * (1 + ROUNDING)
