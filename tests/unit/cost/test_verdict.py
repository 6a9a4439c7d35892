from dataclasses import replace

import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import Device
from amp_ray.cost.verdict import (
    OUT_OF_MEMORY,
    OVER_TIME_LIMIT,
    RISKY_PROBABILITY,
    WITHOUT_PARAMETERS,
    Judge,
    Verdict,
    exceeds_probability,
    safe_memory_fraction,
)
from amp_ray.models.model import Layer, Model
from amp_ray.runtimes.traits import RuntimeTraits

HALF, FULL = 5_000.0, 10_000.0  # bytes; the toy device holds 10 kB


@pytest.fixture
def judge(model: Model, traits: RuntimeTraits, constants: Constants) -> Judge:
    return Judge(model=model, traits=traits, constants=constants)


def one_stage(judge: Judge, device: Device, *, peak: float = HALF, seconds: float = 1.0) -> Verdict:
    return judge.judge((0, 4), seconds, (peak,), (device,))


def test_a_strategy_that_fits_runs(judge: Judge, device: Device) -> None:
    verdict = one_stage(judge, device)
    assert verdict.reasons == ()
    assert verdict.failure_probability == pytest.approx(0.0, abs=1e-9)


def test_a_stage_that_just_fits_is_a_coin_toss(judge: Judge, device: Device) -> None:
    verdict = one_stage(judge, device, peak=FULL)
    assert verdict.reasons == ()
    assert verdict.failure_probability == pytest.approx(0.5)


def test_the_stage_that_is_furthest_over_is_named(judge: Judge, device: Device) -> None:
    large = replace(device, name="large", memory_bytes=100 * device.memory_bytes)
    verdict = judge.judge((0, 2, 4), 1.0, (3 * FULL, 4 * FULL), (device, large))
    (reason,) = verdict.reasons
    assert reason.kind == OUT_OF_MEMORY
    assert reason.detail.startswith("stage 0 needs")
    assert "toy" in reason.detail
    assert verdict.failure_probability == pytest.approx(1.0)


def test_without_a_launch_limit_time_does_not_matter(judge: Judge, device: Device) -> None:
    assert judge.launch_limit_s is None
    assert one_stage(judge, device, seconds=1e9).reasons == ()


def test_launcher_gives_up_after_its_time(judge: Judge, device: Device) -> None:
    traits = replace(judge.traits, launch_limit_s=100.0, launch_setup_s=20.0, launch_iterations=40)
    limited = replace(judge, traits=traits)
    assert limited.launch_limit_s == 2.0
    assert one_stage(limited, device, seconds=1.0).reasons == ()
    at_limit = one_stage(limited, device, seconds=2.0)
    assert at_limit.reasons == ()
    assert at_limit.failure_probability == pytest.approx(0.5)
    (reason,) = one_stage(limited, device, seconds=3.0).reasons
    assert reason.kind == OVER_TIME_LIMIT
    assert reason.detail == "3.00 s per iteration, at most 2.00 s"


def test_memory_and_time_fail_independently(judge: Judge, device: Device) -> None:
    traits = replace(judge.traits, launch_limit_s=40.0, launch_iterations=40)
    verdict = one_stage(replace(judge, traits=traits), device, peak=FULL, seconds=1.0)
    assert verdict.failure_probability == pytest.approx(0.75)


def test_stages_without_parameters_cannot_start(
    judge: Judge, device: Device, block: Layer, model: Model
) -> None:
    idle = replace(block, operators=())
    chain = replace(judge, model=replace(model, layers=(idle, block, idle, idle)))
    verdict = chain.judge((0, 1, 2, 4), 1.0, (HALF,) * 3, (device,) * 3)
    (reason,) = verdict.reasons
    assert (reason.kind, reason.detail) == (WITHOUT_PARAMETERS, "stage 0, 2")
    assert verdict.failure_probability == 1.0
    tolerant = replace(chain, traits=replace(judge.traits, fails_without_parameters=False))
    assert tolerant.judge((0, 1, 2, 4), 1.0, (HALF,) * 3, (device,) * 3).reasons == ()


def test_chance_follows_the_lognormal_error() -> None:
    assert exceeds_probability(1.1, 0.1) == pytest.approx(0.8297, abs=1e-4)  # 0.953 sigma
    assert exceeds_probability(1 / 1.1, 0.1) == pytest.approx(1 - 0.8297, abs=1e-4)


def test_what_needs_nothing_exceeds_nothing() -> None:
    assert exceeds_probability(0.0, 0.1) == 0.0


@pytest.mark.parametrize("memory_error", [0.02, 0.08, 0.3])
def test_the_most_memory_of_a_safe_strategy_is_just_not_risky(memory_error: float) -> None:
    fraction = safe_memory_fraction(Constants(memory_error=memory_error))
    risk = exceeds_probability(fraction, memory_error)
    assert risk < RISKY_PROBABILITY
    assert risk == pytest.approx(RISKY_PROBABILITY, rel=1e-6)
