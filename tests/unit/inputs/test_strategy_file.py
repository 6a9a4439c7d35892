import json

import pytest

from amp_ray.clusters.catalogue import find_device
from amp_ray.clusters.cluster import Cluster, Link, Node
from amp_ray.errors import InputError
from amp_ray.inputs.strategy_file import Context, Given, parse_strategies
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE, Recompute
from amp_ray.strategies.strategy import StageOptions, Strategy

LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
CLUSTER = Cluster(
    nodes=(Node(name="a", device=find_device("T4"), num_slots=4, intra=LINK, inter=LINK),)
)
CANDIDATE = Candidate(
    micro_batch_size=1, options=StageOptions(tp=1, dp=2), pp=2, num_micro_batches=4
)
HEADER = "tp,pp,dp,micro_batch_size,bounds,measured_s\n"
RECORD = {"tp": 1, "pp": 2, "dp": 2, "micro_batch_size": 1}


def parse(text: str, recompute: Recompute = NO_RECOMPUTE) -> tuple[Given, ...]:
    context = Context(cluster=CLUSTER, num_layers=5, global_batch_size=8, recompute=recompute)
    return parse_strategies(text, file="given", context=context)


def test_a_line_without_bounds_leaves_the_cuts_to_the_solver() -> None:
    (found,) = parse(HEADER + "1,2,2,1,,\n")
    assert (found.candidate, found.strategy) == (CANDIDATE, None)


def test_a_line_with_bounds_is_a_complete_strategy() -> None:
    (found,) = parse(HEADER + "1,2,2,1,0 2 5,\n")
    assert found.strategy == Strategy.uniform(CANDIDATE, (0, 2, 5))


def test_columns_may_stand_in_any_order_with_spaces_and_quotes() -> None:
    (found,) = parse('bounds, dp, pp, tp, micro_batch_size\n"0 2 5", 2, 2, 1, 1\n')
    assert found.strategy == Strategy.uniform(CANDIDATE, (0, 2, 5))


@pytest.mark.parametrize(
    ("cell", "measured"),
    [
        ("", (None, None)),
        ("1.25", (1.25, None)),
        ("oom", (None, "oom")),
        ("failed", (None, "failed")),
    ],
)
def test_a_measurement_is_seconds_or_a_word_for_a_failure(
    cell: str, measured: tuple[float | None, str | None]
) -> None:
    (found,) = parse(f"{HEADER}1,2,2,1,,{cell}\n")
    assert (found.measured_s, found.failure) == measured


def test_each_strategy_knows_its_line() -> None:
    found = parse(HEADER + "1,2,2,1,,\n\n2,1,2,1,,\n")
    assert [str(entry.where) for entry in found] == ["given:2", "given:4"]


def test_columns_at_the_end_may_be_left_out_of_a_line() -> None:
    (found,) = parse(HEADER + "1,2,2,1\n")
    assert (found.strategy, found.measured_s) == (None, None)


def test_recompute_is_the_experiments_unless_told() -> None:
    found = parse("tp,pp,dp,micro_batch_size,recompute\n1,2,2,1,\n1,2,2,1,none\n", FULL)
    assert [entry.candidate and entry.candidate.options.recompute for entry in found] == [
        FULL,
        NO_RECOMPUTE,
    ]


def test_sequence_parallelism_is_the_experiments_unless_told() -> None:
    context = Context(
        cluster=CLUSTER,
        num_layers=5,
        global_batch_size=8,
        recompute=NO_RECOMPUTE,
        sequence_parallel=True,
        divides_tokens=lambda tp: tp < 4,
    )
    text = "tp,pp,dp,micro_batch_size,sequence_parallel\n2,2,1,1,\n2,2,1,1,false\n4,1,1,1,\n"
    found = parse_strategies(text, file="given", context=context)
    options = [entry.candidate.options for entry in found if entry.candidate]
    assert [own.sequence_parallel for own in options] == [True, False, False]
    for row, message in {
        "4,1,1,1,true": "sequence_parallel: found true; tp 4 must divide the tokens",
        "1,2,2,1,true": "sequence_parallel divides .* needs tp 2 or more",
        "2,2,1,1,yes": "sequence_parallel: found 'yes'; expected true or false",
    }.items():
        with pytest.raises(InputError, match=message):
            parse_strategies(f"{text}{row}\n", file="given", context=context)


