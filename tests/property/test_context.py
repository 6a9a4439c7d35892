"""Ranks of a sequence do all its work, whatever they exchange, and exchange what they must."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import find_device
from amp_ray.cost.collective import Path
from amp_ray.cost.roofline import Rank
from amp_ray.cost.samples import ContextGroup, context_exchange_s, context_experiment
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.model import Layer
from amp_ray.models.operator import Elementwise
from amp_ray.strategies.candidate import StageOptions
from support.experiments import experiment_from

HEADS, PAIRS, HEAD_SIZE = 16, 8, 64
BYTES_PER_S = 1e9
TEXT = f"""
name: long
model: {{family: llama, num_layers: 2, hidden_size: {HEADS * HEAD_SIZE}, num_heads: {HEADS},
  num_key_value_heads: {PAIRS}, feed_forward_size: 2048, vocab_size: 32000, sequence_length: 8192}}
cluster: {{nodes: [{{count: 4, device: H100, slots: 8, inter_gbit_per_s: 3200}}]}}
precision: bf16
runtime: megatron-core
global_batch_size: 32
"""
WHOLE = experiment_from(TEXT)
powers = st.sampled_from((1, 2, 4, 8))
lengths = st.sampled_from((1024, 8192, 65536))


def of_length(length: int) -> Experiment:
    shape = replace(WHOLE.model.shape, sequence_length=length)
    return replace(WHOLE, model=replace(WHOLE.model, shape=shape))


def block(experiment: Experiment, cp: int, head_ranks: int) -> Layer:
    return context_experiment(experiment, cp, head_ranks).model.layers[1]


def attention(layer: Layer) -> Elementwise:
    [found] = [op for op in layer.elementwise if op.name == "attention"]
    return found


@given(length=lengths, ring=powers, heads=powers)
def test_work_and_kept_tensors_of_attention_are_divided_alike(
    length: int, ring: int, heads: int
) -> None:
    experiment, cp = of_length(length), ring * heads
    divided, alone = (attention(block(experiment, cp, ranks)) for ranks in (heads, 1))
    whole = attention(block(experiment, 1, 1))
    assert divided.flops == alone.flops == whole.flops / cp
    assert divided.saved_elements == alone.saved_elements == whole.saved_elements / cp
    assert divided.num_kernels == ring
    assert divided.forward_elements <= alone.forward_elements
    # A block of queries of a rank with all tokens of its heads reaches as far as without cp
    assert (divided.block_flops == whole.block_flops) == (ring == 1)


@given(length=lengths, tp=powers, heads=st.sampled_from((2, 4, 8)))
def test_all_to_alls_carry_every_head_of_every_token_once_in_each_pass(
    length: int, tp: int, heads: int
) -> None:
    layer = block(of_length(length), heads, heads)
    rank = Rank.of(find_device("H100"), StageOptions(tp=tp, dp=1), 1, "bf16")
    path = Path(bytes_per_s=BYTES_PER_S, step_s=0.0)
    group = ContextGroup(ring_ranks=1, ring=path, exchange=path)
    free = Constants(collective_start_s=0.0)
    times = context_exchange_s(layer, rank, group, WHOLE.traits, free)
    carried = 2 * length * 2 * (HEADS + PAIRS) * HEAD_SIZE / heads / tp
    assert times == pytest.approx((carried / BYTES_PER_S,) * 2)


@given(length=lengths, ring=st.sampled_from((2, 4, 8)), heads=powers)
def test_blocks_of_a_ring_are_as_large_after_all_to_alls(
    length: int, ring: int, heads: int
) -> None:
    both = attention(block(of_length(length), ring * heads, heads))
    assert both.context_elements == 2 * length * PAIRS * HEAD_SIZE / ring / heads


@given(length=lengths)
def test_nothing_is_exchanged_where_nothing_is_divided(length: int) -> None:
    layer = block(of_length(length), 1, 1)
    assert not any(op.head_exchanges or op.context_elements for op in layer.elementwise)
