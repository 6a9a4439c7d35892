"""What a user may get wrong in a file of strategies."""

from typing import Final

import pytest

from support.bad_input import COLUMNS, DESCRIPTION, EXPERIMENT, TABLE, WITH_TABLE, Files, Refused

STRATEGIES: Final[dict[str, tuple[str | bytes, str]]] = {
    "empty": ("", f"strategies.csv:1: expected the header {COLUMNS}[,bounds]"),
    "no rows": (f"{COLUMNS}\n", "strategies.csv: no strategy found in it"),
    "missing column": (
        "tp,pp,dp\n1,2,2\n",
        "strategies.csv:1: expected the header tp,pp,dp,micro_batch_size[,bounds]",
    ),
    "unknown column": (f"{COLUMNS},speed\n", "strategies.csv:1: expected the header tp,pp,dp,micr"),
    "column twice": (f"{COLUMNS},tp\n", "strategies.csv:1: expected the header tp,pp,dp,micro_bat"),
    "word for a degree": (
        f"{COLUMNS}\ntwo,1,2,1\n",
        "strategies.csv:2: tp: found 'two'; expected an integer of at least 1",
    ),
    "missing cell": (f"{COLUMNS}\n1,2,2\n", "strategies.csv:2: micro_batch_size: found ''; expect"),
    "cell too many": (
        f"{COLUMNS}\n1,2,2,1,9\n",
        "strategies.csv:2: expected 4 columns (tp, pp, dp, micro_batch_size), found 5",
    ),
    "degrees that do not multiply to the devices": (
        f"{COLUMNS}\n1,2,2,1\n2,2,2,1\n",
        "strategies.csv:3: tp 2 x pp 2 x dp 2 = 8 devices; the cluster has 4",
    ),
    "samples that do not divide the batch": (
        f"{COLUMNS}\n1,2,2,3\n",
        "strategies.csv:2: dp 2 x micro_batch_size 3 = 6 does not divide global_batch_size 8",
    ),
    "bounds that do not cover": (
        f"{COLUMNS},bounds\n1,2,2,1,0 2 4\n",
        "strategies.csv:2: bounds: found 0 2 4; expected 0 to 5, the number of the model's layers",
    ),
    "bounds of another pp": (
        f"{COLUMNS},bounds\n1,2,2,1,0 1 2 5\n",
        "strategies.csv:2: bounds: bounds must run from 0 in 2 stages, found (0, 1, 2, 5)",
    ),
    "bounds that fall": (
        f"{COLUMNS},bounds\n1,2,2,1,0 6 5\n",
        "strategies.csv:2: bounds: a stage needs layers, found [6, 5)",
    ),
    "word in bounds": (
        f"{COLUMNS},bounds\n1,2,2,1,0 x 5\n",
        "strategies.csv:2: bounds: found 'x'; expected an integer of at least 0",
    ),
    "unknown recompute": (
        f"{COLUMNS},recompute\n1,2,2,1,some\n",
        "strategies.csv:2: recompute: found 'some'; expected one of none, selective, full; or",
    ),
    "negative measurement": (
        f"{COLUMNS},measured_s\n1,2,2,1,-3\n",
        "strategies.csv:2: measured_s: found '-3'; expected seconds, from 1e-06 to 1,000,000",
    ),
    "JSON cut short": ('[{"tp": 1,\n', "strategies.csv:2: not valid JSON: Expecting property"),
    "JSON object": ('{"tp": 1}', "strategies.csv: expected a list of strategies, or what plan"),
    "JSON number": ("[7]", "strategies.csv: [0]: expected a strategy object, found int"),
    "JSON with an unknown key": (
        '[{"tp": 1, "pp": 2, "dp": 2, "micro_batch_size": 1, "speed": 3}]',
        "strategies.csv: [0]: speed: unknown key 'speed'; known here: ",
    ),
    "JSON without micro_batch_size": (
        '[{"tp": 1, "pp": 2, "dp": 2}]',
        "strategies.csv: [0]: micro_batch_size: key 'micro_batch_size' is missing",
    ),
    "JSON without tp": (
        '[{"pp": 2, "dp": 2, "micro_batch_size": 1}]',
        "strategies.csv: [0]: tp: key is missing; a strategy without bounds and stages needs it",
    ),
    "JSON with text for a degree": (
        '[{"tp": "1", "pp": 2, "dp": 2, "micro_batch_size": 1}]',
        "strategies.csv: [0]: tp: found '1'; expected an integer",
    ),
    "JSON with another pp than its bounds": (
        (
            '[{"tp": 1, "pp": 4, "dp": 2, "micro_batch_size": 1, "num_micro_batches": 4, '
            '"bounds": [0, 2, 5]}]'
        ),
        "strategies.csv: [0]: pp is 4, but the stages make it 2",
    ),
    "JSON with an unknown host": (
        (
            '[{"tp": 1, "dp": 2, "micro_batch_size": 1, "num_micro_batches": 4, "bounds": '
            '[0, 2, 5], "placement": [["node0", 0], ["node0", 1], ["node1", 0], ["node9", 1]]}]'
        ),
        "strategies.csv: [0]: placement names slot 1 of host 'node9', which the cluster does not h",
    ),
    "JSON with more devices than there are": (
        (
            '[{"tp": 999999999, "dp": 999999999, "micro_batch_size": 1, "num_micro_batches": 4, '
            '"bounds": [0, 2, 5]}]'
        ),
        "strategies.csv: [0]: uses 1999999996000000002 devices; the cluster has 4",
    ),
    "JSON with stages of more devices than there are": (
        (
            '[{"micro_batch_size": 1, "num_micro_batches": 1, '
            '"stages": [{"layers": [0, 5], "tp": 999999999, "dp": 999999999}]}]'
        ),
        "strategies.csv: [0]: uses 999999998000000001 devices; the cluster has 4",
    ),
    "JSON nested too deeply": (
        "[" * 100_000,
        "strategies.csv: not usable JSON: nested too deeply",
    ),
    "JSON with a number of many digits": (
        '[{"tp": ' + "9" * 5000 + "}]",
        "strategies.csv: not usable JSON: found a number of 5000 digits",
    ),
    "measurement of no time": (
        f"{COLUMNS},measured_s\n1,2,2,1,1e-300\n",
        "strategies.csv:2: measured_s: found '1e-300'; expected seconds, from 1e-06 to 1,000,000",
    ),
    "cell without end": (
        f"{COLUMNS}\n{'1' * 200_000},1,1,1\n",
        "strategies.csv:2: not valid CSV: field larger than field limit",
    ),
    "JSON that uses some of the devices": (
        '[{"tp": 1, "dp": 1, "micro_batch_size": 1, "num_micro_batches": 8, "bounds": [0, 2, 5]}]',
        "strategies.csv: [0]: uses 2 devices; the cluster has 4, and a strategy uses each of them",
    ),
    "not UTF-8": (b"\xff\xfe", "strategies.csv: not a text file (byte 0 is not UTF-8)"),
}


@pytest.mark.parametrize(("content", "message"), STRATEGIES.values(), ids=STRATEGIES)
def test_a_wrong_strategy_is_led_to_its_line(
    refused: Refused, content: str | bytes, message: str
) -> None:
    files: Files = {"experiment.yaml": EXPERIMENT, "strategies.csv": content}
    assert message in refused(files, "--strategies", "strategies.csv", command="score")


def test_missing_strategies_are_named(refused: Refused) -> None:
    files: Files = {"experiment.yaml": EXPERIMENT}
    message = refused(files, "--strategies", "strategies.csv", command="score")
    assert message == "strategies.csv: no such file"


def test_a_strategy_beyond_the_profile_is_led_to_its_line(refused: Refused) -> None:
    files: Files = {
        "experiment.yaml": WITH_TABLE,
        "measured/profile.yaml": DESCRIPTION,
        "measured/T4.csv": TABLE,
        "strategies.csv": f"{COLUMNS}\n1,2,2,1\n2,2,1,1\n",
    }
    message = refused(files, "--strategies", "strategies.csv", command="score")
    assert message.startswith("strategies.csv:3: profile measured has no times at tp 2 for device")
