import json
import os
from pathlib import Path

import pytest

from amp_ray.training.events import MAX_EVENT_BYTES, EventChannel, cause_of, summarise, write_result
from support.programs import python

DistNetworkError = type("DistNetworkError", (RuntimeError,), {})
"""Named as torch names its own."""


def sent(capfd: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_events_name_trial_rank_and_time(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    with EventChannel() as channel:
        channel.trial_id = "t"
        channel.send("step", loss=0.5)
    (event,) = sent(capfd)
    assert (event["event"], event["trial_id"], event["rank"], event["loss"]) == (
        "step",
        "t",
        3,
        0.5,
    )
    assert {"host", "pid", "time_s"} < set(event)


def test_events_carry_the_tag_by_which_an_agent_knows_them(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMP_RAY_TAG", "amp-ray-1234")
    with EventChannel() as channel:
        channel.send("started")
    (event,) = sent(capfd)
    assert event["tag"] == "amp-ray-1234"


def test_other_output_goes_to_stderr_while_the_channel_is_open(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with EventChannel() as channel:
        os.write(1, b"noise\n")
        channel.send("started")
    os.write(1, b"after\n")
    out, err = capfd.readouterr()
    assert [line[:1] for line in out.splitlines()] == ["{", "a"]
    assert err == "noise\n"


def test_failure_names_type_message_and_last_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with EventChannel() as channel:
        try:
            int("x")
        except ValueError as error:
            channel.failed(error, "error")
    (event,) = sent(capfd)
    assert (event["cause"], event["type"]) == ("error", "ValueError")
    assert "invalid literal" in str(event["message"])
    assert 'int("x")' in str(event["traceback"])


def test_long_events_stay_atomic_and_name_what_they_lost(capfd: pytest.CaptureFixture[str]) -> None:
    with EventChannel() as channel:
        channel.send("failed", cause="error", message="\u00e9" * MAX_EVENT_BYTES)
    out, _ = capfd.readouterr()
    assert len(out.encode()) <= MAX_EVENT_BYTES
    event = json.loads(out)
    assert (event["cause"], event["dropped"]) == ("error", ["message"])


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), "out_of_memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (RuntimeError("NCCL error: Call to cuMemCreate failed: out of memory"), "out_of_memory"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:3412"), "communication"),
        (RuntimeError("[gloo] Timed out waiting 2000ms for recv operation"), "communication"),
        (ConnectionResetError("reset"), "communication"),
        (DistNetworkError("could not reach the server"), "communication"),
        (DistNetworkError("bind failed: EADDRINUSE, address already in use"), "port_taken"),
        (RuntimeError("shape '[2, 3]' is invalid"), "error"),
        (ValueError("timeout must be positive"), "error"),
        (ModuleNotFoundError("No module named 'torch'"), "error"),
        (KeyboardInterrupt(), "error"),
    ],
)
def test_causes_are_told_apart(error: BaseException, cause: str) -> None:
    assert cause_of(error) == cause


def test_result_appears_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "trial 1"
    write_result(str(folder), {"trial_id": "1"})
    assert [path.name for path in folder.iterdir()] == ["result.json"]
    assert json.loads((folder / "result.json").read_text()) == {"trial_id": "1"}


def test_result_that_cannot_be_written_leaves_none(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_result(str(tmp_path), {"trial_id": object()})
    assert not (tmp_path / "result.json").exists()


def test_what_waits_in_a_buffer_goes_where_other_output_went(tmp_path: Path) -> None:
    program = (
        "from amp_ray.training.events import EventChannel\n"
        "with EventChannel() as channel:\n"
        "    print('a library')\n"
        "    channel.send('started')\n"
    )
    buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = python("-c", program, env=buffered, cwd=tmp_path)
    assert [json.loads(line)["event"] for line in ended.stdout.splitlines()] == ["started"]
    assert ended.stderr == "a library\n"


def rank(stage: int, step_s: list[float], **spans_s: float) -> dict[str, object]:
    return {
        "stage": stage,
        "step_s": step_s,
        "losses": [3.0, 2.0, 1.0],
        "spans_s": spans_s,
        "peak_memory_bytes": 100 + stage,
    }


RANKS = [
    rank(0, [9.0, 2.0, 4.0], forward=0.5, send=0.1),
    rank(0, [9.5, 1.0, 5.0], forward=0.75),
    rank(1, [9.0, 3.0, 3.0], forward=0.25, receive=0.5),
]

STAGES = [[(0, 4)], [(4, 7)]]


def test_step_takes_as_long_as_its_slowest_rank() -> None:
    assert summarise("t", 1, STAGES, RANKS)["step_s"] == [9.5, 3.0, 5.0]


def test_iteration_time_is_the_mean_after_warm_up() -> None:
    assert summarise("t", 1, STAGES, RANKS)["iteration_time_s"] == 4.0


def test_stage_takes_the_longest_of_its_ranks() -> None:
    first, last = summarise("t", 1, STAGES, RANKS)["stages"]
    assert (first["layers"], first["forward_s"], first["send_s"]) == ([0, 4], 0.75, 0.1)
    assert (last["layers"], last["receive_s"], last["backward_s"]) == ([4, 7], 0.5, 0.0)
    assert last["peak_memory_bytes"] == 101


def test_all_ranks_are_kept() -> None:
    result = summarise("t", 1, STAGES, RANKS)
    assert (result["trial_id"], result["schema"], result["ranks"]) == ("t", 1, RANKS)


def test_chunks_of_an_interleaved_stage_are_named() -> None:
    first, last = summarise("t", 1, [[(0, 2), (3, 4)], [(2, 3), (4, 7)]], RANKS)["stages"]
    assert (first["chunks"], last["chunks"]) == ([[0, 2], [3, 4]], [[2, 3], [4, 7]])
