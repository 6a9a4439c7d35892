"""``amp-ray tune``: prepare a study, drive it, and write its results."""

import contextlib
import functools
import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

from amp_ray.calibration.calibration import calibration_to_json
from amp_ray.calibration.fingerprint import fingerprint
from amp_ray.errors import AmpRayError, InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.redaction import NOT_KEPT, redact, redact_values
from amp_ray.runtime.files import read_text
from amp_ray.runtime.hosts.host import experiment_folder
from amp_ray.runtime.launch.program_files import program_record
from amp_ray.runtime.ray.address import RayUnavailableError, require_ray
from amp_ray.runtime.study import events as study_events
from amp_ray.runtime.study.driver import Driver, DriverSettings, Steady, View
from amp_ray.runtime.study.events import Resumed
from amp_ray.runtime.study.folder import CHANGE, JOURNAL, PROGRAM, Study, open_study
from amp_ray.runtime.study.pool import (
    MakeRunner,
    Pool,
    ReplayRunner,
    RunnerPool,
    make_runner,
    portable,
)
from amp_ray.runtime.study.result import (
    Ending,
    StudyResult,
    history_csv,
    history_jsonl,
    measurements_csv,
    study_text,
)
from amp_ray.runtime.study.space import Space, TuneOptions, recorded_outcome, study_space
from amp_ray.runtime.threads import directly
from amp_ray.trials.own_program.program import check_program
from amp_ray.tuner.state import TunerSettings, TunerState, begin

_LOGGER = logging.getLogger(__name__)
RESULT: Final = "result.json"  # in a study's folder: the object of ``tune --json``
_DIGEST_LETTERS: Final = 12  # leading digits of the SHA-256 of a table
_ACTOR_CPUS: Final = 1  # CPUs of a Ray instance only for trial actors, which request none

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of Ctrl-C, of ``kill`` and service managers, and of a closed terminal."""


class Interruption:
    """Context manager that turns signals into ``KeyboardInterrupt``, but not inside `steady`.

    Use it in the main thread. A signal that is ignored already, as under ``nohup``, stays ignored.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._is_steady = False
        self._is_pending = False

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Delay signals until the end of a ``with`` block, which should be short.

        Raises `KeyboardInterrupt` at the end if a signal came during the block. Raises it at the
        beginning if an earlier one was swallowed by other code (starting Ray can do that).
        """
        if isinstance(sys.exception(), KeyboardInterrupt):
            self._is_pending = False  # the signal is being handled: this block is its clean-up
        self._raise_pending()
        self._is_steady = True
        try:
            yield
        finally:
            self._is_steady = False
        self._raise_pending()

    def _raise_pending(self) -> None:
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _arrived(self, _number: int, _frame: FrameType | None) -> None:
        self._is_pending = True
        if not self._is_steady:
            raise KeyboardInterrupt


def begin_state(experiment: Experiment, space: Space, options: TuneOptions) -> TunerState:
    """Return the tuner's state before the first trial."""
    settings = TunerSettings(budget=options.budget, policy=options.policy, seed=options.seed)
    return begin(experiment, space.results, settings, order=space.order)


