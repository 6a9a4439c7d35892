"""Time the slice plans within a search: those of every candidate of the uniform space."""

import time
from collections.abc import Iterator
from unittest.mock import patch

from amp_ray.cost.estimate import Estimate
from amp_ray.search import amp_ray_planner
from amp_ray.search.space import uniform_candidates
from amp_ray.search.token_slices import plan_slices
from support.experiments import experiment_from

NODES = (16, 128)
EXPERIMENT = """\
name: long sequences
model:
  {family: llama, num_layers: 96, hidden_size: 8192, num_heads: 64, sequence_length: 16384,
   vocab_size: 32000}
cluster:
  nodes: [{count: NODES, device: A100-80, slots: 8, intra_gbit_per_s: 2400, inter_gbit_per_s: 200}]
runtime: torch
recompute: full
global_batch_size: 768
search: {token_slices: true, tp_across_nodes: true}
"""

Row = dict[str, str | int | float]


def rows() -> Iterator[Row]:
    """Plan all candidates of clusters of some sizes; process CPU seconds of one core."""
    for nodes in NODES:
        experiment = experiment_from(EXPERIMENT.replace("NODES", str(nodes)))
        candidates = uniform_candidates(experiment)
        planner = amp_ray_planner.AmpRayPlanner(experiment=experiment)
        planner.plan(candidates[0])
        with patch.object(amp_ray_planner, "plan_slices", wraps=plan_slices) as counted:
            start_s = time.process_time()
            results = [planner.plan(candidate) for candidate in candidates]
            took_s = time.process_time() - start_s
        plans = [result.strategy for result in results if isinstance(result, Estimate)]
        yield {
            "devices": experiment.cluster.num_devices,
            "candidates": len(candidates),
            "slice_plans": counted.call_count,
            "sliced": sum(bool(strategy.token_slices) for strategy in plans),
            "cpu_s_per_1000_plans": round(1000 * took_s / counted.call_count, 1),
            "target_s": 20,
        }
