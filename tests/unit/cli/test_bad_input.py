"""What a user may get wrong: exit code 2 and one message that leads to the place."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from amp_ray.cli import main

EXPERIMENT: Final = """\
name: mistaken
model: {family: gpt2, num_layers: 2, hidden_size: 64, \
num_heads: 4, sequence_length: 32, vocab_size: 128}
cluster:
  nodes:
    - {count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
profile: {source: analytic}
precision: fp16
zero_stage: 0
runtime: deepspeed
global_batch_size: 8
search: {space: uniform}
"""
NUM_LAYERS: Final = 5
"""Embedding, two blocks, norm and head."""

DESCRIPTION: Final = """\
num_layers: 5
model: two blocks
precision: fp16
hardware: T4
versions: none
"""
HEADER: Final = "layer,tp,micro_batch_size,forward_s\n"
TABLE: Final = HEADER + "".join(f"{layer},1,1,0.001\n" for layer in range(NUM_LAYERS))

LLAMA: Final = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "vocab_size": 128,
}

Run = Callable[..., str]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run a command on files; return its messages, one per mistake, after the common checks.

    The files are written below an empty folder, in which the command runs.
    """
    monkeypatch.chdir(tmp_path)

    def run(
        files: dict[str, str | bytes], *options: str, command: str = "plan", mistakes: int = 1
    ) -> str:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        before = sorted(tmp_path.rglob("*"))
        argv = ["amp-ray", command, "experiment.yaml", *options, "--json", "result.json"]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, ""), err
        assert all(line.startswith("amp-ray: ") for line in err.splitlines()), err
        assert len(err.splitlines()) == mistakes, err
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        return "\n".join(line.removeprefix("amp-ray: ") for line in err.splitlines())

    return run


def edited(*replacements: tuple[str, str]) -> str:
    """Return the experiment with parts of its text replaced."""
    text = EXPERIMENT
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return text


# ------------------------------------------------------------------- the experiment file

MODEL: Final = "vocab_size: 128}"
NODE: Final = "slots: 2, "

