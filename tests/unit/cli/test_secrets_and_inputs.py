"""Every command with planted secrets, and outputs that are inputs."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from amp_ray.cli import MODULES
from support.commands import Run
from support.experiments import SMALL

PLANTED = "planted"

SECRETS = f"""\
trials:
  environment: {{HF_TOKEN: {PLANTED}-1, MORE: ghp_{PLANTED}2, URL: "http://me:{PLANTED}-3@h/"}}
  program: {{argv: [run, --wandb-token, {PLANTED}-4, --api-key={PLANTED}-5, "{{tp}}"]}}
"""
SETTINGS = (
    *("--set", f"trials.environment.WANDB_API_KEY={PLANTED}-6 with more"),
    *("--set", f"trials.program.argv.2={PLANTED}-7"),
)
TABLE = "tp,pp,dp,micro_batch_size,measured_s\n2,1,2,2,0.5\n1,2,2,1,0.6\n1,1,4,1,oom\n"

CASES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "calibrate": (("x.yaml", *SETTINGS, "--measurements", "t.csv", "-o", "c.json", "--json"),),
    "diff": (("x.yaml", "x.yaml", *SETTINGS), ("x.yaml", "x.yaml", "--json")),
    "doctor": (("x.yaml", *SETTINGS, "--trials", "nowhere"), ("x.yaml", *SETTINGS, "--help")),
    "explain": (("x.yaml", *SETTINGS), ("x.yaml", *SETTINGS, "--json")),
    "export": (("study", "--to", "csv"), ("x.yaml", *SETTINGS, "--to", "optuna")),
    "import": (("metis", "--hostfile", f"http://me:{PLANTED}@h/"),),
    "init": (("-o", "new.yaml", "--model", f"hf_{PLANTED}Planted123"),),
    "plan": (("x.yaml", *SETTINGS), ("x.yaml", *SETTINGS, "--json"), ("x.yaml", *SETTINGS, "-v")),
    "profile": (("x.yaml", *SETTINGS, "-o", "p", "--set", f"a.b.my_token={PLANTED}"),),
    "report": (("study", "-o", "s.html"), ("x.yaml", *SETTINGS, "-o", "r.html")),
    "score": (("x.yaml", *SETTINGS, "--strategies", "t.csv", "--json"),),
    "show": (("study",), ("study", "--json")),
    "slices": (("x.yaml", *SETTINGS),),
    "sweep": (("x.yaml", "--set", f"trials.environment.HF_TOKEN={PLANTED},{PLANTED}-9"),),
    "tune": (
        ("x.yaml", *SETTINGS, "--trials", "replay:t.csv", "--study", "study", "--json"),
        ("x.yaml", "--trials", "local", "--study", "other", "--set", f"a.b.token={PLANTED}-8"),
    ),
}
"""Arguments of each command; a new one needs a line here."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment that has secrets, and a table."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(SMALL + SECRETS, encoding="utf-8")
    (tmp_path / "t.csv").write_text(TABLE, encoding="utf-8")
    return tmp_path


def test_every_command_has_a_case() -> None:
    assert set(CASES) == set(MODULES)


def test_no_command_shows_or_keeps_a_secret(amp_ray: Run, here: Path) -> None:
    for name in ("tune", *sorted(set(CASES) - {"tune"})):
        for arguments in CASES[name]:
            ended = amp_ray(name, *arguments)
            output = f"{ended.out}{ended.err}".casefold()
            assert PLANTED not in output, (name, arguments, output)
    files = [path for path in here.rglob("*") if path.is_file() and path.name != "x.yaml"]
    names = {path.name for path in files}
    assert {"experiment.yaml", "journal.jsonl", "s.html", "r.html", "c.json"} <= names
    leaks = [path for path in files if PLANTED in path.read_text(encoding="utf-8").casefold()]
    assert not leaks


@pytest.mark.parametrize(
    ("entry", "secret"),
    [
        ("environment: {HF_TOKEN: 12345678}", "12345678"),
        ("environment: {HF_TOKEN: [planted]}", PLANTED),
        (f"ssh: {{user: [hf_{PLANTED}Planted123]}}", PLANTED),
        (f"program: {{argv: [run, --a-token, {PLANTED}], metric: {{pattern: '('}}}}", PLANTED),
        (f'environment: {{HF_TOKEN: "{PLANTED}\\0"}}', PLANTED),
    ],
)
def test_a_message_about_a_value_does_not_show_it(
    amp_ray: Run, here: Path, entry: str, secret: str
) -> None:
    (here / "x.yaml").write_text(f"{SMALL}trials: {{{entry}}}\n", encoding="utf-8")
    ended = amp_ray("plan", "x.yaml")
    assert ended.code == 2
    assert "x.yaml:8: trials" in ended.err
    assert secret not in ended.err


# ------------------------------------------------------------------------- -o and inputs


OVERWRITING: Mapping[str, tuple[str, ...]] = {
    "export": ("x.yaml", "--to", "csv", "-o", "x.yaml"),
    "export of strategies": ("x.yaml", "--to", "deepspeed", "--strategies", "t.csv", "-o", "t.csv"),
    "export by a link": ("x.yaml", "--to", "csv", "-o", "link"),
    "export over a hostfile": (
        *("x.yaml", "--to", "perfetto", "--hostfile", "hosts", "-o", "../here/hosts"),
    ),
    "export over anything": ("x.yaml", "--to", "csv", "-o", "notes.txt"),
    "report": ("page.html", "-o", "page.html"),
    "init": ("-o", "x.yaml", "--model", "gpt2-7m", "--cluster", "this-machine", "--batch", "8"),
    "calibrate": ("x.yaml", "--measurements", "t.csv", "-o", "t.csv"),
    "calibrate an experiment": ("page.html", "--measurements", "t.csv", "-o", "page.html"),
    "plan": ("page.html", "--json", "page.html"),
}


@pytest.mark.parametrize("case", OVERWRITING)
def test_no_output_is_written_over_an_input(
    amp_ray: Run, here: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    folder = here / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "x.yaml").write_text(SMALL, encoding="utf-8")
    (folder / "page.html").write_text(SMALL, encoding="utf-8")
    (folder / "t.csv").write_text(TABLE, encoding="utf-8")
    (folder / "hosts").write_text("a slots=2\nb slots=2\n", encoding="utf-8")
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    (folder / "link").symlink_to("x.yaml")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    ended = amp_ray(case.split(maxsplit=1)[0], *OVERWRITING[case])
    assert ended.code == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_output_may_be_written_again(amp_ray: Run, here: Path) -> None:
    for _ in range(2):
        assert amp_ray("report", "x.yaml", "-o", "r.html").code == 0
        assert amp_ray("plan", "x.yaml", "--json", "plan.json").code == 0
    assert json.loads((here / "plan.json").read_text(encoding="utf-8"))["ranking"]
