"""Strategies that define the use of each operator: tp, dp, algorithm and recompute."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from amp_ray.inputs.operator_profile import OperatorProfile
from amp_ray.strategies.operator_run import OperatorUse, operator_runs
from amp_ray.strategies.recompute import RecomputeKind
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.strategies.zero import NO_ZERO, Zero

_ATTENTION_CORE: Final = (
    "attention-score",
    "attention-softmax",
    "attention-dropout",
    "attention-context",
)
"""Substrings of the names of operators that ``selective`` recomputes."""


def operator_strategy(
    stages: Sequence[Sequence[OperatorUse]],
    *,
    samples_per_micro_batch: int,
    num_micro_batches: int,
    zero: Zero = NO_ZERO,
) -> Strategy:
    """Return a strategy from the use of each operator of each stage, rank ``r`` on device ``r``.

    ``stages`` cover the chain of operators; samples count over all replicas, and every dp divides
    them.

    Raises:
        ValueError: If a dp does not divide the micro-batch, or a stage's operators take different
            numbers of ranks.
    """
    undivided = [
        (index, use)
        for index, uses in enumerate(stages)
        for use in uses
        if samples_per_micro_batch % use[1]
    ]
    if undivided:
        index, (_, dp, _, _) = undivided[0]
        raise ValueError(
            f"stage {index}: dp {dp} does not divide a micro-batch of {samples_per_micro_batch}"
        )
    dps = [uses[0][1] for uses in stages]
    even = len(set(dps)) == 1
    built = []
    first = 0
    for uses, dp in zip(stages, dps, strict=True):
        runs = operator_runs(first, uses)
        built.append(
            Stage(
                first_layer=first,
                end_layer=first + len(uses),
                options=StageOptions(tp=runs[0].tp, dp=runs[0].dp, zero=zero),
                shares=None if even else (samples_per_micro_batch // dp,) * dp,
                operators=runs,
            )
        )
        first += len(uses)
    return Strategy(
        stages=tuple(built),
        micro_batch_size=samples_per_micro_batch // dps[0] if even else samples_per_micro_batch,
        num_micro_batches=num_micro_batches,
        placement=tuple(range(sum(stage.num_ranks for stage in built))),
    )


def operator_uses(strategy: Strategy, profile: OperatorProfile) -> list[list[OperatorUse]]:
    """Return the use of each operator of each stage.

    If the strategy does not name operators, its layers must be those of the profile's chain:
    blocks, and each operator outside of blocks.

    Raises:
        ValueError: If the strategy has another number of layers.
    """
    edges = profile.layer_bounds
    if strategy.has_operators:
        edges = tuple(range(profile.num_operators + 1))
    if strategy.bounds[-1] != len(edges) - 1:
        raise ValueError(
            f"the strategy has {strategy.bounds[-1]} layers, {profile.model} has {len(edges) - 1} "
            "(blocks, and each operator outside of them)"
        )
    return [_stage_uses(stage, edges, profile) for stage in strategy.stages]


def refuse_uneven(strategy: Strategy, subject: str) -> None:
    """Refuse replicas that share samples unevenly; ``subject`` divides a micro-batch evenly."""
    samples = strategy.samples_per_micro_batch
    for index, stage in enumerate(strategy.stages):
        if stage.shares is not None and set(stage.shares) != {samples / stage.options.dp}:
            raise ValueError(
                f"{subject} a micro-batch evenly; stage {index} has shares {list(stage.shares)}"
            )


def _stage_uses(stage: Stage, edges: Sequence[int], profile: OperatorProfile) -> list[OperatorUse]:
    """Return the use of each operator of a stage; recompute covers the stage's first blocks."""
    if stage.operators:
        return [
            (run.tp, run.dp, run.algorithm, run.recompute)
            for run in stage.operators
            for _ in range(run.num_operators)
        ]
    options, layers_left = stage.options, stage.options.recompute.layers
    uses: list[OperatorUse] = []
    for first, end in pairwise(edges[stage.first_layer : stage.end_layer + 1]):
        recomputes = end - first > 1 and layers_left != 0
        layers_left = layers_left - 1 if layers_left and recomputes else layers_left
        uses += [
            (
                options.tp,
                options.dp,
                0,
                recomputes and _computed_again(options.recompute.kind, profile.names[operator]),
            )
            for operator in range(first, end)
        ]
    return uses


def recomputed_operators(profile: OperatorProfile, kind: RecomputeKind) -> list[bool]:
    """Return, per operator of the chain, whether it is in a block and this kind recomputes it."""
    return [
        end - first > 1 and _computed_again(kind, profile.names[operator])
        for first, end in pairwise(profile.layer_bounds)
        for operator in range(first, end)
    ]


def _computed_again(kind: RecomputeKind, name: str) -> bool:
    """Return whether an operator of a recomputed block runs again."""
    if kind == "selective":
        return "post" not in name and any(part in name for part in _ATTENTION_CORE)
    return kind == "full"
