import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from amp_ray.clusters.cluster import Cluster, Link, Node
from amp_ray.clusters.device import find_device
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import (
    Entry,
    parse_strategies,
    strategy_from_json,
    strategy_to_json,
)
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE, Recompute
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from support.checked import grid_of, required
from support.experiments import experiment_on, small_experiment

LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
CLUSTER = Cluster(
    nodes=tuple(
        Node(name=name, device=find_device("T4"), num_slots=2, intra=LINK, inter=LINK)
        for name in ("a", "b")
    )
)
CANDIDATE = grid_of(dp=2, pp=2, num_micro_batches=4)
CUT = Strategy.uniform(CANDIDATE, (0, 2, 5))
RECORD = {"tp": 1, "pp": 2, "dp": 2, "micro_batch_size": 1}


def experiment(**changes: object) -> Experiment:
    return experiment_on(CLUSTER, num_layers=5, global_batch_size=8, **changes)


def parse(text: str, **changes: object) -> tuple[Entry, ...]:
    return parse_strategies(text, file="given", experiment=experiment(**changes))


def line(columns: str, cells: str, **changes: object) -> Entry:
    """Read one line that has more columns than the degrees."""
    (entry,) = parse(f"tp,pp,dp,micro_batch_size,{columns}\n1,2,2,1,{cells}\n", **changes)
    return entry


# ------------------------------------------------------------------------------------ CSV


def test_a_line_without_bounds_leaves_the_cuts_to_the_solver() -> None:
    entry = line("bounds", "")
    assert (entry.candidate, entry.strategy) == (CANDIDATE, None)
    (short,) = parse("tp,pp,dp,micro_batch_size,bounds,measured_s\n1,2,2,1\n")
    assert (short.strategy, short.measured_s) == (None, None)


def test_a_line_with_bounds_is_a_complete_strategy() -> None:
    assert line("bounds", "0 2 5").strategy == CUT
    (entry,) = parse('bounds, dp, pp, tp, micro_batch_size\n"0 2 5", 2, 2, 1, 1\n')
    assert entry.strategy == CUT


def test_each_strategy_has_its_line() -> None:
    entries = parse("tp,pp,dp,micro_batch_size\n1,2,2,1\n\n2,1,2,1\n")
    assert [str(entry.where) for entry in entries] == ["given:2", "given:4"]


def test_recompute_is_the_experiments_unless_the_line_sets_it() -> None:
    for cell, expected in (("", FULL), ("none", NO_RECOMPUTE)):
        candidate = required(line("recompute", cell, recompute=FULL).candidate)
        assert candidate.options.recompute == expected


def test_stages_may_recompute_differently() -> None:
    strategy = required(line("recompute,bounds", "full:2 none,0 3 5").strategy)
    assert [str(stage.options.recompute) for stage in strategy.stages] == ["full:2", "none"]
    strategy = required(line("recompute,bounds", "selective,0 3 5").strategy)
    assert strategy.recompute == Recompute(kind="selective")


def test_sequence_parallelism_is_the_experiments_unless_the_line_sets_it() -> None:
    even = small_experiment(("sequence_length: 128", "sequence_length: 126"))
    text = "tp,pp,dp,micro_batch_size,sequence_parallel\n2,2,1,1,\n2,2,1,1,false\n4,1,1,1,\n"
    entries = parse_strategies(
        text, file="given", experiment=replace(even, sequence_parallel=True, zero_stage=0)
    )
    options = [entry.candidate.options for entry in entries if entry.candidate]
    assert [chosen.sequence_parallel for chosen in options] == [True, False, False]


def test_a_column_sets_how_experts_are_shared_out() -> None:
    for cell, ep in (("2", 2), ("", 1)):
        candidate = required(line("ep", cell).candidate)
        assert candidate.options.ep == ep


