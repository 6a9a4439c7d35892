"""The measurements on a CPU with tiny sizes; a device without memory stands in for real sizes."""

import gc
import json
import math
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import one_gpu  # noqa: E402
from amp_ray.errors import InputError  # noqa: E402
from gpu_measurements import (  # noqa: E402
    Bench,
    Row,
    Setting,
    Shape,
    measure_attention,
    measure_layer,
    measure_step,
)
from support.cpu_machine import CpuMachine  # noqa: E402
from support.programs import python  # noqa: E402

# Torch renamed collectives that older versions have by these names alone.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is deprecated. Please use:FutureWarning"),
    # Torch's compiler, which DeepSpeed imports, uses what torch deprecates.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

Layer = Literal["embedding", "block", "head", "loss"]

TINY = {
    "family": "llama",
    "hidden_size": 32,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "feed_forward_size": 64,
    "sequence_length": 16,
    "vocab_size": 64,
}
EXPERTS = {**TINY, "num_experts": 4, "experts_per_token": 2}
PARAMETERS = 2 * 64 * 32 + 32 + 2 * (32 * (2 * 32 + 2 * 16) + 3 * 32 * 64 + 2 * 32)
"""Two tables, the last norm, and in each of two blocks attention, feed-forward part and norms."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def bench() -> Bench:
    return Bench(machine=CpuMachine(), board="cpu")


def chosen() -> dict[str, Any]:
    return dict(yaml.safe_load(one_gpu.CHOSEN.read_text(encoding="utf-8")))


def check(rows: list[Row]) -> None:
    for row in rows:
        assert row.outcome == "measured"
        assert row.measured is not None
        assert row.measured > 0
        assert row.predicted is not None
        assert row.predicted > 0
        assert row.error is not None
        assert math.isfinite(row.error)


@pytest.mark.parametrize(
    ("figures", "layer", "tp"),
    [
        *((TINY, "block", 1), (TINY, "block", 2), (TINY, "head", 1), (TINY, "loss", 2)),
        *((TINY, "embedding", 2), (EXPERTS, "block", 2)),
    ],
)
def test_a_layer_has_both_passes_and_their_launch(
    bench: Bench, figures: dict[str, Any], layer: Layer, tp: int
) -> None:
    shape = Shape(model="tiny", figures=figures, layer=layer)
    rows = list(measure_layer(bench, shape, tp))
    check(rows)
    launch = [] if layer == "loss" else ["launch"]
    assert [row.part for row in rows] == ["layer", "layer", *launch]
    assert rows[0].what == f"tiny {layer}, 1 x 16, tp {tp}, forward"
    assert rows[0].detail["repeats"] >= 5


def test_attention_has_the_heads_of_a_rank(bench: Bench) -> None:
    rows = list(measure_attention(bench, Shape(model="tiny", figures=TINY, tokens=8), 2))
    check(rows)
    assert [row.what for row in rows] == [
        "tiny block, 1 x 8, tp 2, forward",
        "tiny block, 1 x 8, tp 2, backward",
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": "full", "micro_batch_size": 2},
        {"precision": "fp32"},
        {"zero_stage": 1, "dp": 8},
        {"tp": 2, "sequence_parallel": True},
    ],
)
def test_states_have_the_predicted_bytes(bench: Bench, options: dict[str, Any]) -> None:
    setting = Setting(model="tiny", figures=TINY, num_layers=2, **options)
    rows = list(measure_step(bench, setting))
    check(rows)
    alone = setting.dp == setting.tp == 1
    assert [row.part for row in rows] == ["memory", *["step", "optimizer"] * alone]
    detail = rows[0].detail
    counted, predicted = detail["counted"], detail["predicted_parts"]
    assert detail["predicted_to_fit"]
    assert counted["weights"] == predicted["weights"]
    assert counted["optimizer"] == predicted["optimizer"]
    if setting.tp == 1:
        width = 4 if setting.precision else 2
        assert counted["weights"] == width * PARAMETERS
        assert counted["gradients"] == 4 * PARAMETERS
    assert counted["gradients"] == predicted["gradients"]


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_emulated_ranks_hold_a_shard_of_the_weights(bench: Bench, zero_stage: int) -> None:
    setting = Setting(model="tiny", figures=TINY, num_layers=2, zero_stage=zero_stage, dp=8)
    (row,) = measure_step(bench, setting)
    check([row])
    # Single-precision weights and two moments. With stage 2 weights are gathered, too, and those in
    # single precision are states of the optimizer.
    predicted = row.detail["predicted_parts"]
    shards = predicted["optimizer"] + (predicted["weights"] if zero_stage == 3 else 0.0)
    assert sum(row.detail["counted"].values()) == shards == 12 * PARAMETERS / 8


@pytest.mark.parametrize("options", [{}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}])
def test_deepspeed_trains_beside_emulated_ranks_and_leaves_no_memory(
    bench: Bench, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepspeed")
    dp = 8 if options else 1
    setting = Setting(
        model="tiny", figures=TINY, num_layers=2, dp=dp, runtime="deepspeed", **options
    )
    before, rows = {id(tensor) for tensor in all_tensors()}, list[Row]()
    for _ in range(2):  # what DeepSpeed keeps in globals does not hinder the next setting
        rows = list(measure_step(bench, setting))
        check(rows)
    assert [row.part for row in rows] == ["memory", *["step", "optimizer"] * (dp == 1)]
    assert rows[0].what.endswith("deepspeed")
    assert not torch.distributed.is_initialized()
    more = [tensor for tensor in all_tensors() if id(tensor) not in before]
    assert sum(tensor.untyped_storage().nbytes() for tensor in more) < 4 * PARAMETERS
    assert "Using topology" not in capsys.readouterr().out


def all_tensors() -> list[Any]:
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]


def test_a_precision_that_the_board_lacks_is_named(bench: Bench) -> None:
    setting = Setting(model="tiny", figures=TINY, num_layers=2, precision="fp8")
    (row,) = measure_step(bench, setting)
    assert (row.measured, row.predicted, row.error) == (None, None, None)
    assert row.outcome == "no fp8 in the board's data sheet"


@pytest.mark.parametrize(
    "board",
    [
        "H100",
        "T4",
        {"name": "mine", "memory_gib": 20, "bf16_tflops": 100, "memory_gbyte_per_s": 900},
    ],
)
def test_all_that_is_chosen_is_predicted_and_survives_a_full_device(
    board: str | dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_measurements.use_cuda", lambda _: True)
    monkeypatch.setattr("gc.collect", lambda: 0)  # all of pytest's objects, 88 times
    rows = list[Row]()
    one_gpu.run(
        one_gpu.tasks_of(Bench(machine=one_gpu.RecordedMachine(), board=board), chosen()),
        math.inf,
        lambda measured, _: rows.__setitem__(slice(None), measured),
    )
    tried = [row for row in rows if row.predicted is not None]
    assert {row.outcome for row in tried} == {"out of memory"}
    assert all(row.predicted is not None and row.predicted > 0 for row in tried)
    assert {row.part for row in rows} == set(one_gpu.PARTS)
    assert sum(row.part == "memory" for row in rows) == 28
    # The settings are on both sides of the limit of every board.
    assert {row.detail["predicted_to_fit"] for row in tried if row.part == "memory"} == {
        True,
        False,
    }
    assert one_gpu.medians(rows) == {}


def test_sixteen_layers_are_chosen_at_four_degrees() -> None:
    entries = chosen()
    assert len(entries["layers"]) == 16
    tasks = [
        name for name, _ in one_gpu.tasks_of(Bench(machine=CpuMachine(), board="H100"), entries)
    ]
    assert len([name for name in tasks if name.startswith("layer of")]) == 52
    # What comes first of each part is worth most.
    assert tasks[0].startswith("layer of llama-3-8b block")
    assert tasks[2].startswith("step of llama-2-7b")


def test_what_the_time_is_too_short_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    kept = list[tuple[int, list[str]]]()
    row = Row(part="layer", what="a", measured=1.0, predicted=1.5)

    def slow() -> list[Row]:
        now[0] += 5.0
        return [row]

    one_gpu.run(
        [("a", slow), ("b", slow), ("c", slow)],
        1.0,
        lambda rows, left_out: kept.append((len(rows), list(left_out))),
    )
    assert kept == [(1, ["b", "c"])]


def test_medians_are_of_compared_rows() -> None:
    rows = [
        Row(part="layer", what="a", measured=1.0, predicted=1.5),
        Row(part="layer", what="b", measured=1.0, predicted=0.9),
        Row(part="layer", what="c", measured=2.0, predicted=1.6),
        Row(part="memory", what="d", measured=None, predicted=9.0, outcome="out of memory"),
    ]
    assert one_gpu.medians(rows) == {
        "layer": {"rows": 3, "size": pytest.approx(0.2), "error": pytest.approx(-0.1)}
    }


def test_the_table_ends_with_the_medians_and_the_file_has_every_row(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"models": {"tiny": TINY}, "layers": [], "attention": [{"model": "tiny"}]}
    steps = [{"model": "tiny", "num_layers": 2}]
    tasks = one_gpu.tasks_of(bench, {**figures, "steps": steps})
    full = Setting(model="tiny", figures=TINY, num_layers=2, micro_batch_size=400_000)
    tasks.append(
        ("full", lambda: measure_step(Bench(machine=one_gpu.RecordedMachine(), board="cpu"), full))
    )
    one_gpu.measure_all(bench, tasks, tmp_path / "result.json", 9.0, "busy")
    record = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (record["board"], record["note"], record["left_out"]) == ("cpu", "busy", [])
    assert record["begin"] == record["end"] == {"name": "a CPU [x]"}
    assert record["versions"]["torch"] == torch.__version__
    assert len(record["rows"]) == 2 * 2 + 3 + 3
    assert record["medians"].keys() == {"attention", "memory", "step", "optimizer"}
    assert record["medians"]["step"]["rows"] == 1
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert "out of memory" in output
    assert "GiB, does not fit" in output
    assert any(line.startswith("a CPU [x] as cpu; ") for line in lines)
    assert lines[-1].startswith("median error: attention ")


def test_a_board_is_named_described_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    described = "{name: mine, memory_gib: 20, bf16_tflops: 100, memory_gbyte_per_s: 900}"
    assert one_gpu.board_of("a100") == "A100-40"
    assert one_gpu.board_of(described) == yaml.safe_load(described)
    board = torch.cuda.get_device_properties
    answers = {"name": "NVIDIA H100 80GB HBM3", "total_memory": 80 << 30}
    monkeypatch.setattr(
        torch.cuda,
        board.__name__,
        lambda _: type("Board", (), {**answers, "multi_processor_count": 7}),
    )
    assert one_gpu.board_of(None) == "H100"
    answers["name"] = "Unheard-of 9"
    with pytest.raises(InputError, match=r"'Unheard-of 9'.* name one by --device \(T4, .*: 7}'"):
        one_gpu.board_of(None)


def test_the_driver_is_asked_for_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert one_gpu.driver_facts("GPU-1") == dict.fromkeys(one_gpu.FACTS)
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\n[ "$3 $4" = "-i GPU-1" ] && echo "570.1, 700, 700, 1980, 2619, 9, 2619"\n',
        encoding="utf-8",
    )
    program.chmod(0o755)
    facts = one_gpu.driver_facts("GPU-1")
    assert facts["driver_version"] == "570.1"
    assert facts["clocks.current.memory"] == "2619"
    assert one_gpu.driver_facts("GPU-2") == dict.fromkeys(one_gpu.FACTS)


def test_the_command_measures_what_its_file_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = {"models": {"tiny": TINY}, "layers": [], "attention": [{"model": "tiny"}], "steps": []}
    (tmp_path / "listed.yaml").write_text(yaml.safe_dump(listed), encoding="utf-8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(one_gpu, "CudaMachine", CpuMachine)
    monkeypatch.setattr(one_gpu, "CHOSEN", tmp_path / "listed.yaml")
    monkeypatch.setattr(one_gpu, "RESULTS", tmp_path)
    done = CliRunner().invoke(one_gpu.main, ["--device", "cpu", "--note", "quiet"])
    assert done.exit_code == 0
    record = json.loads((tmp_path / "one-gpu-cpu.json").read_text(encoding="utf-8"))
    assert (record["minutes"], record["note"], len(record["rows"])) == (8.0, "quiet", 4)
    refused = CliRunner().invoke(one_gpu.main, ["--device", "{name: x}"])
    assert refused.exit_code == 2
    assert "device" in refused.stderr
    refused = CliRunner().invoke(one_gpu.main, ["--device", "Z80"])
    assert refused.exit_code == 2
    assert "device 'Z80' is not in the catalogue" in refused.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so_and_exits_3(repository: Path) -> None:
    done = python("experiments/one_gpu.py", "--json", "never.json", cwd=repository, code=3)
    assert done.stdout == ""
    assert done.stderr == "torch finds no CUDA device here, and there is nothing to measure.\n"
    assert not (repository / "never.json").exists()


def test_recorded_measurements_meet_todays_predictions(tmp_path: Path) -> None:
    what = "llama-2-7b, 4 blocks, 1 samples"
    row = {"part": "step", "what": what, "measured": 0.11, "outcome": "measured"}
    record = {"board": "H200", "begin": {"name": "a board"}, "versions": {}, "rows": [row]}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    result = CliRunner().invoke(one_gpu.main, ["--recorded", str(path)])
    assert result.exit_code == 0, result.output
    assert what in result.output
    assert "110.000 ms" in result.output
    assert "step" in result.output.rpartition("median error: ")[2]
