"""Changes that a command proposes are accepted when they are pasted."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import amp_ray as amp
from amp_ray.cli import commands
from amp_ray.errors import NotFeasibleError
from support.experiments import SMALL

NODES = "{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}"
MIXED = f"{NODES}\n    - {{count: 1, device: V100-16, slots: 2, inter_gbit_per_s: 10}}"
HOSTS = "cluster:\n  hostfile: hosts\n"
TINY = NODES.replace("slots: 2", "slots: 2, memory_gib: MEMORY")
TEXTS = {
    "plain": SMALL,
    "odd batch": SMALL.replace("count: 2", "count: 3"),
    "mixed": SMALL.replace(NODES, MIXED),
    "hosts": SMALL.replace("cluster:\n", HOSTS),
    "all used": f"{SMALL}search: {{idle_devices: false}}\n".replace("count: 2", "count: 3"),
    "megatron": f"{SMALL}runtime: megatron-core\nzero_stage: 0\n",
    "historic": f"{SMALL}runtime: amp-2022\nzero_stage: 0\nrecompute: none\n",
}
LARGE = SMALL.replace("num_layers: 6", "num_layers: 12").replace("size: 256", "size: 2048")
NOTHING_FITS = {
    "recompute": f"{LARGE}recompute: none\nzero_stage: 0\n".replace(
        NODES, TINY.replace("MEMORY", "4.5")
    ),
    "limits": f"{SMALL}search: {{min_tokens_per_s: 1e12, max_tp: 1}}\n",
    "nodes": LARGE.replace(NODES, TINY.replace("MEMORY", "4.5")),
    "hosts": LARGE.replace(NODES, TINY.replace("MEMORY", "4.5")).replace("cluster:\n", HOSTS),
}


def written(folder: Path, text: str) -> Path:
    """Write an experiment and a hostfile."""
    (folder / "hosts").write_text("one slots=2\ntwo slots=2\n", encoding="utf-8")
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def options(text: str) -> list[str]:
    """Return the words of the ``--set`` options in a text, as a shell reads them."""
    return shlex.split(" ".join(re.findall(r"--set [^\s)]+", text)))


@pytest.mark.parametrize("name", TEXTS)
def test_explain_proposes_what_the_file_takes(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, TEXTS[name])
    done = CliRunner().invoke(commands, ["explain", str(path), "--json"], catch_exceptions=False)
    advice = json.loads(done.stdout)["advice"]
    for entry in advice:
        amp.load(path, changes=entry["set"])
    proposed = {change for entry in advice for change in entry["set"]}
    expected = {
        "odd batch": {"global_batch_size=9"},
        "mixed": {"search.space=placement"},
        "all used": {"search.idle_devices=true"},
    }
    assert expected.get(name, set()) <= proposed
    helpful = [entry for entry in advice if entry["speedup"] > 1.005]
    bought = [entry["set"][0].startswith("cluster.") for entry in helpful]
    assert bought == sorted(bought)  # what costs nothing comes first


@pytest.mark.parametrize("name", NOTHING_FITS)
@pytest.mark.parametrize("command", ["plan", "explain", "sweep", "export", "report"])
def test_what_would_fit_can_be_pasted(name: str, command: str, tmp_path: Path) -> None:
    path = written(tmp_path, NOTHING_FITS[name])
    more = {
        "explain": ["--no-advice"],
        "sweep": ["--set", "precision=fp16"],
        "export": ["--to", "slurm", "-o", str(tmp_path / "out")],
        "report": ["-o", str(tmp_path / "page.html")],
    }.get(command, [])
    done = CliRunner().invoke(commands, [command, str(path), *more])
    assert isinstance(done.exception, NotFeasibleError) or command == "report"
    page = tmp_path / "page.html"
    said = f"{done.output}{done.exception}" + (
        page.read_text(encoding="utf-8") if page.exists() else ""
    )
    assert "best plan" not in said.casefold()
    ways = re.findall(r"would do: [^(]*", said)
    assert ways
    for way in ways:
        again = CliRunner().invoke(commands, ["plan", str(path), "--top", "1", *options(way)])
        assert again.exit_code == 0, again.output


def test_a_batch_that_devices_do_not_divide_is_remarked(tmp_path: Path) -> None:
    keys = [
        "cluster.nodes.0.count=5",
        "global_batch_size=29",
        "cluster.nodes.0.inter_gbit_per_s=800",
    ]
    path = written(tmp_path, SMALL)
    plan = amp.plan(path, changes=keys)
    [remark] = plan.planned.remarks
    other = amp.plan(path, changes=[*keys, *options(remark)[1::2]])
    fastest = other.planned.ranking.fastest
    assert plan.best is not None
    assert fastest is not None
    gain = plan.best.iteration_time_s / 29 * 30 / fastest.iteration_time_s - 1
    assert remark == (
        f"10 devices do not divide the batch of 29: with 30 training is {100 * gain:.0f} % faster "
        "per token (--set global_batch_size=30)"
    )
    assert not other.planned.remarks