@pytest.mark.parametrize(
    ("columns", "cells", "message"),
    [
        ("ep", "4", "given:2: ep x etp divides the ranks of a stage, found ep 4"),
        ("sequence_parallel", "true", "given:2: sequence_parallel divides .* needs tp 2 or more"),
        (
            "sequence_parallel",
            "yes",
            "given:2: sequence_parallel: found 'yes'; expected true or false",
        ),
        (
            "recompute,bounds",
            "full:0,0 3 5",
            (
                "given:2: recompute: found 'full:0'; expected one of none, selective, "
                "per-operator, full; or full:3"
            ),
        ),
        ("recompute,bounds", "none:1,0 3 5", ".*recompute 'none' has no layers, found 1"),
        (
            "recompute,bounds",
            "full none full,0 3 5",
            ".*found 3 values; expected one for all stages, or one for each of",
        ),
        (
            "recompute,bounds",
            "full none,",
            ".*found 2 values; expected one for all stages, as it has no bounds",
        ),
        ("bounds", "0 5", "given:2: bounds: bounds must run from 0 in 2 stages, found "),
        ("bounds", "0 2 x", "given:2: bounds: found 'x'; expected an integer of at least 0"),
        ("virtual_stages", "2x", "given:2: virtual_stages: found '2x'; expected an integer"),
    ],
)
def test_a_cell_that_does_not_fit_is_refused(columns: str, cells: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        line(columns, cells)


def test_tokens_that_cannot_be_divided_are_refused() -> None:
    shorter = small_experiment(("sequence_length: 128", "sequence_length: 126"))
    text = "tp,pp,dp,micro_batch_size,sequence_parallel\n4,1,1,1,true\n"
    with pytest.raises(InputError, match="sequence_parallel: found true; tp 4 must divide the tok"):
        parse_strategies(text, file="given", experiment=shorter)


def test_a_header_names_everything_that_is_wrong_with_it() -> None:
    with pytest.raises(InputError, match=r"missing: pp, micro_batch_size; unknown: x; twice: tp$"):
        parse("tp,tp,dp,x\n")


# --------------------------------------------------------------------------- measurements


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (",,,", (None, None, None, None, ())),
        ("1.25,,,", (1.25, 1.25, None, None, ())),
        ("1.25,1.5,,", (1.25, 1.5, None, None, ())),
        ("1.25,,0.02,3000000000 2000000000", (1.25, 1.25, None, 0.02, (3e9, 2e9))),
        ("1.25,,0,3000000000", (1.25, 1.25, None, 0.0, (3e9,))),
        ("oom,,,15800000000", (None, None, "oom", None, (15.8e9,))),
        ("failed,,,", (None, None, "failed", None, ())),
    ],
)
def test_a_measurement_stands_beside_the_strategy(cells: str, expected: tuple[object, ...]) -> None:
    entry = line("measured_s,mean_s,spread_s,peak_memory_bytes", cells)
    times = (entry.measured_s, entry.mean_s, entry.failure, entry.spread_s)
    assert (*times, entry.peak_memory_bytes) == expected


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ("measured,1.5", (1.5, None, True)),
        ("oom,", (None, "oom", True)),
        ("crashed,", (None, "failed", True)),
        ("timeout,", (None, "failed", True)),
        ("unreachable,", (None, None, False)),
        (",", (None, None, False)),
    ],
)
def test_a_trial_of_an_exported_study_has_an_outcome(
    cells: str, expected: tuple[object, ...]
) -> None:
    entry = line("outcome,measured_s,wall_s,breakdown_other,lines", f"{cells},9,x,y")
    assert (entry.measured_s, entry.failure, entry.has_ended) == expected


def test_the_columns_of_a_whole_strategy_count_before_it() -> None:
    cells = json.dumps(record()).replace('"', '""')
    entry = line("bounds,sequence_parallel,strategy", f'0 1 5,False,"{cells}"')
    assert entry.strategy is not None
    assert (entry.strategy.bounds, entry.strategy.sequence_parallel) == ((0, 1, 5), False)
    with pytest.raises(InputError, match="needs tp 2 or more"):
        line("sequence_parallel,strategy", f'TRUE,"{cells}"')


