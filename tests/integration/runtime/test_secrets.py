"""A study of real trials whose program prints its secrets: no file or output has one."""

import sys
from pathlib import Path

import pytest

from support.commands import Run, amp_ray

__all__ = ["amp_ray"]

pytestmark = pytest.mark.integration

PROGRAM = """\
import os, sys
print(sys.argv, os.environ["MY_SECRET"], "MORE", os.environ["MORE"], flush=True)
print(open("settings.txt").read(), flush=True)
if "1" == sys.argv[-1]:
    sys.exit("wrong password: " + os.environ["MY_SECRET"])
for _ in range(4):
    print("time: 5 ms", flush=True)
"""

EXPERIMENT = """\
name: tiny
model: {{family: gpt2, num_layers: 2, hidden_size: 32, num_heads: 2, sequence_length: 16,
        vocab_size: 64}}
cluster:
  nodes:
    - {{count: 1, device: cpu, slots: 2, intra_gbit_per_s: 10, inter_gbit_per_s: 10}}
precision: fp32
global_batch_size: 4
trials:
  backend: local
  steps: 3
  warmup_steps: 1
  environment: {{MY_SECRET: planted-1, MORE: "http://me:planted-2@host/"}}
  program:
    argv: ["{python}", train.py, --wandb-token, planted-3, --key=ghp_planted4, "{{tp}}"]
    files: [train.py, settings.txt]
    metric: {{pattern: "time: ([0-9.]+) ms", unit: ms}}
"""


def test_no_file_and_no_output_of_a_study_has_a_secret(
    amp_ray: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "settings.txt").write_text("planted-1 and hf_PLANTED12345\n", encoding="utf-8")
    experiment = tmp_path / "tiny.yaml"
    text = EXPERIMENT.format(python=sys.executable)
    experiment.write_text(text, encoding="utf-8")
    study = ("--study", "study")
    ended = [
        amp_ray("tune", "tiny.yaml", "--budget", "2", *study, "--json", "-v"),
        amp_ray("show", "study", "--json"),
        amp_ray("report", "study", "-o", "report.html"),
        amp_ray("export", "study", "--to", "csv"),
    ]
    assert [each.code for each in ended] == [0, 0, 0, 0], ended
    files = [path for path in (tmp_path / "study").rglob("*") if path.is_file()]
    files += [tmp_path / "report.html"]
    names = {path.name for path in files}
    assert {"launch.json", "rerun.sh", "events.jsonl", "rank-0.log"} <= names
    kept = [path for path in files if "planted" in path.read_text(encoding="utf-8").casefold()]
    assert not kept
    assert not [each for each in ended if "planted" in (each.out + each.err).casefold()]
    assert all(path.stat().st_mode & 0o077 == 0 for path in files if path.name != "report.html")
