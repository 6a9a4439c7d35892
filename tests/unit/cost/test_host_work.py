"""The host takes as long for a module as measured, and at least a launch for each kernel."""

from dataclasses import replace

import pytest

from amp_ray.cost.host_work import host_launches, modules
from amp_ray.cost.model import CostModel
from amp_ray.cost.roofline import Rank, cast_operands
from amp_ray.models.model import Layer, count_kernels
from amp_ray.models.operator import Gemm
from amp_ray.runtimes.releases import HOST_WORK, CudaGraphs, FormatName, HostWork
from amp_ray.runtimes.traits import RuntimeTraits
from support.experiments import experiment_from

MOE = """\
name: moe
model:
  {family: llama, num_layers: 2, hidden_size: 512, num_heads: 8, vocab_size: 2048,
   sequence_length: 512, num_experts: 64, experts_per_token: 2, expert_feed_forward_size: 512}
cluster: {nodes: [{device: H100, slots: 8, count: 1}]}
runtime: megatron-core
global_batch_size: 64
release: "26.02"
"""
RATIO = 3.0  # of the backward pass; not the default


def block(keys: str = "precision: bf16\n", ep: int = 8) -> tuple[Layer, RuntimeTraits, Rank]:
    """Return a block of one rank, the program's traits, and the rank."""
    experiment = experiment_from(MOE + keys)
    traits = experiment.traits
    layer = CostModel(experiment=experiment).time_tables.rank_model(1, ep, 1).layers[1]
    device = experiment.cluster.nodes[0].device
    rank = Rank(
        device=device,
        tp=1,
        micro_batch_size=1,
        precision=experiment.precision,
        expert_streams=traits.expert_streams,
    )
    return layer, traits, rank


def launches(
    layer: Layer, traits: RuntimeTraits, rank: Rank, *, is_measured: bool = False
) -> tuple[float, float]:
    return host_launches(layer, traits, rank, RATIO, is_measured=is_measured)


def in_table(work: HostWork, held: int) -> tuple[float, float]:
    """Return the launches of both passes by the table alone, with the residual behind experts."""
    sums = [
        work.attention[i]
        + work.router[i]
        + work.dispatchers["deepep"][i]
        + work.experts[i]
        + held * work.each[i]
        + 1
        for i in (0, 1)
    ]
    return sums[0], RATIO * sums[1]


@pytest.mark.parametrize(
    ("keys", "row"),
    [
        ("precision: bf16\n", "bf16"),
        ("precision: fp8\n", "tensorwise"),
        ("precision: fp8\ntraits: {fp8_recipe: mxfp8}\n", "mxfp8"),
    ],
)
@pytest.mark.parametrize("ep", [4, 8])
def test_a_block_takes_the_sum_of_its_modules(keys: str, row: FormatName, ep: int) -> None:
    assert launches(*block(keys, ep)) == pytest.approx(in_table(HOST_WORK[row], 64 // ep))


def test_modules_hold_every_operator_once() -> None:
    layer, _, _ = block()
    parts = modules(layer)
    assert sorted(op.name for part in parts.values() for op in part) == sorted(
        op.name for op in layer.operators
    )
    dense = replace(layer, experts=None)
    assert modules(dense) == {"rest": dense.measurable}


def test_a_module_takes_at_least_its_kernels_and_casts() -> None:
    """Attention and experts with many more kernels than the measured ones; not the router."""
    layer, traits, rank = block("precision: fp8\n")
    usual = launches(layer, traits, rank)
    grown = {"attention": 50, "route": 50, "experts-activation": 60}
    operators = tuple(
        op if isinstance(op, Gemm) else replace(op, num_kernels=grown.get(op.name, op.num_kernels))
        for op in layer.operators
    )
    many = replace(layer, operators=operators)
    parts = modules(many)
    work = HOST_WORK["tensorwise"]
    held = 8
    known = {
        "attention": work.attention,
        "experts": tuple(a + held * b for a, b in zip(work.experts, work.each, strict=True)),
    }
    more = [0.0, 0.0]
    for name in ("attention", "experts"):
        kernels = count_kernels(parts[name])
        casts = [cast_operands(op, rank) for op in parts[name] if isinstance(op, Gemm)]
        more[0] += kernels + sum(each[0] for each in casts) - known[name][0]
        more[1] += RATIO * kernels + sum(each[1] for each in casts) - RATIO * known[name][1]
    assert more[0] > 0
    assert more[1] > 0
    expected = usual[0] + more[0], usual[1] + more[1]
    assert launches(many, traits, rank) == pytest.approx(expected)


def test_a_graph_starts_attention_and_router_in_one_launch() -> None:
    graphs: tuple[CudaGraphs, ...] = ("none", "attention")
    layer, traits, rank = block()
    plain, captured = (launches(layer, replace(traits, cuda_graphs=kind), rank) for kind in graphs)
    work = HOST_WORK["bf16"]
    freed = [work.attention[i] + work.router[i] - 1 for i in (0, 1)]
    assert plain[0] - captured[0] == pytest.approx(freed[0])
    assert plain[1] - captured[1] == pytest.approx(RATIO * freed[1])


def test_a_measured_layer_has_the_work_of_all_but_its_dispatcher() -> None:
    layer, traits, rank = block()
    forward, backward = launches(layer, traits, rank, is_measured=True)
    counted = layer.num_kernels - count_kernels(modules(layer)["dispatcher"])
    sends = HOST_WORK["bf16"].dispatchers["deepep"]
    assert forward == pytest.approx(counted + sends[0])
    assert backward == pytest.approx(RATIO * (counted + sends[1]))


def test_a_program_without_these_modules_launches_its_kernels() -> None:
    layer, traits, rank = block()
    other = replace(traits, expert_streams=0, dispatcher="nccl")
    kernels = layer.num_kernels
    assert launches(layer, other, rank) == (kernels, RATIO * kernels)


def test_one_operation_of_all_experts_does_not_depend_on_their_number() -> None:
    keys = "precision: fp8\ntraits: {fp8_recipe: mxfp8}\n"
    seconds = {
        (fused, ep): launches(layer, replace(traits, fused_experts=fused), rank)
        for ep in (4, 8)
        for layer, traits, rank in (block(keys, ep),)
        for fused in (False, True)
    }
    assert seconds[True, 4] == seconds[True, 8]
    assert seconds[False, 4] > seconds[False, 8] > seconds[True, 8]
