"""Aceso's plan files: one JSON object with lists, per stage, of the use of each operator."""

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field

from amp_ray.errors import InputError, Where
from amp_ray.exports.chosen import Chosen, Export
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.operator_profile import OperatorProfile
from amp_ray.inputs.section import Count, Section, validate
from amp_ray.inputs.yaml_text import Document
from amp_ray.planners.aceso2024.cost import aceso_plan
from amp_ray.planners.aceso2024.planner import not_expressible
from amp_ray.planners.operators.strategy import operator_strategy, operator_uses
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import Zero

SIGNATURE: Final = "num_ops_in_each_stage"
"""Top-level key that only Aceso's plan files have, by which they are recognised."""

_MODEL: Final = re.compile(r"(?P<name>.*?(?:gpt|t5|resnet))_(?P<size>.+)", flags=re.IGNORECASE)

_Stages = Annotated[list[Count], Field(min_length=1)]
_Operators = Annotated[list[list[Count]], Field(min_length=1)]
_Bits = Annotated[list[list[Annotated[int, Field(ge=0, le=1)]]], Field(min_length=1)]


class AcesoPlanRecord(Section):
    """The keys of a plan file that define the plan; the others repeat the model."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    global_batch_size: Count
    micro_batch_size: Count
    num_stages: Count
    num_gpus: _Stages
    num_ops_in_each_stage: _Stages
    model_parallel_size_of_each_op: _Operators
    data_parallel_size_of_each_op: _Operators
    recompute_ops: _Bits
    algo_of_each_op: _Bits


_PER_OPERATOR: Final = (
    "model_parallel_size_of_each_op",
    "data_parallel_size_of_each_op",
    "algo_of_each_op",
    "recompute_ops",
)
"""Keys of a stage, in the order of the fields of `OperatorUse`."""


def read_aceso_plan(record: Mapping[str, Any], *, file: str, experiment: Experiment) -> Strategy:
    """Read a plan file for an experiment with operators.

    Raises:
        InputError: If a key is missing or wrong, or the plan does not fit the experiment.
    """
    checked = validate(AcesoPlanRecord, Document(file=file, values=record))
    profile = experiment.profile.operators
    if profile is None:
        message = "a plan of Aceso's needs an experiment whose profile knows operators (aceso)"
        raise InputError(message, where=Where(file=file))
    _check_experiment(checked, file, experiment, profile)
    stages = _uses(checked, file)
    try:
        return operator_strategy(
            stages,
            samples_per_micro_batch=checked.micro_batch_size,
            num_micro_batches=checked.global_batch_size // checked.micro_batch_size,
            zero=Zero(stage=max(experiment.zero_stage, 0)),
        )
    except ValueError as error:
        raise InputError(str(error), where=Where(file=file)) from None


def aceso_plan_text(strategy: Strategy, experiment: Experiment) -> str:
    """Return a strategy as the text of an Aceso plan file.

    `read_aceso_plan` reads it back. If the strategy names layers, they are written as the operators
    of the profile's chain.

    Raises:
        ValueError: If the experiment's profile has no operators, the strategy has other layers, or
            its stages do not use all devices in order.
    """
    profile = experiment.profile.operators
    if profile is None:
        message = "a plan of Aceso's needs a profile that knows operators: profile.source aceso"
        raise ValueError(message)
    if strategy.placement != tuple(range(experiment.cluster.num_devices)):
        raise ValueError(
            f"Aceso uses all {experiment.cluster.num_devices} devices in their order; the strategy "
            "has another placement: plan with search.idle_devices=false, or choose another one"
        )
    stages = operator_uses(strategy, profile)
    columns = [list(zip(*uses, strict=True)) for uses in stages]
    shape, family = experiment.model.shape, _MODEL.fullmatch(profile.model)
    document = {
        "model_name": family["name"] if family else profile.family,
        "model_size": family["size"] if family else profile.model,
        "num_layers": shape.num_layers,
        "seq_length": shape.sequence_length,
        "max_position_embeddings": shape.sequence_length,
        "num_attention_heads": shape.num_heads,
        "hidden_size": shape.hidden_size,
        "global_batch_size": strategy.global_batch_size,
        "micro_batch_size": strategy.samples_per_micro_batch,
        "num_stages": strategy.pp,
        "num_gpus": [stage.num_ranks for stage in strategy.stages],
        "checkpoint_activations": [any(use[3] for use in uses) for uses in stages],
        "resharding_stages": [
            any(first[:3] != second[:3] for first, second in pairwise(uses)) for uses in stages
        ],
        SIGNATURE: [len(uses) for uses in stages],
        **{
            key: [list(map(int, per_stage[index])) for per_stage in columns]
            for index, key in enumerate(_PER_OPERATOR)
        },
    }
    return json.dumps(document, indent=1) + "\n"


def _check_experiment(
    record: AcesoPlanRecord, file: str, experiment: Experiment, profile: OperatorProfile
) -> None:
    batch, devices = experiment.global_batch_size, experiment.cluster.num_devices
    samples = record.micro_batch_size
    for key, value, expected in (
        ("num_stages", record.num_stages, len(record.num_gpus)),
        (SIGNATURE, sum(record.num_ops_in_each_stage), profile.num_operators),
        ("num_gpus", sum(record.num_gpus), devices),
        ("global_batch_size", record.global_batch_size, batch),
        ("micro_batch_size", batch // samples * samples, batch),
    ):
        if value != expected:
            message = {
                "num_stages": f"found {value}; num_gpus has {expected} stages",
                SIGNATURE: f"found {value} operators; {profile.model} has {expected}",
                "num_gpus": f"found {value} devices; the cluster has {expected}",
                "global_batch_size": f"found {value}; the experiment has {expected}",
                "micro_batch_size": f"found {samples}; it must divide {expected}, the batch",
            }[key]
            raise InputError(message, where=Where(file=file, key=key))


def _uses(record: AcesoPlanRecord, file: str) -> list[list[OperatorUse]]:
    """Return the use of each operator by stage; raise `InputError` if lists differ in length."""
    columns = {key: getattr(record, key) for key in _PER_OPERATOR}
    for key, stages in columns.items():
        if list(map(len, stages)) != record.num_ops_in_each_stage:
            message = (
                f"found lists of {list(map(len, stages))} operators; {SIGNATURE} is "
                f"{record.num_ops_in_each_stage}"
            )
            raise InputError(message, where=Where(file=file, key=key))
    uses = [
        [(tp, dp, algorithm, bool(bit)) for tp, dp, algorithm, bit in zip(*lists, strict=True)]
        for lists in zip(*columns.values(), strict=True)
    ]
    for stage, (stage_uses, num_gpus) in enumerate(zip(uses, record.num_gpus, strict=True)):
        for operator, (tp, dp, _, _) in enumerate(stage_uses):
            if tp * dp != num_gpus:
                message = (
                    f"operator {operator} of stage {stage} has tp {tp} x dp {dp}; num_gpus of the "
                    f"stage is {num_gpus}"
                )
                raise InputError(message, where=Where(file=file, key=_PER_OPERATOR[0]))
    return uses


def export_plan(chosen: Chosen) -> Export:
    """Return a plan file, with notes on the parts that Aceso cannot run."""
    experiment, strategy = chosen.experiment, chosen.strategy
    text = aceso_plan_text(strategy, experiment)
    assert experiment.profile.operators is not None, "refused by then"
    plan = aceso_plan(strategy, experiment.profile.operators)
    reasons = not_expressible(plan, experiment.cluster.nodes[0].num_slots)
    details = [reason.detail for reason in reasons]
    if strategy.stages[0].options.zero.stage:
        details.append("ZeRO is not in its plans")
    notes = tuple(f"Aceso cannot run this plan: {detail}" for detail in details)
    return Export(files={"plan.json": text}, notes=notes)
