"""The folder of a Ray that was started here: nobody else gets at the sockets in it."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import ray

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("cluster")]

INTRUDER = """
import os, socket, sys
path = sys.argv[1]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
def attempt(what, *arguments):
    try:
        what(*arguments)
    except PermissionError:
        return
    sys.exit(f"{what} {arguments} is allowed")
folder = path
while folder.count("/") > 2:
    folder = os.path.dirname(folder)
    attempt(os.listdir, folder)
attempt(socket.socket(socket.AF_UNIX).connect, path)
attempt(os.rename, path, path + ".old")
attempt(os.unlink, path)
attempt(os.mknod, path + ".new")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_enter_nor_replace_a_socket() -> None:
    path = Path(ray.nodes()[0]["RayletSocketName"])
    outer = Path(*path.parts[:3])
    assert outer.name.startswith("amp-ray-")
    assert stat.S_IMODE(outer.stat().st_mode) == 0o700
    # What would be reached if it were not for that.
    assert {stat.S_IMODE(parent.stat().st_mode) & 0o005 for parent in path.parents[:-3]} == {0o005}
    done = subprocess.run(
        [sys.executable, "-I", "-c", INTRUDER, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert path.is_socket()
