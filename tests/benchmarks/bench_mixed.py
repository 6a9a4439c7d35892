"""Search for stages with their own devices on mixed clusters; with numbers, pairs of clusters.

``python tests/benchmarks/bench_mixed.py FIRST LAST`` draws pairs "cluster, better cluster" and
counts those where the plan of the first, scored on the second, beats the plan of the second.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import candidates_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from support.better_clusters import cluster_pair
from support.experiments import experiment_from
from support.mixed_cases import CASES, case_text


def rows() -> Iterator[dict[str, str]]:
    """Measure every case; one table row each."""
    for name, model, count, kinds, batch, target in CASES:
        experiment = experiment_from(case_text(model, count, kinds, batch))
        start_s = time.process_time()
        best = _best(experiment)[1]
        yield {
            "devices": name,
            "measured": f"{time.process_time() - start_s:.1f} s CPU",
            "target": target,
            "iteration": "-" if best is None else f"{best.iteration_time_s:.4f} s",
        }


def _best(experiment: Experiment) -> tuple[AmpRayPlanner, Estimate | None]:
    """Return a planner and the fastest plan that it finds."""
    planner = AmpRayPlanner(experiment=experiment)
    ranking = search_candidates(
        planner,
        candidates_of(experiment),
        optional=planner.candidates().optional,
        workers=ALONE,
    )
    estimates = [
        estimate
        for estimate in ranking.results
        if isinstance(estimate, Estimate) and estimate.feasible
    ]
    return planner, min(estimates, key=lambda estimate: estimate.iteration_time_s, default=None)


def _pairs(first: int, last: int) -> None:
    """Compare pairs of clusters."""
    beaten = 0
    for seed in range(first, last):
        before, after, how = cluster_pair(seed, most_devices=32)
        old, (planner, new) = _best(before)[1], _best(after)
        if old is None:
            continue
        scored = planner.score(old.strategy)
        assert isinstance(scored, Estimate)
        if new is None or scored.iteration_time_s < new.iteration_time_s * (1 - 1e-9):
            beaten += 1
            print(seed, how, scored.iteration_time_s, new and new.iteration_time_s)
    print(f"{beaten} of {last - first} pairs")


if __name__ == "__main__":
    if sys.argv[1:]:
        _pairs(*map(int, sys.argv[1:3]))
    else:
        for row in rows():
            print("  ".join(f"{name}: {value}" for name, value in row.items()))
