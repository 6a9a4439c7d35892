"""Runs trials on one group of hosts; connections and warm processes stay between them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.hosts.make_hosts import MakeHost, experiment_folder, host_groups, host_maker
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.runtime.launch.log_process import read_logs_aside
from amp_ray.runtime.launch.program_files import program_files
from amp_ray.runtime.study.pool import Task
from amp_ray.trials.command import trial_launch, trial_reader, trial_warm_up
from amp_ray.trials.outcome import Outcome

Backend = Literal["ssh", "local"]


class TrialRunner:
    """A `Runner` for the strategies of one experiment."""

    def __init__(
        self,
        experiment: Experiment,
        group: int,
        make_host: MakeHost,
        settings: AgentSettings | None = None,
    ) -> None:
        self._experiment = experiment
        self._names = host_groups(experiment)[group]
        hosts = [make_host(name) for name in self._names]
        self._python = experiment.trials.python or hosts[0].python
        self._files = program_files(experiment, experiment_folder(experiment))
        warm_up = trial_warm_up(experiment, self._python)
        self._launcher = Launcher(hosts, settings, warm_up=warm_up)

    def run(self, task: Task) -> Outcome:
        """Run a trial to its end.

        Returns what came of it, whatever goes wrong on the hosts. Raises `InterruptedTrialError` if
        ``interrupt`` was called; the hosts are clean then.
        """
        launch = trial_launch(
            self._experiment,
            task.strategy,
            trial_id=task.trial_id,
            hosts=self._names,
            files=self._files,
            python=self._python,
        )
        reader = trial_reader(self._experiment, read_logs_aside)
        return self._launcher.run(launch, task.folder, reader=reader)

    def interrupt(self) -> None:
        """End the trial that runs, from any thread; does nothing where none does."""
        self._launcher.interrupt()

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """Sweep after a driver that has died; say what stays, and which hosts do not answer."""
        return self._launcher.agents.sweep_trials(trial_ids)

    def close(self) -> None:
        """End everything that was started, and disconnect."""
        self._launcher.close()


def make_runner(experiment: Experiment, backend: Backend, group: int) -> TrialRunner:
    """Make the runner of one group; `functools.partial` of it can be sent to another process."""
    chosen = replace(experiment, trials=replace(experiment.trials, backend=backend))
    return TrialRunner(chosen, group, host_maker(chosen))


def portable(experiment: Experiment) -> Experiment:
    """Return an experiment whose relative paths mean the same in every process of this machine."""
    source = replace(experiment.source, file=str(Path(experiment.source.file).absolute()))
    return replace(experiment, source=source)
