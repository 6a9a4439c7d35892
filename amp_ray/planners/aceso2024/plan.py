"""A plan of the published planner: each operator has a tp, dp, algorithm and recompute."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from amp_ray.arrays import BoolArray
from amp_ray.inputs.operator_profile import OperatorProfile
from amp_ray.planners.operators.strategy import operator_uses
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcesoStage:
    """Operators of one stage; arrays have shape ``(num_operators,)`` of the stage."""

    first_operator: int  # index of its first operator in the chain
    num_devices: int  # ``tp * dp`` of each of its operators
    tp: NDArray[np.int64]
    dp: NDArray[np.int64]
    algorithm: NDArray[np.int64]
    recompute: BoolArray

    @property
    def end_operator(self) -> int:
        """Index after its last operator."""
        return self.first_operator + len(self.tp)

    @property
    def uses(self) -> list[OperatorUse]:
        """The use of each operator: tp, dp, algorithm and recompute."""
        columns = (self.tp, self.dp, self.algorithm, self.recompute)
        return list(zip(*(column.tolist() for column in columns), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcesoPlan:
    """All stages, and the numbers and sizes of micro-batches."""

    stages: tuple[AcesoStage, ...]  # cover all operators
    micro_batch_size: int  # samples of one micro-batch over all replicas
    num_micro_batches: int  # per iteration


def aceso_plan(strategy: Strategy, profile: OperatorProfile) -> AcesoPlan:
    """Return a strategy as a plan of operators.

    Raises:
        ValueError: If its layers are not those of the profile's chain, or replicas share samples
            unevenly.
    """
    samples = strategy.samples_per_micro_batch
    for index, stage in enumerate(strategy.stages):
        if stage.shares is not None and set(stage.shares) != {samples / stage.options.dp}:
            raise ValueError(
                f"cost model aceso-2024 divides a micro-batch evenly; stage {index} has shares "
                f"{list(stage.shares)}"
            )
    stages = []
    first = 0
    for uses in operator_uses(strategy, profile):
        stages.append(aceso_stage(first, uses))
        first += len(uses)
    return AcesoPlan(
        stages=tuple(stages),
        micro_batch_size=samples,
        num_micro_batches=strategy.num_micro_batches,
    )


def aceso_stage(first_operator: int, uses: Sequence[OperatorUse]) -> AcesoStage:
    """Return a stage from the use of each of its operators."""
    tp, dp, algorithm, recompute = zip(*uses, strict=True)
    return AcesoStage(
        first_operator=first_operator,
        num_devices=tp[0] * dp[0],
        tp=np.array(tp),
        dp=np.array(dp),
        algorithm=np.array(algorithm),
        recompute=np.array(recompute, dtype=np.bool_),
    )
