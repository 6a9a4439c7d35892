import copy
from dataclasses import replace
from typing import Any

import pytest

from amp_ray.clusters.catalogue import find_device
from amp_ray.clusters.cluster import Cluster, Link, Node
from amp_ray.errors import InputError
from amp_ray.inputs.strategy_json import strategy_from_json, strategy_to_json
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE, Recompute
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy

LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
CLUSTER = Cluster(
    nodes=tuple(
        Node(name=name, device=find_device("T4"), num_slots=2, intra=LINK, inter=LINK)
        for name in ("a", "b")
    )
)
UNIFORM = Strategy.uniform(
    Candidate(micro_batch_size=2, options=StageOptions(tp=1, dp=2), pp=2, num_micro_batches=4),
    (0, 3, 5),
    (3, 2, 1, 0),
)
DIFFERENT = Strategy(
    stages=(
        Stage(first_layer=0, end_layer=3, options=StageOptions(tp=1, dp=2), shares=(1, 3)),
        Stage(
            first_layer=3,
            end_layer=5,
            options=StageOptions(tp=2, dp=1, recompute=FULL),
            shares=(4,),
        ),
    ),
    micro_batch_size=4,
    num_micro_batches=2,
    placement=(0, 1, 2, 3),
)
PARTLY = Strategy(
    stages=(
        Stage(first_layer=0, end_layer=3, options=StageOptions(tp=2, dp=1)),
        Stage(
            first_layer=3,
            end_layer=5,
            options=StageOptions(tp=2, dp=1, sequence_parallel=True),
        ),
    ),
    micro_batch_size=1,
    num_micro_batches=2,
    placement=(0, 1, 2, 3),
)


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
    found = record(DIFFERENT)
    assert (found["tp"], found["dp"], found["recompute"]) == (None, None, ["none", "full"])
    assert found["stages"][1] == {
        "layers": [3, 5],
        "tp": 2,
        "dp": 1,
        "devices": [2, 3],
        "recompute": "full",
        "shares": [4],
    }


def test_slices_stand_beside_the_degrees_only_where_there_are_some() -> None:
    sliced = replace(UNIFORM, token_slices=((2, (5, 3)),))
    found = record(sliced)
    assert found["token_slices"] == [[2, [5, 3]]]
    assert strategy_from_json(found, CLUSTER) == sliced


def test_sequence_parallelism_stands_beside_the_degrees_only_where_it_is_on() -> None:
    options = StageOptions(tp=2, dp=1, sequence_parallel=True)
    candidate = Candidate(micro_batch_size=2, options=options, pp=2, num_micro_batches=4)
    divided = Strategy.uniform(candidate, (0, 3, 5))
    found = record(divided)
    assert found["sequence_parallel"] is True
    assert strategy_from_json(found, CLUSTER) == divided
    with pytest.raises(InputError, match="sequence_parallel is False, but the stages make it None"):
        strategy_from_json(record(PARTLY) | {"sequence_parallel": False}, CLUSTER)


def test_stages_that_differ_in_sequence_parallelism_are_spelled_out() -> None:
    found = record(PARTLY)
    assert [stage.get("sequence_parallel") for stage in found["stages"]] == [None, True]
    assert strategy_from_json(found, CLUSTER) == PARTLY


def test_a_placement_that_is_left_out_is_the_order_of_the_devices() -> None:
    assert strategy_from_json(record(placement=None), CLUSTER).placement == (0, 1, 2, 3)


def test_experts_are_told_where_they_are_shared_out() -> None:
    found = strategy_from_json(record(ep=2, etp=1), CLUSTER)
    assert [(stage.options.ep, stage.options.expert_dp) for stage in found.stages] == [(2, 1)] * 2
    told = strategy_to_json(found, CLUSTER)
    assert (told["ep"], told["etp"]) == (2, 1)
    assert strategy_from_json(told, CLUSTER) == found
    assert "ep" not in record()


def test_stages_may_share_out_experts_differently() -> None:
    stages = tuple(
        replace(stage, options=replace(stage.options, ep=ep))
        for stage, ep in zip(UNIFORM.stages, (1, 2), strict=True)
    )
    strategy = replace(UNIFORM, stages=stages)
    told = strategy_to_json(strategy, CLUSTER)
    assert "ep" not in told
    assert [stage.get("ep") for stage in told["stages"]] == [None, 2]
    assert strategy_from_json(told, CLUSTER) == strategy


def test_recompute_may_differ_by_stage() -> None:
    found = strategy_from_json(record(recompute=["full", "none"]), CLUSTER)
    assert [stage.options.recompute for stage in found.stages] == [FULL, NO_RECOMPUTE]


def test_part_of_a_stage_may_be_recomputed() -> None:
    part = {"kind": "full", "layers": 2}
    found = strategy_from_json(record(recompute=[part, "selective"]), CLUSTER)
    assert [str(stage.options.recompute) for stage in found.stages] == ["full:2", "selective"]
    told = strategy_to_json(found, CLUSTER)
    assert told["recompute"] == [part, "selective"]
    assert strategy_from_json(told, CLUSTER) == found


def test_a_part_that_all_stages_have_stands_there_once() -> None:
    part = {"kind": "selective", "layers": 1}
    found = strategy_from_json(record(recompute=part), CLUSTER)
    assert found.recompute == Recompute(kind="selective", layers=1)
    assert strategy_to_json(found, CLUSTER)["recompute"] == part


def test_stages_alone_are_enough() -> None:
    found = record(DIFFERENT, tp=None, pp=None, dp=None, bounds=None, recompute=None)
    for stage in found["stages"]:
        del stage["devices"]
    assert strategy_from_json(found, CLUSTER) == DIFFERENT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": "1"}, "strategy: tp: found '1'; expected an integer"),
        ({"tp": 1.0}, "strategy: tp: found 1.0; expected an integer"),
        ({"tp": None}, "strategy: a strategy needs tp, dp and bounds, or stages"),
        ({"pp": 3}, "strategy: pp is 3, but the stages make it 2"),
        ({"bounds": [0]}, r"strategy: bounds: found \[0\]; expected"),
        ({"bounds": [1, 3, 5]}, r"strategy: bounds run from 0 to the number of layers, found \[1"),
        ({"bounds": [0, 5, 3]}, r"strategy: a stage needs layers, found \[5, 3\)"),
        ({"bounds": "0 3 5"}, "strategy: bounds: found '0 3 5'; expected a list"),
        ({"num_micro_batches": None}, "strategy: key 'num_micro_batches' is missing"),
        (
            {"recompute": "some"},
            "strategy: recompute: found 'some'; expected 'none', 'selective', 'full' or 'auto'",
        ),
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
    ("key", "value", "message"),
    [
        ("tp", 2, "tp is 2, but the stages make it None"),
        ("bounds", [0, 2, 5], r"bounds is \[0, 2, 5\], but the stages make it \[0, 3, 5\]"),
        ("recompute", "full", "recompute is full, but the stages make it None"),
    ],
)
def test_keys_that_contradict_the_stages_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        strategy_from_json(record(DIFFERENT) | {key: value}, CLUSTER)


def test_devices_are_the_ranks_of_their_stage() -> None:
    found = record(DIFFERENT)
    found["stages"][0]["devices"] = [1, 0]
    with pytest.raises(
        InputError, match=r"devices of stage 0 are its ranks \[0, 1\], found \[1, 0"
    ):
        strategy_from_json(found, CLUSTER)
