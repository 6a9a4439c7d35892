import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import candidates_of
from support.cluster_pairs import cluster_pair, with_new_kind


def best(experiment: Experiment) -> Estimate | None:
    """Return the fastest plan that fits."""
    planner = AmpRayPlanner(experiment=experiment)
    ranking = search_candidates(
        planner,
        candidates_of(experiment),
        optional=planner.candidates().optional,
        workers=ALONE,
    )
    found = [each for each in ranking.results if isinstance(each, Estimate) and each.feasible]
    return min(found, key=lambda each: each.iteration_time_s, default=None)


@pytest.mark.parametrize("seed", range(12))
def test_the_old_plan_never_beats_the_answer_on_a_better_cluster(seed: int) -> None:
    before, after, _ = cluster_pair(seed, most_devices=5)
    check(before, after)


@pytest.mark.parametrize("seed", range(8))
def test_nor_does_it_where_a_node_of_another_kind_is_added(seed: int) -> None:
    before, _, _ = cluster_pair(seed, most_devices=5)
    check(before, with_new_kind(before, seed))


def check(before: Experiment, after: Experiment) -> None:
    """Compare the best plan of a better cluster with the old one on it."""
    old = best(before)
    if old is None:
        return
    scored, new = AmpRayPlanner(experiment=after).score(old.strategy), best(after)
    assert isinstance(scored, Estimate)
    assert new is not None
    assert new.iteration_time_s <= scored.iteration_time_s * (1 + 1e-9)
