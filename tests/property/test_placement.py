import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from amp_ray.clusters.cluster import Cluster
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtimes.traits import find_optimizer
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.placement import objective_s, plan_placement, solve_placement
from amp_ray.search.space import idle_candidates, uniform_candidates
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.units import BYTES_PER_ELEMENT
from support.better_nodes import BETTER
from support.examples import examples
from support.placement_oracle import all_placements, best_placement, random_experiment

ROUNDING = 1e-9


@st.composite
def experiments(draw: st.DrawFn, sizes: tuple[int, ...] = (2, 3, 4, 6)) -> Experiment:
    """Small random clusters; the number of devices shrinks, and so does the seed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_experiment(rng, draw(st.sampled_from(sizes)))


@st.composite
def cases(draw: st.DrawFn, sizes: tuple[int, ...] = (2, 3, 4, 6)) -> tuple[CostModel, Candidate]:
    """An experiment, and one of its candidates that the model can be divided by."""
    experiment = draw(experiments(sizes))
    num_layers, heads = experiment.model.num_layers, experiment.model.shape.num_heads
    fitting = [
        candidate
        for candidate in uniform_candidates(experiment)
        if candidate.pp <= num_layers and heads % candidate.options.tp == 0
    ]
    return CostModel(experiment=experiment), draw(st.sampled_from(fitting))


@st.composite
def idle_cases(draw: st.DrawFn) -> tuple[CostModel, Candidate]:
    """An experiment, and a candidate that leaves some of its devices idle."""
    experiment = draw(experiments((2, 3, 4)))
    experiment = replace(experiment, limits=replace(experiment.limits, space="placement"))
    heads = experiment.model.shape.num_heads
    found = [own for own in idle_candidates(experiment) if heads % own.options.tp == 0]
    return CostModel(experiment=experiment), draw(st.sampled_from(found))


def value_of(cost_model: CostModel, candidate: Candidate) -> float:
    """Give the best objective, infinite where nothing fits."""
    value_s = solve_placement(cost_model, candidate).value_s
    return math.inf if value_s is None else value_s


def is_matched_freely(cost_model: CostModel, candidate: Candidate) -> bool:
    """Tell whether the replicas' order cannot change what tied weights take."""
    tied = cost_model.weights(candidate.options.tp).tied
    return tied is None or candidate.options.dp == 1 or candidate.pp == 1


@examples(120)
@given(case=cases() | idle_cases())
def test_search_equals_brute_force(case: tuple[CostModel, Candidate]) -> None:
    cost_model, candidate = case
    solution = solve_placement(cost_model, candidate)
    best_s, best = best_placement(cost_model, candidate)
    if best is None:
        assert solution.value_s is None
        return
    assert solution.value_s is not None
    assert solution.lower_bound_s is not None
    assert solution.lower_bound_s <= best_s * (1 + ROUNDING)
    assert best_s <= solution.value_s * (1 + ROUNDING)
    if is_matched_freely(cost_model, candidate):
        assert solution.value_s == pytest.approx(best_s, rel=ROUNDING)
        assert solution.lower_bound_s == pytest.approx(best_s, rel=ROUNDING)


@examples(6)
@given(case=cases((8,)))
def test_search_equals_brute_force_on_eight_devices(case: tuple[CostModel, Candidate]) -> None:
    cost_model, candidate = case
    assume(is_matched_freely(cost_model, candidate))
    best_s, _ = best_placement(cost_model, candidate)
    assert value_of(cost_model, candidate) == pytest.approx(best_s, rel=ROUNDING)


@examples(40)
@given(case=cases((2, 4, 6, 8, 12)))
def test_no_plan_is_worse_than_the_default_placement(case: tuple[CostModel, Candidate]) -> None:
    cost_model, candidate = case
    placed = plan_placement(cost_model, candidate)
    default = AmpRayPlanner(experiment=cost_model.experiment).plan(candidate)
    assert isinstance(default, Estimate)
    assert placed.feasible or not default.feasible
    if placed.feasible == default.feasible:
        assert placed.iteration_time_s <= default.iteration_time_s * (1 + ROUNDING)


