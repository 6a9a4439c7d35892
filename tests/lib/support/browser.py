"""A headless browser that opens pages from disk, as people do."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LIMIT_S = 300

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium")


def arguments(profile: Path) -> list[str]:
    """Return the command that starts the browser."""
    assert CHROMIUM is not None
    return [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={profile}", "--disable-dev-shm-usage"),
    ]


def drawn(url: str, profile: Path) -> str:
    """Return a page's document after the browser has drawn it; fail on errors of its console."""
    argv = [
        *(*arguments(profile), "--virtual-time-budget=10000", "--enable-logging=stderr"),
        *("--dump-dom", url),
    ]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert [line for line in ended.stderr.splitlines() if "CONSOLE" in line] == []
    return ended.stdout


@dataclass
class Page:
    """A page that is controlled by the browser's debugging protocol, over a pair of pipes."""

    commands: BinaryIO
    answers: BinaryIO
    session: str = ""
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def call(self, method: str, **params: object) -> Any:  # noqa: ANN401 - the protocol's JSON
        """Call a method of the protocol and return its result."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while True:
            text = b"".join(iter(lambda: self.answers.read(1), b"\0"))
            answer = json.loads(text)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def value(self, expression: str) -> Any:  # noqa: ANN401 - any value of a script
        """Return the value of an expression; wait for it if it is a promise."""
        told = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            told = {"text": text} if text and kind == "keyDown" else {}
            params = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, **told}
            self.call("Input.dispatchKeyEvent", **params)


@contextmanager
def opened(
    url: str, profile: Path, scheme: str = "light", width: int | None = None
) -> Iterator[Page]:
    """Open a page in a colour scheme, wait until it is loaded, and end the browser afterwards.

    ``width`` is that of the window, in pixels of CSS; by default the browser's own.
    """
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()
    shell = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
    argv = ["bash", "-c", shell, "-", *arguments(profile), "--remote-debugging-pipe"]
    with (
        subprocess.Popen(
            argv, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process,
        os.fdopen(commands, "wb") as into,
        os.fdopen(answers, "rb") as out,
    ):
        os.close(to_read)
        os.close(to_write)
        page = Page(commands=into, answers=out)
        try:
            target = page.call("Target.createTarget", url="about:blank")["targetId"]
            attached = page.call("Target.attachToTarget", targetId=target, flatten=True)
            page.session = attached["sessionId"]
            media = {"name": "prefers-color-scheme", "value": scheme}
            page.call("Emulation.setEmulatedMedia", features=[media])
            if width is not None:
                sizes = {"width": width, "height": 800, "deviceScaleFactor": 1}
                page.call("Emulation.setDeviceMetricsOverride", mobile=False, **sizes)
            page.call("Page.navigate", url=url)
            loaded = (
                "document.readyState === 'complete' ? 0 : new Promise(r => onload = () => r(0))"
            )
            page.value(loaded)
            yield page
        finally:
            process.kill()
