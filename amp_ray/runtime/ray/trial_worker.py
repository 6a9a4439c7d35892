"""What a trial actor does: owns the runner of one host group, in a process of its own.

No Ray here; `actors` makes an actor of it. Trials end by an interruption, never by killing
the process: only the runner can clean up, and where it cannot, the hosts' agents do by their lease.
"""

import asyncio
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import amp_ray
from amp_ray.errors import AmpRayError
from amp_ray.runtime.study.pool import Fault, Runner, Task, run_task, sweep_lines
from amp_ray.trials.outcome import Outcome

MakeRunner = Callable[[int], Runner]
"""From the number of a host group to its runner; it is sent to another process."""

SET_BY_RAY: Final = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Variables that Ray may set in its workers; trials of this machine inherit the driver's."""


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

    node: str
    folder: str  # its working folder, from which experiments name their files
    environment: Mapping[str, str]  # what it has of `SET_BY_RAY`

    @classmethod
    def of_this_process(cls, node: str) -> "Home":
        """Describe this process as the driver."""
        found = {name: os.environ[name] for name in SET_BY_RAY if name in os.environ}
        return cls(node=node, folder=str(Path.cwd()), environment=found)

    def enter(self) -> None:
        """Make this process, on the same machine, see what the driver sees."""
        os.chdir(self.folder)
        for name in SET_BY_RAY:
            os.environ.pop(name, None)
        os.environ.update(self.environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """An attempt that is over."""

    outcome: Outcome | Fault | None  # what came of it; None if it was interrupted
    # Of its folder by relative path, where the driver cannot see the folder itself
    files: Mapping[str, bytes]


class TrialWorker:
    """One host group's runner, as the methods of an async actor."""

    def __init__(
        self, make_runner: MakeRunner, group: int, home: Home, this_node: Callable[[], str]
    ) -> None:
        """Remember what ``open`` needs: an error there arrives as it is, one here as text."""
        self._make_runner = make_runner
        self._group = group
        self._home = home
        self._is_home = this_node() == home.node
        self._runner: Runner | None = None

    async def open(self, lost: Sequence[str]) -> Hello | AmpRayError:
        """Make the runner, and end what a dead process of this group has left running.

        Returns the error, if the runner cannot be made.

        Args:
            lost: Names of the trials that ran when it died.
        """
        if self._is_home:
            self._home.enter()
        try:
            self._runner = await asyncio.to_thread(self._make_runner, self._group)
        except AmpRayError as error:
            return error
        if lost:
            await asyncio.to_thread(sweep_lines, self._runner, lost)
        return Hello.here()

    async def run(self, task: Task) -> Ran:
        """Run one attempt; cancelling it interrupts the runner and waits until that is clean."""
        running = asyncio.ensure_future(asyncio.to_thread(self._run, task))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await self.interrupt()
            return await running

    async def interrupt(self) -> None:
        """End the trial that runs."""
        await asyncio.to_thread(self._opened.interrupt)

    async def sweep(self, trial_ids: Sequence[str]) -> list[str]:
        """End and remove what attempts have left."""
        return await asyncio.to_thread(sweep_lines, self._opened, trial_ids)

    async def close(self) -> None:
        """End everything; an actor that never opened has nothing to end."""
        if self._runner is not None:
            await asyncio.to_thread(self._runner.close)

    @property
    def _opened(self) -> Runner:
        assert self._runner is not None, "open() comes first"
        return self._runner

    def _run(self, task: Task) -> Ran:
        """Run in a thread: in the driver's folder, or in one here whose files are sent."""
        if self._is_home:
            return Ran(outcome=run_task(self._opened, task), files={})
        with tempfile.TemporaryDirectory(prefix="amp-ray-trial-") as name:
            folder = Path(name) / task.folder.name
            outcome = run_task(self._opened, replace(task, folder=folder))
            return Ran(outcome=outcome, files=read_files(folder))


def read_files(folder: Path) -> dict[str, bytes]:
    """Read every file below a folder; none if it was never made."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a folder that is not there yet."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
