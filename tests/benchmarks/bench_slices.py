"""Token slices: time the solver by length of the sequence, and the slice plans within a search."""

import time
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np

from amp_ray.cost.estimate import Estimate
from amp_ray.partition.slices import SliceSolution, SliceTables, solve_slices
from amp_ray.search import amp_ray_planner
from amp_ray.search.space import uniform_candidates
from amp_ray.search.token_slices import Granules, plan_slices
from support.experiments import experiment_from

NUM_STAGES = 48
LENGTHS = ((4096, 8), (8192, 8), (16384, 8), (32768, 8), (131072, 128))  # tokens, granularity
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


def long_sequences() -> Iterator[Row]:
    """Time one sequence on many stages; kernels have a floor, and attention grows with context."""
    _solved(SliceTables(forward_s=np.ones((1, 3)), backward_s=np.ones((1, 3))))  # compile
    for tokens, granularity in LENGTHS:
        granules = Granules(tokens=tokens, granularity=granularity)
        size, context = granules.cells
        forward_s = np.maximum(3.5e-4, 9e-7 * (size + 96) + 1.5e-11 * size * (size + context))
        tables = SliceTables(forward_s=forward_s[None, :], backward_s=2 * forward_s[None, :])
        start_s = time.process_time()
        answer = _solved(tables)
        yield {
            "tokens": tokens,
            "granularity": granularity,
            "granules": granules.count,
            "cpu_s": round(time.process_time() - start_s, 4),
            "evaluations": answer.num_evaluations,
            "proven": str(answer.value_s == answer.lower_bound_s),
        }


def _solved(tables: SliceTables) -> SliceSolution:
    answer = solve_slices(tables, (1.0, NUM_STAGES - 1.0))
    assert isinstance(answer, SliceSolution)
    return answer


def searches() -> Iterator[Row]:
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
