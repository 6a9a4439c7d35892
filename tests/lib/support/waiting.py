"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable
from typing import Final

HANG_GUARD_S: Final = 600.0
"""Limit for whatever must not take for ever; no test waits so long unless it fails."""


def wait_for(
    condition: Callable[[], object],
    timeout_s: float = HANG_GUARD_S,
    told: Callable[[], object] = lambda: "waited in vain",
) -> None:
    """Wait until a condition is true; fail with what ``told`` returns."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)
