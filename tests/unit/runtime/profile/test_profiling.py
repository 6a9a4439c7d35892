"""Measuring with hosts whose agents follow a script."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.files import ExperimentFiles
from amp_ray.runtime.profile.parts import profile_parts
from amp_ray.runtime.profile.profiling import PartReport, ProfileFolder, Settings, measure
from support.experiments import small_experiment
from support.scripted_host import Message, ScriptedHost, file_messages, well_behaved

EXPERIMENT = small_experiment()
TIMES: dict[str, Any] = {
    **dict.fromkeys(("forward_s", "backward_s", "forward_launch_s", "backward_launch_s"), 1e-3),
    **dict.fromkeys(("all_reduce_s", "spread_s"), 1e-4),
    **dict.fromkeys(("repeats", "kept_bytes", "temporary_bytes"), 8),
}
STEP: dict[str, Any] = {
    "host_s_per_micro_batch": 1e-4,
    "host_s_per_iteration": 5e-3,
    "memory_bytes_per_s": 1e10,
}
HARDWARE = {"event": "hardware", "hardware": "a board", "versions": "torch"}


def said(**event: Any) -> Message:  # noqa: ANN401 - JSON
    return {"kind": "said", "rank": 0, "data": event}


class Measuring:
    """What the program would say on a host.

    Args:
        limit: Micro-batch size for which the kernel ends a rank.
        cut: After so many layers the time is up.
    """

    def __init__(self, *, limit: int = 99, cut: int = 999) -> None:
        """Have not been asked yet."""
        self.limit, self.cut = limit, cut
        self.jobs: list[dict[str, Any]] = []

    def __call__(self, message: Message) -> Iterable[Message | bytes]:
        if message.get("kind") != "job" or message["ranks"][0]["rank"] != 0:
            yield from well_behaved(message)
            return
        job = json.loads(message["files"]["job.json"])
        self.jobs.append(job)
        yield said(**HARDWARE)
        for link in job["links"]:
            num_bytes = link.pop("num_bytes")
            yield said(event="link", **link, bytes=num_bytes, seconds=1e-3)
        if job["step"]:
            yield said(event="step", **STEP)
        for point in job["points"][: self.cut]:
            yield said(event="begin", **point)
            if point["micro_batch_size"] >= self.limit:
                yield from self.killed(message)
                return
            yield said(event="slice" if point["tokens"] else "layer", **point, **TIMES)
        result = {"trial_id": job["trial"]["trial_id"], "complete": True, "elapsed_s": 1.0}
        yield from file_messages("result.json", json.dumps(result).encode())
        yield from well_behaved(message)

    def killed(self, message: Message) -> Iterable[Message]:
        for rank in message["ranks"]:
            end: Message = {"code": None, "signal": 9, "ended": False, "tail": []}
            yield {"kind": "exit", "rank": rank["rank"], **end}
        done = {"reason": "failed", "clean": True, "left": [], "num_oom_kills": 1}
        yield {"kind": "done", **done}


def run(
    path: Path, script: Measuring, *, token_slices: bool = False, **hosts: str
) -> tuple[PartReport, ...]:
    settings = Settings(
        seconds=60.0,
        make_host=lambda name: ScriptedHost(name, script, refuses=hosts.get(name)),
        say=lambda _line: None,
    )
    folder = ProfileFolder(path, EXPERIMENT.model, EXPERIMENT.precision)
    parts = profile_parts(EXPERIMENT, is_local=False, token_slices=token_slices)
    reports = measure(EXPERIMENT, parts, folder, settings)
    folder.write()
    return reports


def test_everything_is_measured_and_can_be_planned_with(tmp_path: Path) -> None:
    reports = run(tmp_path, Measuring())
    assert [(report.num_missing, report.problem) for report in reports] == [(0, None)] * 2
    assert (tmp_path / "T4.csv").exists()
    assert (tmp_path / "profile.yaml").exists()


def test_a_second_run_starts_nothing(tmp_path: Path) -> None:
    run(tmp_path, Measuring())
    again = Measuring()
    assert all(report.num_missing == 0 for report in run(tmp_path, again))
    assert again.jobs == []


def test_a_second_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    first, second = Measuring(cut=7), Measuring()
    reports = run(tmp_path, first)
    assert reports[0].num_missing == 40 - 7
    assert reports[0].missing[0] == "3 layers at tp 2 micro-batch size 1"
    run(tmp_path, second)
    assert [len(job["points"]) for job in second.jobs] == [40 - 7]
    assert second.jobs[0]["links"] == []
    assert (first.jobs[0]["step"], second.jobs[0]["step"]) == (True, False)


def test_an_unfinished_profile_is_no_profile_and_says_how_to_go_on(tmp_path: Path) -> None:
    report, _ = run(tmp_path, Measuring(cut=2))
    assert report.missing[:2] == (
        "3 layers at tp 1 micro-batch size 1",
        "5 layers at tp 2 micro-batch size 1",
    )
    with pytest.raises(InputError, match=f"unfinished profile.*run amp-ray profile .* {tmp_path}"):
        ExperimentFiles(base=tmp_path).folder(str(tmp_path))
    run(tmp_path, Measuring())
    assert sorted(ExperimentFiles(base=tmp_path).folder(".")) == ["T4.csv", "profile.yaml"]


def test_sizes_for_which_a_rank_is_ended_are_given_up_and_the_others_measured(
    tmp_path: Path,
) -> None:
    script = Measuring(limit=4)
    report, _ = run(tmp_path, script)
    assert report.too_large == {1: 4, 2: 4}
    assert (report.num_missing, report.problem) == (0, None)
    assert {(p["tp"], p["micro_batch_size"]) for p in script.jobs[1]["points"]} == {(2, 4), (2, 8)}


def test_a_host_that_cannot_be_reached_is_told_and_keeps_what_there_is(tmp_path: Path) -> None:
    run(tmp_path, Measuring(cut=10))
    report, _ = run(tmp_path, Measuring(), node0="node0 is away")
    assert report.problem == "node0 is away"
    assert report.num_missing == 30
    assert (tmp_path / "T4.csv").exists()


def test_an_older_profile_is_completed_by_what_surrounds_the_layers(tmp_path: Path) -> None:
    run(tmp_path, Measuring())
    records = tmp_path / "details/records.jsonl"
    lines = records.read_text(encoding="utf-8").splitlines(keepends=True)
    records.write_text("".join(line for line in lines if '"step"' not in line), encoding="utf-8")
    again = Measuring()
    assert all(report.num_missing == 0 for report in run(tmp_path, again))
    (job,) = again.jobs
    assert (job["points"], job["links"], job["step"]) == ([], [], True)


def test_slices_are_measured_on_demand_and_only_once(tmp_path: Path) -> None:
    script = Measuring(cut=45)
    report, _ = run(tmp_path, script, token_slices=True)
    sizes = [point["tokens"] for point in script.jobs[0]["points"]]
    # Whole sequences of any micro-batch size come first, so that there is a profile soon.
    assert sizes == sorted(sizes, key=bool)
    assert "slices at tp 1 micro-batch size 1" in report.missing[0]
    again = Measuring()
    report, _ = run(tmp_path, again, token_slices=True)
    assert (report.num_missing, report.problem) == (0, None)
    assert len(again.jobs[0]["points"]) == len(sizes) - 45
    run(tmp_path, third := Measuring())
    assert third.jobs == []


def test_a_slice_for_which_a_rank_is_ended_is_given_up_alone(tmp_path: Path) -> None:
    script = Measuring(limit=8)
    report, _ = run(tmp_path, script, token_slices=True)
    assert (report.num_missing, report.problem) == (0, None)
    lines = (tmp_path / "details/records.jsonl").read_text(encoding="utf-8").splitlines()
    ended = [record for record in map(json.loads, lines) if record["record"] == "oom"]
    # At each tp whole sequences, and the shortest slice, than which no other is smaller.
    assert [(record["tp"], record["tokens"]) for record in ended] == [
        (1, 0),
        (2, 0),
        (1, 4),
        (2, 4),
    ]
