"""Every export of an experiment with hostile names and values, run as what it is written in."""

import csv
import io
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from amp_ray.cli.exchange import export
from support.aceso import EXPERIMENT as ACESO
from support.aceso import aceso_files
from support.checked import check_ended
from support.commands import Run
from support.experiments import SMALL

TARGETS: list[str] = next(
    list(vars(option.type)["choices"]) for option in export.params if option.name == "target"
)

NAMES = (
    "\"; touch owned; $(touch owned) `touch owned` '; touch owned #",
    "coding: utf-7 +AAo-open('owned','w')",
    "{evil: !!python|name:os.system ['touch owned']}: - & * | > % @ ' \"\"\"",
    "=cmd|' -c calc'!A1, \"b\" ,",
)
"""Of an experiment: for shells, Python's first line, YAML, spreadsheets."""

VARIABLES = {
    "PLAIN": "\"; touch owned; $(touch owned) `touch owned` '$IFS",
    "LINES": "a\n#SBATCH --wrap=touch\ntouch owned\n",
    "_x9": '\\" \\n {} %s \t',
}
SECRETS = {
    "HF_TOKEN": "planted-token",
    "OTHER": "hf_plantedPlanted99",
    "PROXY": "http://me:planted-word@host:1/",
}

LLAMA = (
    *("--set", "model.family=llama", "--set", "runtime=megatron-core"),
    *("--set", "precision=bf16", "--set", "cluster.nodes.0.device=A100-40"),
)
DATA_PARALLEL = "tp,pp,dp,micro_batch_size\n1,1,4,1\n"

CASES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("csv", "deepspeed", "metis", "optuna", "perfetto", "ray-train", "slurm"), ()),
    **dict.fromkeys(("megatron-bridge", "megatron-lm"), LLAMA),
    **dict.fromkeys(
        ("accelerate", "nanotron", "torchtitan"),
        (*LLAMA, "--set", "zero_stage=0", "--strategies", "mine.csv"),
    ),
    "aceso": ("aceso",),
}
"""Options of each target; a new one needs a line here."""

