"""An experiment file that cannot be read, and one with several mistakes."""

from typing import Final

import pytest

from support.bad_input import EXPERIMENT, MODEL, NODE, WITH_HOSTFILE, Refused, edited

TEXTS: Final[dict[str, tuple[str | bytes, str]]] = {
    "empty": ("", "experiment.yaml: expected a mapping of keys such as"),
    "cut short between keys": (
        EXPERIMENT[: EXPERIMENT.index("runtime")],
        "experiment.yaml: global_batch_size: key 'global_batch_size' is missing",
    ),
    "key twice within a mapping": (
        edited((NODE, "slots: 2, slots: 4, ")),
        "experiment.yaml:5: key 'slots' stands here and on line 5: keep one",
    ),
    "not UTF-8": (
        b"name: caf\xe9\n",
        "experiment.yaml: not a text file (byte 9 is not UTF-8)",
    ),
    "UTF-16": (EXPERIMENT.encode("utf-16"), "experiment.yaml: not a text file (byte 0 is not UTF"),
}
"""The messages about YAML itself are tested in unit/inputs/test_yaml_text.py."""


@pytest.mark.parametrize(("content", "message"), TEXTS.values(), ids=TEXTS)
def test_a_file_that_cannot_be_read_says_where(
    refused: Refused, content: str | bytes, message: str
) -> None:
    assert message in refused({"experiment.yaml": content})


BOMB: Final = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
"""9 to the power of 9 values in a few hundred bytes."""


@pytest.mark.parametrize("command", ["plan", "doctor", "tune", "profile"])
def test_aliases_that_explode_are_refused_at_once(refused: Refused, command: str) -> None:
    options = {"tune": ("--budget", "1"), "profile": ("-o", "out")}.get(command, ())
    message = refused({"experiment.yaml": BOMB}, *options, command=command)
    assert message.startswith("experiment.yaml:6: stands for 597,871 values by its aliases")


def test_all_mistakes_of_a_file_are_told_at_once(refused: Refused) -> None:
    text = edited(
        ("device: T4", "device: T5"),
        ("profile:", "profil:"),
        ("zero_stage: 0", "zero_stage: 3\ntraits: {max_zero_stage: 2}"),
        ("runtime: deepspeed", "constants: {speed: 1}"),
        ("global_batch_size", "globl_batch_size"),
        ("space: uniform", "max_tp: 0"),
        (MODEL, "vocab_size: 128, bottom_width: 8}"),
    )
    lines = refused({"experiment.yaml": text}, mistakes=7).splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        "experiment.yaml:6: profil: unknown key 'profil'",
        "experiment.yaml:11: globl_batch_size: unknown key 'globl_batch_size'",
        "experiment.yaml:12: search.max_tp: found 0",
        "experiment.yaml:8: zero_stage: found 3",
        "experiment.yaml:10: constants.speed: unknown constant 'speed'",
        "experiment.yaml:2: model: family 'gpt2' has no bottom_width",
        "experiment.yaml:5: cluster.nodes.0.device: device 'T5' is not in the catalogue",
    ]
    assert lines[1].endswith("did you mean 'global_batch_size'?")


def test_what_depends_on_a_wrong_part_is_not_told_again(refused: Refused) -> None:
    text = edited(
        ("runtime: deepspeed", "runtime: horovod"), ("{source: analytic}", "{source: table}")
    )
    message = refused({"experiment.yaml": text})
    assert message.startswith("experiment.yaml:9: runtime: found 'horovod'")


@pytest.mark.parametrize("key", ["precision", "shard_ranks", "reshard_after_forward"])
def test_a_key_that_is_set_from_outside_is_refused_once(refused: Refused, key: str) -> None:
    message = refused({"experiment.yaml": EXPERIMENT}, "--set", f"{key}=none-such")
    assert message.startswith(f"--set {key}=none-such: {key}: found 'none-such'")


def test_many_mistakes_are_counted(refused: Refused) -> None:
    hosts = "".join(f"h{n} slots=x\n" for n in range(50))
    lines = refused({"experiment.yaml": WITH_HOSTFILE, "hosts": hosts}, mistakes=21).splitlines()
    assert lines[0].startswith("hosts:1: slots must be a positive integer")
    assert lines[-1].endswith("and 30 more mistakes")


def test_a_file_without_end_is_refused(refused: Refused) -> None:
    text = WITH_HOSTFILE.replace("hostfile: hosts", "hostfile: /dev/zero")
    assert "this is a device; expected a file" in refused({"experiment.yaml": text})


def test_a_file_that_ends_too_early_asks_whether_it_was_cut(refused: Refused) -> None:
    text = EXPERIMENT[: EXPERIMENT.index("hidden_size")]
    assert "is it cut short?" in refused({"experiment.yaml": text})
