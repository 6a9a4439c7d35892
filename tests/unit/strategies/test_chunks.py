"""Chunks per stage: a field of candidates and strategies, in every form a strategy has."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from amp_ray.cost.model import CostModel
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import parse_strategies, strategy_from_json, strategy_to_json
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.strategy import Strategy, all_bounds, candidate_of, chunk_bounds
from support.checked import as_estimate, grid_of
from support.experiments import experiment_from

TEXT = """
name: long
model:
  family: gpt2
  num_layers: 8
  hidden_size: 512
  num_heads: 8
  sequence_length: 256
  vocab_size: 99
cluster: {nodes: [{device: A100-80, slots: 4, intra_gbit_per_s: 1200, inter_gbit_per_s: 100}]}
precision: bf16
runtime: torch
global_batch_size: 16
"""
CANDIDATE = grid_of(dp=2, pp=2, num_micro_batches=8, virtual_stages=2)
UNEVEN = Strategy.uniform(CANDIDATE, (0, 4, 5, 6, 11))
EVEN = Strategy.uniform(CANDIDATE, (0, 6, 11))


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return experiment_from(TEXT)


def test_chunks_follow_stage_after_stage(experiment: Experiment) -> None:
    assert UNEVEN.bounds == (0, 5, 11)  # four layers and one, one layer and five
    assert all_bounds(experiment.model, UNEVEN) == (0, 4, 5, 6, 11)
    assert all_bounds(experiment.model, EVEN) == (0, 3, 4, 7, 11)
    assert candidate_of(EVEN) == CANDIDATE


@pytest.mark.parametrize("strategy", [UNEVEN, EVEN])
def test_json_tells_chunks(experiment: Experiment, strategy: Strategy) -> None:
    record = json.loads(json.dumps(strategy_to_json(strategy, experiment.cluster)))
    assert record["virtual_stages"] == 2
    assert strategy_from_json(record, experiment.cluster) == strategy


def test_csv_tells_chunks(experiment: Experiment) -> None:
    limits = replace(experiment.limits, virtual_stages=(2,))
    interleaved = replace(experiment, limits=limits)
    rows = ("1,2,2,1,2,0 4 5 6 11", "1,2,2,1,,0 6 11", "1,1,4,1,,0 11")
    text = "\n".join(("tp,pp,dp,micro_batch_size,virtual_stages,bounds", *rows))
    found = parse_strategies(text, file="s.csv", experiment=interleaved)
    assert [given.strategy for given in found[:2]] == [UNEVEN, EVEN]
    assert found[2].candidate is not None
    assert found[2].candidate.virtual_stages == 1
    text = "tp,pp,dp,micro_batch_size,virtual_stages\n1,1,4,1,2\n"
    with pytest.raises(InputError, match=r"s.csv:2: virtual_stages.*need several stages"):
        parse_strategies(text, file="s.csv", experiment=interleaved)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [((0, 6, 6, 7, 11), "5 ascending bounds"), ((0, 6), "bounds must run from 0 in 2 stages")],
)
def test_what_makes_no_chunks_is_refused(bounds: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Strategy.uniform(CANDIDATE, bounds)


def test_a_single_stage_has_one_chunk() -> None:
    with pytest.raises(ValueError, match="virtual_stages 2 need several stages, found pp 1"):
        replace(CANDIDATE, pp=1)


def test_search_looks_at_the_chunks_that_it_is_told(experiment: Experiment) -> None:
    wider = experiment_from(TEXT + "search: {virtual_stages: [1, 2, 8]}\n")
    found = {(own.pp, own.virtual_stages) for own in uniform_candidates(wider)}
    assert found == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)}
    assert all(own.virtual_stages == 1 for own in uniform_candidates(experiment))
    result = as_estimate(AmpRayPlanner(experiment=wider).plan(CANDIDATE))
    assert result.strategy.virtual_stages == 2
    assert result.launchable
    plain = as_estimate(AmpRayPlanner(experiment=wider).plan(replace(CANDIDATE, virtual_stages=1)))
    assert plain.breakdown is not None
    assert result.breakdown is not None
    assert result.breakdown.bubble_s < plain.breakdown.bubble_s


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("runtime: torch", "runtime: deepspeed"), "runtimes that do: torch, megatron-core"),
        (("[2]", "[2], space: placement"), "planned in space uniform; the space is placement"),
        (("[2]", "[2], token_slices: true"), "token slices cannot be added to interleaved chunks"),
    ],
)
def test_what_cannot_interleave_is_refused(change: tuple[str, str], words: str) -> None:
    text = TEXT + "search: {virtual_stages: [2]}\n"
    with pytest.raises(InputError, match=f"search.virtual_stages: .*{words}"):
        experiment_from(text.replace(*change))


def test_every_chunk_needs_a_block(experiment: Experiment) -> None:
    candidate = replace(CANDIDATE, virtual_stages=4)
    strategy = Strategy.uniform(candidate, (0, 3, 11))
    estimate = CostModel(experiment=experiment).estimate(strategy)
    assert [reason.kind for reason in estimate.reasons] == ["fewer blocks than chunks"]
    planned = as_estimate(AmpRayPlanner(experiment=experiment).plan(candidate))
    assert planned.feasible
    bounds = chunk_bounds(experiment.model, planned.strategy.bounds, 4)
    assert all(first < end for first, end in pairwise(bounds))
