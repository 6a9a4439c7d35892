import numpy as np

from amp_ray.search.cuts import even_block_bounds
from amp_ray.search.placement.problem import stage_needs
from support.mixed_cluster import mixed_candidate, mixed_cost_model


def test_every_size_of_memory_has_its_limits() -> None:
    cost_model, candidate = mixed_cost_model(slow_gib=3), mixed_candidate(dp=2)
    needs = stage_needs(cost_model, candidate, tied_counts=False)
    small, large = (needs.earliest_start[gib * 2.0**30] for gib in (3, 16))
    assert small.shape == (candidate.pp, cost_model.experiment.model.num_layers + 1)
    assert (small >= large).all()
    assert (small > large).any()


def test_parameters_add_up_to_those_of_the_model() -> None:
    cost_model, candidate = mixed_cost_model(), mixed_candidate(dp=2)
    needs = stage_needs(cost_model, candidate, tied_counts=False)
    total = sum(layer.num_parameters for layer in cost_model.experiment.model.layers)
    assert needs.parameters[-1] == total


def test_one_stage_holds_a_tied_weight_once() -> None:
    cost_model = mixed_cost_model(tied=True)
    alone, parted = (
        stage_needs(cost_model, mixed_candidate(dp=dp), tied_counts=False).parameters[-1]
        for dp in (6, 3)
    )
    tied = cost_model.weights(1).tied
    assert tied is not None
    assert parted - alone == tied.parameters


def test_cuts_that_a_runtime_fixes_are_the_only_ones() -> None:
    cost_model = mixed_cost_model(("name: mixed", "name: mixed\nruntime: megatron"))
    candidate = mixed_candidate(dp=3)
    (starts,) = stage_needs(cost_model, candidate, tied_counts=False).earliest_start.values()
    bounds = even_block_bounds(cost_model.experiment.model, candidate.pp)
    ends = np.arange(starts.shape[1])
    for stage, row in enumerate(starts):
        assert np.flatnonzero(row < ends).tolist() == [bounds[stage + 1]]
        assert row[bounds[stage + 1]] == bounds[stage]
