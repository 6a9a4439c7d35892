"""What practice trains is found: Llama 3 70B on 64 H100 by Megatron-core."""

from dataclasses import replace

from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.ranking import Ranking, is_risky
from amp_ray.search.space import candidates_of
from support.experiments import experiment_from

LLAMA_3_70B = """\
name: llama-3-70b
model: {family: llama, num_layers: 80, hidden_size: 8192, num_heads: 64, num_key_value_heads: 8,
        feed_forward_size: 28672, sequence_length: 8192, vocab_size: 128256, tied_embedding: false}
cluster:
  nodes:
    - {count: 8, device: H100, slots: 8, intra_gbit_per_s: 2900, inter_gbit_per_s: 3200}
precision: bf16
optimizer: adamw
zero_stage: 1
runtime: megatron-core
global_batch_size: 128
"""
DENSE_FLOPS = 6 * 70.6e9 * 128 * 8192
"""Of a step's products with weights, without attention."""


def planned(experiment: Experiment) -> Ranking:
    candidates = candidates_of(experiment)
    return search_candidates(AmpRayPlanner(experiment=experiment), candidates, workers=ALONE)


def test_llama_3_70b_fits_64_h100_at_the_speed_that_practice_reaches() -> None:
    best = planned(experiment_from(LLAMA_3_70B)).results[0]
    assert isinstance(best, Estimate)
    assert best.feasible
    assert best.launchable
    assert not is_risky(best)
    assert best.strategy.tp in {4, 8}
    assert best.strategy.sequence_parallel
    utilisation = DENSE_FLOPS / best.iteration_time_s / (64 * 989e12)
    assert 0.3 < utilisation < 0.5


def test_fewer_strategies_fit_without_sequence_parallelism() -> None:
    divided = experiment_from(LLAMA_3_70B)
    whole = replace(divided, sequence_parallel=False)
    assert planned(divided).num_feasible > 2 * planned(whole).num_feasible
