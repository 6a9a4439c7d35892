"""Runs trials of strategies, and reads the events that their agents have sent."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_ray.runtime.study.pool import Task, TrialRunner
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Measured, Outcome


def events_of(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Read the agents' messages from a trial's folder."""
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if kind in {None, event["kind"]}]


def were_warm(folder: Path) -> list[bool]:
    """Return for each rank of a trial whether it was forked from a warm process."""
    return [event["warm"] for event in events_of(folder, "started")]


@dataclass
class Trials:
    """Runs strategies, each in a new folder."""

    folder: Path
    runner: TrialRunner
    number: int = 0

    @property
    def last(self) -> Path:
        """Folder of the last trial."""
        return self.folder / f"study-{self.number}"

    def run(self, strategy: Strategy) -> Outcome:
        """Run the next trial."""
        self.number += 1
        name = self.last.name
        task = Task(
            number=self.number, attempt=0, trial_id=name, strategy=strategy, folder=self.last
        )
        return self.runner.run(task)

    def losses(self, strategy: Strategy) -> list[float]:
        """Run a strategy and return the loss of every step."""
        outcome = self.run(strategy)
        assert isinstance(outcome, Measured), outcome
        (path,) = self.last.glob("hosts/*/result.json")
        losses: list[float] = json.loads(path.read_text(encoding="utf-8"))["losses"]
        assert len(losses) == len(outcome.step_time_s)
        return losses
