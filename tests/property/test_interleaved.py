"""Micro-batches in flight of interleaved chunks, compared with their instruction lists."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.cost.instructions import Schedule
from amp_ray.cost.model import CostModel
from amp_ray.cost.timer import chunks_in_flight
from amp_ray.search.cuts import even_block_bounds
from amp_ray.strategies.strategy import Strategy, chunk_bounds
from support.checked import grid_of
from support.experiments import experiment_from

PIPELINES = st.tuples(st.integers(2, 5), st.integers(1, 12), st.integers(2, 4))
"""Stages, micro-batches, chunks per stage."""

LONG = """
name: long
model:
  family: gpt2
  num_layers: 16
  hidden_size: 512
  num_heads: 8
  sequence_length: 256
  vocab_size: 99
cluster:
  nodes:
    - {count: 2, device: A100-80, slots: 4, intra_gbit_per_s: 1200, inter_gbit_per_s: 100}
precision: bf16
runtime: torch
global_batch_size: 32
"""


@given(size=PIPELINES, data=st.data())
def test_chunks_in_flight_are_those_of_the_instruction_lists(
    size: tuple[int, int, int], data: st.DataObject
) -> None:
    pp, num_micro_batches, chunks = size
    stage = data.draw(st.integers(0, pp - 1))
    schedule = Schedule(pp=pp, num_slices=(1,) * num_micro_batches, virtual_stages=chunks)
    now, states = [0] * chunks, set[tuple[int, ...]]()
    for kind, unit in schedule.passes(stage):
        now[unit.chunk] += 1 if kind == "F" else -1
        if kind == "F":
            states.add(tuple(now))
    in_flight = chunks_in_flight(stage, pp, num_micro_batches, chunks)
    assert {tuple(int(count) for count in row) for row in in_flight} == states


@given(data=st.data())
def test_memory_of_even_chunks_is_never_below_that_of_one(data: st.DataObject) -> None:
    """Interleaving has more forward passes in flight; the chunks of a stage add up to the stage."""
    pp, chunks = data.draw(st.sampled_from([(2, 2), (4, 2), (2, 4), (4, 4)]))
    model = CostModel(experiment=experiment_from(LONG))
    candidate = grid_of(dp=8 // pp, pp=pp, num_micro_batches=32 * pp // 8)
    layers = model.experiment.model
    bounds = even_block_bounds(layers, pp)
    plain = Strategy.uniform(candidate, bounds)
    whole = model.estimate(plain)
    even = model.estimate(replace(plain, virtual_stages=chunks))
    told = Strategy.uniform(
        replace(candidate, virtual_stages=chunks), chunk_bounds(layers, bounds, chunks)
    )
    assert model.estimate(told).iteration_time_s == even.iteration_time_s
    assert model.estimate(told).peak_memory_bytes == even.peak_memory_bytes
    assert even.breakdown is not None
    assert whole.breakdown is not None
    assert even.breakdown.compute_s == pytest.approx(whole.breakdown.compute_s, rel=1e-9)
    assert sum(even.peak_memory_bytes) >= sum(whole.peak_memory_bytes) * (1 - 1e-9)
