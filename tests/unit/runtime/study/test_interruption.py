import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from amp_ray.runtime.study.tuning import SIGNALS, Interruption


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Leave the process's handlers as they are."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def block(
    interruption: Interruption,
    *numbers: signal.Signals,
    done: list[str] | None = None,
    error: Exception | None = None,
) -> None:
    """Get signals in a steady block, which may fail."""
    with interruption.steady():
        for number in numbers:
            send(number)
        if error is not None:
            raise error
        if done is not None:
            done.append("block")
    if done is not None:
        done.append("after")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_interrupts_at_once(number: signal.Signals) -> None:
    with Interruption(), pytest.raises(KeyboardInterrupt):
        send(number)


@pytest.mark.parametrize("numbers", [*((number,) for number in SIGNALS), SIGNALS])
def test_signals_wait_for_the_end_of_a_steady_block_and_interrupt_once(
    numbers: tuple[signal.Signals, ...],
) -> None:
    done: list[str] = []
    with Interruption() as interruption:
        with pytest.raises(KeyboardInterrupt):
            block(interruption, *numbers, done=done)
        assert done == ["block"]
        block(interruption)


def test_a_failure_in_a_block_comes_first_and_the_signal_is_not_lost() -> None:
    with Interruption() as interruption:
        with pytest.raises(OSError, match=r"^$"):
            block(interruption, signal.SIGTERM, error=OSError())
        with pytest.raises(KeyboardInterrupt):
            block(interruption)


def test_a_signal_that_other_code_has_caught_comes_again_before_the_next_block() -> None:
    done: list[str] = []
    with Interruption() as interruption:
        with contextlib.suppress(KeyboardInterrupt):
            send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            block(interruption, done=done)
        assert done == []
        block(interruption, done=done)
        assert done == ["block", "after"]


def test_a_block_of_the_orderly_end_is_not_interrupted_by_what_it_is_there_for() -> None:
    done: list[str] = []

    def run(interruption: Interruption) -> None:
        try:
            send(signal.SIGINT)
        finally:
            block(interruption, done=done)
            block(interruption, done=done)

    with Interruption() as interruption:
        with pytest.raises(KeyboardInterrupt):
            run(interruption)
        assert done == ["block", "after"] * 2


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruption():
        send(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_the_handlers_before_come_back() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    with Interruption(), pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)
    send(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_outside_of_the_main_loop_nothing_is_taken_over() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    Interruption()
    assert [signal.getsignal(number) for number in SIGNALS] == before