_NO_BYTES = "peak_memory_bytes: found '.*'; expected bytes as whole numbers, separated by spaces"
_NO_SECONDS = "expected seconds from 0 beside a measured_s in seconds"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("never,,,", "measured_s: found 'never'; expected seconds, from 1e-06 to 1,000,000, or"),
        ("1.25,0,,", "mean_s: found '0'; expected seconds from 1e-06"),
        ("1.25,-1,,", "mean_s: found '-1'; expected seconds from 1e-06"),
        ("1.25,x,,", "mean_s: found 'x'; expected seconds from 1e-06"),
        ("oom,1.5,,", "mean_s: found '1.5'"),
        *((f"{word},,0.02,", f"spread_s: found '0.02'; {_NO_SECONDS}") for word in ("", "oom")),
        *((f'1.25,,"{word}",', "spread_s: found '") for word in ("-0.02", "nan", "inf", "0,02")),
        *((f"1.25,,,{text}", _NO_BYTES) for text in ("3e9", "-1", "2.5 GB", "3_000", "30;20")),
        ("1.25,,,\N{SUPERSCRIPT TWO}", _NO_BYTES),
        ("1.25,,,1 2 3", r"peak_memory_bytes: found 3 figures; expected one, or one per stage \(2"),
    ],
)
def test_a_measurement_that_is_none_is_refused(cells: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^given:2: {message}"):
        line("measured_s,mean_s,spread_s,peak_memory_bytes", cells)


# -------------------------------------------------------------------------- lists in JSON


def test_json_without_bounds_leaves_the_cuts_to_the_solver() -> None:
    row = {"position": 1, "strategy": RECORD | {"bounds": None, "placement": None}}
    for text in ([RECORD], [row], {"schema": 1, "ranking": [row]}, {"schema": 1, "rows": [row]}):
        (entry,) = parse(json.dumps(text))
        assert (entry.candidate, entry.strategy) == (CANDIDATE, None)


def test_json_with_bounds_takes_the_experiments_recompute() -> None:
    cut = RECORD | {"num_micro_batches": 4, "bounds": [0, 2, 5]}
    (entry,) = parse(json.dumps([cut]), recompute=FULL)
    assert entry.strategy is not None
    assert entry.strategy.recompute == FULL


def test_the_batch_decides_the_micro_batches_of_given_cuts() -> None:
    (entry,) = parse(json.dumps([RECORD | {"bounds": [0, 2, 5]}]))
    assert entry.strategy is not None
    assert entry.strategy.num_micro_batches == 4
    stages = [{"layers": [0, 5], "tp": 4, "dp": 1}]
    (entry,) = parse(json.dumps([{"micro_batch_size": 2, "stages": stages}]))
    assert entry.strategy is not None
    assert entry.strategy.num_micro_batches == 4
    with pytest.raises(InputError, match="= 6 does not divide global_batch_size 8"):
        parse(json.dumps([RECORD | {"bounds": [0, 2, 5], "micro_batch_size": 3}]))


def test_a_file_of_json_that_is_none_is_refused_as_json() -> None:
    with pytest.raises(InputError, match=r"plans\.json:1: not valid JSON"):
        parse_strategies("nonsense", file="plans.json", experiment=experiment())


def test_stages_set_recompute_by_themselves() -> None:
    stages = [{"layers": [0, 5], "tp": 4, "dp": 1}]
    spelled = {"micro_batch_size": 1, "num_micro_batches": 8, "stages": stages}
    (entry,) = parse(json.dumps([spelled]), recompute=FULL)
    assert entry.strategy is not None
    assert entry.strategy.recompute == NO_RECOMPUTE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_micro_batches": 3}, r"num_micro_batches: found 3; global_batch_size 8 makes it 4"),
        (
            {"recompute": ["none", "full"]},
            r"recompute: found 2 values; expected one for all stages, as it has no b",
        ),
        ({"dp": 3}, "tp 1 x pp 2 x dp 3 = 6 devices; the cluster has 4"),
        (
            {"num_micro_batches": 3, "bounds": [0, 2, 5]},
            "makes 6 samples per step; the experiment has global_batch_size 8",
        ),
        (
            {"num_micro_batches": 4, "bounds": [0, 2, 4]},
            "bounds: found 0 2 4; expected 0 to 5, the number of the model's layers",
        ),
        ({"dp": None}, "dp: key is missing; a strategy without bounds and stages needs it"),
        ({"token_slices": [[2, [5, 3]]]}, "token_slices: needs cuts; add bounds"),
        ({"placement": [["node0", 0]]}, "placement: needs cuts; add bounds"),
    ],
)
def test_a_strategy_of_another_experiment_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=rf"^given: \[0\]: {message}"):
        parse(json.dumps([RECORD | changes]))


# ----------------------------------------------------------------------- STRATEGY objects

