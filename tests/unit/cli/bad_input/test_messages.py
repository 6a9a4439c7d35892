"""What a user may get wrong in an experiment file, and in the files beside it: two tables."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from support.bad_input import (
    COLUMNS,
    DESCRIPTION,
    EXPERIMENT,
    TABLE,
    WITH_HOSTFILE,
    WITH_TABLE,
    Files,
    Refused,
    edited,
)

WITH_CONFIG: Final = EXPERIMENT.replace(EXPERIMENT.splitlines()[1], "model: {config: config.json}")
MEASURED: Final[Files] = {"measured/profile.yaml": DESCRIPTION, "measured/T4.csv": TABLE}
SCORE: Final = ("--strategies", "strategies.csv")
DEEP: Final = "(" * 2000 + ")" * 2000

BESIDE: Final[dict[str, tuple[str, str, Files]]] = {
    "hostfile": (WITH_HOSTFILE, "hosts", {}),
    "configuration": (WITH_CONFIG, "config.json", {}),
    "strategies": (EXPERIMENT, "strategies.csv", {}),
    "table": (WITH_TABLE, "measured/T4.csv", MEASURED),
    "description": (WITH_TABLE, "measured/profile.yaml", MEASURED),
}
"""By section of files.yaml: the experiment, the file that is wrong, and others."""

LONG: Final[dict[str, tuple[str, str | bytes, str]]] = {
    "host in Latin-1": (
        "hostfile",
        b"h\xf6st slots=2\n",
        "experiment.yaml:4: cluster.hostfile: hosts: not a text file (byte 1 is not UTF-8)",
    ),
    "architecture of many digits": (
        "configuration",
        '{"model_type": 1' + "0" * 5000 + "}",
        "config.json: not usable JSON: found a number of 5001 digits; expected at most 300",
    ),
    "configuration nested too deeply": (
        "configuration",
        "[" * 100_000,
        "config.json: not usable JSON: nested more than 50 levels deep",
    ),
    "strategies nested too deeply": (
        "strategies",
        "[" * 100_000,
        "strategies.csv: not usable JSON: nested more than 50 levels deep",
    ),
    "degree of many digits": (
        "strategies",
        '[{"tp": ' + "9" * 5000 + "}]",
        "strategies.csv: not usable JSON: found a number of 5000 digits",
    ),
    "cell without end": (
        "strategies",
        f"{COLUMNS}\n{'1' * 200_000},1,1,1\n",
        "strategies.csv:2: not valid CSV: field larger than field limit",
    ),
    "strategies in UTF-16": (
        "strategies",
        b"\xff\xfe",
        "strategies.csv: not a text file (byte 0 is not UTF-8)",
    ),
    "long integer": (
        "table",
        TABLE + f"0,1,{'9' * 5000},1\n",
        "measured/T4.csv:7: micro_batch_size: found",
    ),
}
"""Contents that no table has room for."""


def cases(file: str) -> Iterator[Any]:
    """Yield the cases of a table, with their section first."""
    sections = yaml.safe_load(Path(__file__).with_name(file).read_text(encoding="utf-8"))
    for section, mistakes in sections.items():
        for name, mistake in mistakes.items():
            yield pytest.param(section, *mistake, id=f"{section}: {name}")


@pytest.mark.parametrize(
    ("_section", "old", "new", "message"),
    [
        *cases("mistakes.yaml"),
        (
            "keys",
            "global_batch_size: 8",
            f"global_batch_size: 1{'0' * 5000}",
            "global_batch_size: found a number of 5001 digits; expected an integer",
        ),
        (
            "trials",
            "search: {space: uniform}",
            f"trials: {{program: {{argv: [a], metric: {{pattern: '{DEEP}'}}}}}}",
            "trials.program.metric.pattern: found '((((",
        ),
    ],
)
def test_a_mistake_is_led_to_its_line(
    refused: Refused, _section: str, old: str, new: str, message: str
) -> None:
    assert message in refused({"experiment.yaml": edited((old, new))})


@pytest.mark.parametrize(
    ("section", "content", "message"),
    [*cases("files.yaml"), *(pytest.param(*case, id=name) for name, case in LONG.items())],
)
def test_a_mistake_in_another_file_is_led_to_its_line(
    refused: Refused, section: str, content: str | bytes, message: str
) -> None:
    experiment, file, beside = BESIDE[section]
    files: Files = {"experiment.yaml": experiment, **beside, file: content}
    if section == "strategies":
        assert message in refused(files, *SCORE, command="score")
    else:
        assert message in refused(files)


FOLDERS: Final[dict[str, tuple[Files, str]]] = {
    "missing": ({}, "experiment.yaml:6: profile.path: measured: no such folder"),
    "a file": ({"measured": "x"}, "profile.path: measured: this is a file; expected a folder"),
    "no description": (
        {"measured/T4.csv": TABLE},
        "experiment.yaml:6: profile.path: measured: no profile.yaml in it; found T4.csv",
    ),
    "no table": (
        {"measured/profile.yaml": DESCRIPTION},
        "experiment.yaml:6: profile.path: measured: no table in it: expected files such as T4.csv",
    ),
    "another device's table": (
        {"measured/profile.yaml": DESCRIPTION, "measured/H100.csv": TABLE},
        "experiment.yaml:6: profile: profile measured has no times for device 'T4', only for H100",
    ),
    "not UTF-8": (
        {"measured/profile.yaml": DESCRIPTION, "measured/T4.csv": b"\xff\xfe"},
        "profile.path: measured/T4.csv: not a text file (byte 0 is not UTF-8)",
    ),
}


@pytest.mark.parametrize(("folder", "message"), FOLDERS.values(), ids=FOLDERS)
def test_a_wrong_profile_folder_is_led_to_the_key_that_names_it(
    refused: Refused, folder: Files, message: str
) -> None:
    assert message in refused({"experiment.yaml": WITH_TABLE, **folder})


def test_an_unknown_shipped_profile_lists_those_that_are(refused: Refused) -> None:
    text = edited(("{source: analytic}", '{source: table, path: "shipped:none"}'))
    message = refused({"experiment.yaml": text})
    assert message.startswith(
        "experiment.yaml:6: profile.path: shipped:none: no such profile is shipped; there are "
        "shipped:amp-2022-gpt2, "
    )


# ------------------------------------------------------------------------- files that are missing


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"experiment.yaml": WITH_HOSTFILE},
            "experiment.yaml:4: cluster.hostfile: hosts: no such file",
        ),
        (
            {"experiment.yaml": WITH_HOSTFILE, "hosts/a": "x"},
            "experiment.yaml:4: cluster.hostfile: hosts: this is a folder; expected a file",
        ),
        (
            {"experiment.yaml": WITH_CONFIG},
            "experiment.yaml:2: model.config: config.json: no such file",
        ),
        ({}, "experiment.yaml: no such file"),
        (
            {"experiment.yaml/inside.txt": "x"},
            "experiment.yaml: this is a folder; expected a file",
        ),
    ],
)
def test_a_missing_file_is_led_to_the_key_that_names_it(
    refused: Refused, files: Files, message: str
) -> None:
    assert refused(files) == message


def test_missing_strategies_are_named(refused: Refused) -> None:
    message = refused({"experiment.yaml": EXPERIMENT}, *SCORE, command="score")
    assert message == "strategies.csv: no such file"


def test_a_strategy_beyond_the_profile_is_led_to_its_line(refused: Refused) -> None:
    strategies = f"{COLUMNS}\n1,2,2,1\n2,2,1,1\n"
    files: Files = {"experiment.yaml": WITH_TABLE, **MEASURED, "strategies.csv": strategies}
    message = refused(files, *SCORE, command="score")
    assert message.startswith("strategies.csv:3: profile measured has no times at tp 2 for device")