def study_header(experiment: Experiment, options: TuneOptions) -> dict[str, Any]:
    """Return the journal's header: values that must be the same when a study is resumed.

    The header has no names of hosts: a study may go on with other hosts of the same kind.
    """
    table = None
    if options.table is not None:  # the digest detects a changed table
        digest = hashlib.sha256(read_text(options.table).encode()).hexdigest()
        table = f"{options.table.name} ({digest[:_DIGEST_LETTERS]})"
    header = {
        "event": "study",
        "experiment": experiment.name,
        "fingerprint": fingerprint(experiment),
        "global_batch_size": experiment.global_batch_size,
        "backend": options.backend,
        "table": table,
        "policy": options.policy,
        "seed": options.seed,
        "steps": experiment.trials.num_steps,
        "warmup_steps": experiment.trials.num_warmup_steps,
    }
    if options.backend != "replay":
        header[PROGRAM] = program_record(experiment, experiment_folder(experiment))
    return header


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tuning:
    """An experiment, the options of its study, and its candidates."""

    experiment: Experiment
    options: TuneOptions
    space: Space

    def run(
        self,
        folder: Path,
        view: View,
        *,
        resume: bool,
        steady: Steady = contextlib.nullcontext,
    ) -> StudyResult:
        """Drive the study in a folder to its end; write its results even after a failure.

        ``steady`` delays signals, see `Interruption`. Raises `KeyboardInterrupt` after all running
        trials were ended in order.
        """
        header = study_header(self.experiment, self.options)
        state = begin_state(self.experiment, self.space, self.options)
        salvage = self.options.salvage
        with open_study(folder, header, resume=resume, salvage=salvage) as study:
            rebuilt = self._rebuild(study, state, view, header.get(PROGRAM))
            copy_experiment(self.experiment, study)
            with self._pool(steady) as pool:
                budget_s = self.options.time_budget_s
                left_s = None if budget_s is None else max(0.0, budget_s - rebuilt.seconds)
                settings = DriverSettings(
                    trials_folder=study.trials_folder,
                    study_id=study.study_id,
                    time_left_s=left_s,
                    steady=steady,
                    known_failures=rebuilt.known_failures,
                )
                driver = Driver(rebuilt.state, pool, study.journal, view, settings)
                return _drive(driver, rebuilt, study)

    def _rebuild(
        self, study: Study, state: TunerState, view: View, program: Mapping[str, Any] | None
    ) -> study_events.Rebuilt:
        """Replay the journal, and append a ``resumed`` event unless the study is new."""
        path = study.folder / JOURNAL
        rebuilt = study_events.rebuild(state, study.journal.records, file=str(path))
        if self.options.salvage:  # lost records may hide attempts with leftovers on hosts
            names = (f"{study.study_id}-{path.name}" for path in study.trials_folder.iterdir())
            leftovers = tuple(dict.fromkeys((*rebuilt.leftovers, *sorted(names))))
            rebuilt = replace(rebuilt, leftovers=leftovers)
        changed = rebuilt.check_program(program, file=str(path))
        if changed is not None:
            view.note(f"the program has changed, and nothing was measured with it: {changed}")
        if study.broken is not None:
            view.note(f"the study was driven by {study.broken}, which has died")
        if study.journal.dropped is not None:
            view.note(f"{path}: dropped {study.journal.dropped}")
        if not study.is_new:
            event = Resumed(budget=self.options.budget, at=study_events.now(), program=program)
            study.journal.append(event.record())
            view.note(_resumed_text(rebuilt))
        return rebuilt

    @contextlib.contextmanager
    def _pool(self, steady: Steady = contextlib.nullcontext) -> Iterator[Pool]:
        options, experiment = self.options, self.experiment
        if options.backend == "replay":
            answers = {strategy: recorded_outcome(line) for strategy, line in self.space.replayed}
            runner, num_groups = ReplayRunner(answers), options.concurrency or 1
            yield RunnerPool(lambda _group: runner, num_groups, begin=directly)
            return
        num_groups = _num_groups(experiment, options.concurrency)
        factory = functools.partial(make_runner, portable(experiment))
        with contextlib.ExitStack() as stack:
            pool = None
            if _wants_actors(options):
                pool = self._actor_pool(factory, num_groups, stack, steady)
            yield pool or RunnerPool(factory, num_groups)

    def _actor_pool(
        self,
        factory: MakeRunner,
        num_groups: int,
        stack: contextlib.ExitStack,
        steady: Steady,
    ) -> Pool | None:
        """Start trial actors; return None if Ray is unavailable and ``--pool`` is ``auto``."""
        require_ray("--pool ray")
        from amp_ray.runtime.ray import actors  # noqa: PLC0415 - takes seconds to import

        address = self.options.workers.address
        try:
            with steady():  # no signal now: a Ray that has started only in part cannot be ended
                stack.enter_context(actors.connect(address, num_cpus=_ACTOR_CPUS))
            return actors.actor_pool(factory, num_groups)
        except RayUnavailableError as error:
            if self.options.pool == "ray" or address is not None:
                raise
            _LOGGER.warning("%s. Threads of this process hold the hosts instead", error)
            return None


def _resumed_text(rebuilt: study_events.Rebuilt) -> str:
    num_open = len(rebuilt.open)
    num_done = len(rebuilt.state.trials) - num_open
    done = "1 trial is" if num_done == 1 else f"{num_done} trials are"
    again = f", {num_open} {'runs' if num_open == 1 else 'run'} again" if num_open else ""
    return f"resumed: {done} done{again}"