def test_a_column_may_tell_how_experts_are_shared_out() -> None:
    first, second = parse("tp,pp,dp,micro_batch_size,ep\n1,2,2,1,2\n1,2,2,1,\n")
    assert first.candidate is not None
    assert second.candidate is not None
    assert (first.candidate.options.ep, second.candidate.options.ep) == (2, 1)
    with pytest.raises(
        InputError, match=r"given:2: ep x etp divides the ranks of a stage, found ep 4"
    ):
        parse("tp,pp,dp,micro_batch_size,ep\n1,2,2,1,4\n")


def test_stages_may_recompute_differently() -> None:
    head = "tp,pp,dp,micro_batch_size,recompute,bounds\n"
    each, same = parse(head + "1,2,2,1,full:2 none,0 3 5\n1,2,2,1,selective,0 3 5\n")
    assert each.strategy is not None
    assert same.strategy is not None
    assert [str(stage.options.recompute) for stage in each.strategy.stages] == ["full:2", "none"]
    assert same.strategy.recompute == Recompute(kind="selective")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("full:0,0 3 5", "found 'full:0'; expected one of none, selective, full; or full:3 for"),
        ("none:1,0 3 5", "recompute 'none' has no layers, found 1"),
        ("full none full,0 3 5", "found 3 values; expected one for all stages, or one for each of"),
        ("full none,", "found 2 values; expected one for all stages, as it has no bounds"),
    ],
)
def test_recompute_that_does_not_fit_is_refused(row: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(f"tp,pp,dp,micro_batch_size,recompute,bounds\n1,2,2,1,{row}\n")


def test_json_without_bounds_leaves_the_cuts_to_the_solver() -> None:
    (found,) = parse(json.dumps([RECORD]))
    assert (found.candidate, found.strategy) == (CANDIDATE, None)


def test_a_row_of_a_ranking_stands_for_its_strategy() -> None:
    row = {"position": 1, "strategy": RECORD | {"bounds": None, "placement": None}}
    for given in ([row], {"schema": 1, "ranking": [row]}, {"schema": 1, "rows": [row]}):
        assert parse(json.dumps(given))[0].candidate == CANDIDATE


def test_json_with_bounds_takes_the_experiments_recompute() -> None:
    record = RECORD | {"num_micro_batches": 4, "bounds": [0, 2, 5]}
    (found,) = parse(json.dumps([record]), FULL)
    assert found.strategy is not None
    assert found.strategy.recompute == FULL


def test_stages_say_their_own_recompute() -> None:
    stages = [{"layers": [0, 5], "tp": 4, "dp": 1}]
    record = {"micro_batch_size": 1, "num_micro_batches": 8, "stages": stages}
    (found,) = parse(json.dumps([record]), FULL)
    assert found.strategy is not None
    assert found.strategy.recompute == NO_RECOMPUTE


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
    ],
)
def test_a_strategy_of_another_experiment_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=rf"^given: \[0\]: {message}"):
        parse(json.dumps([RECORD | changes]))


def test_a_number_of_too_many_digits_is_refused() -> None:
    with pytest.raises(InputError, match=r"^given: not usable JSON"):
        parse(f"[{'9' * 5000}]")


def test_a_header_tells_everything_that_is_wrong_with_it() -> None:
    with pytest.raises(InputError, match=r"missing: pp, micro_batch_size; unknown: x; twice: tp$"):
        parse("tp,tp,dp,x\n")


