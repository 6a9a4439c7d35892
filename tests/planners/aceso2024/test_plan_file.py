import json
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import strategy_from_json, strategy_to_json
from amp_ray.planners.aceso2024.plan_file import aceso_plan_text, read_aceso_plan
from amp_ray.planners.operators.strategy import operator_strategy
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE, SELECTIVE, Recompute
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from support.aceso import aceso_experiment
from support.experiments import small_experiment

CORE = [0, 0, 1, 1, 1, 1] + [0] * 7
"""Operators of a block that ``selective`` computes again."""


def mixed_plan() -> Strategy:
    """Return two stages of two devices; the first one changes its degrees and recomputes."""
    first = [(2, 1, 0, False)] * 8 + [(1, 2, 0, True)] * 3 + [(2, 1, 1, False)]
    return operator_strategy(
        [first, [(1, 2, 0, False)] * 17], samples_per_micro_batch=2, num_micro_batches=8
    )


def read(record: dict[str, Any], experiment: Experiment | None = None) -> Strategy:
    """Read a plan for the made-up experiment."""
    return read_aceso_plan(record, file="plan.json", experiment=experiment or aceso_experiment())


def test_a_plan_comes_back_as_it_was() -> None:
    plan = mixed_plan()
    record = json.loads(aceso_plan_text(plan, aceso_experiment()))
    assert read(record) == plan
    assert (record["model_name"], record["model_size"]) == ("gpt", "tiny")
    assert record["num_ops_in_each_stage"] == [12, 17]
    assert record["num_gpus"] == [2, 2]
    assert record["checkpoint_activations"] == [True, False]
    assert record["resharding_stages"] == [True, False]
    assert record["recompute_ops"][0] == [0] * 8 + [1] * 3 + [0]
    assert record["algo_of_each_op"][0] == [0] * 11 + [1]
    assert (record["micro_batch_size"], record["global_batch_size"]) == (2, 16)


def test_a_plan_comes_back_from_our_own_json() -> None:
    plan, cluster = mixed_plan(), aceso_experiment().cluster
    record = json.loads(json.dumps(strategy_to_json(plan, cluster)))
    assert strategy_from_json(record, cluster) == plan
    assert record["stages"][0]["operators"][1] == {
        "range": [8, 11],
        "tp": 1,
        "dp": 2,
        "algorithm": 0,
        "recompute": True,
    }


@pytest.mark.parametrize(
    ("recompute", "bits"),
    [
        (FULL, [[0] + [1] * 13, [1] * 13 + [0] * 2]),
        (SELECTIVE, [[0, *CORE], [*CORE, 0, 0]]),
        (NO_RECOMPUTE, [[0] * 14, [0] * 15]),
    ],
)
def test_layers_become_operators(recompute: Recompute, bits: list[list[int]]) -> None:
    options = StageOptions(tp=1, dp=2, recompute=recompute)
    stages = tuple(
        Stage(first_layer=first, end_layer=end, options=options) for first, end in ((0, 2), (2, 5))
    )
    plan = Strategy(stages=stages, micro_batch_size=1, num_micro_batches=8, placement=(0, 1, 2, 3))
    record = json.loads(aceso_plan_text(plan, aceso_experiment()))
    assert record["num_ops_in_each_stage"] == [14, 15]
    assert record["recompute_ops"] == bits
    assert record["micro_batch_size"] == 2


def test_the_first_blocks_of_a_stage_recompute_first() -> None:
    options = StageOptions(tp=2, dp=2, recompute=Recompute(kind="full", layers=1))
    stage = Stage(first_layer=0, end_layer=5, options=options)
    plan = Strategy(
        stages=(stage,), micro_batch_size=1, num_micro_batches=8, placement=(0, 1, 2, 3)
    )
    record = json.loads(aceso_plan_text(plan, aceso_experiment()))
    assert record["recompute_ops"] == [[0] + [1] * 13 + [0] * 15]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_ops_in_each_stage", [12, 16], r"found 28 operators; gpt_tiny has 29"),
        ("num_gpus", [2, 1], r"found 3 devices; the cluster has 4"),
        ("num_gpus", [1, 3], r"operator 0 of stage 0 has tp 2 x dp 1; num_gpus .* is 1"),
        ("num_stages", 3, r"found 3; num_gpus has 2 stages"),
        ("global_batch_size", 32, r"found 32; the experiment has 16"),
        ("micro_batch_size", 3, r"found 3; it must divide 16"),
        ("micro_batch_size", 1, r"dp 2 does not divide a micro-batch of 1"),
        ("algo_of_each_op", [[0] * 12, [2] * 17], r"algo_of_each_op"),
        ("recompute_ops", [[0] * 12, [0]], r"found lists of \[12, 1\] operators"),
        ("recompute_ops", None, r"expected a list"),
    ],
)
def test_what_does_not_fit_is_refused(key: str, value: object, message: str) -> None:
    record = json.loads(aceso_plan_text(mixed_plan(), aceso_experiment()))
    with pytest.raises(InputError, match=message):
        read(record | {key: value})


def test_a_missing_key_is_named() -> None:
    record = json.loads(aceso_plan_text(mixed_plan(), aceso_experiment()))
    del record["algo_of_each_op"]
    with pytest.raises(InputError, match="key 'algo_of_each_op' is missing"):
        read(record)


def test_an_experiment_without_operators_takes_and_gives_none() -> None:
    record = json.loads(aceso_plan_text(mixed_plan(), aceso_experiment()))
    with pytest.raises(InputError, match="profile knows operators"):
        read(record, small_experiment())
    with pytest.raises(ValueError, match=r"profile\.source aceso"):
        aceso_plan_text(mixed_plan(), small_experiment())