UNIFORM = Strategy.uniform(
    Candidate(micro_batch_size=2, options=StageOptions(tp=1, dp=2), pp=2, num_micro_batches=4),
    (0, 3, 5),
    (3, 2, 1, 0),
)
FIRST = Stage(first_layer=0, end_layer=3, options=StageOptions(tp=1, dp=2), shares=(1, 3))
SECOND = Stage(
    first_layer=3, end_layer=5, options=StageOptions(tp=2, dp=1, recompute=FULL), shares=(4,)
)
DIFFERENT = Strategy(
    stages=(FIRST, SECOND), micro_batch_size=4, num_micro_batches=2, placement=(0, 1, 2, 3)
)


def alike(*per_stage: StageOptions) -> Strategy:
    """Return two stages with these options, the same for both if there is one."""
    first, second = per_stage if len(per_stage) > 1 else per_stage * 2
    return Strategy(
        stages=(
            Stage(first_layer=0, end_layer=3, options=first),
            Stage(first_layer=3, end_layer=5, options=second),
        ),
        micro_batch_size=2,
        num_micro_batches=4,
        placement=(0, 1, 2, 3),
    )


PLAIN = StageOptions(tp=2, dp=1)
DIVIDED = StageOptions(tp=2, dp=1, sequence_parallel=True)
SPREAD = StageOptions(tp=1, dp=2, ep=2, etp=1)
PARTLY = {"kind": "full", "layers": 2}


def record(strategy: Strategy = UNIFORM, **changes: object) -> dict[str, Any]:
    return copy.deepcopy(strategy_to_json(strategy, CLUSTER)) | changes


def test_a_uniform_strategy_is_written_by_the_contract() -> None:
    assert record() == {
        "tp": 1,
        "pp": 2,
        "dp": 2,
        "micro_batch_size": 2,
        "num_micro_batches": 4,
        "bounds": [0, 3, 5],
        "recompute": "none",
        "placement": [["b", 1], ["b", 0], ["a", 1], ["a", 0]],
    }


def test_stages_that_differ_are_spelled_out() -> None:
    written = record(DIFFERENT)
    assert (written["tp"], written["dp"], written["recompute"]) == (None, None, ["none", "full"])
    assert written["stages"][1] == {
        "layers": [3, 5],
        "tp": 2,
        "dp": 1,
        "devices": [2, 3],
        "recompute": "full",
        "shares": [4],
    }


@pytest.mark.parametrize(
    ("strategy", "keys", "of_stages"),
    [
        (replace(UNIFORM, token_slices=((2, (5, 3)),)), {"token_slices": [[2, [5, 3]]]}, None),
        (alike(DIVIDED), {"sequence_parallel": True}, None),
        (alike(PLAIN, DIVIDED), {}, [{}, {"sequence_parallel": True}]),
        (alike(SPREAD), {"ep": 2, "etp": 1}, None),
        (alike(replace(SPREAD, ep=1, etp=0), SPREAD), {}, [{}, {"ep": 2, "etp": 1}]),
    ],
)
def test_dimensions_that_are_not_off_stand_beside_the_degrees(
    strategy: Strategy, keys: dict[str, object], of_stages: list[dict[str, object]] | None
) -> None:
    written, names = record(strategy), ("token_slices", "sequence_parallel", "ep", "etp")
    assert {name: written[name] for name in names if name in written} == keys
    if of_stages is not None:
        stages = written["stages"]
        assert [{key: s[key] for key in names if key in s} for s in stages] == of_stages
    assert strategy_from_json(written, CLUSTER) == strategy


def test_a_placement_that_is_left_out_is_the_order_of_the_devices() -> None:
    assert strategy_from_json(record(placement=None), CLUSTER).placement == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (["full", "none"], ["full", "none"]),
        ([PARTLY, "selective"], ["full:2", "selective"]),
        (PARTLY, ["full:2", "full:2"]),
    ],
)
def test_recompute_may_differ_by_stage_and_cover_part_of_one(
    written: object, words: list[str]
) -> None:
    strategy = strategy_from_json(record(recompute=written), CLUSTER)
    assert [str(stage.options.recompute) for stage in strategy.stages] == words
    assert record(strategy)["recompute"] == written
    assert strategy_from_json(record(strategy), CLUSTER) == strategy


