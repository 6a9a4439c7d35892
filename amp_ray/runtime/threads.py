"""Calls whose results are futures: in daemon threads, which do not delay the end of the process."""

import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import FIRST_EXCEPTION, Future
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def in_thread(work: Callable[..., Answer], *arguments: Any) -> "Future[Answer]":  # noqa: ANN401 - of any work
    """Call a function in a daemon thread."""
    call: Future[Answer] = Future()
    threading.Thread(target=_run, args=(call, work, *arguments), daemon=True).start()
    return call


def directly(work: Callable[..., Answer], *arguments: Any) -> "Future[Answer]":  # noqa: ANN401 - of any work
    """Call a function at once, in this thread."""
    call: Future[Answer] = Future()
    _run(call, work, *arguments)
    return call


def _run(call: "Future[Answer]", work: Callable[..., Answer], *arguments: Any) -> None:  # noqa: ANN401
    try:
        call.set_result(work(*arguments))
    except BaseException as error:  # noqa: BLE001 - raised by result()
        call.set_exception(error)


def at_once(tasks: Sequence[Callable[[], object]], limit_s: float) -> None:
    """Run tasks in parallel, wait for ``limit_s`` at most, and raise the first error."""
    for call in futures.wait(map(in_thread, tasks), limit_s, FIRST_EXCEPTION).done:
        call.result()
