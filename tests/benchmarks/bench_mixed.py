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

GPT = (
    "{family: gpt2, num_layers: 24, hidden_size: 2048, num_heads: 16, sequence_length: 1024, "
    "vocab_size: 51200}"
)
LLAMA = (
    "{family: llama, num_layers: 40, hidden_size: 5120, num_heads: 40, sequence_length: 4096, "
    "vocab_size: 32000, feed_forward_size: 13824}"
)
RATES = {
    "A100-40": (2400, 200),
    "A100-80": (2400, 200),
    "H100": (3600, 400),
    "V100-16": (1200, 100),
    "P100-16": (400, 80),
    "T4": (100, 50),
}
CASES = (
    ("16 of 2 kinds", GPT, 1, ("A100-40", "V100-16"), 64, "0.3 s"),
    ("4 kinds x 8", GPT, 1, ("A100-40", "V100-16", "T4", "P100-16"), 128, "2 s"),
    ("48 of 3", GPT, 2, ("A100-40", "V100-16", "T4"), 192, ""),
    ("64 of 4", GPT, 2, ("A100-40", "V100-16", "T4", "P100-16"), 256, "6 s"),
    ("128 of 4", LLAMA, 4, ("A100-40", "V100-16", "T4", "A100-80"), 512, "12 s"),
    ("256 of 2", LLAMA, 16, ("A100-80", "H100"), 1024, "15 s"),
)


def rows() -> Iterator[dict[str, str]]:
    """Measure every case; one table row each."""
    for name, model, count, kinds, batch, target in CASES:
        nodes = "\n".join(
            f"    - {{count: {count}, device: {kind}, slots: 8, "
            f"intra_gbit_per_s: {RATES[kind][0]}, inter_gbit_per_s: {RATES[kind][1]}}}"
            for kind in kinds
        )
        experiment = experiment_from(
            f"name: mixed\nmodel: {model}\ncluster:\n  nodes:\n{nodes}\n"
            f"global_batch_size: {batch}\nsearch: {{space: heterogeneous}}\n"
        )
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
