"""Llama-3-8B on 32 H100 by FSDP: what practice runs (torchtitan), at an MFU that it reaches."""

import pytest

from amp_ray.cost.estimate import Estimate, Result
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.ranking import leader_order
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.zero import Zero
from support.experiments import experiment_from

LLAMA = """\
name: llama-3-8b
model: {family: llama, num_layers: 32, hidden_size: 4096, num_heads: 32, num_key_value_heads: 8,
  sequence_length: 8192, vocab_size: 128256, feed_forward_size: 14336}
cluster:
  nodes: [{count: 4, device: H100, slots: 8, intra_gbit_per_s: 3600, inter_gbit_per_s: 3200}]
precision: bf16
runtime: fsdp2
recompute: auto
global_batch_size: 64
"""


def best_of(experiment: Experiment) -> Estimate:
    """Return the fastest strategy that fits."""
    planner = AmpRayPlanner(experiment=experiment)
    results: list[Result] = [planner.plan(own) for own in uniform_candidates(experiment)]
    fitting = [own for own in results if isinstance(own, Estimate) and own.feasible]
    return min(fitting, key=leader_order)


@pytest.mark.parametrize("keys", ["", "zero_stage: 3\n", "zero_stage: auto\n"])
def test_llama_3_8b_is_planned_as_fsdp(keys: str) -> None:
    experiment = experiment_from(LLAMA + keys)
    best = best_of(experiment)
    strategy = best.strategy
    assert (strategy.tp, strategy.pp, strategy.dp) == (1, 1, 32)
    assert strategy.zero.stage == 3
    assert best.launchable
    assert best.tokens_per_s is not None
    mfu = best.tokens_per_s / 32 * 6 * experiment.model.num_parameters / 989.4e12
    assert 0.35 < mfu < 0.55


def test_hybrid_shards_are_no_slower_between_slow_nodes() -> None:
    slow = LLAMA.replace("inter_gbit_per_s: 3200", "inter_gbit_per_s: 100")
    slow += "zero_stage: auto\nreshard_after_forward: true\nsearch: {max_pp: 1, max_tp: 1}\n"
    assert best_of(experiment_from(slow)).strategy.zero.shard_ranks == 8
    all_ranks = best_of(experiment_from(slow.replace("zero_stage: auto", "zero_stage: 3")))
    assert all_ranks.strategy.zero == Zero(stage=3)
    assert best_of(experiment_from(slow)).iteration_time_s < all_ranks.iteration_time_s
