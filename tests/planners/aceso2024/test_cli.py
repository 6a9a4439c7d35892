"""Aceso's profiles and plan files, as a user meets them."""

import json
from pathlib import Path

import pytest

from support.aceso import EXPERIMENT, aceso_files
from support.commands import Run


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """An experiment file beside its profile."""
    folder = tmp_path / "p"
    folder.mkdir()
    for name, text in aceso_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    path = tmp_path / "tiny.yaml"
    path.write_text(EXPERIMENT, encoding="utf-8")
    return path


def test_a_plan_of_operators_tells_what_its_memory_is_made_of(
    amp_ray: Run, experiment: Path
) -> None:
    options = ("--set", "search.space=operator", "--set", "recompute=auto")
    rows = amp_ray("plan", experiment, *options, "--json").json["ranking"]
    feasible = [row for row in rows if row["feasible"]]
    assert feasible
    for row in feasible:
        for parts, peak in zip(row["memory_bytes"], row["peak_memory_bytes"], strict=True):
            assert min(parts.values()) >= 0
            assert sum(parts.values()) == pytest.approx(peak, abs=len(parts))
    assert amp_ray("explain", experiment, *options).code == 0
    page = experiment.with_suffix(".html")
    assert amp_ray("report", experiment, *options, "-o", page).code == 0


def test_what_does_not_fit_the_memory_or_the_nodes_says_so(
    amp_ray: Run, experiment: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.csv"
    plan.write_text("tp,pp,dp,micro_batch_size,bounds\n1,1,4,1,0 5\n", encoding="utf-8")
    small = EXPERIMENT.replace("slots: 2,", "slots: 2, memory_gib: 0.1,")
    experiment.write_text(small, encoding="utf-8")
    options = ("--strategies", plan, "--cost-model", "aceso-2024", "--json")
    [row] = amp_ray("score", experiment, *options).json["rows"]
    assert not row["feasible"]
    assert "stage 0 lies on two nodes" in row["reason"]
    assert "out of memory: stage 0 needs" in row["reason"]


def test_what_was_not_measured_is_told(amp_ray: Run, experiment: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.csv"
    plan.write_text("tp,pp,dp,micro_batch_size,bounds\n1,4,1,8,0 1 2 3 5\n", encoding="utf-8")
    options = ("--strategies", plan, "--cost-model", "aceso-2024", "--json")
    [row] = amp_ray("score", experiment, *options).json["rows"]
    assert row["reason"] == "not in the profile: stage 0: micro-batch 8 / dp 1, tp 1, algorithm 0"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("path: p, model: gpt_tiny", "path: p", "source 'aceso' needs 'model'"),
        ("path: p, model: gpt_tiny", "path: p, model: gpt_9B", "it has gpt_tiny"),
        ("path: p, model: gpt_tiny", "path: q, model: gpt_tiny", "no such folder"),
        ("source: aceso, path: p, ", "", "only source 'aceso' has models by name"),
    ],
)
def test_a_profile_that_is_not_there(
    amp_ray: Run, experiment: Path, old: str, new: str, message: str
) -> None:
    experiment.write_text(EXPERIMENT.replace(old, new), encoding="utf-8")
    ended = amp_ray("plan", experiment)
    assert ended.code == 2
    assert message in ended.err


