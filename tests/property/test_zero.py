from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.cost.estimate import Estimate, Infeasible, Result
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.ranking import leader_order
from amp_ray.search.space import uniform_candidates, zero_choices
from amp_ray.strategies.candidate import with_zero
from amp_ray.strategies.zero import AUTO_STAGE, AUTO_ZERO, Zero
from support.examples import examples
from support.experiments import small_experiment

ABLE = replace(
    RUNTIMES["fsdp2"],
    min_zero_stage=0,
    context_bytes=0.0,
    launch_limit_s=None,
)
"""A runtime that supports all sharding."""


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    """Draw four devices on two nodes, with links slow or fast, and memory that may fit nothing."""
    given = small_experiment()
    intra, inter = draw(st.floats(1e8, 1e12)), draw(st.floats(1e8, 1e12))
    size = int(2 ** draw(st.floats(24, 34)))
    nodes = tuple(
        replace(
            node,
            device=replace(node.device, memory_bytes=size),
            intra=replace(node.intra, bandwidth_bytes_per_s=intra),
            inter=replace(node.inter, bandwidth_bytes_per_s=inter),
        )
        for node in given.cluster.nodes
    )
    return replace(
        given,
        cluster=replace(given.cluster, nodes=nodes),
        traits=ABLE,
        zero_stage=AUTO_STAGE,
        limits=replace(given.limits, micro_batch_sizes=(1, 2)),
    )


def order(result: Result) -> tuple[object, ...]:
    """Return the sort key of a ranking; a candidate without a strategy comes last."""
    return (1,) if isinstance(result, Infeasible) else (0, leader_order(result))


@examples(10)
@given(experiments())
def test_the_chosen_stage_is_the_best_of_all(experiment: Experiment) -> None:
    planner = AmpRayPlanner(experiment=experiment)
    for candidate in uniform_candidates(experiment):
        options = candidate.options
        choices = zero_choices(experiment, options.tp, options.dp, candidate.pp)
        assert (len(choices) > 1) == (options.zero == AUTO_ZERO)
        fixed = [planner.plan(with_zero(candidate, zero)) for zero in choices]
        fitting = [own for own in fixed if isinstance(own, Estimate) and own.feasible]
        found = planner.plan(candidate)
        if fitting:
            assert isinstance(found, Estimate)
            assert order(found) == order(min(fitting, key=leader_order))
        else:
            assert not (isinstance(found, Estimate) and found.feasible)


@examples(10)
@given(experiments(), st.sampled_from([1, 2, 4]))
def test_states_shrink_with_every_stage_and_larger_groups(experiment: Experiment, dp: int) -> None:
    cost_model = CostModel(experiment=experiment)
    (candidate,) = (
        own
        for own in uniform_candidates(experiment)
        if (own.options.tp, own.options.dp, own.pp) == (1, dp, 4 // dp)
        and own.micro_batch_size == 1
    )
    bounds = (0, *range(2, 2 * candidate.pp, 2), experiment.model.num_layers)

    def states(zero: Zero) -> float:
        """Return the bytes of weights, gradients and optimizer states on the first stage."""
        parts = cost_model.costs(with_zero(candidate, zero)).memory.parts(bounds)[0]
        return sum(parts[name] for name in ("weights", "gradients", "optimizer"))

    kept = [states(Zero(stage=stage)) for stage in range(3 if candidate.pp > 1 else 4)]
    assert kept == sorted(kept, reverse=True)
    if dp > 1:
        assert kept[-1] < kept[0]
    by_group = [states(Zero(stage=2, shard_ranks=ranks)) for ranks in (1, 2, 4) if ranks <= dp]
    assert by_group == sorted(by_group, reverse=True)
    assert by_group[-1] == pytest.approx(kept[2])