MEASURED = "tp,pp,dp,micro_batch_size,measured_s,spread_s,peak_memory_bytes\n"


def test_spread_and_peaks_stand_beside_a_measurement() -> None:
    (found,) = parse(MEASURED + "1,2,2,1,1.25,0.02,3000000000 2000000000\n")
    assert (found.spread_s, found.peak_memory_bytes) == (0.02, (3e9, 2e9))


def test_a_mean_stands_beside_a_median_or_is_the_same() -> None:
    table = HEADER.replace("measured_s", "measured_s,mean_s")
    assert parse(table + "1,2,2,1,,1.25,1.5\n")[0].mean_s == 1.5
    assert parse(table + "1,2,2,1,,1.25,\n")[0].mean_s == 1.25
    assert parse(HEADER + "1,2,2,1,,1.25\n")[0].mean_s == 1.25
    for mean_s in ("0", "-1", "x"):
        with pytest.raises(InputError, match=r"^given:2: mean_s: .*expected seconds from 1e-06"):
            parse(f"{table}1,2,2,1,,1.25,{mean_s}\n")
    with pytest.raises(InputError, match=r"^given:2: mean_s: found '1.5'"):
        parse(table + "1,2,2,1,,oom,1.5\n")


def test_a_spread_of_nothing_is_a_spread() -> None:
    (found,) = parse(MEASURED + "1,2,2,1,1.25,0,\n")
    assert found.spread_s == 0.0


def test_nobody_need_know_spread_and_peaks() -> None:
    (empty,) = parse(MEASURED + "1,2,2,1,1.25,,\n")
    (without,) = parse(HEADER + "1,2,2,1,,1.25\n")
    for found in (empty, without):
        assert (found.measured_s, found.spread_s, found.peak_memory_bytes) == (1.25, None, ())


def test_one_peak_is_that_of_the_largest_stage() -> None:
    (found,) = parse(MEASURED + "1,2,2,1,1.25,,3000000000\n")
    assert found.peak_memory_bytes == (3e9,)


def test_a_trial_out_of_memory_may_know_how_far_it_came() -> None:
    (found,) = parse(MEASURED + "1,2,2,1,oom,,15800000000\n")
    assert (found.failure, found.peak_memory_bytes) == ("oom", (15.8e9,))


@pytest.mark.parametrize("measured", ["", "oom", "failed"])
def test_a_spread_without_seconds_is_refused(measured: str) -> None:
    message = (
        r"^given:2: spread_s: found '0.02'; expected seconds from 0 beside a measured_s in sec"
    )
    with pytest.raises(InputError, match=message):
        parse(f"{MEASURED}1,2,2,1,{measured},0.02,\n")


@pytest.mark.parametrize("word", ["-0.02", "nan", "inf", "2 %", "0,02"])
def test_a_spread_that_is_no_time_is_refused(word: str) -> None:
    with pytest.raises(InputError, match=r"^given:2: spread_s: found '"):
        parse(f'{MEASURED}1,2,2,1,1.25,"{word}",\n')


@pytest.mark.parametrize(
    "text", ["3e9", "-1", "2.5 GB", "3_000", "3000;2000", "\N{SUPERSCRIPT TWO}"]
)
def test_peaks_are_whole_bytes(text: str) -> None:
    with pytest.raises(InputError, match=r"^given:2: peak_memory_bytes: .*; expected bytes as who"):
        parse(f"{MEASURED}1,2,2,1,1.25,,{text}\n")


@pytest.mark.parametrize("text", ["1 2 3", "1 2 3 4"])
def test_there_are_as_many_peaks_as_stages_or_one(text: str) -> None:
    number = len(text.split())
    message = (
        rf"^given:2: peak_memory_bytes: found {number} figures; expected one, or one per stage"
    )
    with pytest.raises(InputError, match=message):
        parse(f"{MEASURED}1,2,2,1,1.25,,{text}\n")
