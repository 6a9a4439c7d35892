"""Studies of real trials on this machine, as users run them: to the end, and after Ctrl-C."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.driven_study import DrivenStudy, finish
from support.waiting import wait_for

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not (find_spec("torch") and find_spec("deepspeed")),
        reason="torch and DeepSpeed are not installed: pip install 'amp-ray[training]'",
    ),
]

EXPERIMENT = """\
name: tiny
model: {{family: gpt2, num_layers: 2, hidden_size: 32, num_heads: 2, sequence_length: 16,
        vocab_size: 64}}
cluster:
  nodes:
    - {{count: 1, device: cpu, slots: 2, intra_gbit_per_s: 10, inter_gbit_per_s: 10}}
precision: fp32
optimizer: sgd
global_batch_size: 4
trials: {{backend: local, budget: 1, steps: {steps}, warmup_steps: 1, timeout_s: 600}}
"""

QUICK_STEPS = 3
ENDLESS_STEPS = 100_000


class Place(DrivenStudy):
    """A folder with an experiment and its study."""

    def write(self, *, steps: int = QUICK_STEPS) -> None:
        """Write the experiment."""
        text = EXPERIMENT.format(steps=steps)
        (self.folder / "tiny.yaml").write_text(text, encoding="utf-8")

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run Python to its end."""
        with self.python(*argv) as process:
            return finish(process)

    def tune(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run ``amp-ray tune`` to its end."""
        return self.run(*TUNE, *options)

    def wait_until_training(self, driver: subprocess.Popen[str]) -> None:
        """Wait until a rank has begun."""

        def has_begun() -> bool:
            assert driver.poll() is None, finish(driver).stderr
            return any(self.scratch.glob("amp-ray-*/job.json"))

        wait_for(has_begun)

    def left(self) -> Sequence[object]:
        """Return the study's processes and temporary files."""
        return [*(path.name for path in self.scratch.iterdir()), *self.processes()]


TUNE = ("-m", "amp_ray", "tune", "tiny.yaml", "--study", "study")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Make a folder; check at the end that no process or temporary file of its study is left."""
    place = Place(folder=tmp_path)
    place.write()
    yield place
    assert place.left() == []


def test_a_script_proves_its_plan_by_trials_and_their_table_answers_the_next_study(
    place: Place, repository: Path
) -> None:
    script = (repository / "experiments" / "demo.py").read_text(encoding="utf-8")
    (place.folder / "tiny.py").write_text(script, encoding="utf-8")
    options = ["--budget", "3", "--policy", "predicted-order", "--json"]
    done = place.run("tiny.py", "--full", "--study", "study", *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [trial["outcome"] for trial in result["trials"]] == ["measured"] * 3
    table = place.path / "measured.csv"
    words = ["tune", "tiny.yaml", "--trials", f"replay:{table}", "--study", "replayed"]
    again = place.run("-m", "amp_ray", *words, *options)
    assert again.returncode == 0, again.stderr
    replayed = json.loads(again.stdout)
    measured_s, replayed_s = (
        {json.dumps(trial["strategy"]): trial["measured_s"] for trial in study["trials"]}
        for study in (result, replayed)
    )
    assert replayed_s == pytest.approx(measured_s)
    # On a busy machine some times are unsteady, in the table, too. They count with their
    # predictions, so the fastest is the one with the least expected time.
    tried = [row for row in replayed["ranking"] if row["measured_s"] is not None]
    fastest = min(tried, key=lambda row: row["iteration_time_s"])
    assert len(tried) == 3
    assert replayed["best"]["mean_s"] == pytest.approx(fastest["measured_s"])
    if replayed["recommendation"]["rests_on"] == "measured":
        assert fastest["iteration_time_s"] == fastest["measured_s"]


def test_ctrl_c_ends_the_trial_which_runs_again_when_the_study_goes_on(place: Place) -> None:
    place.write(steps=ENDLESS_STEPS)
    with place.python(*TUNE, "--budget", "1") as driver:
        place.wait_until_training(driver)
        os.killpg(driver.pid, signal.SIGINT)
        done = finish(driver)
    assert done.returncode == 130, done.stderr
    assert place.left() == []
    assert "--study study --resume goes on" in done.stderr
    done = place.tune("--budget", "1", "--resume", "--time-budget", "0.1")
    assert done.returncode == 4, done.stderr
    assert [event["event"] for event in place.events()] == [
        *("study", "started", "interrupted", "stopped", "resumed", "stopped")
    ]
