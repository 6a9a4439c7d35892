"""The warm process: ranks are forked from it, and its death is no outcome of a trial."""

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_ray.runtime.hosts.host import LocalHost
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.launch import Launch, WarmUp, rank_commands
from amp_ray.trials.outcome import Measured, Outcome
from support.launching import warm
from support.trial_runs import were_warm
from support.waiting import HANG_GUARD_S, wait_for

pytestmark = pytest.mark.integration


PROGRAM = """
import json, os, sys, time
open("ready", "w").close()
while os.path.exists(sys.argv[1]):
    time.sleep(0.02)
json.dump({"trial_id": "t", "step_s": [1.0, 1.0]}, open("result.json", "w"))
"""


class Trials:
    """Trials on this machine, whose warm process imports a module that the test writes."""

    def __init__(self, folder: Path) -> None:
        """Use a folder for all files."""
        self.folder, self.num_trials = folder, 0
        self.modules, self.hosts = folder / "modules", folder / "host"
        self.gate = folder / "gate"
        self.module = f"imported_{secrets.token_hex(4)}"
        self.modules.mkdir()
        self.hosts.mkdir()

    def launcher(self, module: str = "", *, import_timeout_s: float = HANG_GUARD_S) -> Launcher:
        (self.modules / f"{self.module}.py").write_text(module, encoding="ascii")
        warm_up = WarmUp(
            python=sys.executable,
            modules=(self.module,),
            environment={"PYTHONPATH": str(self.modules)},
        )
        settings = AgentSettings(
            base=str(self.hosts), grace_s=0.2, isolate=False, import_timeout_s=import_timeout_s
        )
        return Launcher([LocalHost("a")], settings, warm_up=warm_up)

    def run(
        self, launcher: Launcher, program: str = PROGRAM, *arguments: str, **environment: str
    ) -> Outcome:
        self.num_trials += 1
        argv = [sys.executable, "-u", "program.py", *(arguments or (str(self.gate),))]
        launch = Launch(
            trial_id="t",
            commands=rank_commands(argv, [("a", 0)]),
            files={"program.py": program.encode(), "helper.py": b""},
            environment=environment,
            timeout_s=HANG_GUARD_S,
        )
        return launcher.run(launch, self.folder / f"trial-{self.num_trials}")

    def run_while(self, launcher: Launcher, work: Callable[[], None]) -> Outcome:
        """Run a trial whose rank waits until ``work`` has returned."""
        self.gate.touch()
        thread = threading.Thread(target=work)
        thread.start()
        try:
            return self.run(launcher)
        finally:
            thread.join()

    def ready(self) -> list[Path]:
        return [*self.hosts.glob("amp-ray-*/ready")]

    def kill_warm(self) -> None:
        os.kill(self.warm_pid, signal.SIGKILL)

    @property
    def warm_pid(self) -> int:
        (pid,) = self.warm_pids
        return pid

    @property
    def warm_pids(self) -> list[int]:
        """Return the ids of the warm processes that import this test's module."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
                stat = (path.parent / "stat").read_text(encoding="ascii")
            except OSError:
                continue
            if b"warm" in words and words[-2] == f'["{self.module}"]'.encode():
                parents[int(path.parent.name)] = int(stat.rsplit(")", 1)[1].split()[1])
        return [pid for pid, parent in parents.items() if parent not in parents]  # without ranks

    def were_warm(self) -> list[bool]:
        return were_warm(self.folder / f"trial-{self.num_trials}")


@pytest.fixture
def trials(tmp_path: Path) -> Trials:
    """Trials in the test's folder."""
    return Trials(tmp_path)


def test_a_fork_gets_arguments_variables_folder_and_output_like_a_fresh_process(
    trials: Trials,
) -> None:
    program = """
import os, sys
assert sys.argv[1:] == ["a b", "$(c)"], sys.argv
assert os.environ["X"] == "it's" and "PYTHONPATH" not in os.environ
assert os.getcwd() == os.environ["AMP_RAY_FOLDER"] and sys.path[0] == os.getcwd()
assert sys.stdin.read() == ""
import helper
print("line"); print("other", file=sys.stderr)
open("result.json", "w").write('{"trial_id": "t", "step_s": [1.0, 1.0]}')
"""
    with trials.launcher() as launcher:
        outcome = trials.run(launcher, program, "a b", "$(c)", X="it's")
    assert isinstance(outcome, Measured), outcome
    assert trials.were_warm() == [True]
    log = trials.folder / "trial-1/hosts/a/rank-0.log"
    assert log.read_text(encoding="utf-8") == "line\nother\n"


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("import no_such_module", "ModuleNotFoundError"),
        (
            "import threading; threading.Timer(600, print).start()",
            "the imports started 1 threads",
        ),
    ],
)
def test_where_forking_is_not_safe_ranks_start_afresh(
    trials: Trials, module: str, problem: str
) -> None:
    with trials.launcher(module) as launcher:
        assert problem in warm(launcher)["a"]["problem"]
        assert isinstance(trials.run(launcher), Measured)
    assert trials.were_warm() == [False]


