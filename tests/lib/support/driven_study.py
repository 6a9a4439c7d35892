"""Studies whose drivers are separate processes, as if a user had started them."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from support.waiting import HANG_GUARD_S


@dataclass(kw_only=True)
class DrivenStudy:
    """A study; its drivers, agents and ranks are recognised by their folder for temporary files."""

    folder: Path  # folder with the experiment, the study and temporary files

    @property
    def scratch(self) -> Path:
        """Folder for temporary files of all processes."""
        path = self.folder / "tmp"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def path(self) -> Path:
        """Folder of the study."""
        return self.folder / "study"

    @contextlib.contextmanager
    def python(
        self, *argv: str, output: IO[str] | int = subprocess.PIPE
    ) -> Iterator["subprocess.Popen[str]"]:
        """Start Python in a new process group, as a shell does."""
        with subprocess.Popen(
            [sys.executable, *argv],
            cwd=self.folder,
            env={**os.environ, "TMPDIR": str(self.scratch)},
            stdout=output,
            stderr=output,
            text=True,
            process_group=0,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Read the journal, without an incomplete last line."""
        path = self.path / "journal.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        bodies: list[dict[str, Any]] = [json.loads(line)["body"] for line in lines]
        return [body for body in bodies if kind in {None, body["event"]}]

    def processes(self) -> list[str]:
        """List the living processes of the study on this machine."""
        mark = f"TMPDIR={self.scratch}\0".encode()
        lines = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes():
                    lines.append(f"{path.name}: {(path / 'cmdline').read_bytes()[:200]!r}")
        return lines


def finish(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    """Wait for a driver and read its output."""
    stdout, stderr = process.communicate(timeout=HANG_GUARD_S)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
