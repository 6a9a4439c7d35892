"""A headless browser that opens pages from disk, as people do."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LIMIT_S = 300

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium")


def drawn(url: str, profile: Path) -> str:
    """Return a page as the browser has drawn it; what its console complains about is a failure."""
    assert CHROMIUM is not None
    argv = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={profile}"),
        *("--disable-dev-shm-usage", "--virtual-time-budget=10000", "--enable-logging=stderr"),
        *("--dump-dom", url),
    ]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert [line for line in ended.stderr.splitlines() if "CONSOLE" in line] == []
    return ended.stdout
