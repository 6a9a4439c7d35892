"""A mixture of experts on 64 H100, as practice runs it."""

import json

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment_file import build_experiment
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import candidates_of
from support.experiments import MemoryFiles

MIXTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32000,
}
EXPERIMENT = """\
name: mixtral-8x7b
model: {config: config.json, sequence_length: 4096}
cluster:
  nodes: [{count: 8, device: H100, slots: 8, inter_gbit_per_s: 3200}]
precision: bf16
zero_stage: 1
runtime: megatron-core
global_batch_size: 1024
search: {micro_batch_sizes: [1, 2]}
"""
PEAK_FLOPS = 989e12


@pytest.fixture(scope="module")
def best() -> Estimate:
    """The fastest plan."""
    files = MemoryFiles({"config.json": json.dumps(MIXTRAL)})
    experiment = build_experiment(parse_yaml(EXPERIMENT, file="mixtral.yaml"), files)
    planner = AmpRayPlanner(experiment=experiment)
    ranking = search_candidates(planner, candidates_of(experiment), workers=ALONE)
    found = ranking.results[0]
    assert isinstance(found, Estimate)
    return found


def test_the_plan_shares_experts_out(best: Estimate) -> None:
    """Published recipes of Megatron-LM run it with ep 8 within nodes, few stages, tp 1 or 2."""
    options = best.strategy.stages[0].options
    assert best.feasible
    assert options.ep == 8
    assert options.tp <= 2
    assert best.strategy.pp <= 8


def test_the_rate_is_that_of_practice(best: Estimate) -> None:
    """Published runs of Megatron-LM and NeMo on H100 reach a model FLOPs utilization of 35 to 45 %.

    Counted are six operations for each of 12.9e9 active parameters and token, and causal attention.
    """
    assert best.tokens_per_s is not None
    flops_per_token = 6 * 12.9e9 + 6 * 32 * 4096 * 4096
    mfu = best.tokens_per_s * flops_per_token / 64 / PEAK_FLOPS
    assert 0.33 <= mfu <= 0.50