def test_a_missing_interpreter_is_told(trials: Trials) -> None:
    warm_up = WarmUp(python="/no such/python", modules=())
    settings = AgentSettings(base=str(trials.hosts))
    with Launcher([LocalHost("a")], settings, warm_up=warm_up) as launcher:
        assert "/no such/python" in warm(launcher)["a"]["problem"]


@pytest.mark.parametrize(
    ("death", "how"),
    [
        ("os.kill(os.getpid(), 11)", "was ended by signal 11 (SIGSEGV)"),
        ("sys.exit(3)", "ended with exit code 3"),
        ("os.closerange(3, 100); os.kill(os.getpid(), 19)", "was ended by signal 9 (SIGKILL)"),
    ],
)
def test_a_death_while_importing_is_told_with_its_last_lines_and_ranks_start_afresh(
    trials: Trials, caplog: pytest.LogCaptureFixture, death: str, how: str
) -> None:
    module = f"import os, sys; print('last words', file=sys.stderr, flush=True); {death}"
    with trials.launcher(module) as launcher:
        problem = warm(launcher)["a"]["problem"]
        assert how in problem
        assert f"while it imported {trials.module}" in problem
        assert "last words" in problem
        assert "not started a third time" in problem
        with caplog.at_level(logging.WARNING):
            assert isinstance(trials.run(launcher), Measured)
    assert "a: ranks start afresh: the warm process" in caplog.text
    assert trials.were_warm() == [False]


def test_a_death_once_is_told_and_the_next_process_serves(
    trials: Trials, caplog: pytest.LogCaptureFixture
) -> None:
    mark = trials.folder / "mark"
    module = f"import os\nif not os.path.exists({str(mark)!r}):\n"
    module += f"    open({str(mark)!r}, 'w').close(); os.kill(os.getpid(), 11)"
    with trials.launcher(module) as launcher:
        assert warm(launcher)["a"]["problem"] == ""
        assert isinstance(trials.run(launcher), Measured)
    assert "a: the warm process was ended by signal 11 (SIGSEGV) while" in caplog.text
    assert trials.were_warm() == [True]
    assert caplog.text.count("the warm process") == 1


def test_a_death_between_trials_is_made_good_before_the_next(trials: Trials) -> None:
    with trials.launcher() as launcher:
        assert isinstance(trials.run(launcher), Measured)
        before = trials.warm_pid
        trials.kill_warm()
        wait_for(lambda: trials.warm_pids not in ([before], []))
        assert isinstance(trials.run(launcher), Measured)
        assert trials.were_warm() == [True]


def test_trials_in_which_it_dies_run_again_and_after_the_second_death_afresh(
    trials: Trials, caplog: pytest.LogCaptureFixture
) -> None:
    def kill_twice() -> None:
        wait_for(trials.ready)
        before = trials.ready()
        trials.kill_warm()
        wait_for(lambda: [path for path in trials.ready() if path not in before])
        trials.kill_warm()
        trials.gate.unlink()

    with trials.launcher() as launcher:
        outcome = trials.run_while(launcher, kill_twice)
    assert isinstance(outcome, Measured), outcome
    assert trials.were_warm() == [True, True, False]
    assert "a: ranks start afresh: the warm process was ended by signal 9" in caplog.text


def test_imports_that_never_end_are_ended_and_told(trials: Trials) -> None:
    with trials.launcher("import time; time.sleep(600)", import_timeout_s=1.0) as launcher:
        assert "took longer than 1 s" in warm(launcher)["a"]["problem"]
        assert isinstance(trials.run(launcher), Measured)
        wait_for(lambda: not trials.warm_pids)


def test_folders_of_agents_that_were_killed_are_swept_by_the_next_start(trials: Trials) -> None:
    def folders() -> list[Path]:
        return [*trials.hosts.glob("amp-ray-*-warm")]

    launcher = trials.launcher()
    warm(launcher)
    (folder,) = folders()
    parent = int(Path(f"/proc/{trials.warm_pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    with trials.launcher() as other:  # its start must not remove folders that are in use
        warm(other)
        assert folder in folders()
    os.kill(parent, signal.SIGKILL)
    wait_for(lambda: not trials.warm_pids)
    assert folders() == [folder]
    with trials.launcher() as other:
        warm(other)
        assert folder not in folders()
    launcher.close()
    assert folders() == []


def test_nothing_is_imported_from_the_folder_that_the_user_is_in(trials: Trials) -> None:
    mark = trials.folder / "executed"
    for name in ("json", "socket", "types", "contextlib"):
        text = f"open({str(mark)!r}, 'w').close()\nraise SystemExit(9)\n"
        (trials.folder / f"{name}.py").write_text(text, encoding="ascii")
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.integration.runtime.test_warm import Trials, Measured, warm\n"
        f"trials = Trials(Path({str(trials.folder / 'inner')!r}))\n"
        "launcher = trials.launcher()\n"
        "assert warm(launcher)['a']['problem'] == ''\n"
        "import os\nassert isinstance(trials.run(launcher), Measured)\n"
        "assert trials.were_warm() == [True]\n"
        "launcher.close()\n"
    )
    (trials.folder / "inner").mkdir()
    root = str(Path(__file__).parents[3])
    code = f"import sys; sys.path[0] = {root!r}\n{program}"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=trials.folder, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert not mark.exists()
