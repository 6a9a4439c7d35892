"""Who follows a trial from outside: someone who listens to its ranks, someone who may end it."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from amp_ray.runtime.study.pool import InterruptedTrialError

Listener = Callable[[Mapping[str, Any]], None]
"""Takes an event of a rank as it comes, on the thread that runs the trial."""


def _ignore(_event: Mapping[str, Any]) -> None:
    """Listen to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a launcher looks at while a trial runs.

    Args:
        interrupted: Set by whoever wants the trial to end now.
    """

    listener: Listener = _ignore
    interrupted: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Go on only if nobody wants an end.

        Raises:
            InterruptedTrialError: If somebody does.
        """
        if self.interrupted.is_set():
            message = "the trial was interrupted"
            raise InterruptedTrialError(message)
