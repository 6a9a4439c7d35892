"""Signals end a command in order: at once, or after a block that must not be cut."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Final, Self

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, what ``kill`` and service managers send, and a terminal that closes."""


class Interruption:
    """Turns signals into ``KeyboardInterrupt``, but never inside of `steady`.

    Use it in the main thread. A signal that the process was told to ignore stays ignored: that is
    what ``nohup`` does.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._is_steady = False
        self._is_pending = False

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Let a signal wait until the end of a ``with`` block, which should be short.

        A signal before the block whose ``KeyboardInterrupt`` has ended nothing, since other
        people's code caught it (starting Ray can do that), comes again at the beginning. Raises
        `KeyboardInterrupt`: at the end, if a signal came meanwhile, or at the beginning.
        """
        if isinstance(sys.exception(), KeyboardInterrupt):
            self._is_pending = False  # this block belongs to the orderly end
        self._raise_pending()
        self._is_steady = True
        try:
            yield
        finally:
            self._is_steady = False
        self._raise_pending()

    def _raise_pending(self) -> None:
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _arrived(self, _number: int, _frame: FrameType | None) -> None:
        """Interrupt now or later."""
        self._is_pending = True
        if not self._is_steady:
            raise KeyboardInterrupt
