import os
import signal
import subprocess
import sys
import time

from amp_ray.runtime.hosts.agent.processes import descendants, living, state_of
from support.waiting import wait_for


def test_a_process_that_runs_says_so() -> None:
    assert state_of(os.getpid()) == "R"


def test_a_stopped_process_is_told_from_one_that_is_gone() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert state_of(process.pid) == "T"
        process.kill()
    assert state_of(process.pid) == ""


LEADERLESS = """
import ctypes, subprocess, threading, time
child = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
print(child.pid, flush=True)
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""The first thread ends, another one lives on: the kernel shows a zombie that has a child."""


def test_a_process_whose_first_thread_has_ended_keeps_its_children() -> None:
    argv = [sys.executable, "-c", LEADERLESS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        wait_for(lambda: state_of(process.pid) == "Z")
        listed = descendants()
        os.kill(child, signal.SIGKILL)
        process.kill()
    assert {process.pid, child} <= set(listed)


def test_what_has_ended_is_not_listed() -> None:
    process = subprocess.Popen(["/bin/true"])
    while state_of(process.pid) != "Z":
        time.sleep(0.01)
    assert process.pid not in [*living(), *descendants()]
    process.wait()
