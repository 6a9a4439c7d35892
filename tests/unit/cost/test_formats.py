"""What a rank keeps in narrower formats than usual: bytes, times, and who can."""

from dataclasses import replace
from typing import Any

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtimes.traits import RUNTIMES, Formats
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy
from support.experiments import experiment_from

torch = pytest.importorskip("torch")

TEXT = """
name: narrow
model: {family: llama, num_layers: 8, hidden_size: 4096, num_heads: 32, feed_forward_size: 14336,
        vocab_size: 128256, sequence_length: 4096}
cluster:
  nodes: [{device: H100, slots: 8, intra_gbit_per_s: 3600, inter_gbit_per_s: 3200}]
precision: PRECISION
runtime: megatron-core
recompute: none
zero_stage: 1
global_batch_size: 16
"""
USUAL = "{compute: bf16}"
FP8 = "{compute: fp8, gradients: bf16, primary: fp8}"


def experiment(precision: str, runtime: str = "megatron-core") -> Experiment:
    base = TEXT.replace("zero_stage: 1\n", "") if "zero_stage" in precision else TEXT
    return experiment_from(base.replace("PRECISION", precision).replace("megatron-core", runtime))


def strategy(given: Experiment) -> Strategy:
    options = replace(given.stage_options(2, 4), zero=given.zero(pp=1))
    candidate = Candidate(micro_batch_size=1, options=options, pp=1, num_micro_batches=4)
    return Strategy.uniform(candidate, (0, given.model.num_layers))


def estimate(precision: str) -> Estimate:
    given = experiment(precision)
    return CostModel(experiment=given).estimate(strategy(given))


def parts(precision: str) -> dict[str, float]:
    given = experiment(precision)
    (row,) = CostModel(experiment=given).memory_parts(strategy(given))
    return row


def kept_by_torch(formats: Formats) -> float:
    """Count the bytes per parameter that training keeps, as Megatron-core lays it out.

    A buffer of gradients of its format, single-precision weights or the half of them that bf16
    weights lack, moments of their format; fp8 weights as they are and transposed.
    """
    width = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    model.bfloat16()
    weights = list(model.parameters())
    moments = width[formats.moments or "fp32"]
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.Adam(masters)
    sums = [
        torch.zeros_like(weight, dtype=width[formats.gradients or "fp32"]) for weight in weights
    ]
    for _ in range(2):
        gradients = torch.autograd.grad(model(torch.randn(4, 64).bfloat16()).sum(), weights)
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient)
    for master, total in zip(masters, sums, strict=True):
        master.grad = total.float()
    optimizer.step()
    tensors = [*sums]
    for master in masters:
        state = optimizer.state[master]
        tensors += [state[name].to(moments) for name in ("exp_avg", "exp_avg_sq")]
        narrow = formats.moments == "bf16" and formats.compute == "bf16"
        tensors.append(master.view(torch.int16)[:, ::2].contiguous() if narrow else master)
    for weight in weights:
        small = weight.detach().to(torch.float8_e4m3fn)
        whole = [small, small.t().contiguous()] if formats.compute == "fp8" else []
        tensors += whole if formats.primary == "fp8" else [weight, *whole]
    num_bytes = sum(int(tensor.nbytes) for tensor in tensors)
    return num_bytes / sum(int(weight.numel()) for weight in weights)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"gradients": "bf16"},
        {"moments": "bf16"},
        {"moments": "bf16", "gradients": "bf16"},
        {"compute": "fp8"},
        {"compute": "fp8", "primary": "fp8", "gradients": "bf16"},
        {"compute": "fp8", "moments": "fp8", "primary": "fp8"},
    ],
)
def test_bytes_of_a_parameter_are_those_that_torch_keeps(chosen: dict[str, Any]) -> None:
    formats = Formats(**chosen)
    traits = RUNTIMES["megatron-core"].with_formats(formats)
    per = traits.bytes_per_parameter(formats.compute)
    counted = per.kept + per.master + traits.optimizer("adam").moment_bytes
    if formats.compute == "fp8":
        counted += traits.fp8_bytes_per_parameter - (2 if formats.primary == "fp8" else 0)
    assert counted == kept_by_torch(formats)


def test_parts_of_a_peak_shrink_by_what_is_kept_less() -> None:
    model = experiment(USUAL).model
    parameters = model.num_parameters / 2
    usual = parts(USUAL)
    gradients = parts("{gradients: bf16}")
    assert usual["gradients"] - gradients["gradients"] == pytest.approx(2 * parameters, rel=1e-3)
    moments = parts("{moments: bf16}")  # two of them, and half of the single-precision weights
    less = usual["optimizer"] - moments["optimizer"]
    assert less == pytest.approx((2 * 2 + 2) * parameters / 4, rel=1e-3)
    fp8, primary = parts("fp8"), parts("{compute: fp8, primary: fp8}")
    blocks = model.block_parameters / 2
    assert fp8["weights"] - primary["weights"] == pytest.approx(2 * blocks, rel=1e-3)


def test_narrow_gradients_and_weights_are_exchanged_in_half_the_bytes() -> None:
    model = CostModel(experiment=experiment(FP8)).samples(1).step_end
    usual = CostModel(experiment=experiment("fp8")).samples(1).step_end
    assert model.per_parameter.gradient * 2 == usual.per_parameter.gradient
    assert model.per_parameter.gathered * 2 == usual.per_parameter.gathered
    assert estimate(FP8).iteration_time_s < estimate("fp8").iteration_time_s
    narrow = estimate("{gradients: bf16, moments: bf16}")
    assert narrow.breakdown is not None
    plain = estimate(USUAL)
    assert plain.breakdown is not None
    assert narrow.breakdown.optimizer_s < plain.breakdown.optimizer_s
    assert narrow.iteration_time_s < plain.iteration_time_s


def test_a_mapping_without_formats_is_the_precision_alone() -> None:
    assert experiment(USUAL).traits == experiment("bf16").traits
    assert experiment("{compute: fp16}").precision == "fp16"
    assert experiment("{}").precision == "bf16"


@pytest.mark.parametrize(
    ("precision", "runtime", "message"),
    [
        ("{moments: bf16}", "deepspeed", "'deepspeed' cannot keep moments in bf16; runtimes that"),
        (
            "{moments: int8}",
            "megatron-core",
            "cannot keep moments in int8; runtimes that can: none",
        ),
        ("{compute: fp16, gradients: bf16}", "megatron-core", "with compute fp16: set compute bf1"),
        ("{primary: fp8}", "megatron-core", "primary weights in fp8 with compute bf16: set comp"),
        ("{gradients: fp64}", "megatron-core", "precision.gradients"),
        ("{weights: bf16}", "megatron-core", "weights"),
        ("bf61", "megatron-core", "bf61"),
        ("{moments: bf16}\nzero_stage: 0", "megatron-core", "zero_stage 1 to 3 if it ke"),
    ],
)
def test_what_cannot_be_kept_is_refused(precision: str, runtime: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        experiment(precision, runtime)