def test_what_is_no_plan_of_aceso_is_refused(
    amp_ray: Run, experiment: Path, small: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    assert amp_ray("export", small, "--to", "aceso", "-o", plan).code == 2
    for position in ("99", "0"):
        options = ("--to", "aceso", "--position", position, "-o", plan)
        assert amp_ray("export", experiment, *options).code == 2
    assert not plan.exists()
    ended = amp_ray("export", experiment, "--to", "aceso", "-o", plan)
    assert "plan with search.idle_devices=false" in ended.err
    whole = ("--set", "search.idle_devices=false")
    assert amp_ray("export", experiment, *whole, "--to", "aceso", "-o", plan).code == 0
    ended = amp_ray("score", small, "--strategies", plan)
    assert "profile knows operators" in ended.err


def test_what_the_published_planner_cannot_plan(amp_ray: Run, experiment: Path) -> None:
    model = ("--cost-model", "aceso-2024")
    odd = EXPERIMENT + "search: {micro_batch_sizes: [3, 16]}\n"
    experiment.write_text(odd, encoding="utf-8")
    ended = amp_ray("plan", experiment, *model)
    assert ended.code == 2
    assert "a measured size (1, 2, 4) that divides global_batch_size 16" in ended.err
    tight = EXPERIMENT.replace("slots: 2,", "slots: 2, memory_gib: 0.1,")
    experiment.write_text(tight, encoding="utf-8")
    ended = amp_ray("plan", experiment, *model)
    assert ended.code == 3
    assert "3 out of memory" in ended.err
    experiment.write_text(EXPERIMENT + "zero_stage: 1\n", encoding="utf-8")
    ended = amp_ray("plan", experiment, *model)
    assert ended.code == 2
    assert "needs zero_stage: 0" in ended.err


def test_the_space_of_operators_is_planned_by_both_cost_models(
    amp_ray: Run, experiment: Path, tmp_path: Path
) -> None:
    text = f"{EXPERIMENT}search: {{space: operator}}\nrecompute: auto\n"
    experiment.write_text(text, encoding="utf-8")
    assert amp_ray("plan", experiment, "--cost-model", "aceso-2024").code == 0
    planned = amp_ray("plan", experiment, "--json").json
    best = planned["ranking"][0]
    assert planned["lower_bound_s"] == pytest.approx(best["iteration_time_s"])
    assert not best["launchable"]
    assert best["breakdown_s"]["gradient_sync"] + best["breakdown_s"]["optimizer"] > 0

    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([best["strategy"]]), encoding="utf-8")
    [row] = amp_ray("score", experiment, "--strategies", rows, "--json").json["rows"]
    assert row["iteration_time_s"] == best["iteration_time_s"]
    plan = tmp_path / "plan.json"
    assert amp_ray("export", experiment, "--to", "aceso", "-o", plan).code == 0
    options = ("--strategies", plan, "--json")
    assert amp_ray("score", experiment, *options).json["rows"][0]["strategy"] == best["strategy"]
    assert "cut between operators" in amp_ray("plan", experiment).out
    ended = amp_ray("plan", experiment, "--launchable")
    assert ended.code == 2
    assert "no runtime launches stages cut between operators" in ended.err
    ended = amp_ray("plan", experiment, "--objective", "cost")
    assert "not for stages cut between operators" in ended.err


@pytest.mark.parametrize(
    ("nodes", "more", "message"),
    [
        ("count: 1, device: T4, slots: 3", "", "stage 0 has 3 devices; it knows 1, 2, 4 and 8"),
        ("count: 2, device: T4, slots: 2", "", "stage 0 lies on two nodes"),
        ("count: 1, device: T4, slots: 2", "zero_stage: 1\n", "ZeRO is not in its plans"),
    ],
)
def test_what_aceso_cannot_run_is_exported_with_a_note(
    amp_ray: Run, experiment: Path, tmp_path: Path, nodes: str, more: str, message: str
) -> None:
    text = EXPERIMENT.replace("count: 2, device: T4, slots: 2", nodes)
    text = text.replace("batch_size: 16", "batch_size: 12") + more
    text += "search: {space: operator, max_pp: 1, per_operator: true}\n"
    experiment.write_text(text, encoding="utf-8")
    plan = tmp_path / "plan.json"
    ended = amp_ray("export", experiment, "--to", "aceso", "-o", plan)
    assert ended.code == 0
    assert f"Aceso cannot run this plan: {message}" in ended.err
    [row] = amp_ray("score", experiment, "--strategies", plan, "--json").json["rows"]
    best = amp_ray("plan", experiment, "--json").json["ranking"][0]
    assert row["iteration_time_s"] == pytest.approx(best["iteration_time_s"], rel=1e-9)
