"""What a user may get wrong about measured layer times."""

from typing import Final

import pytest

from support.bad_input import DESCRIPTION, HEADER, TABLE, WITH_TABLE, Files, Refused, edited

PROFILES: Final = {
    "profile that is none": (
        ("{source: analytic}", "{source: guess}"),
        "experiment.yaml:6: profile.source: found 'guess'; expected 'analytic', 'table', 'm",
    ),
    "analytic profile with a path": (
        ("{source: analytic}", "{path: measured}"),
        "experiment.yaml:6: profile.path: found 'measured'; source 'analytic' has none",
    ),
    "table without a path": (
        ("{source: analytic}", "{source: table}"),
        "experiment.yaml:6: profile.path: source 'table' needs 'path', a folder with profile.yaml",
    ),
}


@pytest.mark.parametrize(("replacement", "message"), PROFILES.values(), ids=PROFILES)
def test_a_wrong_profile_key_is_led_to_its_line(
    refused: Refused, replacement: tuple[str, str], message: str
) -> None:
    assert message in refused({"experiment.yaml": edited(replacement)})


TABLES: Final = {
    "wrong header": (
        "layer,tp,batch,time\n0,1,1,0.1\n",
        (
            "measured/T4.csv:1: expected the header "
            "layer,tp,micro_batch_size,forward_s[,backward_s], found 'layer,tp,batch,time'"
        ),
    ),
    "empty": ("", "measured/T4.csv:1: expected the header layer,"),
    "no rows": (HEADER, "profile.path: measured/T4.csv: the file has a header and no rows"),
    "NaN": (
        TABLE + "0,1,2,nan\n",
        "measured/T4.csv:7: forward_s: found 'nan'; expected seconds, a number from 0 to 1,000,00",
    ),
    "infinity": (TABLE + "0,1,2,inf\n", "measured/T4.csv:7: forward_s: found 'inf'; expected sec"),
    "negative time": (TABLE + "0,1,2,-1\n", "measured/T4.csv:7: forward_s: found '-1'; expected"),
    "word": (TABLE + "0,1,2,fast\n", "measured/T4.csv:7: forward_s: found 'fast'; expected sec"),
    "no tp": (TABLE + "0,,2,0.1\n", "measured/T4.csv:7: tp: found ''; expected an integer of at"),
    "tp of zero": (TABLE + "0,0,2,0.1\n", "measured/T4.csv:7: tp: found '0'; expected an integer"),
    "long integer": (TABLE + f"0,1,{'9' * 5000},1\n", "measured/T4.csv:7: micro_batch_size: found"),
    "too few columns": (TABLE + "0,1,2\n", "measured/T4.csv:7: expected 4 columns (layer, tp, "),
    "layer twice": (
        TABLE + "0,1,1,0.001\n",
        "measured/T4.csv:7: layer 0 at tp 1, micro_batch_size 1 stands here a second time",
    ),
    "layer that the model lacks": (
        TABLE + "5,1,1,0.001\n",
        "measured/T4.csv:7: layer: found 5; the model has layers 0..4",
    ),
    "missing layers": (
        HEADER + "0,1,1,0.1\n2,1,1,0.1\n",
        "measured/T4.csv: tp 1, micro_batch_size 1: no row for layer 1, 3, 4 of 0..4",
    ),
    "all zero": (
        TABLE.replace("0.001", "0"),
        "measured/T4.csv: tp 1, micro_batch_size 1: found ze",
    ),
    "open quote": (TABLE + '0,1,2,"0.1\n', "measured/T4.csv:7: not valid CSV: unexpected end of"),
    "not measured at the tp that is searched": (
        TABLE,
        (
            "experiment.yaml:6: profile: profile measured has no times at tp 2 for device "
            "'T4', only at tp 1; measure it, or limit the search with search.max_tp"
        ),
    ),
}


@pytest.mark.parametrize(("table", "message"), TABLES.values(), ids=TABLES)
def test_a_wrong_table_is_led_to_its_line(refused: Refused, table: str, message: str) -> None:
    files: Files = {
        "experiment.yaml": WITH_TABLE,
        "measured/profile.yaml": DESCRIPTION,
        "measured/T4.csv": table,
    }
    assert message in refused(files)


DESCRIPTIONS: Final = {
    "other number of layers": (
        DESCRIPTION.replace("5", "30"),
        "measured/profile.yaml:1: num_layers: found 30; the model has 5 layers",
    ),
    "other precision": (
        DESCRIPTION.replace("fp16", "fp32"),
        "measured/profile.yaml:3: precision: measured in fp32; the experiment has precision fp16",
    ),
    "missing key": (
        DESCRIPTION.replace("versions: none\n", ""),
        "measured/profile.yaml: versions: key 'versions' is missing",
    ),
    "unknown key": (
        DESCRIPTION + "remarks: none\n",
        "measured/profile.yaml:6: remarks: unknown key 'remarks'; known here: num_layers, ",
    ),
}


@pytest.mark.parametrize(("description", "message"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_a_wrong_description_is_led_to_its_line(
    refused: Refused, description: str, message: str
) -> None:
    files: Files = {
        "experiment.yaml": WITH_TABLE,
        "measured/profile.yaml": description,
        "measured/T4.csv": TABLE,
    }
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
