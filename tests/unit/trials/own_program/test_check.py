import json
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.trials.own_program.program import check_program
from support.experiments import experiment_from, small_experiment


def experiment(trials: str = "", **program: Any) -> Experiment:  # noqa: ANN401 - any YAML
    keys = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in program.items())
    section = f"trials:\n{trials}  program:\n{keys}"
    return small_experiment(("global_batch_size: 8\n", f"global_batch_size: 8\n{section}"))


def test_a_sound_program_is_returned() -> None:
    given = experiment(argv=["{python}", "{megatron_flags}", "a{{b"], files=["a/b"], cwd="/x y")
    assert check_program(given) == given.trials.program


def test_an_unknown_placeholder_is_refused_with_line_and_key() -> None:
    text = """\
name: small
model: {family: gpt2, num_layers: 6, hidden_size: 256, num_heads: 8, sequence_length: 128,
        vocab_size: 1024}
cluster: {nodes: [{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}]}
global_batch_size: 8
trials:
  program:
    argv:
      - python
      - --tp={t}
"""
    with pytest.raises(InputError) as caught:
        check_program(experiment_from(text))
    message = str(caught.value)
    assert message.startswith("test.yaml:10: trials.program.argv.1: found {t}, which is no")
    assert "did you mean {tp}?" in message
    assert "micro_batch_size" in message


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("{", "a brace that belongs to no placeholder"),
        ("a{megatron_flags}", "has to be one of its own"),
        ("a\0b", "can hold a zero byte"),
    ],
)
def test_arguments_that_cannot_be_are_refused(word: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"test\.yaml:10: trials\.program\.argv\.1: .*{message}"):
        check_program(experiment(argv=["x", word]))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('A: "{tq}"', r"environment\.A: found {tq}, which is no placeholder\."),
        ('A: "{megatron_flags}"', r"environment\.A: .* one of its own"),
        ('A: "\\0"', "zero byte"),
        ('"A=B": x', "'A=B'; a variable's name has letters"),
        ('"A;$(id)": x', r"'A;\$\(id\)'; a variable's name has letters"),
        ("Aä: x", "'Aä'; a variable's name has letters"),
    ],
)
def test_variables_that_cannot_be_are_refused(entry: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_program(experiment(f"  environment: {{{entry}}}\n", argv=["x"]))
    assert str(caught.value).startswith("test.yaml:9: trials.environment.A")


@pytest.mark.parametrize("cwd", ["code", "~/code", "{trial_dir}", "/a\0"])
def test_a_folder_that_is_not_told_from_the_root_is_refused(cwd: str) -> None:
    with pytest.raises(InputError, match=r"trials\.program\.cwd: found .* from the root"):
        check_program(experiment(argv=["x"], cwd=cwd))


def test_files_below_a_folder_cannot_be_collected() -> None:
    with pytest.raises(InputError, match=r"collect\.1: found 'a/\*'"):
        check_program(experiment(argv=["x"], collect=["*", "a/*"]))


def test_a_launcher_beside_the_program_is_refused() -> None:
    with pytest.raises(InputError, match=r"trials\.launcher: found 'deepspeed' .* with per: node"):
        check_program(experiment("  launcher: deepspeed\n", argv=["x"]))


def test_files_are_checked_too() -> None:
    with pytest.raises(InputError, match=r"files\.0"):
        check_program(experiment(argv=["x"], files=["hostfile"]))
