"""``amp-ray import trace`` on a trace that this machine's PyTorch writes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from support.commands import Run

pytestmark = pytest.mark.integration

HIDDEN, TOKENS, WORDS, SAMPLES = 64, 32, 100, 2
EXPERIMENT = f"""\
name: mine
model: {{family: gpt2, num_layers: 2, hidden_size: {HIDDEN}, num_heads: 4, \
sequence_length: {TOKENS}, vocab_size: {WORDS}}}
cluster: {{nodes: [{{device: cpu, slots: 2, intra_gbit_per_s: 10, inter_gbit_per_s: 10}}]}}
precision: fp32
runtime: torch
global_batch_size: 4
search: {{max_tp: 1, max_cp: 1}}
"""


class Named(nn.Module):  # type: ignore[misc]
    """A layer within a range of its place."""

    def __init__(self, place: int, layer: nn.Module) -> None:
        super().__init__()
        self.place, self.layer = place, layer

    def forward(self, inputs: Tensor) -> Tensor:
        with record_function(f"layer {self.place}"):
            result: Tensor = self.layer(inputs)
        return result


def written_trace(path: Path, *, recomputes: bool) -> Path:
    """Train three steps and write their trace."""
    block = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU())
    parts = (
        *(nn.Embedding(WORDS, HIDDEN), block, block),
        *(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS)),
    )
    layers = [Named(place, part) for place, part in enumerate(parts)]
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(3):
            words = torch.randint(0, WORDS, (SAMPLES, TOKENS))
            stream = words
            for layer in layers:
                again = recomputes and layer.layer is block
                stream = checkpoint(layer, stream, use_reentrant=False) if again else layer(stream)
            nn.functional.cross_entropy(stream.flatten(0, 1), words.flatten()).backward()
    trace.export_chrome_trace(str(path))
    return path


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_trace_becomes_a_profile_that_a_plan_uses(
    amp_ray: Run, tmp_path: Path, recompute: str
) -> None:
    experiment = tmp_path / "mine.yaml"
    experiment.write_text(EXPERIMENT, encoding="utf-8")
    trace = written_trace(tmp_path / "trace.json", recomputes=recompute == "full")
    size = ("--micro-batch-size", str(SAMPLES))
    folder = tmp_path / "measured"
    ended = amp_ray("import", "trace", trace, "--experiment", experiment, *size, "-o", folder)
    assert (ended.code, ended.err) == (0, "")
    assert f"path: {folder}" in ended.out
    lines = (folder / "cpu.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 5
    assert all(float(cell) > 0 for line in lines[1:] for cell in line.split(",")[3:])
    table = ("--set", "profile.source=table", "--set", f"profile.path={folder}")
    planned = amp_ray("plan", experiment, *table, "--json")
    assert planned.code == 0
    assert planned.json["num_feasible"] > 0
    again = amp_ray("import", "trace", trace, "--experiment", experiment, *size, "-o", folder)
    assert again.code == 2
    assert "name a folder that is new or empty" in again.err
