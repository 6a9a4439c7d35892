"""8-bit floats: which products run in them, what is kept, and who can."""

from dataclasses import replace

import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import CATALOGUE, find_device
from amp_ray.cost.estimate import Estimate
from amp_ray.cost.layers import LayerAnchors, LayerWork
from amp_ray.cost.model import CostModel
from amp_ray.cost.roofline import Rank, elementwise_phases, gemm_phases
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.operator import Gemm
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy
from amp_ray.units import Precision
from support.experiments import experiment_from, llama_8b

TEXT = f"""
name: small floats
{llama_8b()}
cluster:
  nodes: [{{device: H100, slots: 8, intra_gbit_per_s: 3600, inter_gbit_per_s: 3200}}]
precision: fp8
runtime: megatron-core
global_batch_size: 16
"""


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return experiment_from(TEXT)


def estimate(given: Experiment, **change: object) -> Estimate:
    own = replace(given, **change)  # type: ignore[arg-type]
    options = replace(own.stage_options(4, 2), zero=own.zero(1))
    candidate = Candidate(micro_batch_size=1, options=options, pp=1, num_micro_batches=8)
    return CostModel(experiment=own).estimate(Strategy.uniform(candidate, (0, 35)))


def rank(precision: Precision) -> Rank:
    return Rank(device=find_device("H100"), tp=1, micro_batch_size=1, precision=precision)


def test_large_linear_layers_gain_and_the_rest_does_not(experiment: Experiment) -> None:
    block = experiment.model.layers[1]
    by_name = {op.name: op for op in block.operators}
    constants = Constants()
    wide, attention = by_name["feed-forward-in"], by_name["attention"]
    assert isinstance(wide, Gemm)
    ratio = (
        gemm_phases(wide, rank("fp8"), constants).forward_s
        / gemm_phases(wide, rank("bf16"), constants).forward_s
    )
    assert 0.5 < ratio < 0.7  # half, and the cast of what it reads
    assert not isinstance(attention, Gemm)
    assert elementwise_phases(attention, rank("fp8"), constants) == elementwise_phases(
        attention, rank("bf16"), constants
    )
    kept = replace(wide, keeps_precision=True)
    assert gemm_phases(kept, rank("fp8"), constants) == gemm_phases(wide, rank("bf16"), constants)


def test_rows_of_experts_are_padded_for_8_bit_floats() -> None:
    """Eight experts with 100 rows of width 64 are copied once in each pass: 4 bytes an element."""
    expert = Gemm(name="experts-in", rows=100, columns=32, inner=64, batch=8, is_expert=True)
    padded, constants = replace(expert, padded_width=64), Constants(kernel_gap_s=0.0)
    copied_s = 8 * 100 * 64 * 4 / (3350e9 * constants.memory_efficiency)
    cases: tuple[tuple[Precision, float], ...] = (("fp8", copied_s), ("bf16", 0.0))
    for name, added_s in cases:
        plain, copied = (gemm_phases(op, rank(name), constants) for op in (expert, padded))
        assert copied.forward_s - plain.forward_s == pytest.approx(added_s)
        assert copied.backward_s - plain.backward_s == pytest.approx(added_s)


def test_operands_are_read_once_more_for_one_scale_each() -> None:
    """Norms find the scale of the input that they write, so that only gradients are read again."""
    alone, after_norm = (
        Gemm(name="product", rows=100, columns=32, inner=64, all_reduce=direction)
        for direction in ("none", "backward")
    )
    reads, constants = replace(rank("fp8"), reads_for_scales=True), Constants()
    bytes_per_s = 3350e9 * constants.memory_efficiency
    for product, width in ((alone, 64), (after_norm, 0)):
        once, twice = (gemm_phases(product, each, constants) for each in (rank("fp8"), reads))
        added_s = twice.forward_s - once.forward_s
        assert added_s == pytest.approx(100 * width * 2 / bytes_per_s, abs=1e-15)
        added_s = twice.backward_s - once.backward_s
        assert added_s == pytest.approx(100 * 32 * 2 / bytes_per_s)


def test_a_narrow_product_may_lose(experiment: Experiment) -> None:
    thin = Gemm(name="thin", rows=8192, columns=64, inner=4096)
    slow, fast = (gemm_phases(thin, rank(name), Constants()) for name in ("fp8", "bf16"))
    assert slow.forward_s > fast.forward_s


def test_an_iteration_is_faster_but_never_twice(experiment: Experiment) -> None:
    small, half = estimate(experiment), estimate(experiment, precision="bf16")
    assert 0.5 < small.iteration_time_s / half.iteration_time_s < 0.9
    assert small.breakdown is not None
    assert half.breakdown is not None
    assert small.breakdown.gradient_sync_s == half.breakdown.gradient_sync_s


def test_weights_stay_in_bf16_beside_copies_and_inputs_are_kept_cast(
    experiment: Experiment,
) -> None:
    copies = estimate(experiment).peak_memory_bytes[0]
    none = replace(experiment.traits, fp8_bytes_per_parameter=0.0)
    without = estimate(experiment, traits=none).peak_memory_bytes[0]
    model = experiment.model
    held = 2.0 * model.block_parameters / 4
    assert copies - without == pytest.approx(held, rel=0.02)
    assert without < estimate(experiment, precision="bf16").peak_memory_bytes[0]


def test_boards_that_cannot_are_refused() -> None:
    with pytest.raises(InputError, match="'A100-80' does not compute in fp8; it can do fp32, fp16"):
        experiment_from(TEXT.replace("H100", "A100-80"))
    able = {name for name, device in CATALOGUE.items() if device.fp8_flops is not None}
    assert {"H100", "B200", "MI300X", "L40S"} <= able
    assert able.isdisjoint({"A100-40", "V100-16", "T4", "RTX3090", "cpu"})
    rates = "bf16_tflops: 900, fp8_tflops: 1800, memory_gbyte_per_s: 3000"
    own = experiment_from(TEXT.replace("H100", f"{{name: X, memory_gib: 80, {rates}}}"))
    assert own.cluster.device_types[0].fp8_flops == 1.8e15


@pytest.mark.parametrize("runtime", ["deepspeed", "megatron-lm-2022"])
def test_runtimes_that_cannot_are_refused_by_name(runtime: str) -> None:
    words = f"precision: runtime '{runtime}' does not train in fp8; runtimes that do: torch, mega"
    with pytest.raises(InputError, match=words):
        experiment_from(TEXT.replace("megatron-core", runtime))


def test_the_host_launches_a_cast_for_each_operand_of_a_product(experiment: Experiment) -> None:
    """Two products of attention and two of the feed-forward part, each with an input to cast."""
    constants = Constants(host_s_per_kernel=1.0)  # the device never takes as long
    work = LayerWork(
        layer=experiment.model.layers[1],
        anchors=LayerAnchors(),
        traits=experiment.traits,
        constants=constants,
    )
    small, wide = (work.compute(rank(precision)) for precision in ("fp8", "bf16"))
    assert small.forward_s - wide.forward_s == pytest.approx(4.0)
    assert small.backward_s - wide.backward_s == pytest.approx(4.0)