def _drive(driver: Driver, rebuilt: study_events.Rebuilt, study: Study) -> StudyResult:
    """Run the driver; write the results even if it fails or is interrupted."""
    try:
        result = driver.run(rebuilt.open, rebuilt.leftovers)
    except BaseException as error:
        ending: Ending = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        with contextlib.suppress(AmpRayError):  # report only the first error, such as a full disk
            write_results(study, driver.result(ending))
        raise
    write_results(study, result)
    return result


def prepare(
    experiment: Experiment, options: TuneOptions, progress: Callable[[int, int], None]
) -> Tuning:
    """Check the options and plan or score all candidates; ``progress`` gets (done, total)."""
    if options.backend != "replay":
        _num_groups(experiment, options.concurrency)
        experiment = with_secrets(experiment, os.environ)
        if experiment.trials.program is not None:
            check_program(experiment)
        trials = replace(experiment.trials, backend=options.backend)
        experiment = replace(experiment, trials=trials)
    space = study_space(experiment, options, progress)
    return Tuning(experiment=experiment, options=options, space=space)


def copy_experiment(experiment: Experiment, study: Study) -> None:
    """Copy the experiment file into the study's folder, without secrets."""
    source = Path(experiment.source.file)
    if source.is_file():
        texts = experiment.source.changes.values()
        changes = "".join(f"{CHANGE}{json.dumps(text)}\n" for text in texts)
        study.write("experiment.yaml", changes + _without_secrets(read_text(source), source))


def _without_secrets(text: str, source: Path) -> str:
    """Return a file's text unchanged; if it has secrets, return its values without them as JSON."""
    values = parse_yaml(text, file=str(source)).values
    kept = redact_values(values)
    if kept == values and redact(text) == text:
        return text
    return f"# Values that look secret are left out.\n{json.dumps(kept, indent=1)}\n"


def with_secrets(experiment: Experiment, environment: Mapping[str, str]) -> Experiment:
    """Fill in redacted environment variables of an experiment from ``environment``.

    Raises:
        InputError: If such a variable is not set, or an argument of the program is redacted.
    """
    trials, variables = experiment.trials, dict(experiment.trials.environment)
    advice = "its value was not kept with the study: name the experiment file that has it"
    for name, text in variables.items():
        if NOT_KEPT in text:
            if not environment.get(name):
                where = experiment.where("trials", "environment", name)
                raise InputError(f"{advice}, or set {name} for this command", where=where)
            variables[name] = environment[name]
    for index, word in enumerate(trials.program.argv if trials.program else ()):
        if NOT_KEPT in word:
            where = experiment.where("trials", "program", "argv", index)
            raise InputError(advice, where=where)
    return replace(experiment, trials=replace(trials, environment=variables))


def write_results(study: Study, result: StudyResult) -> None:
    """Write the result files of a study; all can be rebuilt from the journal."""
    state, calibration = result.state, result.knowledge.calibration
    study.write("history.csv", history_csv(state.trials))
    study.write("history.jsonl", history_jsonl(state.trials, state.experiment.cluster))
    study.write("measured.csv", measurements_csv(state.trials))
    study.write(RESULT, study_text(result, str(study.folder)))
    if calibration is not None:
        text = json.dumps(calibration_to_json(calibration), indent=1)
        study.write("calibration.json", text + "\n")


def _num_groups(experiment: Experiment, concurrency: int | None) -> int:
    num_groups = max(1, len(experiment.host_groups))
    if concurrency is not None and concurrency > num_groups:
        message = (
            f"--concurrency {concurrency}: the hosts make {num_groups} group"
            f"{'s' if num_groups > 1 else ''} that can run a trial each; set trials.host_groups"
        )
        raise InputError(message, where=experiment.where("trials"))
    return concurrency or num_groups


def _wants_actors(options: TuneOptions) -> bool:
    """Return whether trials run in Ray actors.

    If the option is ``auto``, they do if Ray is installed and the backend is SSH, or a Ray cluster
    is requested.
    """
    if options.pool != "auto":
        return options.pool == "ray"
    wants = options.backend == "ssh" or options.workers.forced or "RAY_ADDRESS" in os.environ
    return wants and find_spec("ray") is not None
