"""``amp-ray import trace``: which trace is of what, and where its profile goes."""

import json
from pathlib import Path

import pytest

from support.commands import Run

NUM_LAYERS = 9
"""Of the small experiment: embedding, six blocks, final norm and head."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of a forward pass on the host, 10 us for each layer."""
    path = tmp_path / "trace.json"
    thread = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}
    events = [
        {"name": f"layer {layer}", "ts": 20 * layer, "dur": 10} | thread
        for layer in range(NUM_LAYERS)
    ]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
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


def test_several_devices_need_a_name(
    amp_ray: Run, small: Path, trace: Path, tmp_path: Path
) -> None:
    link = "slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10"
    nodes = f"cluster.nodes=[{{device: T4, {link}}}, {{device: A100-40, {link}}}]"
    options = ("--experiment", small, "--set", nodes, "--micro-batch-size", "4")
    ended = amp_ray("import", "trace", trace, *options, "-o", tmp_path / "profile")
    assert ended.code == 2
    assert "--device: found none; expected T4 or A100-40" in ended.err


def test_two_traces_of_the_same_are_refused(
    amp_ray: Run, small: Path, trace: Path, tmp_path: Path
) -> None:
    options = ("--experiment", small, "--micro-batch-size", "4", "-o", tmp_path / "profile")
    ended = amp_ray("import", "trace", trace, trace, *options)
    assert ended.code == 2
    assert "two traces have the same tp and micro-batch size" in ended.err
