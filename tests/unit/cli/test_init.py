"""A first experiment file, which plans as it is."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from amp_ray.runtime import first_file
from amp_ray.runtime.files import load_experiment
from support.bounded import LONGEST_S
from support.commands import Run

PUBLISHED = {
    "qwen3-8b": "8.19b",
    "mixtral-8x7b": "46.7b",
    "qwen3-30b-a3b": "30.5b",
    "qwen3-235b-a22b": "235b",
    "gpt-oss-120b": "116.8b",
    "deepseek-v3": "682.5b",  # 671 without its module for one more token
}
"""Parameters as their reports and model cards state them, where a name says less."""

NODES = ("--device", "T4", "--nodes", "2", "--slots", "4", "--inter-gbit-per-s", "10")


@pytest.mark.parametrize("model", first_file.presets()["models"])
def test_every_model_is_one_that_can_be_planned(amp_ray: Run, tmp_path: Path, model: str) -> None:
    path = tmp_path / "my.yaml"
    cluster = ("--cluster", "dgx-h100", "--nodes", "2")
    ended = amp_ray("init", "-o", path, "--model", model, *cluster, "--batch", "64")
    assert ended.code == 0
    assert ended.out == f"{path}: 2 x 8 H100\n"
    experiment = load_experiment(path)
    size = PUBLISHED.get(model, model.rsplit("-", maxsplit=1)[-1])
    named = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    precise = 0.005 if model in PUBLISHED else 0.06
    assert experiment.model.num_parameters == pytest.approx(named, rel=precise)


@pytest.mark.parametrize("cluster", first_file.presets()["clusters"])
def test_every_cluster_is_one_that_can_be_planned(
    amp_ray: Run, tmp_path: Path, cluster: str
) -> None:
    path = tmp_path / "my.yaml"
    options = ("--cluster", cluster, "--nodes", "3", "--model", "gpt2-1.5b", "--batch", "64")
    assert amp_ray("init", "-o", path, *options).code == 0
    preset = first_file.preset("clusters", cluster)
    planned = load_experiment(path).cluster
    assert planned.num_devices == 3 * preset["slots"]
    if "protocol" in preset:
        assert planned.hosts[0].inter.protocol == preset["protocol"]
        assert not planned.hosts[0].inter.assumed


@pytest.mark.parametrize("name", ["2", "1e5", "true", "null", "on", "0x1f", "hosts"])
def test_a_name_that_yaml_takes_for_something_else_is_quoted(
    amp_ray: Run, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("a slots=8\nb slots=8\n")
    path = tmp_path / "my.yaml"
    options = ("--hostfile", tmp_path / name, "--device", "H100", "--inter-gbit-per-s", "400")
    model = ("--model", "llama-3-8b", "--batch", "64")
    assert amp_ray("init", "-o", path, *options, *model).code == 0
    assert load_experiment(path).cluster.host_names == ("a", "b")


def test_a_plan_follows(amp_ray: Run, tmp_path: Path) -> None:
    path = tmp_path / "my first.yaml"
    amp_ray("init", "-o", path, *NODES, "--model", "gpt2-1.5b", "--batch", "64")
    assert amp_ray("plan", path, "--json").json["num_feasible"] > 0
    assert amp_ray("plan", path).out.startswith("my first: gpt2-1.5b, 1.56 billion parameters")


def test_help_leaves_out_programs_of_past_years(amp_ray: Run) -> None:
    shown = amp_ray("init", "--help").out
    assert "torch, or a historic" in " ".join(shown.split())
    assert "2022" not in shown


@pytest.mark.parametrize(("tokens", "runtime"), [(16383, "deepspeed"), (16384, "megatron-core")])
def test_long_sequences_get_a_runtime_that_divides_them(
    amp_ray: Run, tmp_path: Path, tokens: int, runtime: str
) -> None:
    path = tmp_path / "my.yaml"
    where = ("--cluster", "dgx-h100", "--nodes", "4", "--batch", "64")
    amp_ray("init", "-o", path, "--model", "llama-3-8b", *where, "--sequence-length", str(tokens))
    assert load_experiment(path).traits.name == runtime


def test_a_configuration_and_a_hostfile_are_named(
    amp_ray: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "new_mixer": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n", encoding="utf-8")
    (tmp_path / "plans").mkdir()
    path = tmp_path / "plans" / "my.yaml"
    options = ("--model", tmp_path, "--hostfile", tmp_path / "hosts")
    ended = amp_ray(
        "init", "-o", path, *options, "--device", "T4", "--inter-gbit-per-s", "10", "--batch", "8"
    )
    assert ended.code == 0
    assert f"not read: new_mixer ({Path('..') / 'config.json'}: not modelled)" in caplog.text
    experiment = load_experiment(path)
    assert [node.name for node in experiment.cluster.nodes] == ["a", "b"]
    assert experiment.precision == "fp16"


def test_hosts_are_asked_for_their_boards(
    amp_ray: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n", encoding="utf-8")
    board = {"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": 81920 * 2**20}
    boards = {"a": [board] * 8, "b": [board] * 8}
    monkeypatch.setattr(first_file, "gpus_of_hosts", lambda _experiment, _make_host: boards)
    path = tmp_path / "my.yaml"
    options = ("--hostfile", tmp_path / "hosts", "--inter-gbit-per-s", "100", "--batch", "64")
    ended = amp_ray("init", "-o", path, "--model", "gpt2-1.5b", *options)
    assert ended.out == f"{path}: 2 x 8 A100-80\n"
    boards["b"] = [{"name": "Tesla T4", "memory_bytes": 15360 * 2**20}] * 4
    (tmp_path / "hosts").write_text("a\nb\n", encoding="utf-8")
    path.unlink()
    ended = amp_ray("init", "-o", path, "--model", "gpt2-1.5b", *options)
    assert ended.out == f"{path}: 1 x 8 A100-80, 1 x 4 T4\n"
    assert load_experiment(path).precision == "fp16"
    boards["b"] = [board, {"name": "Tesla T4", "memory_bytes": 15360 * 2**20}]
    path.unlink()
    ended = amp_ray("init", "-o", path, "--model", "gpt2-1.5b", *options)
    assert ended.out == f"{path}: 1 x 8 A100-80, 1 x 1 A100-80 + 1 T4\n"
    assert load_experiment(path).cluster.places[-2:] == (("b", 0), ("b", 1))
    boards["b"][1] = {"name": "Tesla T9", "memory_bytes": None}
    path.unlink()
    ended = amp_ray("init", "-o", path, "--model", "gpt2-1.5b", *options)
    assert ended.code == 2
    assert "host b has NVIDIA A100-SXM4-80GB, Tesla T9: name one board" in ended.err


@pytest.mark.parametrize(
    ("hosts", "options", "kinds"),
    [
        ("a\nb\n", ("--slots", "8"), "2 x 8 H100"),
        ("a slots=8\nb slots=6\nc slots=6\n", (), "1 x 8 H100, 2 x 6 H100"),
        ("n1\nn1\nn2\nn2\n", (), "2 x 2 H100"),
        ("node[1-3]:8\n", ("--nodes", "3"), "3 x 8 H100"),
    ],
)
def test_each_kind_of_host_has_an_entry(
    amp_ray: Run, tmp_path: Path, hosts: str, options: tuple[str, ...], kinds: str
) -> None:
    (tmp_path / "hosts").write_text(hosts, encoding="utf-8")
    path = tmp_path / "my.yaml"
    given = ("--device", "H100", "--inter-gbit-per-s", "3200", "--batch", "64", *options)
    known = ("--model", "gpt2-1.5b", "--hostfile", tmp_path / "hosts")
    assert amp_ray("init", "-o", path, *known, *given).out == f"{path}: {kinds}\n"
    nodes = load_experiment(path).cluster.nodes
    assert sum(node.num_slots for node in nodes) == sum(
        int(kind.split()[0]) * int(kind.split()[2]) for kind in kinds.split(", ")
    )


@pytest.mark.parametrize("device", ["T4", "V100-16", "A100-40", "H100", "B300", "MI300X", "cpu"])
def test_the_usual_network_is_that_of_a_preset_with_the_board(device: str) -> None:
    presets = [
        entry for entry in first_file.presets()["clusters"].values() if entry["device"] == device
    ]
    rate = first_file.usual_gbit_per_s(device.lower(), 8)
    assert rate == presets[0]["inter_gbit_per_s"]
    if device != "cpu":
        assert first_file.usual_gbit_per_s(device, 4) == presets[0]["inter_gbit_per_s"] / 2
    assert first_file.usual_gbit_per_s("RTX4090", 8) is None


def answered(folder: Path, answers: str, *options: str) -> str:
    """Run `amp-ray init` in a terminal, and return what it asks on stderr."""
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "amp_ray", "init", "-o", "my.yaml", *options]
    os.write(terminal, answers.encode())
    run = subprocess.run(
        command,
        cwd=folder,
        stdin=end,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    os.close(terminal)
    os.close(end)
    assert run.returncode == 0, run.stderr
    return run.stderr


def test_a_terminal_is_asked_for_everything_and_again_after_a_typo(tmp_path: Path) -> None:
    answers = (
        *("alpaca", "llama-3-8b", "dgx-h10", "other", "4096x", "4096", "H1000", "h100", "2", "0"),
        *("4", "fast", "", "64", "torhc", "torch"),
    )
    asked = answered(tmp_path, "\n".join(answers) + "\n")
    for problem in (
        "no model is named 'alpaca'",
        "no cluster is named 'dgx-h10'",
        "'H1000' is not",
    ):
        assert problem in asked
    assert "dgx-a100, dgx-h100" in asked
    assert "tokens of a training sequence [8192]" in asked
    assert "Gbit/s between nodes of 4 H100 [1600]" in asked
    assert "training program [deepspeed]" in asked
    experiment = load_experiment(tmp_path / "my.yaml")
    assert experiment.model.shape.sequence_length == 4096
    assert experiment.traits.name == "torch"
    assert experiment.cluster.nodes[0].inter.bandwidth_bytes_per_s == 200e9
    assert experiment.cluster.num_devices == 8


def test_boards_of_two_kinds_in_one_host_are_one_answer(tmp_path: Path) -> None:
    answers = ("", "other", "", "A100-80:4,T4", "A100-80:4, T4:2", "2", "100", "", "")
    asked = answered(tmp_path, "\n".join(answers) + "\n")
    assert "found A100-80:4,T4; expected one board, or several as A100-80:4,V100-32:2" in asked
    found = load_experiment(tmp_path / "my.yaml").cluster
    assert found.host_names == ("node0", "node1")
    assert [node.num_slots for node in found.nodes] == [4, 2, 4, 2]


def test_a_preset_leaves_little_to_ask(tmp_path: Path) -> None:
    asked = answered(tmp_path, "\naws-p5\n\n3\n\n\n")
    assert asked.count("]: ") == 6  # model, cluster, tokens, nodes, batch, runtime
    assert load_experiment(tmp_path / "my.yaml").cluster.nodes[2].inter.protocol == "efa"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*NODES, "--batch", "8"), "--model is missing"),
        (
            (*NODES, "--batch", "8", "--model", "alpaca"),
            (
                "no model is named 'alpaca' (a Hugging Face config.json, or its folder, works "
                "too); known: gpt2-1.5b"
            ),
        ),
        (("--model", "qwen3-235b"), "too); did you mean qwen3-235b-a22b? known: gpt2-1.5b"),
        (
            ("--cluster", "dgx-h10", "--model", "gpt2-1.5b"),
            "--inter-gbit-per-s works too); did you mean dgx-h100? known: dgx-",
        ),
        (
            ("--cluster", "MI300X", "--model", "gpt2-1.5b"),
            "works too); did you mean azure-nd-mi300x-v5? known: ",
        ),
        ((*NODES, "--model", "gpt2-1.5b"), "--batch is missing"),
        (
            (*NODES, "--device", "T4:2,V100-32:1", "--batch", "8", "--model", "gpt2-1.5b"),
            "3 boards; a node has 4 slots",
        ),
        (
            (*NODES, "--device", "T5", "--batch", "8", "--model", "gpt2-1.5b"),
            "device 'T5' is not in the catalogue",
        ),
        ((*NODES, "--batch", "8", "--model", "no.json"), "no such file"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    amp_ray: Run, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "my.yaml"
    ended = amp_ray("init", "-o", path, *options)
    assert ended.code == 2
    assert message in ended.err
    assert not path.exists()
