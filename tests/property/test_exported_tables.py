"""`export --to csv`, read back: every strategy of every space is the one that was written."""

import pytest

import amp_ray
from amp_ray.cost.estimate import Estimate
from amp_ray.exports.rows import csv_table
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import Entry, parse_strategies
from amp_ray.search.rows import strategy_rows
from amp_ray.strategies.candidate import GroupsCandidate
from support.experiments import experiment_from

GPT = """{family: gpt2, num_layers: 6, hidden_size: 256, num_heads: 8, sequence_length: 256,
        vocab_size: 4096}"""
MIXTRAL = """{family: llama, num_layers: 4, hidden_size: 256, num_heads: 8, num_key_value_heads: 4,
        feed_forward_size: 512, sequence_length: 256, vocab_size: 4096, num_experts: 4,
        experts_per_token: 2}"""
ALIKE = "{count: 2, device: A100-40, slots: 2, intra_gbit_per_s: 1200, inter_gbit_per_s: 100}"
MIXED = f"{ALIKE}, {{device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}}"
TEXT = """\
name: table
model: {model}
cluster: {{nodes: [{nodes}]}}
precision: fp16
recompute: auto
zero_stage: auto
runtime: {runtime}
global_batch_size: 24
search: {{micro_batch_sizes: [1, 2], {search}}}
"""
CASES = {
    "chunks and cp": (GPT, ALIKE, "megatron-core", "virtual_stages: [1, 2], max_cp: 2"),
    "experts": (MIXTRAL, ALIKE, "megatron-core", "max_cp: 2"),
    "shards": (GPT, ALIKE, "fsdp2", "max_pp: 2"),
    "token slices": (GPT, ALIKE, "torch", "token_slices: true"),
    "placement": (GPT, MIXED, "torch", "space: placement"),
    "stages that differ": (GPT, MIXED, "torch", "space: heterogeneous, max_pp: 3"),
    "too little memory": (GPT, ALIKE.replace("slots", "memory_gib: 0.75, slots"), "torch", ""),
}


def table_of(experiment: Experiment, records: object) -> str:
    rows = strategy_rows(records, experiment.cluster)  # type: ignore[arg-type]
    return csv_table(rows).files["strategies.csv"]


def read(text: str, experiment: Experiment) -> tuple[Entry, ...]:
    return parse_strategies(text, file="s.csv", experiment=experiment)


@pytest.mark.parametrize("case", CASES)
def test_a_table_of_a_plan_has_its_strategies(case: str) -> None:
    model, nodes, runtime, search = CASES[case]
    text = TEXT.format(model=model, nodes=nodes, runtime=runtime, search=search)
    experiment = experiment_from(text)
    plan = amp_ray.plan(experiment, num_rows=None, workers=0)
    made = [
        result
        for result in plan.results
        if isinstance(result, Estimate) or not isinstance(result.candidate, GroupsCandidate)
    ]
    entries = read(table_of(experiment, plan.to_json()["ranking"]), experiment)
    assert [entry.strategy or entry.candidate for entry in entries] == [
        result.strategy if isinstance(result, Estimate) else result.candidate for result in made
    ]
    assert len(entries[0].not_read) == (len(made) < len(plan.results))
    assert not any(entry.peak_memory_bytes for entry in entries)  # those of a plan are predicted
