"""A failing trial ends, and reports the first cause and its rank."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import REPOSITORY, Ended, gpt2, make_job

pytestmark = pytest.mark.integration

TWO_STAGES: dict[str, Any] = {"pp": 2, "bounds": [0, 3, 7], "micro_batch_size": 4}


def cause(ended: Ended) -> dict[str, Any]:
    """Return the only failure whose cause is not communication."""
    (first,) = [event for event in ended.failures() if event["cause"] != "communication"]
    return first


def test_error_is_reported_with_its_rank_and_last_lines(run_trial: Callable[..., Ended]) -> None:
    fault = {"rank": 1, "step": 3, "how": "raise"}
    ended = run_trial(make_job("gpt2", **TWO_STAGES), fault=fault)
    event = cause(ended)
    assert (event["rank"], event["cause"], event["type"]) == (1, "error", "RuntimeError")
    assert event["message"] == "injected failure"
    assert event["traceback"][-1] == "RuntimeError: injected failure"
    assert event["trial_id"] == "trial-1"
    assert ended.codes == [43, 1]
    assert not (ended.folder / "result.json").exists()


def test_out_of_memory_has_its_own_code(run_trial: Callable[..., Ended]) -> None:
    fault = {"rank": 0, "step": 2, "how": "out_of_memory"}
    ended = run_trial(make_job("gpt2", **TWO_STAGES), fault=fault)
    assert cause(ended)["cause"] == "out_of_memory"
    assert ended.codes == [42, 43]


def test_recompute_fits_where_the_plain_run_is_out_of_memory(
    run_trial: Callable[..., Ended],
) -> None:
    # 28 blocks of 8 samples, 1024 tokens and width 128 keep 60 MB each; an input is 4 MB.
    job = make_job("gpt2", bounds=[0, 31], steps=1, warmup_steps=0)
    job["model"] = gpt2(num_layers=28, hidden_size=128, sequence_length=1024, vocab_size=64)
    limited = {"rank": 0, "step": 0, "how": "limit_memory"}
    assert cause(run_trial(job, fault=limited))["cause"] == "out_of_memory"
    job["strategy"]["recompute"] = {"kind": "full", "layers": 27}
    assert run_trial(job, fault=limited).codes == [0]


def test_peers_of_a_killed_rank_report_communication(run_trial: Callable[..., Ended]) -> None:
    fault = {"rank": 1, "step": 2, "how": "kill"}
    ended = run_trial(make_job("gpt2", **TWO_STAGES), fault=fault)
    assert ended.codes == [43, -9]
    assert [event["cause"] for event in ended.failures()] == ["communication"]


@pytest.mark.parametrize("layout", [{"pp": 2, "bounds": [0, 3, 7]}, {"dp": 2}, {"tp": 2}])
def test_peers_of_a_hanging_rank_give_up(
    layout: dict[str, Any], run_trial: Callable[..., Ended]
) -> None:
    job = make_job("gpt2", micro_batch_size=4, communication_timeout_s=8, **layout)
    fault = {"rank": 1, "step": 2, "how": "hang"}
    ended = run_trial(job, fault=fault, grace_s=0.5)
    assert ended.codes == [43, -9]


def test_absent_rank_is_not_waited_for_forever(run_trial: Callable[..., Ended]) -> None:
    job = make_job("gpt2", dp=2, micro_batch_size=4, init_timeout_s=2)
    ended = run_trial(job, fault={"rank": 1, "step": 0, "how": "never_start"}, grace_s=0.5)
    assert ended.codes == [43, -9]


def test_taken_port_is_told_from_other_errors(run_trial: Callable[..., Ended]) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        ended = run_trial(make_job("gpt2"), port=holder.getsockname()[1])
    assert [event["cause"] for event in ended.failures()] == ["port_taken"]
    assert ended.codes == [44]


def test_wrong_number_of_processes_is_a_bad_job(run_trial: Callable[..., Ended]) -> None:
    ended = run_trial(make_job("gpt2"), num_ranks=2)
    assert ended.codes == [2, 2]
    assert "WORLD_SIZE is 2" in ended.failures()[0]["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": "fp16"}, "fp16 needs a GPU"),
        ({"device": "cuda"}, "finds no GPU"),
    ],
)
def test_what_this_machine_cannot_do_is_a_bad_job(
    change: dict[str, str], words: str, run_trial: Callable[..., Ended]
) -> None:
    ended = run_trial(make_job("gpt2", **change))
    assert ended.codes == [2]
    assert words in ended.failures()[0]["message"]


def run_program(
    arguments: list[str], folder: Path, **environment: str
) -> tuple[int, dict[str, Any]]:
    """Run a job of one rank in a separate process; return its exit code and last event."""
    job = folder / "job.json"
    job.write_text(json.dumps({**make_job("gpt2"), "out_dir": str(folder)}))
    done = subprocess.run(
        [sys.executable, *arguments, str(job)],
        env={"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_missing_launcher_is_a_bad_job(tmp_path: Path) -> None:
    code, event = run_program(["-m", "amp_ray.training"], tmp_path, RANK="0", WORLD_SIZE="1")
    assert (code, event["cause"]) == (2, "bad_job")
    assert "lacks LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in event["message"]


def test_python_without_torch_is_named(tmp_path: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; from amp_ray.training import main; "
    code, event = run_program(["-c", program + "sys.exit(main(sys.argv[1:]))"], tmp_path)
    assert (code, event["type"]) == (1, "ModuleNotFoundError")
    assert "torch" in event["message"]
