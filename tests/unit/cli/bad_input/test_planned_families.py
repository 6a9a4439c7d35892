"""Families that are planned, and that our training program cannot train."""

from dataclasses import replace
from typing import Final

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import OwnProgram
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.planner import make_planner
from amp_ray.search.space import uniform_candidates
from amp_ray.trials.runtime_strategy import why_not_launchable
from support.aceso import EXPERIMENT as ACESO
from support.aceso import T5_ROWS, aceso_experiment, aceso_files, resnet_rows
from support.bad_input import EXPERIMENT, Refused
from support.experiments import experiment_from

FAMILIES: Final = {
    "t5": (
        "{family: t5, num_layers: 2, hidden_size: 64, num_heads: 4, sequence_length: 32, "
        "vocab_size: 128}"
    ),
    "wide_resnet": "{family: wide_resnet, num_layers: 50, image_size: 64}",
    "blocks": (
        "{family: blocks, sequence_length: 32, blocks: [{name: body, repeat: 6, "
        "parameters: 7000, forward_gflops: 0.5, activation_elements: 9000, "
        "boundary_elements: 2048, sharded: true}]}"
    ),
}


def text_of(family: str, text: str = EXPERIMENT) -> str:
    """Return an experiment with another model."""
    start = text.index("{family")
    return text[:start] + FAMILIES[family] + text[text.index("}", start) + 1 :]


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_are_feasible_and_not_launchable(family: str) -> None:
    experiment = experiment_from(text_of(family))
    planner = AmpRayPlanner(experiment=experiment)
    plans = [planner.plan(candidate) for candidate in uniform_candidates(experiment)]
    feasible = [plan for plan in plans if isinstance(plan, Estimate) and not plan.reasons]
    assert {plan.strategy.pp for plan in feasible} == {1, 2, 4}
    assert {plan.strategy.tp for plan in feasible} == {1, 2}
    for plan in feasible:
        assert not plan.launchable
        assert any("only a program of your own" in warning for warning in plan.warnings)
        reason = why_not_launchable(experiment, plan.strategy)
        assert reason is not None
        assert f"trains gpt2, llama, transgan, not model family {family!r}" in reason


@pytest.mark.parametrize("family", FAMILIES)
def test_an_own_program_may_train_them(family: str) -> None:
    experiment = experiment_from(text_of(family))
    trials = replace(experiment.trials, program=OwnProgram(argv=("train",), metric="helper"))
    experiment = replace(experiment, trials=trials)
    result = AmpRayPlanner(experiment=experiment).plan(uniform_candidates(experiment)[0])
    assert isinstance(result, Estimate)
    assert result.launchable


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("command", "options"), [("tune", ()), ("profile", ("-o", "measured"))], ids=["tune", "profile"]
)
def test_commands_that_train_refuse_them(
    refused: Refused, command: str, options: tuple[str, ...], family: str
) -> None:
    message = refused({"experiment.yaml": text_of(family)}, *options, command=command)
    assert message.startswith("experiment.yaml:2: model: our training program")
    assert f"trains gpt2, llama, transgan, not model family {family!r}" in message


@pytest.mark.parametrize("family", FAMILIES)
def test_token_slices_of_what_is_no_causal_sequence_are_led_to_their_key(
    refused: Refused, family: str
) -> None:
    text = text_of(family).replace("search: {", "search: {token_slices: true, ")
    message = refused({"experiment.yaml": text})
    assert "search.token_slices: model family" in message


def test_a_wrong_key_of_a_block_is_led_to_its_line(refused: Refused) -> None:
    text = text_of("blocks").replace("sharded: true", "shardd: true")
    message = refused({"experiment.yaml": text})
    assert message == (
        "experiment.yaml:2: model.blocks.0.shardd: unknown key 'shardd'; did you mean 'sharded'?"
    )


@pytest.mark.guest("aceso2024")
@pytest.mark.parametrize(
    ("family", "profiled", "rows", "has_tables"),
    [
        ("t5", "t5_x", T5_ROWS, True),
        ("wide_resnet", "resnet_x", resnet_rows(), False),
    ],
)
def test_profiles_of_aceso_are_read(
    family: str, profiled: str, rows: tuple[str, ...], *, has_tables: bool
) -> None:
    text = text_of(family, ACESO).replace("gpt_tiny", profiled)
    text = text.replace("num_layers: 2", "num_layers: 1")
    experiment = aceso_experiment(text, aceso_files(profiled, rows, sizes=(4,), algorithms=(0,)))
    assert bool(experiment.profile.tables) is has_tables
    planner = make_planner(experiment, "aceso-2024")
    plans = [planner.plan(candidate) for candidate in planner.candidates().required]
    assert any(isinstance(plan, Estimate) and not plan.reasons for plan in plans)