KEYS: Final = {
    "unknown key": (
        ("zero_stage: 0", "zero_stag: 0"),
        "experiment.yaml:8: zero_stag: unknown key 'zero_stag'; did you mean 'zero_stage'?",
    ),
    "unknown key in a node": (
        (NODE, "slots: 2, colour: red, "),
        "experiment.yaml:5: cluster.nodes.0.colour: unknown key 'colour'; known here: count, ",
    ),
    "unknown key in a described device": (
        ("device: T4", "device: {name: X, memory_gib: 8, memory_gbyte_per_s: 9, ram: 1}"),
        "experiment.yaml:5: cluster.nodes.0.device.ram: unknown key 'ram'; known here: name, ",
    ),
    "missing key": (
        ("global_batch_size: 8\n", ""),
        "experiment.yaml: global_batch_size: key 'global_batch_size' is missing",
    ),
    "missing key in a node": (
        (NODE, ""),
        "experiment.yaml:5: cluster.nodes.0.slots: key 'slots' is missing",
    ),
    "missing key in a described device": (
        ("device: T4", "device: {name: X, memory_gib: 8}"),
        (
            "experiment.yaml:5: cluster.nodes.0.device.memory_gbyte_per_s: key "
            "'memory_gbyte_per_s' is missing"
        ),
    ),
    "wrong type": (
        ("global_batch_size: 8", "global_batch_size: eight"),
        "experiment.yaml:10: global_batch_size: found 'eight'; expected an integer",
    ),
    "quoted number": (
        ("global_batch_size: 8", 'global_batch_size: "8"'),
        "experiment.yaml:10: global_batch_size: found '8'; expected an integer",
    ),
    "fraction instead of a count": (
        ("global_batch_size: 8", "global_batch_size: 8.0"),
        "experiment.yaml:10: global_batch_size: found 8.0; expected an integer",
    ),
    "flag instead of a count": (
        ("global_batch_size: 8", "global_batch_size: true"),
        "experiment.yaml:10: global_batch_size: found true; expected an integer",
    ),
    "count of zero": (
        (NODE, "slots: 0, "),
        "experiment.yaml:5: cluster.nodes.0.slots: found 0; expected greater than or equal to 1",
    ),
    "unit in the value": (
        ("inter_gbit_per_s: 10", "inter_gbit_per_s: 10 Gbit/s"),
        (
            "experiment.yaml:5: cluster.nodes.0.inter_gbit_per_s: found '10 Gbit/s'; "
            "expected a number alone (the key's name tells the unit)"
        ),
    ),
    "bytes instead of GiB": (
        (NODE, "slots: 2, memory_gib: 16000000000, "),
        "experiment.yaml:5: cluster.nodes.0.memory_gib: found 16000000000; expected 0.001",
    ),
    "not a number": (
        ("inter_gbit_per_s: 10", "inter_gbit_per_s: .nan"),
        "experiment.yaml:5: cluster.nodes.0.inter_gbit_per_s: found nan; expected ",
    ),
    "negative rate": (
        ("inter_gbit_per_s: 10", "inter_gbit_per_s: -10"),
        "cluster.nodes.0.inter_gbit_per_s: found -10; expected 0.001 to 100,000 Gbit/s",
    ),
    "rate that no link has": (
        ("inter_gbit_per_s: 10", "inter_gbit_per_s: 2e-7"),
        "cluster.nodes.0.inter_gbit_per_s: found 2e-07; expected 0.001 to 100,000 Gbit/s",
    ),
    "infinite memory": (
        (NODE, "slots: 2, memory_gib: .inf, "),
        "cluster.nodes.0.memory_gib: found inf; expected 0.001 to 10,000 GiB",
    ),
    "GFLOP/s instead of TFLOP/s": (
        (
            "device: T4",
            "device: {name: X, memory_gib: 8, memory_gbyte_per_s: 900, fp16_tflops: 125000}",
        ),
        "device.fp16_tflops: found 125000; expected 0.001 to 100,000 TFLOP/s",
    ),
    "MB/s instead of GB/s": (
        (
            "device: T4",
            "device: {name: X, memory_gib: 8, memory_gbyte_per_s: 900000, fp16_tflops: 125}",
        ),
        "device.memory_gbyte_per_s: found 900000; expected 0.1 to 100,000 GB/s",
    ),
    "latency in seconds": (
        (NODE, "slots: 2, intra_latency_us: 8e-6, "),
        "intra_latency_us: found 8e-06; expected 0 or 0.001 to 1,000,000 microseconds",
    ),
    "no nodes": (
        ("- {count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}", "[]"),
        "experiment.yaml:4: cluster.nodes: found []; expected a list of at least 1",
    ),
    "more devices than there are": (
        ("count: 2, device: T4, slots: 2", "count: 100000, device: T4, slots: 100000"),
        "experiment.yaml:4: cluster.nodes: found 10,000,000,000 devices; expected at most 1,000,0",
    ),
    "more layers than there are": (
        ("num_layers: 2", "num_layers: 100000"),
        "model.num_layers: found 100000; expected less than or equal to 10000",
    ),
    "count of 22 zeros": (
        ("global_batch_size: 8", "global_batch_size: 1" + "0" * 22),
        "global_batch_size: found 1" + "0" * 22 + "; expected less than or equal to 1000000",
    ),
    "count of 5000 zeros": (
        ("global_batch_size: 8", "global_batch_size: 1" + "0" * 5000),
        "global_batch_size: found a number of 5001 digits; expected an integer",
    ),
    "time limit that never ends": (
        ("search: {space: uniform}", "trials: {timeout_s: 1e300}"),
        "trials.timeout_s: found 1e+300; expected 0.001 to 100,000,000 seconds",
    ),
    "groups without end": (
        ("search: {space: uniform}", "trials: {host_groups: 999999999}"),
        "trials.host_groups: found 999999999; it must divide the number of nodes, 2",
    ),
    "pattern too deep to read": (
        (
            "search: {space: uniform}",
            f"trials: {{program: {{argv: [a], metric: {{pattern: '{'(' * 2000 + ')' * 2000}'}}}}}}",
        ),
        "trials.program.metric.pattern: found '((((",
    ),
    "name that is a path": (
        ("name: mistaken", "name: ../escape/x"),
        "experiment.yaml:1: name: found '../escape/x'; expected a plain name: no '/', no ",
    ),
    "name that is hidden": (
        ("name: mistaken", "name: .mistaken"),
        "experiment.yaml:1: name: found '.mistaken'; expected a plain name: ",
    ),
    "name for a terminal": (
        ("name: mistaken", 'name: "\\e[2J"'),
        "experiment.yaml:1: name: found '\\x1b[2J'; expected a plain name: ",
    ),
    "name too long": (
        ("name: mistaken", "name: " + "x" * 101),
        "expected at most 100 characters",
    ),
    "key for a terminal": (
        ("zero_stage: 0", '"\\e[2J": 0'),
        "experiment.yaml:8: \\x1b[2J: unknown key '\\x1b[2J'; known here: name, ",
    ),
    "device whose name is a path": (
        (
            "device: T4",
            "device: {name: ../X, memory_gib: 8, memory_gbyte_per_s: 9, fp16_tflops: 1}",
        ),
        "device.name: found '../X'; expected a plain name",
    ),
    "zero stage that is not priced": (
        ("zero_stage: 0", "zero_stage: 0\ntraits: {max_zero_stage: 3}"),
        "experiment.yaml:9: traits: max_zero_stage is 3, but the cost model prices ZeRO stages 0 ",
    ),
    "trait beyond numbers": (
        ("runtime: deepspeed", "traits: {context_bytes: 1e300}"),
        "traits.context_bytes: found 1e+300; expected a number from 0 to 1e+15",
    ),
    "word for a flag": (
        ("{space: uniform}", "{tp_across_nodes: yes}"),
        "experiment.yaml:11: search.tp_across_nodes: found 'yes'; expected true or false",
    ),
    "key without a value": (
        ("search: {space: uniform}", "search:"),
        "experiment.yaml:11: search: found nothing; expected a mapping of keys",
    ),
    "text instead of a mapping": (
        ("search: {space: uniform}", "search: uniform"),
        "experiment.yaml:11: search: found 'uniform'; expected a mapping of keys",
    ),
    "mapping instead of a list": (
        ("    - {count", "      {count"),
        "experiment.yaml:4: cluster.nodes: found {'count': 2, ",
    ),
    "number for a name": (
        ("name: mistaken", "name: 7"),
        "experiment.yaml:1: name: found 7; expected text (quote it if it is one)",
    ),
    "unknown search space": (
        ("space: uniform", "space: everything"),
        "experiment.yaml:11: search.space: found 'everything'; expected 'uniform'",
    ),
    "unknown precision": (
        ("precision: fp16", "precision: fp8"),
        "experiment.yaml:7: precision: found 'fp8'; expected 'fp16', 'bf16' or 'fp32'",
    ),
    "unknown runtime": (
        ("runtime: deepspeed", "runtime: horovod"),
        "experiment.yaml:9: runtime: found 'horovod'; expected one of deepspeed, megatron",
    ),
    "zero stage that does not exist": (
        ("zero_stage: 0", "zero_stage: 4"),
        "experiment.yaml:8: zero_stage: found 4; expected less than or equal to 3",
    ),
    "zero stage that the runtime lacks": (
        ("zero_stage: 0", "zero_stage: 3"),
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
    "device not in the catalogue": (
        ("device: T4", "device: B9000"),
        (
            "experiment.yaml:5: cluster.nodes.0.device: device 'B9000' is not in the "
            "catalogue; known: T4, "
        ),
    ),
    "device without a rate": (
        ("device: T4", "device: {name: X, memory_gib: 8, memory_gbyte_per_s: 9}"),
        "cluster.nodes.0.device: device 'X' needs fp32_tflops, fp16_tflops or bf16_tflops",
    ),
    "precision that the device lacks": (
        ("precision: fp16", "precision: bf16"),
        (
            "experiment.yaml:5: cluster.nodes.0.device: device 'T4' does not compute in "
            "bf16; it can do fp32, fp16"
        ),
    ),
    "link to an unknown host": (
        ("profile:", "  links: [{between: [node0, node7], gbit_per_s: 1}]\nprofile:"),
        "experiment.yaml:6: cluster.links.0.between: host 'node7' is not one of node0, node1",
    ),
    "link from a host to itself": (
        ("profile:", "  links: [{between: [node0, node0], gbit_per_s: 1}]\nprofile:"),
        "cluster.links.0.between: found ['node0', 'node0']; expected two different hosts",
    ),
    "link given twice": (
        (
            "profile:",
            (
                "  links:\n    - {between: [node0, node1], gbit_per_s: 1}\n"
                "    - {between: [node1, node0], gbit_per_s: 2}\nprofile:"
            ),
        ),
        (
            "experiment.yaml:8: cluster.links.1.between: the link between node1 and node0 "
            "stands here a second time"
        ),
    ),
    "limits that leave nothing": (
        ("{space: uniform}", "{min_tp: 4}"),
        (
            "experiment.yaml:11: search: no candidate for 4 devices and global_batch_size 8: no tp "
            "within min_tp 4 divides the slots of every node (2); widen the limits or set"
        ),
    ),
    "sizes that do not divide the batch": (
        ("{space: uniform}", "{micro_batch_sizes: [3]}"),
        (
            "experiment.yaml:11: search: no candidate for 4 devices and global_batch_size 8: with "
            "tp 1, 2 and micro_batch_sizes [3] no dp x micro-batch size divides the batch; widen"
        ),
    ),
    "profile that is none": (
        ("{source: analytic}", "{source: guess}"),
        "experiment.yaml:6: profile.source: found 'guess'; expected 'analytic', 'table' or 'm",
    ),
    "analytic profile with a path": (
        ("{source: analytic}", "{path: measured}"),
        "experiment.yaml:6: profile.path: found 'measured'; source 'analytic' has none",
    ),
    "table without a path": (
        ("{source: analytic}", "{source: table}"),
        "experiment.yaml:6: profile.path: source 'table' needs 'path', a folder with profile.yaml",
    ),
    "unknown family": (
        ("family: gpt2", "family: gpt9"),
        "experiment.yaml:2: model: family 'gpt9' is unknown; known: gpt2, llama, transgan",
    ),
    "no family": (
        ("family: gpt2, ", ""),
        "experiment.yaml:2: model: model needs 'family' (gpt2, llama or transgan) or 'config'",
    ),
    "family without its figures": (
        (", " + MODEL, "}"),
        (
            "experiment.yaml:2: model: family 'gpt2' needs num_layers, hidden_size, num_heads, "
            "sequence_length, vocab_size; missing: vocab_size"
        ),
    ),
    "figure of another family": (
        (MODEL, "vocab_size: 128, bottom_width: 8}"),
        "experiment.yaml:2: model: family 'gpt2' has no bottom_width; its figures are ",
    ),
    "heads that do not divide the width": (
        ("num_heads: 4", "num_heads: 7"),
        "experiment.yaml:2: model: hidden_size 64 is not a multiple of num_heads 7",
    ),
    "heads that do not divide each other": (
        ("family: gpt2", "num_key_value_heads: 3, family: llama"),
        "experiment.yaml:2: model: num_heads 4 is not a multiple of num_key_value_heads 3",
    ),
    "published list of another family": (
        ("family: gpt2", "layer_list: amp-2022, family: llama"),
        "experiment.yaml:2: model: layer list 'amp-2022' exists for gpt2 and transgan only",
    ),
}


@pytest.mark.parametrize(("replacement", "message"), KEYS.values(), ids=KEYS)
def test_a_wrong_key_or_value_is_led_to_its_line(
    refused: Run, replacement: tuple[str, str], message: str
) -> None:
    assert message in refused({"experiment.yaml": edited(replacement)})


TEXTS: Final[dict[str, tuple[str | bytes, str]]] = {
    "empty": ("", "experiment.yaml: expected a mapping of keys such as"),
    "only comments": ("# later\n", "found an empty file"),
    "a list": ("- name: x\n", "experiment.yaml: expected a mapping of keys such as 'name:' and"),
    "a word": ("homogeneous\n", "found a str"),
    "cut short within a mapping": (
        EXPERIMENT[: EXPERIMENT.index("hidden_size")],
        "experiment.yaml:2: not valid YAML: ",
    ),
    "cut short between keys": (
        EXPERIMENT[: EXPERIMENT.index("runtime")],
        "experiment.yaml: global_batch_size: key 'global_batch_size' is missing",
    ),
    "key twice": (
        EXPERIMENT + "precision: bf16\n",
        "experiment.yaml:12: key 'precision' stands here and on line 7: keep one",
    ),
    "key twice within a mapping": (
        edited((NODE, "slots: 2, slots: 4, ")),
        "experiment.yaml:5: key 'slots' stands here and on line 5: keep one",
    ),
    "tabs": (edited(("  nodes", "\tnodes")), "experiment.yaml:4: not valid YAML: found character"),
    "two documents": (
        EXPERIMENT + "---\n" + EXPERIMENT,
        "experiment.yaml:12: not valid YAML: but found another document",
    ),
    "control character": (
        EXPERIMENT + "\x01",
        "experiment.yaml:12: not valid YAML: character '\\x01'",
    ),
    "tag": (
        edited(("name: mistaken", "name: !!python/name:os.system x")),
        "experiment.yaml:1: found the tag 'tag:yaml.org,2002:python/name:os.system'; write the",
    ),
    "list as a key": ("? [a, b]\n: c\n", "experiment.yaml:1: expected a word as the key, found a"),
    "value within itself": (
        edited(("search: {space: uniform}", "search: &all {space: *all}")),
        "experiment.yaml:11: a value cannot stand within itself",
    ),
    "nested too deeply": ("a: " + "[" * 5000, "experiment.yaml:1: not valid YAML: nested mo"),
    "not UTF-8": (
        b"name: caf\xe9\n",
        "experiment.yaml: not a text file (byte 9 is not UTF-8)",
    ),
    "UTF-16": (EXPERIMENT.encode("utf-16"), "experiment.yaml: not a text file (byte 0 is not UTF"),
}


@pytest.mark.parametrize(("content", "message"), TEXTS.values(), ids=TEXTS)
def test_a_file_that_cannot_be_read_says_where(
    refused: Run, content: str | bytes, message: str
) -> None:
    assert message in refused({"experiment.yaml": content})


BOMB: Final = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
"""9 to the power of 9 values in a few hundred bytes."""


@pytest.mark.parametrize("command", ["plan", "doctor", "tune", "profile"])
def test_aliases_that_explode_are_refused_at_once(refused: Run, command: str) -> None:
    options = {"tune": ("--budget", "1"), "profile": ("-o", "out")}.get(command, ())
    message = refused({"experiment.yaml": BOMB}, *options, command=command)
    assert message.startswith("experiment.yaml:6: stands for 597,871 values by its aliases")


def test_all_mistakes_of_a_file_are_told_at_once(refused: Run) -> None:
    text = edited(
        ("device: T4", "device: T5"),
        ("profile:", "profil:"),
        ("zero_stage: 0", "zero_stage: 3"),
        ("runtime: deepspeed", "constants: {speed: 1}"),
        ("global_batch_size", "globl_batch_size"),
        ("space: uniform", "max_tp: 0"),
        (MODEL, "vocab_size: 128, bottom_width: 8}"),
    )
    told = refused({"experiment.yaml": text}, mistakes=7).splitlines()
    assert [line.partition(";")[0] for line in told] == [
        "experiment.yaml:6: profil: unknown key 'profil'",
        "experiment.yaml:10: globl_batch_size: unknown key 'globl_batch_size'",
        "experiment.yaml:11: search.max_tp: found 0",
        "experiment.yaml:8: zero_stage: found 3",
        "experiment.yaml:9: constants.speed: unknown constant 'speed'",
        "experiment.yaml:2: model: family 'gpt2' has no bottom_width",
        "experiment.yaml:5: cluster.nodes.0.device: device 'T5' is not in the catalogue",
    ]
    assert told[1].endswith("did you mean 'global_batch_size'?")


def test_what_depends_on_a_wrong_part_is_not_told_again(refused: Run) -> None:
    text = edited(
        ("runtime: deepspeed", "runtime: horovod"), ("{source: analytic}", "{source: table}")
    )
    message = refused({"experiment.yaml": text})
    assert message.startswith("experiment.yaml:9: runtime: found 'horovod'")


def test_many_mistakes_are_counted(refused: Run) -> None:
    hosts = "".join(f"h{n} slots=x\n" for n in range(50))
    told = refused({"experiment.yaml": WITH_HOSTFILE, "hosts": hosts}, mistakes=21).splitlines()
    assert told[0].startswith("hosts:1: slots must be a positive integer")
    assert told[-1].endswith("and 30 more mistakes")


def test_a_file_without_end_is_refused(refused: Run) -> None:
    text = WITH_HOSTFILE.replace("hostfile: hosts", "hostfile: /dev/zero")
    assert "longer than 33,554,432 characters" in refused({"experiment.yaml": text})


def test_a_file_that_ends_too_early_asks_whether_it_was_cut(refused: Run) -> None:
    text = EXPERIMENT[: EXPERIMENT.index("hidden_size")]
    assert "is it cut short?" in refused({"experiment.yaml": text})


def test_a_missing_experiment_is_named(refused: Run) -> None:
    assert refused({}) == "experiment.yaml: no such file"


def test_a_folder_in_place_of_the_experiment_is_told(refused: Run) -> None:
    message = refused({"experiment.yaml/inside.txt": "x"})
    assert message == "experiment.yaml: this is a folder; expected a file"


# --------------------------------------------------------------------------- the hostfile

WITH_HOSTFILE: Final = edited(("  nodes:", "  hostfile: hosts\n  nodes:"))

HOSTFILES: Final[dict[str, tuple[str | bytes, str]]] = {
    "a host alone": (
        "10.0.0.1\n10.0.0.2 8\n",
        "hosts:1: found '10.0.0.1': expected 'host slots=N' or 'host N'",
    ),
    "another form": (
        "a slots=2\nb gpus=2\n",
        "hosts:2: found 'b gpus=2': expected 'host slots=N' or 'host N'",
    ),
    "host twice": (
        "a slots=2\n\na slots=2\n",
        "hosts:3: host 'a' stands here and on line 1: name it once",
    ),
    "no slots": (
        "a slots=0\nb slots=2\n",
        "hosts:1: slots must be a positive integer, found '0' for host 'a'",
    ),
    "slots as a word": (
        "a slots=four\n",
        "hosts:1: slots must be a positive integer, found 'four' for host 'a'",
    ),
    "a host that is an option": (
        "-oProxyCommand=x slots=2\n",
        "hosts:1: found host '-oProxyCommand=x'; a name has at most 255 characters, no spaces, ",
    ),
    "a host that is a path": (
        "../a slots=2\nb slots=2\n",
        "hosts:1: found host '../a'; a name has",
    ),
    "a host for a terminal": (
        "a\x1b[2J slots=2\nb slots=2\n",
        "hosts:1: found host 'a\\x1b[2J'; a name has",
    ),
    "no host": (
        "# none yet\n",
        "experiment.yaml:4: cluster.hostfile: hosts: no host found: expected lines like",
    ),
    "not UTF-8": (
        b"h\xf6st slots=2\n",
        "experiment.yaml:4: cluster.hostfile: hosts: not a text file (byte 1 is not UTF-8)",
    ),
    "other number of hosts": (
        "a slots=2\n",
        "experiment.yaml:5: cluster.nodes: describes 2 hosts and hostfile 'hosts' names 1: ",
    ),
    "other number of slots": (
        "a slots=2\nb slots=4\n",
        "experiment.yaml:6: cluster.nodes.0.slots: found 2; host 'b' has slots=4 in 'hosts'",
    ),
}


@pytest.mark.parametrize(("content", "message"), HOSTFILES.values(), ids=HOSTFILES)
def test_a_wrong_hostfile_is_led_to_its_line(
    refused: Run, content: str | bytes, message: str
) -> None:
    assert message in refused({"experiment.yaml": WITH_HOSTFILE, "hosts": content})


def test_a_missing_hostfile_is_led_to_the_key_that_names_it(refused: Run) -> None:
    message = refused({"experiment.yaml": WITH_HOSTFILE})
    assert message == "experiment.yaml:4: cluster.hostfile: hosts: no such file"


def test_a_folder_in_place_of_the_hostfile_is_told(refused: Run) -> None:
    message = refused({"experiment.yaml": WITH_HOSTFILE, "hosts/a": "x"})
    assert message.endswith("hosts: this is a folder; expected a file")


# ---------------------------------------------------------------------------- the profile

WITH_TABLE: Final = edited(("{source: analytic}", "{source: table, path: measured}"))

TABLES: Final = {
    "wrong header": (
        "layer,tp,batch,time\n0,1,1,0.1\n",
        (
            "measured/T4.csv:1: expected the header "
            "layer,tp,micro_batch_size,forward_s[,backward_s], found 'layer,tp,batch,time'"
        ),
    ),
    "empty": ("", "measured/T4.csv:1: expected the header layer,"),
    "no rows": (HEADER, "profile.path: measured/T4.csv: the file has a header and no rows"),
    "NaN": (
        TABLE + "0,1,2,nan\n",
        "measured/T4.csv:7: forward_s: found 'nan'; expected seconds, a number from 0 to 1,000,00",
    ),
    "infinity": (TABLE + "0,1,2,inf\n", "measured/T4.csv:7: forward_s: found 'inf'; expected sec"),
    "negative time": (TABLE + "0,1,2,-1\n", "measured/T4.csv:7: forward_s: found '-1'; expected"),
    "word": (TABLE + "0,1,2,fast\n", "measured/T4.csv:7: forward_s: found 'fast'; expected sec"),
    "no tp": (TABLE + "0,,2,0.1\n", "measured/T4.csv:7: tp: found ''; expected an integer of at"),
    "tp of zero": (TABLE + "0,0,2,0.1\n", "measured/T4.csv:7: tp: found '0'; expected an integer"),
    "long integer": (TABLE + f"0,1,{'9' * 5000},1\n", "measured/T4.csv:7: micro_batch_size: found"),
    "too few columns": (TABLE + "0,1,2\n", "measured/T4.csv:7: expected 4 columns (layer, tp, "),
    "layer twice": (
        TABLE + "0,1,1,0.001\n",
        "measured/T4.csv:7: layer 0 at tp 1, micro_batch_size 1 stands here a second time",
    ),
    "layer that the model lacks": (
        TABLE + "5,1,1,0.001\n",
        "measured/T4.csv:7: layer: found 5; the model has layers 0..4",
    ),
    "missing layers": (
        HEADER + "0,1,1,0.1\n2,1,1,0.1\n",
        "measured/T4.csv: tp 1, micro_batch_size 1: no row for layer 1, 3, 4 of 0..4",
    ),
    "all zero": (
        TABLE.replace("0.001", "0"),
        "measured/T4.csv: tp 1, micro_batch_size 1: found ze",
    ),
    "open quote": (TABLE + '0,1,2,"0.1\n', "measured/T4.csv:7: not valid CSV: unexpected end of"),
    "not measured at the tp that is searched": (
        TABLE,
        (
            "experiment.yaml:6: profile: profile measured has no times at tp 2 for device "
            "'T4', only at tp 1; measure it, or limit the search with search.max_tp"
        ),
    ),
}


@pytest.mark.parametrize(("table", "message"), TABLES.values(), ids=TABLES)
def test_a_wrong_table_is_led_to_its_line(refused: Run, table: str, message: str) -> None:
    files: dict[str, str | bytes] = {
        "experiment.yaml": WITH_TABLE,
        "measured/profile.yaml": DESCRIPTION,
        "measured/T4.csv": table,
    }
    assert message in refused(files)


DESCRIPTIONS: Final = {
    "other number of layers": (
        DESCRIPTION.replace("5", "30"),
        "measured/profile.yaml:1: num_layers: found 30; the model has 5 layers",
    ),
    "other precision": (
        DESCRIPTION.replace("fp16", "fp32"),
        "measured/profile.yaml:3: precision: measured in fp32; the experiment has precision fp16",
    ),
    "missing key": (
        DESCRIPTION.replace("versions: none\n", ""),
        "measured/profile.yaml: versions: key 'versions' is missing",
    ),
    "unknown key": (
        DESCRIPTION + "remarks: none\n",
        "measured/profile.yaml:6: remarks: unknown key 'remarks'; known here: num_layers, ",
    ),
}


@pytest.mark.parametrize(("description", "message"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_a_wrong_description_is_led_to_its_line(
    refused: Run, description: str, message: str
) -> None:
    files: dict[str, str | bytes] = {
        "experiment.yaml": WITH_TABLE,
        "measured/profile.yaml": description,
        "measured/T4.csv": TABLE,
    }
    assert message in refused(files)


FOLDERS: Final[dict[str, tuple[dict[str, str | bytes], str]]] = {
    "missing": ({}, "experiment.yaml:6: profile.path: measured: no such folder"),
    "a file": ({"measured": "x"}, "profile.path: measured: this is a file; expected a folder"),
    "no description": (
        {"measured/T4.csv": TABLE},
        "experiment.yaml:6: profile.path: measured: no profile.yaml in it; found T4.csv",
    ),
    "no table": (
        {"measured/profile.yaml": DESCRIPTION},
        "experiment.yaml:6: profile.path: measured: no table in it: expected files such as T4.csv",
    ),
    "another device's table": (
        {"measured/profile.yaml": DESCRIPTION, "measured/H100.csv": TABLE},
        "experiment.yaml:6: profile: profile measured has no times for device 'T4', only for H100",
    ),
    "not UTF-8": (
        {"measured/profile.yaml": DESCRIPTION, "measured/T4.csv": b"\xff\xfe"},
        "profile.path: measured/T4.csv: not a text file (byte 0 is not UTF-8)",
    ),
}


@pytest.mark.parametrize(("folder", "message"), FOLDERS.values(), ids=FOLDERS)
def test_a_wrong_profile_folder_is_led_to_the_key_that_names_it(
    refused: Run, folder: dict[str, str | bytes], message: str
) -> None:
    assert message in refused({"experiment.yaml": WITH_TABLE, **folder})


def test_an_unknown_shipped_profile_lists_those_that_are(refused: Run) -> None:
    text = edited(("{source: analytic}", '{source: table, path: "shipped:none"}'))
    message = refused({"experiment.yaml": text})
    assert message.startswith(
        "experiment.yaml:6: profile.path: shipped:none: no such profile is shipped; there are "
        "shipped:amp-2022-gpt2, "
    )


# ------------------------------------------------------------ a Hugging Face configuration

WITH_CONFIG: Final = EXPERIMENT.replace(EXPERIMENT.splitlines()[1], "model: {config: config.json}")

CONFIGS: Final = {
    "not JSON": ("{", "config.json:1: not valid JSON: Expecting property name"),
    "a list": ("[]", "model: config.json: expected a JSON object, found []"),
    "unknown architecture": (
        json.dumps(LLAMA | {"model_type": "bert"}),
        "experiment.yaml:2: model: config.json: model_type: found 'bert'; expected one of gpt2, ",
    ),
    "no architecture": ("{}", "model: config.json: model_type: found null; expected one of gpt2"),
    "text for a number": (
        json.dumps(LLAMA | {"num_hidden_layers": "2"}),
        "model: config.json: num_hidden_layers: found '2'; expected an integer from 1 to 10,000",
    ),
    "number for a flag": (
        json.dumps(LLAMA | {"tie_word_embeddings": 1}),
        "model: config.json: tie_word_embeddings: found 1; expected true or false",
    ),
    "missing figure": (
        json.dumps({key: value for key, value in LLAMA.items() if key != "vocab_size"}),
        (
            "experiment.yaml:2: model: family 'llama' needs num_layers, hidden_size, num_heads, "
            "sequence_length, vocab_size; missing: vocab_size"
        ),
    ),
    "experts": (
        json.dumps(LLAMA | {"num_local_experts": 8}),
        "model: config.json: num_local_experts: found 8; only dense decoders are planned",
    ),
    "experts under another name": (
        json.dumps(LLAMA | {"n_routed_experts": 64}),
        "model: config.json: n_routed_experts: found 64; only dense decoders are planned",
    ),
    "experts per token": (
        json.dumps(LLAMA | {"num_experts_per_tok": 2}),
        "model: config.json: num_experts_per_tok: found 2; only dense decoders are planned",
    ),
    "width of experts": (
        json.dumps(LLAMA | {"moe_intermediate_size": 1408}),
        "model: config.json: moe_intermediate_size: found 1408; only dense decoders are planned",
    ),
    "encoder": (
        json.dumps(LLAMA | {"is_encoder_decoder": True}),
        "model: config.json: is_encoder_decoder: found true; only dense decoders are planned",
    ),
    "layers without end": (
        json.dumps(LLAMA | {"num_hidden_layers": 10**9}),
        "config.json: num_hidden_layers: found 1000000000; expected an integer from 1 to 10,000",
    ),
    "number of many digits": (
        '{"model_type": 1' + "0" * 5000 + "}",
        "config.json: not usable JSON: found a number of 5001 digits; expected at most 300",
    ),
    "number beyond floats": (
        '{"model_type": 1e999}',
        "config.json: not usable JSON: found 1e999; expected a finite number",
    ),
    "nested too deeply": ("[" * 100_000, "config.json: not usable JSON: nested too deeply"),
    "heads of their own size": (
        json.dumps(LLAMA | {"head_dim": 32}),
        "model: config.json: head_dim: found 32; expected hidden_size 64 / num_heads 4",
    ),
}


@pytest.mark.parametrize(("content", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_wrong_model_configuration_is_led_to_its_key(
    refused: Run, content: str, message: str
) -> None:
    assert message in refused({"experiment.yaml": WITH_CONFIG, "config.json": content})


def test_a_missing_model_configuration_is_led_to_the_key_that_names_it(refused: Run) -> None:
    message = refused({"experiment.yaml": WITH_CONFIG})
    assert message == "experiment.yaml:2: model.config: config.json: no such file"


# ------------------------------------------------------------------------- the strategies

COLUMNS: Final = "tp,pp,dp,micro_batch_size"

STRATEGIES: Final[dict[str, tuple[str | bytes, str]]] = {
    "empty": ("", f"strategies.csv:1: expected the header {COLUMNS}[,bounds]"),
    "no rows": (f"{COLUMNS}\n", "strategies.csv: no strategy found in it"),
    "missing column": (
        "tp,pp,dp\n1,2,2\n",
        "[,recompute][,spread_s][,peak_memory_bytes], found 'tp,pp,dp': missing: micro_batch_size",
    ),
    "unknown column": (f"{COLUMNS},speed\n", "strategies.csv:1: expected the header tp,pp,dp,micr"),
    "column twice": (f"{COLUMNS},tp\n", "strategies.csv:1: expected the header tp,pp,dp,micro_bat"),
    "word for a degree": (
        f"{COLUMNS}\ntwo,1,2,1\n",
        "strategies.csv:2: tp: found 'two'; expected an integer of at least 1",
    ),
    "missing cell": (f"{COLUMNS}\n1,2,2\n", "strategies.csv:2: micro_batch_size: found ''; expect"),
    "cell too many": (
        f"{COLUMNS}\n1,2,2,1,9\n",
        "strategies.csv:2: expected 4 columns (tp, pp, dp, micro_batch_size), found 5",
    ),
    "degrees that do not multiply to the devices": (
        f"{COLUMNS}\n1,2,2,1\n2,2,2,1\n",
        "strategies.csv:3: tp 2 x pp 2 x dp 2 = 8 devices; the cluster has 4",
    ),
    "samples that do not divide the batch": (
        f"{COLUMNS}\n1,2,2,3\n",
        "strategies.csv:2: dp 2 x micro_batch_size 3 = 6 does not divide global_batch_size 8",
    ),
    "bounds that do not cover": (
        f"{COLUMNS},bounds\n1,2,2,1,0 2 4\n",
        "strategies.csv:2: bounds: found 0 2 4; expected 0 to 5, the number of the model's layers",
    ),
    "bounds of another pp": (
        f"{COLUMNS},bounds\n1,2,2,1,0 1 2 5\n",
        "strategies.csv:2: bounds: bounds must run from 0 in 2 stages, found (0, 1, 2, 5)",
    ),
    "bounds that fall": (
        f"{COLUMNS},bounds\n1,2,2,1,0 6 5\n",
        "strategies.csv:2: bounds: a stage needs layers, found [6, 5)",
    ),
    "word in bounds": (
        f"{COLUMNS},bounds\n1,2,2,1,0 x 5\n",
        "strategies.csv:2: bounds: found 'x'; expected an integer of at least 0",
    ),
    "unknown recompute": (
        f"{COLUMNS},recompute\n1,2,2,1,some\n",
        "strategies.csv:2: recompute: found 'some'; expected one of none, selective, full; or",
    ),
    "negative measurement": (
        f"{COLUMNS},measured_s\n1,2,2,1,-3\n",
        "strategies.csv:2: measured_s: found '-3'; expected seconds, from 1e-06 to 1,000,000",
    ),
    "JSON cut short": ('[{"tp": 1,\n', "strategies.csv:2: not valid JSON: Expecting property"),
    "JSON object": ('{"ranking": []}', "strategies.csv: expected a list of strategies, found an o"),
    "JSON number": ("[7]", "strategies.csv: [0]: expected a strategy object, found int"),
    "JSON with an unknown key": (
        '[{"tp": 1, "pp": 2, "dp": 2, "micro_batch_size": 1, "speed": 3}]',
        "strategies.csv: [0]: speed: unknown key 'speed'; known here: tp, pp, dp, ",
    ),
    "JSON without micro_batch_size": (
        '[{"tp": 1, "pp": 2, "dp": 2}]',
        "strategies.csv: [0]: micro_batch_size: key 'micro_batch_size' is missing",
    ),
    "JSON without tp": (
        '[{"pp": 2, "dp": 2, "micro_batch_size": 1}]',
        "strategies.csv: [0]: tp: key is missing; a strategy without bounds and stages needs it",
    ),
    "JSON with text for a degree": (
        '[{"tp": "1", "pp": 2, "dp": 2, "micro_batch_size": 1}]',
        "strategies.csv: [0]: tp: found '1'; expected an integer",
    ),
    "JSON with another pp than its bounds": (
        (
            '[{"tp": 1, "pp": 4, "dp": 2, "micro_batch_size": 1, "num_micro_batches": 4, '
            '"bounds": [0, 2, 5]}]'
        ),
        "strategies.csv: [0]: pp is 4, but the stages make it 2",
    ),
    "JSON with an unknown host": (
        (
            '[{"tp": 1, "dp": 2, "micro_batch_size": 1, "num_micro_batches": 4, "bounds": '
            '[0, 2, 5], "placement": [["node0", 0], ["node0", 1], ["node1", 0], ["node9", 1]]}]'
        ),
        "strategies.csv: [0]: placement names slot 1 of host 'node9', which the cluster does not h",
    ),
    "JSON with more devices than there are": (
        (
            '[{"tp": 999999999, "dp": 999999999, "micro_batch_size": 1, "num_micro_batches": 4, '
            '"bounds": [0, 2, 5]}]'
        ),
        "strategies.csv: [0]: uses 1999999996000000002 devices; the cluster has 4",
    ),
    "JSON with stages of more devices than there are": (
        (
            '[{"micro_batch_size": 1, "num_micro_batches": 1, '
            '"stages": [{"layers": [0, 5], "tp": 999999999, "dp": 999999999}]}]'
        ),
        "strategies.csv: [0]: uses 999999998000000001 devices; the cluster has 4",
    ),
    "JSON nested too deeply": (
        "[" * 100_000,
        "strategies.csv: not usable JSON: nested too deeply",
    ),
    "JSON with a number of many digits": (
        '[{"tp": ' + "9" * 5000 + "}]",
        "strategies.csv: not usable JSON: found a number of 5000 digits",
    ),
    "measurement of no time": (
        f"{COLUMNS},measured_s\n1,2,2,1,1e-300\n",
        "strategies.csv:2: measured_s: found '1e-300'; expected seconds, from 1e-06 to 1,000,000",
    ),
    "cell without end": (
        f"{COLUMNS}\n{'1' * 200_000},1,1,1\n",
        "strategies.csv:2: not valid CSV: field larger than field limit",
    ),
    "JSON that uses some of the devices": (
        '[{"tp": 1, "dp": 1, "micro_batch_size": 1, "num_micro_batches": 8, "bounds": [0, 2, 5]}]',
        "strategies.csv: [0]: uses 2 devices; the cluster has 4, and a strategy uses each of them",
    ),
    "not UTF-8": (b"\xff\xfe", "strategies.csv: not a text file (byte 0 is not UTF-8)"),
}


@pytest.mark.parametrize(("content", "message"), STRATEGIES.values(), ids=STRATEGIES)
def test_a_wrong_strategy_is_led_to_its_line(
    refused: Run, content: str | bytes, message: str
) -> None:
    files: dict[str, str | bytes] = {"experiment.yaml": EXPERIMENT, "strategies.csv": content}
    assert message in refused(files, "--strategies", "strategies.csv", command="score")


def test_missing_strategies_are_named(refused: Run) -> None:
    files: dict[str, str | bytes] = {"experiment.yaml": EXPERIMENT}
    message = refused(files, "--strategies", "strategies.csv", command="score")
    assert message == "strategies.csv: no such file"


def test_a_strategy_beyond_the_profile_is_led_to_its_line(refused: Run) -> None:
    files: dict[str, str | bytes] = {
        "experiment.yaml": WITH_TABLE,
        "measured/profile.yaml": DESCRIPTION,
        "measured/T4.csv": TABLE,
        "strategies.csv": f"{COLUMNS}\n1,2,2,1\n2,2,1,1\n",
    }
    message = refused(files, "--strategies", "strategies.csv", command="score")
    assert message.startswith("strategies.csv:3: profile measured has no times at tp 2 for device")


# ----------------------------------------------------------------- the published baseline


def test_the_baseline_says_what_it_needs(refused: Run) -> None:
    message = refused({"experiment.yaml": EXPERIMENT}, "--cost-model", "amp-2022")
    assert message.startswith("experiment.yaml: cost model amp-2022 needs a measured profile")


def test_the_baseline_refuses_cuts_that_leave_a_stage_idle(refused: Run) -> None:
    bounds = "0 20 25 56"  # entries 20 to 24 of the published list only pass data on
    files: dict[str, str | bytes] = {
        "experiment.yaml": TRANSGAN,
        "strategies.csv": f"{COLUMNS},bounds\n1,3,1,1,{bounds}\n",
    }
    options = ("--strategies", "strategies.csv", "--cost-model", "amp-2022")
    message = refused(files, *options, command="score")
    assert message.startswith("strategies.csv:2: bounds=(0, 20, 25, 56) leave a stage without a w")


def test_the_baseline_refuses_a_model_that_was_not_published(refused: Run) -> None:
    text = (
        TRANSGAN.replace("[12, 0, 0, 0, 0, 12]", "[1, 1]")
        .replace("layer_list: amp-2022", "layer_list: runtime")
        .replace("shipped:amp-2022-transgan", "measured")
    )
    files: dict[str, str | bytes] = {
        "experiment.yaml": text,
        "measured/profile.yaml": DESCRIPTION.replace("5", "4"),
        "measured/V100-16.csv": HEADER + "".join(f"{layer},1,1,0.001\n" for layer in range(4)),
    }
    message = refused(files, "--cost-model", "amp-2022")
    assert message.startswith("experiment.yaml: depth=(1, 1): the published list is known for 6 s")


TRANSGAN: Final = """\
name: generator
model: {family: transgan, hidden_size: 1024, num_heads: 4, depth: [12, 0, 0, 0, 0, 12],
        bottom_width: 9, window_size: 18, layer_list: amp-2022}
cluster:
  nodes:
    - {count: 3, device: V100-16, slots: 1, intra_gbit_per_s: 170, inter_gbit_per_s: 10}
profile: {source: table, path: "shipped:amp-2022-transgan"}
global_batch_size: 3
"""
