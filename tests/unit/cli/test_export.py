"""``amp-ray export`` to other programs, and what they run scored."""

import csv
import io
import json
from pathlib import Path

import pytest

from amp_ray.inputs.yaml_text import parse_yaml
from support.commands import Run
from support.nccl_log import nccl_log

LLAMA = (
    *("--set", "model.family=llama", "--set", "runtime=megatron-core"),
    *("--set", "precision=bf16", "--set", "cluster.nodes.0.device=A100-40"),
)


def test_a_script_goes_to_standard_output_or_a_file(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    shown = amp_ray("export", small, *LLAMA, "--to", "megatron-lm")
    assert shown.code == 0
    assert shown.out.startswith("#!/usr/bin/env bash\n# small: ")
    assert "data, tokenizer and learning rate are yours" in shown.err
    file = tmp_path / "run.sh"
    written = amp_ray("export", small, *LLAMA, "--to", "megatron-lm", "-o", file)
    assert file.read_text(encoding="utf-8") == shown.out.replace(" megatron.sh ", " run.sh ")
    assert written.out.startswith(f"{file}: small: tp ")


def test_what_runs_today_is_scored_beside_the_best(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.sh"
    options = ("--to", "megatron-lm", "--position", "3", "-o", file)
    assert amp_ray("export", small, *LLAMA, *options).code == 0
    ended = amp_ray("score", small, *LLAMA, "--strategies", file)
    assert "best by the same cost model: tp " in ended.out
    scores = amp_ray("score", small, *LLAMA, "--strategies", file, "--json").json
    ranking = amp_ray("plan", small, *LLAMA, "--json").json["ranking"]
    assert scores["rows"][0]["strategy"] == ranking[2]["strategy"]
    assert scores["best"] == ranking[0]
    file.write_text(file.read_text().replace('"$@"', "--tp-comm-overlap-cfg x"))
    scored = amp_ray("score", small, *LLAMA, "--strategies", file, "--json")
    note = f"not read: --tp-comm-overlap-cfg ({file}: not modelled)"
    assert scored.err.count(note) == 1
    assert scored.json["rows"][0]["warnings"][-1] == note
    assert note not in amp_ray("score", small, *LLAMA, "--strategies", file).out


def test_a_folder_of_one_file_is_a_folder(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    job = tmp_path / "job"
    assert amp_ray("export", small, *LLAMA, "--to", "slurm", "-o", job).code == 0
    assert [path.name for path in job.iterdir()] == ["job.sbatch"]
    ended = amp_ray("score", small, *LLAMA, "--strategies", job / "job.sbatch")
    assert ended.code == 0


def test_a_study_is_exported_by_what_it_recommends(
    amp_ray: Run, small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table, study = tmp_path / "table.csv", tmp_path / "study"
    rows = [f"{tp},1,{4 // tp},{size},{0.3 * tp + size / 50}" for tp in (1, 2) for size in (1, 2)]
    table.write_text("\n".join(["tp,pp,dp,micro_batch_size,measured_s", *rows]), encoding="utf-8")
    tuned = amp_ray(
        "tune", small, *LLAMA, "--trials", f"replay:{table}", "--study", study, "--json"
    )
    best = tuned.json["recommendation"]["strategy"]
    ended = amp_ray("export", study, *LLAMA, "--to", "megatron-lm")
    assert f"--tensor-model-parallel-size {best['tp']} " in ended.out
    assert f"--micro-batch-size {best['micro_batch_size']} " in ended.out
    written = amp_ray("export", study, *LLAMA, "--to", "csv").out
    (tmp_path / "trials.csv").write_text(written, encoding="utf-8")
    again = ("--trials", f"replay:{tmp_path / 'trials.csv'}", "--study", tmp_path / "again")
    replayed = amp_ray("tune", small, *LLAMA, *again, "--json").json
    assert replayed["recommendation"]["strategy"] == best
    trials = list(csv.DictReader(io.StringIO(written)))
    assert [row["outcome"] for row in trials] == ["measured"] * len(tuned.json["trials"])
    assert "COMPLETE" in amp_ray("export", study, *LLAMA, "--to", "optuna").out
    predicted = amp_ray("export", study, *LLAMA, "--to", "perfetto")
    assert {event["pid"] for event in predicted.json["traceEvents"]} == {1}
    assert "no trial of it left a timeline" in predicted.err
    number = next(trial["number"] for trial in tuned.json["trials"] if trial["strategy"] == best)
    folder = study / "trials" / f"{number:04d}-0"
    (folder / "hosts" / "b").mkdir(parents=True)
    (folder / "hosts" / "a").mkdir()
    (folder / "launch.json").write_text('{"commands": [{"host": "a"}]}', encoding="utf-8")
    (folder / "hosts/b/timeline.json").write_text('{"ranks": []}', encoding="utf-8")
    unusable = folder.with_name(f"{number:04d}-1")
    (unusable / "hosts" / "a").mkdir(parents=True)
    (unusable / "launch.json").write_text('{"commands": [{"host": "a"}]}', encoding="utf-8")
    (unusable / "hosts/a/timeline.json").write_text('{"ranks": 7}', encoding="utf-8")
    rank = {"rank": 0, "host": "a", "stage": 0, "instructions": [["0F0", 0.0, 0.25]]}
    (folder / "hosts/a/timeline.json").write_text(json.dumps({"ranks": [rank]}), encoding="utf-8")
    both = amp_ray("export", study, *LLAMA, "--to", "perfetto").json["traceEvents"]
    assert f"{unusable}/hosts/a/timeline.json is left out: timeline.json: ranks: found 7" in (
        caplog.text
    )
    assert [event["dur"] for event in both if event["ph"] == "X" and event["pid"] == 2] == [
        250000.0
    ]
    ends = [event["ts"] + event["dur"] for event in both if event["ph"] == "X"]
    assert max(ends) == pytest.approx(1e6 * tuned.json["recommendation"]["predicted_s"], rel=1e-6)


def test_a_hostfile_names_the_hosts_of_a_plan_and_of_a_study(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    hosts, table = tmp_path / "my hosts", tmp_path / "table.csv"
    hosts.write_text("gpu-7 slots=2\ngpu-3 slots=2\n", encoding="utf-8")
    table.write_text("tp,pp,dp,micro_batch_size,measured_s\n1,2,2,1,0.5\n", encoding="utf-8")
    study, plan = tmp_path / "study", tmp_path / "plan.json"
    amp_ray("plan", small, "--json", plan)
    amp_ray("tune", small, "--trials", f"replay:{table}", "--study", study)
    for name, source in (("a", [small, "--strategies", plan]), ("b", [study])):
        options = ("--to", "deepspeed", "--hostfile", hosts, "-o", tmp_path / name)
        assert amp_ray("export", *source, *options).code == 0
        text = (tmp_path / name / "hostfile").read_text(encoding="utf-8")
        assert text == "gpu-7 slots=2\ngpu-3 slots=2\n"
    ended = amp_ray("export", study, "--to", "megatron-lm", "--hostfile", hosts)
    assert "\nHOSTS=(gpu-7 gpu-3)\n" in ended.out
    first, named = tmp_path / "first", tmp_path / "named"
    first.write_text("me@rack-1:22 slots=2\nrack-2 slots=2\n", encoding="utf-8")
    replay = ("--trials", f"replay:{table}", "--hostfile", first)
    assert amp_ray("tune", small, *replay, "--study", named).code == 0
    for more, words in (((), "rack-1,rack-2"), (("--hostfile", hosts), "gpu-7,gpu-3")):
        job = tmp_path / words
        assert amp_ray("export", named, "--to", "slurm", "-o", job, *more).code == 0
        text = (job / "job.sbatch").read_text(encoding="utf-8")
        assert f"#SBATCH --nodelist={words}\n" in text


@pytest.mark.guest("metis2024")
def test_a_hostfile_names_the_hosts_of_an_experiment(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("gpu-7 slots=2\ngpu-3 slots=2\n", encoding="utf-8")
    options = ("--to", "metis", "--hostfile", hosts, "-o", tmp_path / "metis")
    assert amp_ray("export", small, *options).code == 0
    assert "gpu-7" in (tmp_path / "metis" / "hostfile").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "torchtitan"), "not model family 'gpt2'"),
        (("--to", "metis"), "name a folder by -o"),
        (("--to", "csv", "--hostfile", "hosts"), "tells no program its hosts"),
        (("--to", "deepspeed", "-o", "new", "--hostfile", "no-such"), "no-such: no such file"),
        (("--to", "csv", "--position", "1"), "leave --position and --strategies out"),
        (("--to", "megatron-lm", "--position", "9999"), "--position 9999: there are"),
    ],
)
def test_what_cannot_be_exported_says_so(
    amp_ray: Run, small: Path, options: tuple[str, ...], message: str
) -> None:
    ended = amp_ray("export", small, *options)
    assert ended.code == 2
    assert message in ended.err


def test_a_folder_that_is_no_study_says_so(amp_ray: Run, tmp_path: Path) -> None:
    ended = amp_ray("export", tmp_path, "--to", "csv")
    assert ended.code == 2
    assert "no study with a result" in ended.err


def test_logs_of_nccl_tests_become_keys_of_a_node(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    inside, outside = tmp_path / "inside.log", tmp_path / "outside.log"
    times = [(2**power, 16 + 2**power / 2e4) for power in range(10, 28)]
    inside.write_text(nccl_log("all_reduce", ["a"] * 2, times), encoding="utf-8")
    outside.write_text(nccl_log("all_gather", ["a", "b"], times), encoding="utf-8")
    ended = amp_ray("import", "nccl-tests", inside, outside)
    assert ended.code == 0
    keys = parse_yaml(ended.out, file="keys").values
    assert keys["intra_gbit_per_s"] == pytest.approx(200, rel=0.05)
    settings = [
        option
        for key, value in keys.items()
        for option in ("--set", f"cluster.nodes.0.{key}={value}")
    ]
    assert amp_ray("plan", small, *settings).code == 0
    file = tmp_path / "links.yaml"
    assert amp_ray("import", "nccl-tests", inside, outside, "-o", file).code == 0
    assert file.read_text(encoding="utf-8") == ended.out
    inside.write_text("no log", encoding="utf-8")
    refused = amp_ray("import", "nccl-tests", inside)
    assert (refused.code, refused.out) == (2, "")
    assert "inside.log: found lines '# Rank N" in refused.err
