from itertools import permutations
from typing import Any

import pytest

from amp_ray.trials.causes import (
    Sign,
    SignKind,
    failure,
    first_cause,
    kind_of_text,
    last_error,
    sign_of_deadline,
    sign_of_event,
    sign_of_exit,
    sign_of_trouble,
)
from amp_ray.trials.outcome import Crashed, OutOfMemory, TimedOut, Unreachable, blames_host
from support.checked import required


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


FULL = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("text", "lines"), [(FULL, ()), ("RuntimeError: file write failed", (FULL, "and so"))]
)
def test_a_full_disk_is_named_by_host_and_folder(text: str, lines: tuple[str, ...]) -> None:
    full = Sign(kind="disk", host="b", rank=3, time_s=1.0, text=text, lines=lines)
    outcome = failure(
        [full], timeout_s=5.0, wall_s=2.0, folders={"a": "/scratch/one", "b": "/scratch/\x1bcase"}
    )
    assert outcome.reason == (
        f"rank 3 on b: {text}; make room on the disk of b that this trial used "
        "(/scratch/\\x1bcase there)"
    )
    assert blames_host(outcome)


def test_a_folder_that_cannot_be_made_needs_no_room() -> None:
    shut = Sign(kind="disk", host="b", rank=None, time_s=1.0, text="/scratch: Permission denied")
    outcome = failure([shut], timeout_s=5.0, wall_s=2.0, folders={})
    assert outcome.reason == "b: /scratch: Permission denied"
    assert blames_host(outcome)


def test_a_crash_blames_no_host() -> None:
    assert not blames_host(failure([sign("crash", 1.0)], timeout_s=5.0, wall_s=2.0))
    assert not blames_host(None)


def test_lines_of_a_later_sign_of_the_same_rank_are_kept() -> None:
    event = sign("crash", 1.0, 3)
    end = Sign(kind="crash", host="a", rank=3, time_s=2.0, text="exit code 1", lines=("last",))
    outcome = failure([event, end], timeout_s=5.0, wall_s=2.0)
    assert isinstance(outcome, Crashed)
    assert (outcome.reason, outcome.lines) == ("rank 3 on a: crash 3", ("last",))


def exit_message(**more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {"rank": 2, "code": None, "signal": None, "ended": False, "tail": [], **more}


@pytest.mark.parametrize(
    ("message", "num_oom_kills", "kind"),
    [
        (exit_message(code=1), 0, "crash"),
        (exit_message(code=42), 0, "memory"),
        (exit_message(code=43), 0, "communication"),
        (exit_message(code=44), 0, "port"),
        (exit_message(signal=9), 0, "killed"),
        (exit_message(signal=9), 1, "memory"),
        (exit_message(signal=11), 1, "killed"),
        (exit_message(code=247), 0, "killed"),
        (exit_message(code=137), 1, "memory"),
        (exit_message(signal=6, tail=["terminate called: std::bad_alloc"]), 0, "memory"),
        (exit_message(code=1, tail=["MemoryError"]), 0, "memory"),
    ],
)
def test_an_end_tells_its_kind(message: dict[str, Any], num_oom_kills: int, kind: SignKind) -> None:
    sign = required(sign_of_exit("a", message, 1.5, num_oom_kills=num_oom_kills))
    assert (sign.kind, sign.rank, sign.host, sign.time_s) == (kind, 2, "a", 1.5)


@pytest.mark.parametrize(
    "message", [exit_message(code=0), exit_message(signal=15, ended=True), exit_message(ended=True)]
)
def test_an_end_that_is_no_failure_is_no_sign(message: dict[str, Any]) -> None:
    assert sign_of_exit("a", message, 1.5, num_oom_kills=1) is None


def test_only_the_last_lines_are_kept() -> None:
    message = exit_message(code=1, tail=[str(number) for number in range(40)])
    sign = required(sign_of_exit("a", message, 1.5, num_oom_kills=0))
    assert sign.lines == tuple(str(number) for number in range(20, 40))


def test_a_reported_failure_tells_cause_and_traceback() -> None:
    data = {"event": "failed", "cause": "out_of_memory", "type": "X", "message": "y"}
    message = {"rank": 1, "data": {**data, "traceback": ["a", "b"]}}
    sign = required(sign_of_event("a", message, 1.0))
    assert (sign.kind, sign.text, sign.lines) == ("memory", "X: y", ("a", "b"))


def test_a_reported_failure_may_be_a_full_disk() -> None:
    data = {"event": "failed", "cause": "error", "type": "OSError"}
    message = {"rank": 1, "data": {**data, "message": "[Errno 28] No space left on device"}}
    sign = required(sign_of_event("a", message, 1.0))
    assert sign.kind == "disk"


def test_an_event_that_reports_no_failure_is_no_sign() -> None:
    assert sign_of_event("a", {"rank": 1, "data": {"event": "step"}}, 1.0) is None


def test_a_reported_failure_with_odd_values_is_a_crash() -> None:
    data = {"event": "failed", "cause": ["x"], "traceback": "text"}
    sign = required(sign_of_event("a", {"rank": 1, "data": data}, 1.0))
    assert (sign.kind, sign.lines) == ("crash", ())


def test_trouble_is_sorted_by_what_mends_it() -> None:
    message = {"rank": None, "what": "disk-full", "text": "no space"}
    assert sign_of_trouble("a", message, 1.0).kind == "disk"


def test_a_deadline_names_who_was_still_running() -> None:
    ended = [
        ("a", exit_message(ended=True, tail=["x"])),
        ("b", exit_message(rank=3, ended=True, state="S")),
    ]
    sign = sign_of_deadline("a", ended, 5.0, timeout_s=5.0)
    assert sign.text == "still running after 5 s: rank 2 on a, rank 3 on b"
    assert (sign.host, sign.lines) == ("a", ("x",))


def test_a_deadline_tells_who_was_stopped_and_what_that_rank_said() -> None:
    ended = [
        ("a", exit_message(ended=True, state="S", tail=["waiting"])),
        ("b", exit_message(rank=3, ended=True, state="T", tail=["working"])),
    ]
    sign = sign_of_deadline("a", ended, 5.0, timeout_s=5.0)
    assert sign.text.endswith("rank 2 on a, rank 3 on b (stopped by a signal)")
    assert sign.lines == ("working",)


def test_a_failure_is_that_of_the_rank_that_reports_it() -> None:
    data = {"event": "failed", "rank": 3, "type": "X", "message": "y"}
    sign = required(sign_of_event("a", {"rank": 2, "data": data}, 1.0))
    assert sign.rank == 3


def test_an_interpreter_that_cannot_train_is_answered_with_what_to_do() -> None:
    text = "No module named 'torch'"
    data = {"event": "failed", "type": "ModuleNotFoundError", "message": text}
    said = sign_of_event("a", {"rank": 0, "data": data}, 1.0)
    ended = sign_of_exit("a", exit_message(code=1, tail=[text]), 1.0, num_oom_kills=0)
    for sign in (said, ended):
        assert sign is not None
        assert "trials.python" in sign.text


def test_a_missing_module_of_the_users_is_left_to_the_user() -> None:
    message = exit_message(code=1, tail=["No module named 'torchvision'"])
    sign = required(sign_of_exit("a", message, 1.0, num_oom_kills=0))
    assert "trials.python" not in sign.text
