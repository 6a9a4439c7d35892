"""The driver of a study is killed at random moments; the resumed study gives the same result.

AMP_RAY_KILLS=30 in the environment sets the number of kills.
"""

import json
import logging
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.driven_study import DrivenStudy
from support.waiting import HANG_GUARD_S, wait_for

pytestmark = pytest.mark.integration

_LOGGER = logging.getLogger(__name__)

NUM_KILLS = int(os.environ.get("AMP_RAY_KILLS", "2"))

TINY = """\
name: tiny
model: {family: gpt2, num_layers: 2, hidden_size: 32, num_heads: 2, sequence_length: 16,
        vocab_size: 64}
cluster:
  nodes:
    - {count: 1, device: cpu, slots: 2, intra_gbit_per_s: 10, inter_gbit_per_s: 10}
precision: fp32
runtime: deepspeed
global_batch_size: 4
trials: {backend: local, budget: 4, steps: 60, warmup_steps: 2, timeout_s: 600}
"""
"""Experiment with trials of two warm ranks, about half a second each."""

needs_training = pytest.mark.skipif(
    not (find_spec("torch") and find_spec("deepspeed")),
    reason="torch and DeepSpeed are not installed: pip install 'amp-ray[training]'",
)


@dataclass(kw_only=True)
class Study(DrivenStudy):
    """A study whose drivers may be killed."""

    experiment: tuple[str, ...]  # the file, and options of ``tune``
    outcomes: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # outcomes in the journal
    num_kills: int = 0
    num_processes: list[int] = field(default_factory=list)  # at each kill
    gone_s: list[float] = field(default_factory=list)  # how long the processes lived after the kill

    @contextmanager
    def driver(self) -> Iterator["subprocess.Popen[str]"]:
        """Start a driver, which begins the study or resumes it."""
        resume = ["--resume"] if self.events() else []
        options = ["--study", str(self.path), "--policy", "predicted-order", "--no-doctor"]
        argv = ["-m", "amp_ray", "tune", *self.experiment, *options, *resume]
        with (self.folder / "output").open("a") as output, self.python(*argv, output=output) as run:
            yield run

    def run_until(self, delay_s: float, *, num_processes: int = 1) -> bool:
        """Kill a driver some time after its first event; return whether it had ended before.

        The time begins when so many processes run.
        """
        num_before = len(self.events())

        def has_begun() -> bool:
            begun = len(self.events()) > num_before and len(self.processes()) >= num_processes
            return begun or process.poll() is not None

        with self.driver() as process:
            self.wait_for(has_begun)
            try:
                process.wait(delay_s)
            except subprocess.TimeoutExpired:
                self.num_processes.append(len(self.processes()))
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
            has_ended = process.returncode != -signal.SIGKILL
            assert not has_ended or process.returncode == 0, self.output()
        if not has_ended:
            self.num_kills += 1
            start_s = time.monotonic()
            self.wait_for(lambda: not self.processes())
            self.gone_s.append(time.monotonic() - start_s)
        self.check()
        return has_ended

    def check(self) -> None:
        """Check that no recorded outcome is lost, and that no trial runs again after its end."""
        attempts: dict[int, int] = {}
        outcomes: dict[int, Mapping[str, Any]] = {}
        for event in self.events():
            number = event.get("number", -1)
            if event["event"] == "started":
                assert number not in outcomes, f"trial {number} ran again after its end"
                assert event["attempt"] == attempts.get(number, -1) + 1
                attempts[number] = event["attempt"]
            elif event["event"] == "ended":
                assert number not in outcomes, f"trial {number} ended twice"
                outcomes[number] = event
        lost = [number for number, event in self.outcomes.items() if outcomes.get(number) != event]
        assert not lost, f"lost trials {lost}"
        strategies = [json.dumps(event["strategy"]) for event in self.first_attempts()]
        assert len(strategies) == len(set(strategies)), "a strategy was tried twice"
        self.outcomes = outcomes

    def first_attempts(self) -> list[dict[str, Any]]:
        """Return the ``started`` event of each trial's first attempt."""
        return [event for event in self.events() if event.get("attempt") == 0 and "group" in event]

    def output(self) -> str:
        """Read the output of all drivers."""
        return (self.folder / "output").read_text(encoding="utf-8")

    def wait_for(self, condition: Callable[[], object]) -> None:
        wait_for(condition, told=lambda: f"{self.processes()} {self.output()}")


def make_study(folder: Path, *experiment: str) -> Study:
    folder.mkdir()
    return Study(folder=folder, experiment=experiment)


@needs_training
def test_a_study_of_real_trials_survives_kills_at_random_instants(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    _LOGGER.info("seed %d", seed)
    generator = random.Random(seed)
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(TINY, encoding="utf-8")
    studies: list[Study] = []
    while sum(study.num_kills for study in studies) < NUM_KILLS:
        study = make_study(tmp_path / f"{len(studies)}", str(experiment))
        studies.append(study)
        # After its first event, a driver needs two seconds to warm up, and two for four trials.
        # The first kill meets an agent, however slow the start is.
        is_first = len(studies) == 1
        while not (
            study.run_until(0.0, num_processes=2)
            if is_first
            else study.run_until(generator.uniform(0.0, 3.0))
        ):
            is_first = False
            if sum(each.num_kills for each in studies) >= NUM_KILLS:
                assert study.run_until(HANG_GUARD_S)
                break
        assert sorted(study.outcomes) == [0, 1, 2, 3]
        assert {event["outcome"] for event in study.outcomes.values()} == {"measured"}
        assert list(study.scratch.glob("amp-ray-*")) == []
        assert study.processes() == []
        assert len(json.loads((study.path / "result.json").read_text())["trials"]) == 4
    slowest_s = max(seconds for study in studies for seconds in study.gone_s)
    most = max(number for study in studies for number in study.num_processes)
    assert most > 1, "no kill met an agent"
    _LOGGER.info("%d kills: up to %d processes, gone after %.2f s", NUM_KILLS, most, slowest_s)
