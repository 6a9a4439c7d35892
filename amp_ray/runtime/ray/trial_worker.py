"""What a trial actor does: owns the runner of one host group, in a process of its own.

No Ray here; `actors` makes an actor of it. Trials end by an interruption, never by killing
the process: only the runner can clean up, and where it cannot, the hosts' agents do by their lease.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import amp_ray
from amp_ray.errors import AmpRayError
from amp_ray.runtime.study.pool import Fault, MakeRunner, Runner, Task, run_task, sweep_lines
from amp_ray.trials.outcome import Outcome

# Variables that Ray may set in its workers; trials of this machine inherit the driver's
SET_BY_RAY: Final = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a process tells of itself before it gets work."""

    version: str
    pid: int
    host: str

    @classmethod
    def here(cls) -> "Hello":
        """Describe this process."""
        return cls(version=amp_ray.__version__, pid=os.getpid(), host=platform.node())

    def check_version(self) -> None:
        """Refuse a process that runs another version: it might launch differently."""
        if self.version != amp_ray.__version__:
            raise AmpRayError(
                f"{self.host} has amp-ray {self.version} and this machine {amp_ray.__version__}: "
                "install the same version on every node of the Ray cluster"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where the driver runs."""

    folder: str  # its working folder, from which experiments name their files
    environment: Mapping[str, str]  # what it has of `SET_BY_RAY`

    @classmethod
    def of_this_process(cls) -> "Home":
        """Describe this process as the driver."""
        environment = {name: os.environ[name] for name in SET_BY_RAY if name in os.environ}
        return cls(folder=str(Path.cwd()), environment=environment)

    def enter(self) -> None:
        """Make this process, on the same machine, see what the driver sees."""
        os.chdir(self.folder)
        for name in SET_BY_RAY:
            os.environ.pop(name, None)
        os.environ.update(self.environment)


class TrialWorker:
    """One host group's runner; its methods are called side by side, each in a thread."""

    def __init__(self, make_runner: MakeRunner, group: int, home: Home) -> None:
        """Remember what ``open`` needs: an error there arrives as it is, one here as text."""
        self._make_runner, self._group, self._home = make_runner, group, home
        self._runner: Runner | None = None

    def open(self) -> Hello | AmpRayError:
        """Make the runner, or return why not."""
        self._home.enter()
        try:
            self._runner = self._make_runner(self._group)
        except AmpRayError as error:
            return error
        return Hello.here()

    def run(self, task: Task) -> Outcome | Fault | None:
        """Run one attempt."""
        return run_task(self._opened, task)

    def interrupt(self) -> None:
        """End the trial that runs."""
        self._opened.interrupt()

    def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """End and remove what attempts have left."""
        return sweep_lines(self._opened, trial_ids)

    def close(self) -> None:
        """End everything; an actor that never opened has nothing to end."""
        if self._runner is not None:
            self._runner.close()

    @property
    def _opened(self) -> Runner:
        assert self._runner is not None, "open() comes first"
        return self._runner