STUB = """#!/bin/bash
{{ printf '%s\\0' "${{0##*/}}" "$@"; printf '%s\\0' "PLAIN=$PLAIN" "LINES=$LINES"; }} >> '{calls}'
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment file and a profile; `owned` in it means that code has run."""
    (tmp_path / "p").mkdir()
    for name, text in aceso_files().items():
        (tmp_path / "p" / name).write_text(text, encoding="utf-8")
    (tmp_path / "mine.csv").write_text(DATA_PARALLEL, encoding="utf-8")
    (tmp_path / "hosts").write_text("me@gpu-1:2222 slots=2\ngpu_2.x slots=2\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(amp_ray: Run, here: Path, target: str, name: str, *more: str) -> tuple[Path, str]:
    """Export, and return the file or folder, and what was said."""
    text = ACESO if target == "aceso" else SMALL
    variables = json.dumps({**VARIABLES, **SECRETS})
    text = text.replace("name: small", f"name: {json.dumps(name)}").replace(
        "name: tiny", f"name: {json.dumps(name)}"
    )
    (here / "evil.yaml").write_text(f"{text}trials: {{environment: {variables}}}\n", "utf-8")
    options = [option for option in CASES[target] if option != "aceso"]
    output = here / "out $(touch owned) 'it'"
    more = (*more, "--set", "search.idle_devices=false")
    ended = amp_ray("export", "evil.yaml", *options, *more, "--to", target, "-o", output)
    assert ended.code == 0, ended.err
    return output, ended.out + ended.err


def bash(script: Path, here: Path, **variables: str) -> list[str]:
    """Run a script with stubs; return the words and variables that they were started with."""
    stubs, calls = here / "stubs", here / "calls"
    stubs.mkdir(exist_ok=True)
    for program in ("deepspeed", "torchrun", "python", "python3", "srun", "scontrol"):
        (stubs / program).write_text(STUB.format(calls=calls), encoding="utf-8")
        (stubs / program).chmod(0o755)
    path = {"PATH": f"{stubs}:/usr/bin:/bin", "RECIPE": "recipe.py", "MEGATRON_LM": "$(x) y"}
    for words in (["/bin/bash", "-n", str(script)], ["/bin/bash", str(script)]):
        subprocess.run(
            words,
            cwd=here,
            env={**path, **variables},
            check=True,
            timeout=60,
            capture_output=True,
        )
    return calls.read_text(encoding="utf-8").split("\0")


def run_shell(path: Path, here: Path) -> None:
    words = bash(path, here, MASTER_ADDR="127.0.0.1", SLURM_JOB_NODELIST="a")
    assert words[0] in {"deepspeed", "torchrun", "python", "srun", "scontrol"}
    if path.name in {"launch.sh", "job.sbatch"}:
        assert f"PLAIN={VARIABLES['PLAIN']}" in words
        assert f"LINES={VARIABLES['LINES']}" in words
    head = path.read_text(encoding="utf-8").partition("\nexport")[0]
    assert "#SBATCH --wrap" not in head


def run_python(path: Path, _here: Path) -> None:
    assert path.read_bytes().isascii() or path.read_text(encoding="utf-8")
    stubs = (
        *("optuna", "ray", "ray.train", "ray.train.torch", "torchtitan", "torchtitan.models"),
        *("torchtitan.distributed", "torchtitan.distributed.activation_checkpoint"),
        "torchtitan.models.llama3",
    )
    with pytest.MonkeyPatch.context() as patch:
        for stub in stubs:
            patch.setitem(sys.modules, stub, MagicMock())
        values = runpy.run_path(str(path))
    if "ENVIRONMENT" in values:
        assert VARIABLES.items() <= values["ENVIRONMENT"].items()


def run_yaml(path: Path, _here: Path) -> None:
    record = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert record.get("general", {}).get("run", "") in {"", *NAMES}


def run_json(path: Path, _here: Path) -> None:
    json.loads(path.read_text(encoding="utf-8"))


def run_table(path: Path, _here: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
    assert all(None not in row and row["tp"].isdigit() for row in rows)


def run_hosts(path: Path, _here: Path) -> None:
    assert not set(path.read_text(encoding="utf-8")) & set("$`;'\"&|<>()")


CHECKS: Mapping[str, Callable[[Path, Path], None]] = {
    **dict.fromkeys((".sh", ".sbatch", "megatron-bridge", "megatron-lm"), run_shell),
    **dict.fromkeys((".py", "ray-train", "torchtitan", "optuna"), run_python),
    **dict.fromkeys(("accelerate", "nanotron"), run_yaml),
    **dict.fromkeys((".json", "aceso", "perfetto"), run_json),
    "csv": run_table,
    **dict.fromkeys(("hostfile", "hosts"), run_hosts),
}
"""By the target of a single file, else by the name or ending of a file in a folder."""


def marked(targets: Iterable[str]) -> list[Any]:
    """Return parameters; a target that a guest writes needs that guest."""
    guests = {"metis": "metis2024", "aceso": "aceso2024"}
    return [
        pytest.param(target, marks=[pytest.mark.guest(guests[target])] if target in guests else [])
        for target in targets
    ]


def test_every_target_has_a_case() -> None:
    assert set(CASES) == set(TARGETS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", marked(TARGETS))
def test_nothing_of_an_input_is_code(amp_ray: Run, here: Path, target: str, name: str) -> None:
    output, messages = written(amp_ray, here, target, name)
    files = [path for path in output.rglob("*") if path.is_file()] or [output]
    texts = [path.read_text(encoding="utf-8") for path in files]
    assert not [text for text in (*texts, messages) if "planted" in text.casefold()]
    for path in files:
        check = CHECKS[target if path == output else path.suffix or path.name]
        check(path, here)
    assert not list(here.rglob("owned"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("runtime", ["megatron-core", "fsdp2"])
@pytest.mark.parametrize("target", ["ray-train", "slurm"])
def test_nothing_is_code_around_other_programs(
    amp_ray: Run, here: Path, target: str, runtime: str, name: str
) -> None:
    more = ("--set", f"runtime={runtime}", "--strategies", "mine.csv")
    output, messages = written(amp_ray, here, target, name, *LLAMA, *more)
    for path in [path for path in output.rglob("*") if path.is_file()] or [output]:
        assert "planted" not in path.read_text(encoding="utf-8").casefold()
        CHECKS[target if path == output else path.suffix](path, here)
    assert "planted" not in messages.casefold()
    assert not list(here.rglob("owned"))


@pytest.mark.parametrize(
    "target", marked(["accelerate", "deepspeed", "megatron-lm", "metis", "slurm"])
)
def test_hosts_are_reached_by_their_addresses(amp_ray: Run, here: Path, target: str) -> None:
    output, _ = written(amp_ray, here, target, "hosts", "--hostfile", "hosts")
    files = [path for path in output.rglob("*") if path.is_file()] or [output]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert "gpu-1" in text
    assert target == "metis" or "2222" not in text


@pytest.mark.parametrize("host", ["h;$(touch${IFS}owned)", "h'x", "h`x`", "h|x", "h&x", "h$x"])
def test_a_host_of_other_letters_is_refused(amp_ray: Run, here: Path, host: str) -> None:
    (here / "evil").write_text(f"{host} slots=2\nb slots=2\n", encoding="utf-8")
    (here / "small.yaml").write_text(SMALL, encoding="utf-8")
    for target in TARGETS:
        options = ("--to", target, "--hostfile", "evil", "-o", here / target)
        ended = amp_ray("export", "small.yaml", *options)
        assert ended.code == 2
        assert "evil:1: found host" in ended.err or "leave --hostfile out" in ended.err
    assert not list(here.rglob("owned"))


@pytest.mark.parametrize("name", ["A;touch owned", "A B", "9A", "Ä", "A=B", "A-B", ""])
def test_a_variable_of_other_letters_is_refused(amp_ray: Run, here: Path, name: str) -> None:
    text = f"{SMALL}trials: {{environment: {json.dumps({name: 'x'})}}}\n"
    (here / "evil.yaml").write_text(text, encoding="utf-8")
    check_ended(amp_ray("plan", "evil.yaml"), 2, "evil.yaml:8: trials.environment")


def test_a_host_that_nobody_knows_ends_a_launch_at_once(amp_ray: Run, here: Path) -> None:
    output, _ = written(amp_ray, here, "deepspeed", "x")
    with pytest.raises(subprocess.CalledProcessError) as ended:
        bash(output / "launch.sh", here, MASTER_ADDR="node0.invalid")
    assert ended.value.returncode == 2
    assert b"no host is known here as node0.invalid" in ended.value.stderr
    assert b"--hostfile FILE" in ended.value.stderr


def test_a_cluster_that_this_machine_plays_is_launched_here(amp_ray: Run, here: Path) -> None:
    options = ("--set", "trials.backend=local")
    output, _ = written(amp_ray, here, "deepspeed", "x", *options)
    assert (output / "hostfile").read_text(encoding="utf-8") == "127.0.0.1 slots=4\n"
    words = bash(output / "launch.sh", here)
    assert words[words.index("--master_addr") + 1] == "127.0.0.1"
    assert words[words.index("--include") + 1] == "127.0.0.1:0,1,2,3"
    job = json.loads((output / "job.json").read_text(encoding="utf-8"))
    places = [["127.0.0.1", slot] for slot in range(4)]
    assert sorted(job["strategy"]["placement"]) == places
