from dataclasses import replace

import pytest

from amp_ray.calibration.evidence import (
    FIRST_MET,
    NEW_RELEASE,
    Evidence,
    Setting,
    backing,
    settings,
)
from amp_ray.clusters.constants import Uncertainty
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from support.experiments import experiment_from, small_experiment
from support.planted import small_strategies

ON_A100 = ("device: T4", "device: A100-80")
IN_MEGATRON = ("global", "runtime: megatron\nglobal")


def case(*changes: tuple[str, str]) -> tuple[Experiment, Strategy]:
    """The small experiment with changes of its text, and a strategy of it."""
    experiment = small_experiment(*changes)
    return experiment, small_strategies(experiment)[0]


def test_what_was_measured_is_narrow_and_says_nothing() -> None:
    found = Evidence.of(*case(ON_A100, IN_MEGATRON))
    assert found.first_met == 0.0
    assert found.warnings == ()
    assert found.sigma(0.1) == pytest.approx(0.1 * found.factor)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ([ON_A100], "runtime 'deepspeed'"),
        ([IN_MEGATRON], "runtime 'megatron' on T4"),
        ([("device: T4", "device: H100"), IN_MEGATRON], "runtime 'megatron' on H100"),
    ],
)
def test_what_was_not_measured_says_so_and_is_wide(
    changes: list[tuple[str, str]], text: str
) -> None:
    found = Evidence.of(*case(*changes))
    assert found.warnings == (f"wide interval: no published time of {text}",)
    assert found.sigma(0.0) == FIRST_MET
    assert found.sigma(0.1) > max(0.1, FIRST_MET)


def test_a_kind_of_strategy_without_measurements_says_so() -> None:
    experiment, strategy = case(ON_A100, IN_MEGATRON)
    traits = replace(experiment.traits, name="llm-foundry", blocking_launches=True)
    found = Evidence.of(replace(experiment, traits=traits), strategy)
    expected = "runtime 'llm-foundry' on A100-80: dense, blocking launches"
    assert found.unbacked == expected


def test_of_several_boards_the_least_known_counts() -> None:
    mixed = ("device: T4, slots: 2", "device: A100-80, slots: 2")
    experiment, strategy = case(IN_MEGATRON)
    text = "runtime 'megatron' on T4"
    assert {each.board for each in settings(experiment, strategy)} == {"T4"}
    both, plan = case(IN_MEGATRON, mixed)
    assert Evidence.of(both, plan).unbacked in {"", text}


def test_after_trials_nothing_is_corrected() -> None:
    experiment, strategy = case()
    certain = Uncertainty(names=("gemm_scale",), covariance=((0.0,),))
    found = Evidence.of(replace(experiment, uncertainty=certain), strategy)
    assert (found.sigma(0.2), found.warnings) == (0.2, ())


def test_a_release_counts_before_other_releases() -> None:
    """Times of other releases back it in part: their largest factor, beside a common one."""
    old = Setting(program="megatron-core", release="25.04", board="H100", kind="dense")
    new = replace(old, release="26.06")
    factors = {old: 2.0, replace(old, release="25.09"): 0.5}
    assert backing(old, factors) == (2.0, 0.0)
    assert backing(new, factors) == (2.0, NEW_RELEASE)
    assert backing(new, {**factors, new: 0.7}) == (0.7, 0.0)
    assert backing(replace(new, board="T4"), factors) == (1.0, FIRST_MET)
    assert NEW_RELEASE < FIRST_MET


EXPERTS = "num_experts: 8, experts_per_token: 2, "
ON_H100 = "runtime 'megatron-core' on H100: experts, release 26.08"


@pytest.mark.parametrize(
    ("release", "experts", "text"),
    [
        *(("26.02", EXPERTS, ""), ("25.09", EXPERTS, ""), ("26.08", EXPERTS, ON_H100)),
        *(("26.02", "", ""), ("26.08", "", "")),
    ],
)
def test_a_release_without_measurements_says_so(release: str, experts: str, text: str) -> None:
    """Releases by which a model's times are the same are one: without experts, 26.02 and 26.08."""
    given = experiment_from(
        f"""
name: small
model:
  {{{experts}family: llama, num_layers: 2, hidden_size: 256, num_heads: 4, feed_forward_size: 512,
   vocab_size: 512, sequence_length: 128}}
cluster: {{nodes: [{{device: H100, slots: 2}}]}}
precision: bf16
runtime: megatron-core
release: "{release}"
global_batch_size: 4
"""
    )
    found = Evidence.of(given, small_strategies(given)[0])
    assert found.unbacked == text
    assert found.first_met == (NEW_RELEASE if text else 0.0)
