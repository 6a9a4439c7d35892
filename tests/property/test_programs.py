"""Importing an exported strategy gives the same strategy, with any degrees, cuts and recompute."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.exports.chosen import Chosen
from amp_ray.exports.megatron import bridge_overrides, megatron_script
from amp_ray.exports.reading import read_program
from amp_ray.exports.torchtitan import titan_config
from amp_ray.inputs.strategies import strategies_of
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE, SELECTIVE
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import NO_ZERO, Zero
from support.checked import grid_of
from support.experiments import small_experiment

NUM_BLOCKS = 8
EXPERIMENT = small_experiment(
    ("device: T4, slots: 2", "device: A100-40, slots: 8"),
    ("family: gpt2", "family: llama"),
    ("num_layers: 6", f"num_layers: {NUM_BLOCKS}"),
    ("global_batch_size: 8\n", "global_batch_size: 32\nruntime: megatron-core\nprecision: bf16\n"),
)
NUM_DEVICES = EXPERIMENT.cluster.num_devices
ZEROS = (NO_ZERO, Zero(stage=1), Zero(stage=2), Zero(stage=3), Zero(stage=3, keeps_weights=True))
RECOMPUTE = (NO_RECOMPUTE, SELECTIVE, FULL)


@st.composite
def drawn(draw: st.DrawFn) -> Strategy:
    """Draw a strategy on all devices with any cuts; norm and head are in the same stage."""
    pp = draw(st.sampled_from((1, 2, 4)))
    tp = draw(st.sampled_from([tp for tp in (1, 2, 4, 8) if NUM_DEVICES % (tp * pp) == 0]))
    cp = draw(st.sampled_from([cp for cp in (1, 2) if NUM_DEVICES % (tp * pp * cp) == 0]))
    dp = NUM_DEVICES // tp // pp // cp
    size = draw(st.sampled_from([size for size in (1, 2, 4) if 32 % (size * dp) == 0]))
    cuts = st.lists(st.integers(1, NUM_BLOCKS + 1), min_size=pp - 1, max_size=pp - 1, unique=True)
    candidate = grid_of(
        tp=tp,
        cp=cp,
        dp=dp,
        recompute=draw(st.sampled_from(RECOMPUTE)),
        sequence_parallel=tp > 1 and draw(st.booleans()),
        zero=draw(st.sampled_from(ZEROS)) if dp > 1 else NO_ZERO,
        pp=pp,
        micro_batch_size=size,
        num_micro_batches=32 // size // dp,
    )
    bounds = (0, *sorted(draw(cuts)), EXPERIMENT.model.num_layers)
    return Strategy.uniform(candidate, bounds)


def interleaved(strategy: Strategy) -> Strategy | None:
    """Return the same stages with two chunks each; None if a chunk would be empty."""
    blocks = [end - first for first, end in pairwise((1, *strategy.bounds[1:-1], NUM_BLOCKS + 1))]
    several = strategy.pp > 1 and min(blocks) > 1
    return replace(strategy, virtual_stages=2) if several else None


@pytest.mark.parametrize("write", [megatron_script, bridge_overrides, titan_config])
@given(strategy=drawn())
def test_an_import_of_an_export_is_the_same_strategy(write: object, strategy: Strategy) -> None:
    assert callable(write)
    try:
        [text] = write(Chosen(experiment=EXPERIMENT, strategy=strategy)).files.values()
    except ValueError:  # ZeRO and recompute of the attention core are not in every program
        kinds = {stage.options.recompute.kind for stage in strategy.stages}
        assert strategy.zero.stage or "selective" in kinds
        return
    record = read_program(text, file="run", experiment=EXPERIMENT) or {}
    record.pop("not_read", None)
    [entry] = strategies_of([record], file="run", experiment=EXPERIMENT)
    assert entry.strategy == strategy


@given(strategy=drawn(), nodes=st.permutations(range(len(EXPERIMENT.cluster.nodes))))
def test_hosts_in_another_order_come_back(strategy: Strategy, nodes: list[int]) -> None:
    own = EXPERIMENT.cluster.node_of_device
    order = tuple(device for node in nodes for device, of in enumerate(own) if of == node)
    stages = tuple(
        replace(stage, options=replace(stage.options, zero=NO_ZERO)) for stage in strategy.stages
    )
    moved = replace(strategy, stages=stages, placement=order)
    [text] = megatron_script(Chosen(experiment=EXPERIMENT, strategy=moved)).files.values()
    said = read_program(text, file="run", experiment=EXPERIMENT)
    [found] = strategies_of([said], file="run", experiment=EXPERIMENT)
    assert found.strategy == moved


@given(strategy=drawn())
def test_chunks_of_stages_come_back(strategy: Strategy) -> None:
    chunked = interleaved(strategy)
    if chunked is None:
        return
    options = replace(chunked.stages[0].options, zero=NO_ZERO)
    stages = tuple(replace(stage, options=options) for stage in chunked.stages)
    chunked = replace(chunked, stages=stages)
    [text] = megatron_script(Chosen(experiment=EXPERIMENT, strategy=chunked)).files.values()
    said = read_program(text, file="run", experiment=EXPERIMENT)
    [found] = strategies_of([said], file="run", experiment=EXPERIMENT)
    assert found.strategy == chunked
