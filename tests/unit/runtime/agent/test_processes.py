import os
import signal
import subprocess

from amp_ray.runtime.agent.processes import state_of


def test_a_process_that_runs_says_so() -> None:
    assert state_of(os.getpid()) == "R"


def test_a_stopped_process_is_told_from_one_that_is_gone() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert state_of(process.pid) == "T"
        process.kill()
    assert state_of(process.pid) == ""
