"""``amp-ray import trace``: which trace is of what, and where its profile goes."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.files import read_text
from support.commands import Run

NUM_LAYERS = 9
"""Of the small experiment: embedding, six blocks, final norm and head."""
LINK = "slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10"


def events_of(layer: int, gpu: int = 0) -> list[dict[str, object]]:
    """Return the events of a forward pass: a range, a launch in it, and its kernel of 10 us."""
    of_host = {"ph": "X", "pid": 1, "tid": 1, "ts": 20 * layer, "dur": 10}
    number = {"correlation": layer, "device": gpu}
    return [
        {**of_host, "cat": "user_annotation", "name": f"layer {layer}"},
        {**of_host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": number},
        {**of_host, "cat": "kernel", "name": "gemm", "tid": 7, "args": number},
    ]


def trace_of(events: list[dict[str, object]], **more: object) -> str:
    return json.dumps({"traceEvents": events, **more})


STEP = [event for layer in range(NUM_LAYERS) for event in events_of(layer)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of a forward pass on a GPU, 10 us for each layer."""
    path = tmp_path / "trace.json"
    path.write_text(trace_of(STEP), encoding="utf-8")
    return path


def test_each_trace_has_its_tp_or_all_have_one(
    amp_ray: Run, small: Path, trace: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "profile"
    options = ("--experiment", small, "--tp", "1", "--tp", "2", "--micro-batch-size", "4")
    ended = amp_ray("import", "trace", trace, trace, *options, "-o", folder)
    assert (ended.code, ended.err) == (0, "")
    table = (folder / "T4.csv").read_text(encoding="utf-8").splitlines()
    assert table[0] == "layer,tp,micro_batch_size,forward_s"
    assert table[1:] == [f"{layer},{tp},4,1e-05" for tp in (1, 2) for layer in range(NUM_LAYERS)]
    assert sorted(path.name for path in folder.iterdir()) == ["T4.csv", "profile.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", "1", "--tp", "2"), "--tp: found 2 values; expected one, or one for each trace"),
        (("--device", "H100"), "--device: found 'H100'; expected T4"),
        (("--set", "model.num_layers=7"), "no range named 'layer 9'"),
        (("--ranges", "block {}"), "no range named 'block 0'"),
        (("--ranges", "{} {"), "no range named '0 {'"),
        (("--ranges", "{x} {} {0!r:>{"), "no range named '{x} 0 {0!r:>{'"),
        (("--ranges", "{}{}"), "--ranges: found '{}{}'; expected one {}"),
        (
            ("--set", "cluster.nodes.0.device=cpu", "--set", "precision=fp32"),
            "ran kernels of a GPU",
        ),
        (
            ("--set", f"cluster.nodes=[{{device: T4, {LINK}}}, {{device: A100-40, {LINK}}}]"),
            "--device: found none; expected T4 or A100-40",
        ),
    ],
)
def test_what_does_not_fit_the_experiment_is_refused(
    amp_ray: Run, small: Path, trace: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    options = ("--experiment", small, "--micro-batch-size", "4", *arguments)
    ended = amp_ray("import", "trace", trace, *options, "-o", tmp_path / "profile")
    assert ended.code == 2
    assert message in ended.err
    assert not (tmp_path / "profile").exists()


def test_two_traces_of_the_same_are_refused(
    amp_ray: Run, small: Path, trace: Path, tmp_path: Path
) -> None:
    options = ("--experiment", small, "--micro-batch-size", "4", "-o", tmp_path / "profile")
    ended = amp_ray("import", "trace", trace, trace, *options)
    assert ended.code == 2
    assert "two traces have the same tp and micro-batch size" in ended.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            trace_of(STEP[::3]),
            "has no kernel of a GPU; expected a trace of the experiment's device, T4",
        ),
        (trace_of([*STEP[:-3], *events_of(NUM_LAYERS - 1, gpu=1)]), "kernels of 2 GPUs; expected"),
        (gzip.compress(trace_of(STEP).encode())[:-20], "cannot be unpacked: "),
        (b"\x1f\x8b no gzip", "cannot be read: "),
    ],
)
def test_traces_of_no_gpu_or_several_and_damaged_archives_are_refused(
    amp_ray: Run, small: Path, tmp_path: Path, text: str | bytes, message: str
) -> None:
    path = tmp_path / ("x.json" if isinstance(text, str) else "x.json.gz")
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    options = ("--experiment", small, "--micro-batch-size", "4", "-o", tmp_path / "profile")
    ended = amp_ray("import", "trace", path, *options)
    assert ended.code == 2
    assert message in ended.err


def test_an_archive_is_read_and_what_is_not_read_is_named(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    npu = {"ph": "X", "cat": "npu_kernel", "name": "x", "ts": 0, "dur": 1, "pid": 0, "tid": 0}
    boards = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}, {"id": 1, "name": "Tesla T4"}]
    text = trace_of([*STEP, npu], deviceProperties=boards, schemaVersion=2, cluster="b")
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    options = ("--experiment", small, "--micro-batch-size", "4", "-o", tmp_path / "profile")
    ended = amp_ray("import", "trace", path, *options)
    assert ended.code == 0
    assert ended.err.replace(str(path), "FILE").splitlines() == [
        "amp-ray: not read: cluster, schemaVersion 2 (FILE: not modelled)",
        "amp-ray: not read: events of npu_kernel (FILE: not modelled)",
        "amp-ray: FILE was recorded on 'NVIDIA H100 80GB HBM3', and is taken for T4",
    ]


def test_an_archive_is_unpacked_no_further_than_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(b" " * 2**24))
    tracemalloc.start()
    with pytest.raises(InputError, match="longer than 1,000 characters"):
        read_text(path, 1000)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()