def test_stages_alone_are_enough() -> None:
    written = record(DIFFERENT, tp=None, pp=None, dp=None, bounds=None, recompute=None)
    for stage in written["stages"]:
        del stage["devices"]
    assert strategy_from_json(written, CLUSTER) == DIFFERENT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": "1"}, "strategy: tp: found '1'; expected an integer"),
        ({"tp": 1.0}, "strategy: tp: found 1.0; expected an integer"),
        ({"tp": None}, "strategy: a strategy needs tp, dp and bounds, or stages"),
        ({"pp": 3}, "strategy: pp is 3, but the stages make it 2"),
        ({"dp": 3}, "strategy: uses 6 devices; the cluster has 4"),
        ({"bounds": [0]}, r"strategy: bounds: found \[0\]; expected"),
        ({"bounds": [1, 3, 5]}, r"strategy: bounds run from 0 to the number of layers, found \[1"),
        ({"bounds": [0, 5, 3]}, r"strategy: a stage needs layers, found \[5, 3\)"),
        ({"bounds": "0 3 5"}, "strategy: bounds: found '0 3 5'; expected a list"),
        ({"num_micro_batches": None}, "strategy: key 'num_micro_batches' is missing"),
        (
            {"recompute": "some"},
            (
                "strategy: recompute: found 'some'; expected 'none', 'selective', 'per-operator', "
                "'full' or 'auto'"
            ),
        ),
        (
            {"recompute": ["some", "none"]},
            (
                "strategy: recompute.0: found 'some'; expected 'none', 'selective', 'per-operator' "
                "or 'full'"
            ),
        ),
        (
            {"recompute": {"kind": "full"}},
            "strategy: recompute.layers: key 'layers' is missing",
        ),
        ({"recompute": "auto"}, "strategy: recompute 'auto' is for a search to choose"),
        (
            {"ep": 4},
            "strategy: ep x etp divides the ranks of a stage, found ep 4 x etp 1 for 2 ranks",
        ),
        ({"recompute": ["none"]}, "strategy: found 1 values of recompute for 2 stages"),
        ({"placement": [["a", 0]]}, "strategy: placement must give 4 ranks a device each"),
        ({"placement": [["a", 2]]}, "strategy: placement names slot 2 of host 'a', which the clu"),
        ({"placement": [["a"]]}, "strategy: placement.0.1: entry 1 is missing"),
        ({"placement": ["a"]}, "strategy: placement.0: found 'a'; expected a list"),
        ({"speed": 1}, "strategy: speed: unknown key 'speed'; known here: .*tp, pp"),
        ({"token_slices": [[2]]}, "strategy: token_slices.0.1: entry 1 is missing"),
        ({"token_slices": [[2, []]]}, r"strategy: token_slices.0.1: found \[\]; expected"),
        ({"token_slices": [[1, [8]]]}, "strategy: the sequences of token_slices must add up to"),
        ({"stages": []}, r"strategy: stages: found \[\]; expected"),
        ({"stages": [{"layers": [0, 5]}]}, "strategy: stages.0.tp: key 'tp' is missing"),
        (
            {"stages": [{"layers": [0, 5], "tp": [1, 4], "dp": 2}]},
            r"strategy: stages.0.tp: found \[1, 4\]; expected one tp for all replicas",
        ),
    ],
)
def test_a_mistake_is_led_to_its_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        strategy_from_json(record() | changes, CLUSTER)


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        (DIFFERENT, {"tp": 2}, "tp is 2, but the stages make it None"),
        (
            DIFFERENT,
            {"bounds": [0, 2, 5]},
            r"bounds is \[0, 2, 5\], but the stages make it \[0, 3, 5\]",
        ),
        (DIFFERENT, {"recompute": "full"}, "recompute is full, but the stages make it None"),
        (
            alike(PLAIN, DIVIDED),
            {"sequence_parallel": False},
            "sequence_parallel is False, but the stages make it None",
        ),
    ],
)
def test_keys_that_contradict_the_stages_are_refused(
    strategy: Strategy, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        strategy_from_json(record(strategy) | changes, CLUSTER)


def test_devices_are_the_ranks_of_their_stage() -> None:
    written = record(DIFFERENT)
    written["stages"][0]["devices"] = [1, 0]
    message = r"devices of stage 0 are its ranks \[0, 1\], found \[1, 0"
    with pytest.raises(InputError, match=message):
        strategy_from_json(written, CLUSTER)
