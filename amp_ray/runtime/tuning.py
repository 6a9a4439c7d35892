"""``amp-ray tune``: from an experiment and a folder to a driven study and its result."""

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from amp_ray.calibration import fingerprint
from amp_ray.errors import InputError
from amp_ray.runtime import study_events
from amp_ray.runtime.driver import Driver, DriverSettings, View
from amp_ray.runtime.driver import Result as Ended
from amp_ray.runtime.files import read_text
from amp_ray.runtime.pool import Pool, Runner, ThreadPool
from amp_ray.runtime.ray_address import require_ray
from amp_ray.runtime.replay import ReplayPool, recorded_outcome
from amp_ray.runtime.study_folder import JOURNAL, Study, open_study
from amp_ray.runtime.study_result import (
    history_csv,
    history_jsonl,
    measurements_csv,
    study_json,
)
from amp_ray.runtime.study_space import Space, TuneOptions, study_space
from amp_ray.runtime.trial_runner import make_runner, portable
from amp_ray.spec.experiment import Experiment
from amp_ray.trials.program_check import check_program
from amp_ray.tuner.state import TunerSettings, TunerState, begin


def begin_state(experiment: Experiment, space: Space, options: TuneOptions) -> TunerState:
    """Return the state of a study in which nothing has run yet."""
    settings = TunerSettings(budget=options.budget, policy=options.policy, seed=options.seed)
    return begin(experiment, space.results, settings, order=space.order)


def study_header(experiment: Experiment, options: TuneOptions) -> dict[str, Any]:
    """Return what has to be the same when a study is resumed."""
    return {
        "event": "study",
        "experiment": experiment.name,
        "fingerprint": fingerprint(experiment),
        "backend": options.backend,
        "table": None if options.table is None else options.table.name,
        "policy": options.policy,
        "seed": options.seed,
        "steps": experiment.trials.num_steps,
        "warmup_steps": experiment.trials.num_warmup_steps,
        "host_groups": [list(group) for group in experiment.trials.host_groups],
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tuning:
    """An experiment, what is asked of its study, and what there is to choose from.

    Args:
        experiment: What is tuned.
        options: Of the study.
        space: All candidates.
    """

    experiment: Experiment
    options: TuneOptions
    space: Space

    def run(self, folder: Path, view: View, *, resume: bool) -> Ended:
        """Drive the study in a folder to its end.

        Args:
            folder: Of the study; made where it is new.
            view: Who watches.
            resume: Whether there is a study to go on with.

        Raises:
            InputError: If the folder has another study, or a driver is at work on it.
            HostError: If hosts cannot be used.
            AmpRayError: If the journal cannot be written.
            KeyboardInterrupt: After everything that ran has been ended in order.
        """
        header = study_header(self.experiment, self.options)
        state = begin_state(self.experiment, self.space, self.options)
        with open_study(folder, header, resume=resume) as study:
            copy_experiment(self.experiment, study)
            with self._pool() as pool:
                ended = self._drive(study, state, pool, view)
            write_results(study, ended)
        return ended

    @contextlib.contextmanager
    def _pool(self) -> Iterator[Pool]:
        """Make the groups of hosts that trials run on; nothing is opened before the first trial."""
        options, experiment = self.options, self.experiment
        if options.backend == "replay":
            answers = {strategy: recorded_outcome(given) for strategy, given in self.space.given}
            yield ReplayPool(answers, options.concurrency or 1)
            return
        num_groups = _num_groups(experiment, options.concurrency)
        factory: Callable[[int], Runner] = functools.partial(
            make_runner, portable(experiment), options.backend
        )
        if not _wants_actors(options):
            yield ThreadPool(factory, num_groups)
            return
        require_ray()
        from amp_ray.runtime import actors  # noqa: PLC0415 - takes seconds to start

        with actors.connect(options.workers.address):
            yield actors.actor_pool(factory, num_groups)

    def _drive(self, study: Study, state: TunerState, pool: Pool, view: View) -> Ended:
        """Take up what the journal tells, and go on from there."""
        cluster, path = self.experiment.cluster, study.folder / JOURNAL
        rebuilt = study_events.rebuild(state, cluster, study.journal.records[1:], file=str(path))
        if not study.is_new:
            event = {"event": "resumed", "budget": self.options.budget, "at": study_events.now()}
            study.journal.append(event)
            done = sum(told.outcome is not None for told in rebuilt.state.trials)
            view.note(f"resumed: {done} trials are done, {len(rebuilt.open)} run again")
        if study.journal.dropped is not None:
            view.note(f"{path}: dropped {study.journal.dropped}")
        deadline_s = None
        if self.options.time_budget_s is not None:
            left_s = max(0.0, self.options.time_budget_s - rebuilt.seconds)
            deadline_s = time.monotonic() + left_s
        settings = DriverSettings(
            trials_folder=study.trials_folder, study_id=study.study_id, deadline_s=deadline_s
        )
        driver = Driver(rebuilt.state, pool, study.journal, view, settings)
        return driver.run(rebuilt.open)


def prepare(
    experiment: Experiment, options: TuneOptions, progress: Callable[[int, int], None]
) -> Tuning:
    """Plan or score everything that a study chooses from.

    Args:
        experiment: What is tuned.
        options: Of the study.
        progress: Called with (candidates done, candidates in all).

    Raises:
        InputError: If the limits leave no candidate, a table does not fit, or there are fewer
            groups of hosts than trials are to run side by side.
    """
    if options.backend != "replay":
        _num_groups(experiment, options.concurrency)
        if experiment.trials.program is not None:
            check_program(experiment)
        trials = replace(experiment.trials, backend=options.backend)
        experiment = replace(experiment, trials=trials)
    space = study_space(experiment, options, progress)
    return Tuning(experiment=experiment, options=options, space=space)


def copy_experiment(experiment: Experiment, study: Study) -> None:
    """Keep the experiment file with the study."""
    source = Path(experiment.document.file)
    if source.is_file():
        study.write("experiment.yaml", read_text(source))


def write_results(study: Study, ended: Ended) -> None:
    """Write what people and other commands read; all of it can be made again from the journal."""
    told = ended.state.trials
    record = study_json(ended, str(study.folder))
    study.write("history.csv", history_csv(told))
    study.write("history.jsonl", history_jsonl(record["trials"]))
    study.write("measured.csv", measurements_csv(told))
    study.write("result.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    if record["calibration"] is not None:
        study.write("calibration.json", json.dumps(record["calibration"], indent=1) + "\n")


def _num_groups(experiment: Experiment, concurrency: int | None) -> int:
    """Return how many groups of hosts are used.

    Raises:
        InputError: If there are fewer than asked for.
    """
    num_groups = max(1, len(experiment.trials.host_groups))
    if concurrency is not None and concurrency > num_groups:
        message = (
            f"--concurrency {concurrency}: the hosts make {num_groups} group"
            f"{'s' if num_groups > 1 else ''} that can run a trial each; set trials.host_groups"
        )
        raise InputError(message, where=experiment.where("trials"))
    return concurrency or num_groups


def _wants_actors(options: TuneOptions) -> bool:
    """Tell whether Ray actors hold the hosts: over SSH where Ray is installed, or on a cluster."""
    if options.pool != "auto":
        return options.pool == "ray"
    over_ssh = options.backend == "ssh" and find_spec("ray") is not None
    return over_ssh or options.workers.forced or "RAY_ADDRESS" in os.environ
