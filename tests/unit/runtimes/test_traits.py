from dataclasses import replace
from typing import get_args

import pytest

from amp_ray.runtimes.traits import OPTIMIZERS, RUNTIMES, RuntimeTraits, find_optimizer
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE
from amp_ray.units import Precision
from support.experiments import small_experiment

PLAIN = RuntimeTraits(name="plain", description="A runtime for tests.")


@pytest.mark.parametrize("traits", RUNTIMES.values(), ids=RUNTIMES)
def test_every_runtime_is_found_by_its_name_and_described(traits: RuntimeTraits) -> None:
    assert RUNTIMES[traits.name] is traits
    assert traits.description.endswith(".")


def test_a_record_has_the_traits_of_the_one_that_it_is_like() -> None:
    own, like = RUNTIMES["amp-2022-transgan"], RUNTIMES["amp-2022"]
    assert (own.forward_runs, like.forward_runs) == (1, 2)
    assert own.synchronisation_s == like.synchronisation_s == 63e-6


@pytest.mark.parametrize("trait", ["vocabulary_multiple", "forward_runs", "virtual_stages"])
def test_a_count_of_zero_is_refused(trait: str) -> None:
    changed: dict[str, int] = {trait: 0}
    with pytest.raises(ValueError, match=f"{trait} must be at least 1"):
        replace(PLAIN, **changed)  # type: ignore[arg-type]


def test_a_time_limit_needs_iterations() -> None:
    with pytest.raises(
        ValueError, match=r"launch_limit_s 9.0 needs launch_iterations of at least 1"
    ):
        replace(PLAIN, launch_limit_s=9.0)


def test_a_time_limit_must_leave_time_after_the_start() -> None:
    with pytest.raises(ValueError, match=r"found 3 and 9.0"):
        replace(PLAIN, launch_limit_s=9.0, launch_setup_s=9.0, launch_iterations=3)


@pytest.mark.parametrize(
    ("precision", "kept", "accumulation", "gradient"),
    [("fp16", 4, 6, 2), ("bf16", 8, 10, 4), ("fp32", 8, 12, 4)],
)
def test_what_is_left_out_follows_from_the_precision(
    precision: Precision, kept: float, accumulation: float, gradient: float
) -> None:
    per = PLAIN.bytes_per_parameter(precision)
    assert (per.kept, per.accumulation, per.gradient, per.tied) == (
        kept,
        accumulation,
        gradient,
        gradient,
    )


@pytest.mark.parametrize(
    ("precision", "kept", "accumulation"), [("fp16", 6, 6), ("bf16", 6, 6), ("fp32", 8, 4)]
)
def test_fused_accumulation_writes_the_sum_instead_of_a_gradient(
    precision: Precision, kept: float, accumulation: float
) -> None:
    fused = replace(PLAIN, fused_accumulation=True, accumulates_fp16_in_fp32=True)
    per = fused.bytes_per_parameter(precision)
    assert (per.kept, per.accumulation, per.gradient) == (kept, accumulation, 4)


def test_what_is_given_counts() -> None:
    given = replace(
        PLAIN,
        kept_bytes_per_parameter=1.0,
        accumulation_bytes_per_parameter=3.0,
        gradient_bytes_per_parameter=5.0,
        tied_bytes_per_parameter=6.0,
    )
    per = given.bytes_per_parameter("fp16")
    assert (per.kept, per.accumulation, per.gradient, per.tied) == (1.0, 3.0, 5.0, 6.0)


def test_no_gradient_is_sent_narrower_than_it_is() -> None:
    narrow = replace(PLAIN, gradient_bytes_per_parameter=2.0, tied_bytes_per_parameter=2.0)
    assert narrow.bytes_per_parameter("bf16").gradient == 2.0
    assert narrow.bytes_per_parameter("fp32").gradient == 4.0
    assert narrow.bytes_per_parameter("fp32").tied == 4.0


def test_single_precision_has_no_copies_but_wider_buckets() -> None:
    mixed = replace(
        PLAIN,
        bucket_bytes_per_element=2.0,
        bucket_traffic_bytes_per_parameter=8.0,
        step_bytes_per_parameter=8.0,
    )
    half, single = mixed.bytes_per_parameter("bf16"), mixed.bytes_per_parameter("fp32")
    assert (half.master, half.step, half.step_traffic) == (8.0, 8.0, 32.0)
    assert (single.master, single.step, single.step_traffic) == (0.0, 0.0, 4.0)
    assert (half.bucket, half.bucket_traffic) == (2.0, 8.0)
    assert (single.bucket, single.bucket_traffic) == (4.0, 16.0)


ADAM_STATES = {
    ("deepspeed", "fp16"): 16,
    ("deepspeed", "fp32"): 16,
    ("megatron", "fp16"): 20,
    ("megatron", "bf16"): 24,
    ("megatron-lm-2022", "fp16"): 18,
    ("megatron-core", "bf16"): 18,
    ("nanotron", "bf16"): 20,
    ("amp-2022", "fp16"): 16,
}


@pytest.mark.parametrize(("runtime", "precision"), ADAM_STATES)
def test_states_with_adam(runtime: str, precision: Precision) -> None:
    per = RUNTIMES[runtime].bytes_per_parameter(precision)
    moments = find_optimizer("adam").moment_bytes
    assert per.kept + per.master + moments == ADAM_STATES[runtime, precision]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("precision", get_args(Precision))
def test_every_runtime_knows_every_precision(runtime: str, precision: Precision) -> None:
    per = RUNTIMES[runtime].bytes_per_parameter(precision)
    assert per.gradient >= 2
    assert per.kept >= 4


def test_only_a_runtime_that_synchronises_waits_for_all_reduces() -> None:
    assert RUNTIMES["amp-2022"].waits_for_all_reduces
    assert not RUNTIMES["deepspeed"].waits_for_all_reduces


@pytest.mark.parametrize(
    ("name", "moment_bytes", "update_bytes"), [("adam", 8, 28), ("adamw", 8, 28), ("sgd", 0, 12)]
)
def test_optimizers_keep_and_touch_their_moments(
    name: str, moment_bytes: int, update_bytes: int
) -> None:
    # update: read the gradient; read and write the weight and each moment; 4 bytes each
    optimizer = find_optimizer(name)
    assert optimizer.moment_bytes == moment_bytes
    assert optimizer.update_traffic_bytes == update_bytes


def test_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'lion' is not known; known: adam, adamw, sgd"):
        find_optimizer("lion")
    assert set(OPTIMIZERS) == {"adam", "adamw", "sgd"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_experiment_may_name_every_optimizer(name: str) -> None:
    batch = "global_batch_size: 8"
    experiment = small_experiment((batch, f"optimizer: {name}\n{batch}"))
    assert find_optimizer(experiment.optimizer).name == name


def test_only_a_runtime_that_offloads_activations_takes_offloaded_blocks() -> None:
    with pytest.raises(ValueError, match=r"found offloaded_blocks 2; .* offload: megatron-core"):
        replace(PLAIN, offloaded_blocks=2)
    offloads = RUNTIMES["megatron-core"].with_offloaded(2)
    assert "without recompute" in (offloads.why_no_recompute([FULL]) or "")
    assert offloads.why_no_recompute([NO_RECOMPUTE]) is None
