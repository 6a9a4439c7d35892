from itertools import combinations, pairwise

import pytest

from amp_ray.cost.model import CandidateCosts, CostModel
from amp_ray.cost.topology import IntArray
from amp_ray.search.cuts import NO_LIMIT, last_with_parameters, roomiest_bounds
from amp_ray.spec.candidate import Candidate
from support.experiments import small_experiment

MIXED = (
    "    - {count: 2, device: T4, slots: 2,",
    (
        "    - {count: 1, device: A100-80, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}\n"
        "    - {count: 1, device: T4, slots: 2,"
    ),
)


def costs_of(pp: int, *replacements: tuple[str, str]) -> CandidateCosts:
    candidate = Candidate(micro_batch_size=1, tp=1, dp=4 // pp, pp=pp, num_micro_batches=2 * pp)
    return CostModel(experiment=small_experiment(*replacements)).costs(candidate)


def need(costs: CandidateCosts, bounds: tuple[int, ...]) -> float:
    """The stage that needs most of its device, in parts of what that has."""
    peaks = costs.memory.peak_bytes(bounds)
    return max(
        peak / device.memory_bytes for peak, device in zip(peaks, costs.smallest, strict=True)
    )


def least_need(costs: CandidateCosts, num_layers: int, latest: IntArray) -> float:
    """The least need of all cuts, one after the other."""
    chains = (
        (0, *inner, num_layers)
        for inner in combinations(range(1, num_layers), costs.candidate.pp - 1)
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
    model = small_experiment().model
    latest = last_with_parameters(model) if with_parameters else NO_LIMIT
    bounds = roomiest_bounds(costs, latest)
    assert bounds is not None
    assert len(bounds) == pp + 1
    assert need(costs, bounds) == pytest.approx(
        least_need(costs, model.num_layers, latest), rel=1e-4
    )


def test_stages_that_cannot_have_what_they_need_have_no_cuts() -> None:
    nowhere = last_with_parameters(small_experiment().model) * 0 - 1
    assert roomiest_bounds(costs_of(2), nowhere) is None