@examples(40)
@given(case=cases((4, 6, 8, 12)))
def test_plans_use_every_device_once_and_keep_groups_in_nodes(
    case: tuple[CostModel, Candidate],
) -> None:
    cost_model, candidate = case
    cluster = cost_model.experiment.cluster
    for leader in solve_placement(cost_model, candidate).leaders:
        assert sorted(leader.placement) == list(range(cluster.num_devices))
        nodes = np.array(cluster.node_of_device)[list(leader.placement)]
        groups = nodes.reshape(-1, candidate.options.tp)
        assert (groups == groups[:, :1]).all()


@examples(40)
@given(case=cases((4, 6, 8, 12)))
def test_no_rank_needs_more_than_its_device_has(case: tuple[CostModel, Candidate]) -> None:
    cost_model, candidate = case
    placed = plan_placement(cost_model, candidate)
    nodes = cost_model.experiment.cluster.nodes
    limits = [node.device.memory_bytes for node in nodes for _ in range(node.num_slots)]
    peaks = [
        peak_bytes(cost_model, candidate, placed.strategy.bounds, stage)
        for stage in range(candidate.pp)
    ]
    assert peaks == pytest.approx(placed.peak_memory_bytes, rel=ROUNDING)
    stage_size = candidate.options.dp * candidate.options.tp
    fits = [
        peaks[rank // stage_size] <= limits[device] * (1 + ROUNDING)
        for rank, device in enumerate(placed.strategy.placement)
    ]
    assert all(fits) or not placed.feasible


@examples(40)
@given(case=cases((4, 6, 8, 12)))
def test_the_value_is_the_objective_of_a_leader_that_fits(
    case: tuple[CostModel, Candidate],
) -> None:
    cost_model, candidate = case
    solution = solve_placement(cost_model, candidate)
    fitting = [leader for leader in solution.leaders if cost_model.estimate(leader).feasible]
    values = [objective_s(cost_model, leader) for leader in fitting]
    assert solution.value_s == min(values, default=None)


@given(case=cases(), data=st.data())
def test_a_better_node_never_gives_a_worse_best(
    case: tuple[CostModel, Candidate], data: st.DataObject
) -> None:
    cost_model, candidate = case
    assume(is_matched_freely(cost_model, candidate))
    cluster = cost_model.experiment.cluster
    index = data.draw(st.integers(0, len(cluster.nodes) - 1))
    better = data.draw(st.sampled_from(BETTER))
    nodes = list(cluster.nodes)
    nodes[index] = better(nodes[index])
    improved = replaced(cost_model, Cluster(nodes=tuple(nodes), pair_links=cluster.pair_links))
    before_s = value_of(cost_model, candidate)
    assert value_of(improved, candidate) <= before_s * (1 + ROUNDING)


@given(case=cases((4, 6)), data=st.data())
def test_the_order_in_which_nodes_are_listed_does_not_matter(
    case: tuple[CostModel, Candidate], data: st.DataObject
) -> None:
    cost_model, candidate = case
    assume(is_matched_freely(cost_model, candidate))
    cluster = cost_model.experiment.cluster
    # Rings go through nodes in their order: with more than three, it tells which pairs they meet.
    assume(candidate.options.dp <= 3 or not cluster.pair_links)
    order = data.draw(st.permutations(range(len(cluster.nodes))))
    shuffled = replaced(cost_model, cluster.part(order))
    value_s = value_of(cost_model, candidate)
    assert value_of(shuffled, candidate) == pytest.approx(value_s, rel=ROUNDING)


def test_brute_force_knows_every_placement_up_to_symmetry() -> None:
    experiment = random_experiment(np.random.default_rng(0), 4)
    node = experiment.cluster.nodes[0]
    nodes = tuple(replace(node, name=name, num_slots=2) for name in "ab")
    pipeline = Candidate(
        micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=4, num_micro_batches=1
    )
    found = list(all_placements(Cluster(nodes=nodes), pipeline))
    assert found == [(0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1)]


@given(case=cases((4, 8)), data=st.data())
def test_tilings_of_the_published_planner_are_never_better(
    case: tuple[CostModel, Candidate], data: st.DataObject
) -> None:
    cost_model, candidate = case
    assume(is_matched_freely(cost_model, candidate))
    cluster, dp = cost_model.experiment.cluster, candidate.options.dp
    assume(len({node.num_slots for node in cluster.nodes}) == 1)
    units = cluster.nodes[0].num_slots // candidate.options.tp
    height = data.draw(
        st.sampled_from(
            [
                rows
                for rows in range(1, dp + 1)
                if dp % rows == 0 and len(cluster.nodes) % rows == 0 and units % (dp // rows) == 0
            ]
            or [0]
        )
    )
    assume(height)
    placement = tiling(cluster, candidate, height)
    strategies = [
        Strategy.uniform(candidate, leader.bounds, placement)
        for leader in solve_placement(cost_model, candidate).leaders
    ]
    for strategy in strategies:
        if cost_model.estimate(strategy).feasible:
            value_s = value_of(cost_model, candidate)
            assert value_s <= objective_s(cost_model, strategy) * (1 + ROUNDING)


def tiling(cluster: Cluster, candidate: Candidate, height: int) -> tuple[int, ...]:
    """Lay stages over the grid of nodes and groups as tiles that are ``height`` nodes high."""
    width = candidate.options.dp // height
    slots = cluster.nodes[0].num_slots
    return tuple(
        node * slots + unit * candidate.options.tp + tp_index
        for top in range(0, len(cluster.nodes), height)
        for left in range(0, slots // candidate.options.tp, width)
        for node in range(top, top + height)
        for unit in range(left, left + width)
        for tp_index in range(candidate.options.tp)
    )


def peak_bytes(
    cost_model: CostModel, candidate: Candidate, bounds: tuple[int, ...], stage: int
) -> float:
    """Add up what a rank of a stage needs, term by term, apart from the tables of the solver."""
    given, tp = cost_model.experiment, candidate.options.tp
    traits, constants = given.traits, given.constants
    per = traits.bytes_per_parameter(given.precision)
    size, width = candidate.micro_batch_size, BYTES_PER_ELEMENT[given.precision]
    held = given.model.layers[bounds[stage] : bounds[stage + 1]]
    parameters = sum(layer.sharded_parameters / tp + layer.replicated_parameters for layer in held)
    tied = [layer.tied_parameters / tp for layer in held if layer.tied_parameters]
    parameters -= tied[0] if len(tied) > 1 else 0.0
    flying = min(candidate.pp - stage, candidate.num_micro_batches)
    kept = sum(layer.saved_bytes(tp=tp, bytes_per_element=width) for layer in held)
    temporary = max(
        max(
            layer.logits * traits.logit_bytes / tp,
            3 * layer.largest_saved_bytes(tp=tp, bytes_per_element=width),
        )
        for layer in held
    )
    entering, leaving = (
        0.0
        if not 0 < bound < given.model.num_layers
        else size * width * before.output_elements / (tp if before.output_sharded else 1)
        + traits.mask_bytes
        for bound in bounds[stage : stage + 2]
        for before in [given.model.layers[bound - 1]]
    )
    bucketed = candidate.options.dp > 1 or traits.buckets_alone
    bucket = per.bucket * min(parameters, traits.bucket_elements) if bucketed else 0.0
    moments = find_optimizer(given.optimizer).moment_bytes
    passing = flying * size * kept + (flying + 1) * entering + flying * leaving + size * temporary
    passing += max(bucket, per.step * parameters)
    return (
        traits.context_bytes * constants.context_scale
        + parameters * (per.kept + per.master + moments)
        + traits.allocator_factor * constants.allocator_scale * passing
    )


def replaced(cost_model: CostModel, cluster: Cluster) -> CostModel:
    """Put the experiment on another cluster."""
    return CostModel(experiment=replace(cost_model.experiment, cluster=cluster))
