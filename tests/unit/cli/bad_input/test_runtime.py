"""What a user may get wrong about precision, ZeRO stage, runtime, its traits and constants."""

from typing import Final

import pytest

from support.bad_input import Refused, edited

RUNTIMES: Final = {
    "zero stage that is not priced": (
        ("zero_stage: 0", "zero_stage: 0\ntraits: {max_zero_stage: 4}"),
        "experiment.yaml:9: traits: max_zero_stage is 4; expected 0, which is min_zero_stage, to 3",
    ),
    "trait beyond numbers": (
        ("runtime: deepspeed", "traits: {context_bytes: 1e300}"),
        "traits.context_bytes: found 1e+300; expected a number from 0 to 1e+15",
    ),
    "unknown precision": (
        ("precision: fp16", "precision: fp4"),
        "experiment.yaml:7: precision: found 'fp4'; expected 'fp16', 'bf16', 'fp32' or 'fp8'",
    ),
    "unknown runtime": (
        ("runtime: deepspeed", "runtime: horovod"),
        "experiment.yaml:9: runtime: found 'horovod'; expected one of deepspeed, torch",
    ),
    "zero stage that does not exist": (
        ("zero_stage: 0", "zero_stage: 4"),
        "experiment.yaml:8: zero_stage: found 4; expected less than or equal to 3",
    ),
    "zero stage that the runtime lacks": (
        ("zero_stage: 0", "zero_stage: 3\ntraits: {max_zero_stage: 1}"),
        "experiment.yaml:8: zero_stage: found 3; runtime 'deepspeed' works with zero_stage up to 1",
    ),
    "unknown trait": (
        ("runtime: deepspeed", "traits: {speed: 3}"),
        "experiment.yaml:9: traits.speed: unknown trait 'speed'; those that can be set: ",
    ),
    "trait of another type": (
        ("runtime: deepspeed", "traits: {shards_heads: 1}"),
        "experiment.yaml:9: traits.shards_heads: found 1; expected true or false",
    ),
    "half a virtual stage": (
        ("runtime: deepspeed", "traits: {virtual_stages: 1.5}"),
        "experiment.yaml:9: traits.virtual_stages: found 1.5; expected an integer from 0 to",
    ),
    "time limit without iterations": (
        ("runtime: deepspeed", "traits: {launch_limit_s: 100}"),
        "experiment.yaml:9: traits: launch_limit_s 100.0 needs launch_iterations of at least 1",
    ),
    "unknown constant": (
        ("runtime: deepspeed", "constants: {speed: 3}"),
        "experiment.yaml:9: constants.speed: unknown constant 'speed'; known: ",
    ),
    "constant of zero": (
        ("runtime: deepspeed", "constants: {gemm_scale: 0}"),
        "experiment.yaml:9: constants.gemm_scale: found 0; expected greater than 0",
    ),
}


@pytest.mark.parametrize(("replacement", "message"), RUNTIMES.values(), ids=RUNTIMES)
def test_a_wrong_runtime_is_led_to_its_line(
    refused: Refused, replacement: tuple[str, str], message: str
) -> None:
    assert message in refused({"experiment.yaml": edited(replacement)})
