"""NVFP4: rates of boards, traffic of casts, what is kept, and who can."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import CATALOGUE, find_device
from amp_ray.cost.model import CostModel
from amp_ray.cost.roofline import Rank, gemm_phases, looped_kernels
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.operator import Gemm
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import Zero
from amp_ray.units import Precision
from support.experiments import experiment_from, llama_8b

KERNELS = Path(__file__).parents[3] / "experiments" / "published" / "kernels.csv"
SHORT_RUNS = 0.9  # long runs against short ones: H200 against H100
BOARDS = ("B200", "B300", "GB200", "GB300")
TEXT = f"""
name: four bits
{llama_8b()}
cluster:
  nodes: [{{device: B200, slots: 8, intra_gbit_per_s: 7200, inter_gbit_per_s: 3200}}]
precision: nvfp4
zero_stage: 1
runtime: megatron-core
global_batch_size: 16
"""


def read(precision: str = "nvfp4", text: str = TEXT) -> Experiment:
    return experiment_from(text.replace("precision: nvfp4", f"precision: {precision}"))


def rank(precision: Precision = "nvfp4") -> Rank:
    return Rank(device=find_device("B200"), tp=1, micro_batch_size=1, precision=precision)


def parts(precision: str) -> dict[str, float]:
    """Return the parts of the memory of a rank, of eight replicas in a pipeline of one stage."""
    given = read(precision)
    options = replace(given.stage_options(1, 8), zero=Zero(stage=1))
    candidate = Candidate(micro_batch_size=1, options=options, pp=1, num_micro_batches=2)
    [found] = CostModel(experiment=given).memory_parts(Strategy.uniform(candidate, (0, 35)))
    return found


@pytest.mark.parametrize("board", BOARDS)
def test_rates_are_those_of_the_measured_tables_in_long_runs(board: str) -> None:
    with KERNELS.open(encoding="utf-8", newline="") as file:
        [row] = [
            row
            for row in csv.DictReader(file)
            if (row["board"], row["kernel"], row["kind"]) == (board, "product", "nvfp4")
        ]
    sustained = float(row["tflops"]) * (1.0 if row["power_fraction"] else SHORT_RUNS)
    assert CATALOGUE[board].product_flops("nvfp4") / 1e12 == pytest.approx(sustained, rel=0.01)


def test_only_blackwell_boards_of_data_centres_compute_in_it() -> None:
    able = {name for name, device in CATALOGUE.items() if device.nvfp4_flops is not None}
    assert able == {*BOARDS}
    with pytest.raises(InputError, match="'H100' does not compute in nvfp4; it can do fp32, fp16"):
        read(text=TEXT.replace("B200", "H100"))
    rates = "bf16_tflops: 900, nvfp4_tflops: 4000, memory_gbyte_per_s: 3000"
    described = read(text=TEXT.replace("B200", f"{{name: X, memory_gib: 80, {rates}}}"))
    device = described.cluster.device_types[0]
    assert device.product_flops("nvfp4") == pytest.approx(0.4 * 4e15)


@pytest.mark.parametrize("runtime", ["torch", "deepspeed"])
def test_runtimes_that_cannot_are_refused_by_name(runtime: str) -> None:
    words = f"runtime '{runtime}' does not train in nvfp4; runtimes that do: megatron-core"
    with pytest.raises(InputError, match=words):
        read(text=TEXT.replace("megatron-core", runtime))


@pytest.mark.parametrize("direction", ["none", "backward"])
def test_casts_read_twice_and_write_two_copies_even_after_a_norm(direction: str) -> None:
    """2 bytes for the largest element, 2 for the cast, and 9/16 each for two copies."""
    device, bandwidth = rank().device, 8000e9 * Constants().memory_efficiency
    fast = replace(device, nvfp4_flops=1e30, bf16_flops=1e30)
    product = Gemm(name="product", rows=4096, columns=2048, inner=8192, all_reduce=direction)  # type: ignore[arg-type]
    small, wide = (
        gemm_phases(product, replace(rank(name), device=fast), Constants())
        for name in ("nvfp4", "bf16")
    )
    saved = 2 - 9 / 16  # bytes that the product itself reads less, of each element
    operands = 4096 * 8192 + 8192 * 2048
    cast_s = 5.125 * 4096 * 8192 / bandwidth
    assert small.forward_s - wide.forward_s == pytest.approx(cast_s - saved * operands / bandwidth)
    cast_s = 5.125 * 4096 * 2048 / bandwidth
    both = (4096 * 2048 + 2048 * 8192) + (8192 * 4096 + 4096 * 2048)
    assert small.backward_s - wide.backward_s == pytest.approx(cast_s - saved * both / bandwidth)


def test_scales_of_experts_have_kernels_of_their_own() -> None:
    product = Gemm(name="experts-in", rows=64, columns=64, inner=64, batch=8, is_expert=True)
    streams = replace(rank(), expert_streams=4)
    assert looped_kernels(product, streams) == (8 * (1 + 3), 8 * (2 + 3))
    assert looped_kernels(product, replace(streams, precision="bf16")) == (8, 16)


def test_weights_stay_beside_two_copies_and_inputs_are_kept_in_four_bits() -> None:
    given = read()
    small, wide = parts("nvfp4"), parts("bf16")
    copies = 2 * (1 / 2 + 1 / 16) * given.model.block_parameters
    assert small["weights"] - wide["weights"] == pytest.approx(copies, rel=1e-3)
    for part in ("gradients", "optimizer"):
        assert small[part] == wide[part]
    blocks = given.model.layers[1:33]
    inputs = sum(layer.cast_saved_bytes(tp=1, bytes_per_element=2) for layer in blocks)
    less = inputs * (1 - (1 / 2 + 1 / 16) / 2) * given.traits.allocator_factor
    assert wide["activations"] - small["activations"] == pytest.approx(less)


def test_optimizers_of_narrow_moments_keep_the_lower_halves_as_of_bf16_weights() -> None:
    both = (parts(f"{{compute: {name}, moments: bf16}}") for name in ("nvfp4", "bf16"))
    assert len({found["optimizer"] for found in both}) == 1


def test_weights_are_gathered_in_bf16_alone() -> None:
    with pytest.raises(InputError, match="primary weights in fp8 with compute nvfp4: set compute"):
        read("{compute: nvfp4, primary: fp8}")


def test_an_iteration_is_faster_than_in_fp8() -> None:
    def iteration_s(precision: str) -> float:
        given = read(precision)
        options = replace(given.stage_options(1, 8), zero=Zero(stage=1))
        candidate = Candidate(micro_batch_size=1, options=options, pp=1, num_micro_batches=2)
        plan = Strategy.uniform(candidate, (0, 35))
        return CostModel(experiment=given).estimate(plan).iteration_time_s

    assert 0.6 * iteration_s("fp8") < iteration_s("nvfp4") < 0.95 * iteration_s("fp8")
