from itertools import permutations

import pytest

from amp_ray.trials.causes import Sign, SignKind, failure, first_cause, kind_of_text, last_error
from amp_ray.trials.outcome import Crashed, OutOfMemory, TimedOut, Unreachable


def sign(kind: SignKind, time_s: float, rank: int | None = 0, host: str = "a") -> Sign:
    return Sign(kind=kind, host=host, rank=rank, time_s=time_s, text=f"{kind} {rank}")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "communication"),
        (
            "torch.distributed.DistBackendError: NCCL error in: unhandled system error",
            "communication",
        ),
        ("BrokenPipeError: [Errno 32] Broken pipe", "communication"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", "memory"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "memory"),
        ("MemoryError", "memory"),
        ("OSError: [Errno 98] Address already in use", "port"),
        ("OSError: [Errno 28] No space left on device", "disk"),
        ("ValueError: connection of layers 3 and 4", "crash"),
    ],
)
def test_the_last_error_tells_the_kind(text: str, kind: SignKind) -> None:
    assert kind_of_text(["step 3", "Traceback (most recent call last):", "  File x", text]) == kind


def test_what_was_printed_before_the_error_does_not_count() -> None:
    lines = ["warning: NCCL is old", "Traceback (most recent call last):", "KeyError: 'x'"]
    assert kind_of_text(lines) == "crash"


def test_the_error_is_named_although_more_follows() -> None:
    lines = ["Traceback (most recent call last):", "  File x", "RuntimeError: no", "frame #0: y"]
    assert last_error(lines) == "RuntimeError: no"


def test_without_a_traceback_the_last_line_is_the_error() -> None:
    assert last_error(["one", "two", ""]) == "two"


def test_communication_loses_against_a_later_crash() -> None:
    assert first_cause([sign("communication", 1.0), sign("crash", 2.0)]) == sign("crash", 2.0)


def test_communication_loses_against_a_lost_host() -> None:
    assert first_cause([sign("communication", 1.0), sign("lost", 6.0, None)]) is not None
    assert first_cause([sign("communication", 1.0), sign("lost", 6.0, None)]) == sign(
        "lost", 6.0, None
    )


def test_a_deadline_loses_against_a_crash() -> None:
    assert first_cause([sign("deadline", 1.0, None), sign("crash", 2.0)]) == sign("crash", 2.0)


def test_communication_alone_is_the_cause() -> None:
    assert first_cause([sign("communication", 2.0), sign("communication", 1.0, 1)]) == sign(
        "communication", 1.0, 1
    )


def test_the_order_of_signs_does_not_matter() -> None:
    signs = [sign("crash", 1.0, 1), sign("crash", 1.0, 0), sign("killed", 1.0, 1, "b")]
    assert {first_cause(order) for order in permutations(signs)} == {sign("crash", 1.0, 0)}


def test_no_sign_has_no_cause() -> None:
    assert first_cause([]) is None


def test_a_failure_without_a_sign_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="at least one sign"):
        failure([], timeout_s=1.0, wall_s=1.0)


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("memory", OutOfMemory),
        ("lost", Unreachable),
        ("deadline", TimedOut),
        ("disk", Crashed),
        ("communication", Crashed),
    ],
)
def test_each_kind_has_its_outcome(kind: SignKind, outcome: type) -> None:
    assert isinstance(failure([sign(kind, 1.0)], timeout_s=5.0, wall_s=2.0), outcome)


def test_the_outcome_says_who_where_and_what() -> None:
    outcome = failure([sign("crash", 1.0, 3, "b")], timeout_s=5.0, wall_s=2.0)
    assert outcome.reason == "rank 3 on b: crash 3"


def test_lines_of_a_later_sign_of_the_same_rank_are_kept() -> None:
    event = sign("crash", 1.0, 3)
    end = Sign(kind="crash", host="a", rank=3, time_s=2.0, text="exit code 1", lines=("last",))
    outcome = failure([event, end], timeout_s=5.0, wall_s=2.0)
    assert isinstance(outcome, Crashed)
    assert (outcome.reason, outcome.lines) == ("rank 3 on a: crash 3", ("last",))
