"""Bytes per parameter that the training program keeps, counted, beside those that are predicted."""

import datetime as dt
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, distributed, nn  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from amp_ray.cost.model import CostModel  # noqa: E402
from amp_ray.strategies.candidate import Candidate, StageOptions  # noqa: E402
from amp_ray.strategies.zero import SHARDED_GRADIENTS, Zero  # noqa: E402
from amp_ray.training.executor.chunks import BuiltChunk  # noqa: E402
from amp_ray.training.executor.parameters import (  # noqa: E402
    FlatParameters,
    Part,
    ShardedChunk,
    replicas_of,
)
from amp_ray.training.workload import DTYPES  # noqa: E402
from support.experiments import experiment_from  # noqa: E402

NUM_RANKS = 4
WIDTH = 64

EXPERIMENT = """
name: kept
model:
  {{family: llama, num_layers: 2, hidden_size: 64, num_heads: 2, sequence_length: 8, vocab_size: 8}}
cluster:
  nodes: [{{device: H100, slots: 4, inter_gbit_per_s: 400}}]
global_batch_size: 4
precision: {precision}
runtime: torch
traits: {{allocator_factor: 1.0}}
"""


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    """One of four ranks, whose collectives move nothing."""
    distributed.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    yield
    distributed.destroy_process_group()


def predicted(precision: str, zero_stage: int) -> float:
    """Return the bytes of weights, gradients and optimizer states per parameter."""
    model = CostModel(experiment=experiment_from(EXPERIMENT.format(precision=precision)))
    options = StageOptions(tp=1, dp=NUM_RANKS, zero=Zero(stage=zero_stage))
    candidate = Candidate(micro_batch_size=1, options=options, pp=1, num_micro_batches=1)
    memory, layers = model.memory(candidate), model.experiment.model
    states = (memory.only(part) for part in ("weights", "gradients", "optimizer"))
    return sum(part.peak(0, 0, layers.num_layers) for part in states) / layers.num_parameters


def counted(precision: str, zero_stage: int) -> float:
    """Train a product of 64 x 64 for a step; return the bytes that stay per parameter."""
    layer, dtype, device = nn.Linear(WIDTH, WIDTH, bias=False), DTYPES[precision], "cpu"
    num_shards = NUM_RANKS if zero_stage else 1
    replicas = replicas_of(range(NUM_RANKS), num_shards, dt.timedelta(minutes=1))
    part: Part
    if zero_stage < SHARDED_GRADIENTS:
        part = FlatParameters(
            [layer.weight], dtype=dtype, device=torch.device(device), replicas=replicas
        )
        whole, run = [part.weights, part.gradients], layer
    else:
        job: Any = SimpleNamespace(
            zero_stage=zero_stage, grid=SimpleNamespace(pp=1, keeps_weights=False)
        )
        chunk = ShardedChunk(
            job,
            BuiltChunk(modules=nn.ModuleList([layer]), run=(layer,)),
            replicas,
            dtype=dtype,
            device=torch.device(device),
            table=None,
        )
        chunk.begin_backward(last=True)
        (part,), whole, run = chunk.parts, [], chunk
    optimizer = torch.optim.AdamW(part.masters)
    run(torch.ones(1, WIDTH, dtype=dtype)).sum().backward()
    part.reduce()
    optimizer.step()
    moments = [
        value for state in optimizer.state.values() for value in state.values() if value.dim()
    ]
    gradients = [layer.weight.grad] if zero_stage < SHARDED_GRADIENTS else []
    return kept_bytes([*whole, *part.masters, *part.totals, *gradients, *moments]) / WIDTH**2


def kept_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of tensors, those that share memory once."""
    memory = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_states_are_those_that_a_rank_keeps(precision: str, zero_stage: int) -> None:
    assert predicted(precision, zero_stage) == pytest.approx(counted(precision, zero_stage))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_stage_2_keeps_gathered_weights_beside_the_shards(precision: str) -> None:
    gathered = torch.finfo(DTYPES[precision]).bits / 8
    shards = counted(precision, 2)
    in_both = gathered / NUM_RANKS if precision == "fp32" else 0.0
    assert predicted(precision, 2) == pytest.approx(shards + gathered - in_both)
