"""Programs of trials that attack the agent which runs them."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from amp_ray.runtime.hosts.host import Channel, LocalHost
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.launch import Launch, WarmUp, rank_commands
from amp_ray.trials.outcome import Measured

pytestmark = pytest.mark.integration

NOBODY = 65534

ATTACK = r"""
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
forged = [
    {"kind": "file", "name": "../owned", "content": "b3duZWQ="},
    {"kind": "file", "name": "result.json", "content": "e30=", "data": "eJw=", "last": True},
    {"kind": "exit", "rank": 0, "code": 0, "signal": None, "ended": False, "tail": []},
    {"kind": "done", "reason": "exited", "clean": True, "left": [], "num_oom_kills": 0},
]
done = []

above = [name for name in os.listdir("/proc/self/fd") if int(name) > 2]
open_ones = [os.path.realpath(f"/proc/self/fd/{name}") for name in above
             if os.path.exists(f"/proc/self/fd/{name}")]

def attack(what, action):
    try:
        value = action()
    except OSError:
        return
    if value is None or value != -1:
        done.append(what)

def forge(path):
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    for message in forged:
        os.write(descriptor, b"\n" + json.dumps(message).encode() + b"\n")

def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])

class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

def read_memory(pid):
    buffer = ctypes.create_string_buffer(8)
    here = Vector(ctypes.addressof(buffer), 8)
    there = Vector(id(sys), 8)
    return libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)

def descriptor_of(pid, number):
    pidfd = os.pidfd_open(pid)
    return libc.syscall(438, pidfd, number, 0)

targets, pid = [], os.getppid()
while pid > 0 and len(targets) < 2:  # the agent, or the warm process and the agent
    targets.append(pid)
    pid = parent(pid)
if "amp-ray-agent" == open(f"/proc/{targets[0]}/comm").read().strip():
    del targets[1:]
for pid in targets:
    attack(f"link {pid}", lambda: os.readlink(f"/proc/{pid}/fd/0"))
    attack(f"memory {pid}", lambda: open(f"/proc/{pid}/mem", "r+b"))
    attack(f"vm {pid}", lambda: read_memory(pid))
    for number in range(20):
        attack(f"forge {pid} {number}", lambda: forge(f"/proc/{pid}/fd/{number}"))
        attack(f"copy {pid} {number}", lambda: descriptor_of(pid, number))
    attack(f"trace {pid}", lambda: libc.ptrace(0x4206, pid, 0, 0))
record = {"done": done, "targets": targets, "open": open_ones, "uid": os.getuid(),
          "debuggers_allowed": libc.prctl(3, 0, 0, 0, 0),  # PR_GET_DUMPABLE
          "names": [open(f"/proc/{pid}/comm").read().strip() for pid in targets]}
with open("attack.json", "w") as file:
    json.dump(record, file)
with open("result.json", "w") as file:
    json.dump({"trial_id": "t", "step_s": [0.9, 0.2, 0.2, 0.2]}, file)
"""


class OrdinaryHost(LocalHost):
    """This machine, with agents that run as a user without privileges."""

    def open_channel(self, argv: Sequence[str]) -> Channel:
        """Start a command as the other user."""
        words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
        return super().open_channel([*words, *argv])


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder that every user may enter and write to."""
    folder = Path(f"/var/tmp/amp-ray-attacks-{os.getpid()}")  # noqa: S108 - it is reached by nobody
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    yield folder
    assert [*folder.iterdir()] == []
    folder.rmdir()


@pytest.mark.parametrize("isolate", [True, False], ids=["namespace", "plain"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "fresh"])
@pytest.mark.parametrize("kind", [LocalHost, OrdinaryHost])
def test_a_rank_reaches_neither_the_agent_nor_the_warm_process(
    base: Path, tmp_path: Path, kind: type[LocalHost], *, warm: bool, isolate: bool
) -> None:
    if os.geteuid() != 0 and kind is OrdinaryHost:
        pytest.skip("only root can become another user")
    python = "/usr/bin/python3" if kind is OrdinaryHost else sys.executable
    if not Path(python).exists():
        pytest.skip(f"{python}, which any user can run, is not there")
    argv = [python, "-u", "attack.py"]
    launch = Launch(
        trial_id="t",
        commands=rank_commands(argv, [("localhost", 0)]),
        files={"attack.py": ATTACK.encode()},
        environment={},
        collect=("result.json", "attack.json", "rank-*.log"),
    )
    settings = AgentSettings(base=str(base), grace_s=0.2, isolate=isolate)
    warm_up = WarmUp(python=python, modules=("json", "ctypes")) if warm else None
    with Launcher([kind(python=python)], settings, warm_up=warm_up) as launcher:
        outcome = launcher.run(launch, tmp_path / "t")
    folder = tmp_path / "t/hosts/localhost"
    assert isinstance(outcome, Measured), (outcome, (folder / "rank-0.log").read_text())
    record = json.loads((folder / "attack.json").read_text(encoding="utf-8"))
    assert record["uid"] == (NOBODY if kind is OrdinaryHost else os.geteuid())
    assert record["names"][-1] == "amp-ray-agent"
    assert len(record["targets"]) == (2 if warm else 1)
    assert record["done"] == []
    assert record["open"] == []
    assert record["debuggers_allowed"] == 1
    assert not (tmp_path / "t/hosts/owned").exists()


def test_a_rank_takes_no_power_over_its_agent_with_it(base: Path, tmp_path: Path) -> None:
    program = """
import json, os
lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
sets = {name: int(lines[name], 16) >> 19 & 1 for name in ("CapEff", "CapPrm", "CapInh", "CapBnd")}
with open("result.json", "w") as file:
    json.dump({"trial_id": "t", "step_s": [1.0]}, file)
with open("power.json", "w") as file:
    score = int(open("/proc/self/oom_score_adj").read())
    json.dump({**sets, "oom_score": score}, file)
"""
    launch = Launch(
        trial_id="t",
        commands=rank_commands([sys.executable, "power.py"], [("localhost", 0)]),
        files={"power.py": program.encode()},
        environment={},
        collect=("result.json", "power.json"),
    )
    with Launcher([LocalHost()], AgentSettings(base=str(base), grace_s=0.2)) as launcher:
        assert isinstance(launcher.run(launch, tmp_path / "t"), Measured)
    record = json.loads((tmp_path / "t/hosts/localhost/power.json").read_text(encoding="utf-8"))
    assert record == {"CapEff": 0, "CapPrm": 0, "CapInh": 0, "CapBnd": 0, "oom_score": 1000}
