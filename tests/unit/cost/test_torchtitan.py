"""torchtitan and Automodel: recompute by operator, eager kernels, loss in chunks, kept formats."""

from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.operator import Elementwise
from amp_ray.runtimes.traits import Formats
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import RecomputeKind, parse_recompute
from amp_ray.strategies.strategy import Strategy
from amp_ray.units import GIB
from support.experiments import experiment_from

BOTH = "fsdp2", "megatron-core"

TEXT = """
name: eight billion
model:
  {family: llama, num_layers: 32, hidden_size: 4096, num_heads: 32, num_key_value_heads: 8,
   feed_forward_size: 14336, vocab_size: 128256, sequence_length: 8192}
cluster:
  nodes: [{device: H100, slots: 8, inter_gbit_per_s: 3200}]
precision: bf16
zero_stage: 3
runtime: RUNTIME
global_batch_size: 8
"""


def experiment(runtime: str = "fsdp2", keys: str = "") -> Experiment:
    return experiment_from(TEXT.replace("RUNTIME", runtime) + keys)


def estimate(given: Experiment, kind: RecomputeKind = "per-operator", tp: int = 1) -> Estimate:
    dp = 8 // tp
    options = given.stage_options(tp, dp, recompute=parse_recompute(kind), zero=given.zero(1))
    candidate = Candidate(micro_batch_size=1, options=options, pp=1, num_micro_batches=8 // dp)
    return CostModel(experiment=given).estimate(Strategy.uniform(candidate, (0, 35)))


def test_only_what_the_runtime_can_is_worth_a_try() -> None:
    changes = [{change for _, change in experiment(name).other_settings()} for name in BOTH]
    assert "recompute=per-operator" in changes[0] - changes[1]
    assert "recompute=selective" in changes[1] - changes[0]


def peak_gib(found: Estimate) -> float:
    return max(found.peak_memory_bytes) / GIB


@pytest.mark.parametrize("tp", [1, 4])
def test_recompute_by_operator_lies_between_none_and_full(tp: int) -> None:
    given = experiment()
    none, some, full = (estimate(given, kind, tp) for kind in ("none", "per-operator", "full"))
    assert none.iteration_time_s < some.iteration_time_s < full.iteration_time_s
    assert peak_gib(none) > peak_gib(some) > peak_gib(full)


def test_the_usual_run_of_eight_billion_fits_with_room_to_spare() -> None:
    """Blocks keep queries, values, half of the gated product, attention and the last product."""
    found = estimate(experiment())
    assert found.feasible
    per_block = 2 * 8192 * (4096 * 3 + 1024 + 14336) + 4 * 32 * 8192
    assert peak_gib(found) - peak_gib(estimate(experiment(), "full")) == pytest.approx(
        32 * per_block * 1.06 / GIB, rel=1e-6
    )


def test_gradients_do_not_live_beside_the_logits() -> None:
    """Without the part of the head, its loss needs its weights, and logits at 12 bytes each."""
    (parts,) = CostModel(experiment=experiment()).memory_parts(estimate(experiment()).strategy)
    head, block = 128256 * 4096, 218_112_000
    needed = 12 * 8192 * 128256 + 2 * (head + block)
    assert parts["temporary"] == pytest.approx(1.06 * needed, rel=0.01)


def test_compiled_kernels_are_faster_and_old_norms_slower() -> None:
    releases = ("0.3-compile", "0.3", "2024")
    compiled, eager, old = (
        estimate(experiment(keys=f"release: {name}\n")).iteration_time_s for name in releases
    )
    assert compiled < eager < old


def test_eager_rotation_moves_ten_elements_where_a_fused_one_moves_two() -> None:
    eager, fused = (
        next(op for op in given.model.layers[1].elementwise if op.name == "rotary")
        for given in (experiment(), experiment(keys="release: 0.3-compile\n"))
    )
    assert eager.forward_elements == 5 * fused.forward_elements
    assert (eager.num_kernels, fused.num_kernels) == (6, 2)


def loss_of(given: Experiment) -> Elementwise:
    return next(op for op in given.model.layers[-1].elementwise if op.logits)


def test_a_loss_in_chunks_has_fewer_logits_at_once_and_more_launches() -> None:
    whole, eighths = experiment(), experiment(keys="loss_chunks: 8\n")
    layers = whole.model.layers[-1], eighths.model.layers[-1]
    assert layers[1].logits == layers[0].logits / 8
    assert loss_of(eighths).num_kernels == 8 * loss_of(whole).num_kernels + 7
    plain, divided = estimate(whole), estimate(eighths)
    saved = peak_gib(plain) - peak_gib(divided)
    logits = 12 * 8192 * 128256 * 1.06 / GIB
    assert 0.7 * logits < saved < 7 / 8 * logits  # then a block and its gradients need more
    assert plain.iteration_time_s < divided.iteration_time_s < 1.002 * plain.iteration_time_s


def test_chosen_chunks_have_no_more_logits_than_the_stream() -> None:
    """31.3 times as many columns as the stream: 32 chunks."""
    assert loss_of(experiment(keys="loss_chunks: auto\n")).chunks == 32


@pytest.mark.parametrize(
    ("runtime", "keys", "message"),
    [
        ("megatron-core", "loss_chunks: auto\n", "computes the loss as a whole, found auto"),
        ("fsdp2", "recompute: {modules: [mlp]}\n", "'fsdp2' recomputes no mlp alone"),
        ("megatron-core", "recompute: {modules: [norm]}\n", "found 'norm'; expected 'core_attn'"),
        ("megatron-core", "recompute: {modules: []}\n", "recompute.modules"),
    ],
)
def test_what_a_runtime_cannot_is_refused(runtime: str, keys: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("{", r"\{")):
        experiment(runtime, keys.replace("zero_stage: 3", "zero_stage: 1"))


def test_modules_are_a_kind_for_the_core_and_a_trait_for_the_rest() -> None:
    keys = "recompute: {modules: [mlp, core_attn, layernorm]}\n"
    given = experiment("megatron-core", keys)
    assert given.recompute.kind == "selective"
    assert given.traits.recompute_modules == ("layernorm", "mlp")
    assert experiment("megatron-core", "recompute: {modules: [mlp]}\n").recompute.kind == "none"


def test_a_feed_forward_part_that_runs_again_keeps_its_input_alone() -> None:
    plain, again = (
        estimate(experiment("megatron-core", keys), "none")
        for keys in ("recompute: none\n", "recompute: {modules: [mlp]}\n")
    )
    inner = 2 * 8192 * 3 * 14336  # both halves, and their product
    saved = peak_gib(plain) - peak_gib(again)
    assert saved == pytest.approx(32 * inner * 1.1 / GIB, rel=0.02)
    assert plain.iteration_time_s < again.iteration_time_s


def test_automodel_keeps_all_in_bf16_unless_told_otherwise() -> None:
    """2 bytes each of weight and gradient, 4 of both moments, on eight ranks."""
    given = experiment("automodel")
    states = {"weights": 2, "gradients": 2, "optimizer": 4}
    (parts,) = CostModel(experiment=given).memory_parts(estimate(given, "full").strategy)
    for part, num_bytes in states.items():
        share = num_bytes * given.model.num_parameters / 8
        assert parts[part] == pytest.approx(share, rel=1e-6)
    wide = given.traits.with_formats(Formats(moments="fp32", master="fp32"))
    assert wide.formats.kept == {"gradients": "bf16"}


def deferred(given: Experiment, micro_batches: int, *, defers: bool = True) -> tuple[float, float]:
    """Return the bytes of gradients of a rank, and seconds of gathers and reduce-scatters."""
    traits = replace(given.traits, defers_gradient_sync=defers)
    model = CostModel(experiment=replace(given, traits=traits))
    options = given.stage_options(1, 8, zero=given.zero(1))
    candidate = Candidate(
        micro_batch_size=1, options=options, pp=1, num_micro_batches=micro_batches
    )
    found = model.estimate(Strategy.uniform(candidate, (0, 35)))
    (parts,) = model.memory_parts(found.strategy)
    assert found.breakdown is not None
    return parts["gradients"], found.breakdown.gradient_sync_s


def test_deferred_gradients_are_whole_until_the_last_micro_batch() -> None:
    """4 bytes of each parameter, the width of the reduction, beside a shard of 2."""
    given = experiment("automodel")
    parameters = given.model.num_parameters
    assert deferred(given, 1)[0] == pytest.approx(parameters * 2 / 8)
    assert deferred(given, 2)[0] == pytest.approx(parameters * (2 / 8 + 4))
    assert deferred(given, 2, defers=False)[0] == pytest.approx(parameters * 2 / 8)


def test_deferred_gradients_are_reduced_once() -> None:
    """Every micro-batch but the last has gathers alone to wait for."""
    given = experiment("automodel")
    once, twice, often = (deferred(given, number)[1] for number in (1, 2, 5))
    assert deferred(given, 1, defers=False)[1] == once
    assert twice - once == pytest.approx((often - twice) / 3)
    assert often < deferred(given, 5, defers=False)[1]


def test_fp8_keeps_no_copies_of_sharded_weights() -> None:
    """Only those of a gathered block are there: 2 bytes of 218 million weights, at most."""
    bf16 = experiment("megatron-core")
    fp8 = replace(bf16, precision="fp8")
    first, second = (peak_gib(estimate(given, "full")) for given in (bf16, fp8))
    assert second - first < 2 * 1.1 * 525e6 / GIB


def test_sequences_are_divided_with_keys_and_values_gathered() -> None:
    assert experiment().traits.why_no_context(2) is None
    assert experiment().traits.context_parallel == "all-gather"
