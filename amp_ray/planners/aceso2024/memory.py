"""Memory of a stage by the published formulas."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray
from amp_ray.inputs.operator_profile import OperatorFamily, OperatorProfile, OperatorTable
from amp_ray.planners.aceso2024.plan import AcesoStage
from amp_ray.planners.operators.cost import run_sums

MIXED_PRECISION_COPIES: Final = 8
"""Half precision: weights, their gradients, a master copy and two moments of twice their width."""

SINGLE_PRECISION_COPIES: Final = 4
"""A ResNet trains in single precision: weights, gradients, two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What a device of a stage holds."""

    states_bytes: float  # weights, gradients and optimizer
    in_flight_bytes: float  # of one micro-batch that waits for its backward pass
    num_in_flight: int  # such micro-batches at once
    recomputed_bytes: float  # the largest run of operators that is recomputed at once
    reserved_bytes: float  # what the allocator holds beyond that
    # What a recomputed run at the end of the stage needs beyond that and the published model
    # forgets: it promises too little memory then
    omitted_bytes: float

    @property
    def normal_bytes(self) -> float:
        """All but what the allocator reserves."""
        return self.states_bytes + self.num_in_flight * self.in_flight_bytes + self.recomputed_bytes

    @property
    def total_bytes(self) -> float:
        """What is compared with the memory of a device."""
        return self.normal_bytes + self.reserved_bytes


def stage_memory(
    profile: OperatorProfile, stage: AcesoStage, table: OperatorTable, *, num_stages_behind: int
) -> StageMemory:
    """Return the memory of a stage.

    An operator that recomputes together with its successor saves its activation, except where the
    successor starts a block, whose input is kept.

    Args:
        profile: Tells which operators start blocks and which share buffers.
        stage: Its operators.
        table: What was measured of each of them, at its own setting.
        num_stages_behind: Stages that a micro-batch still passes.
    """
    here = slice(stage.first_operator, stage.end_operator)
    share = profile.kept_share[here]
    kept = share * table.activation_bytes
    before_block = np.append(profile.starts_block[here][1:], False)
    both = np.append(stage.recompute[:-1] & stage.recompute[1:], False)
    saved = float(kept[both & ~before_block].sum())
    runs = run_sums(kept, both, before_block)
    counted = runs[:-1] if _omits_last_run(both, share) else runs
    largest = float(counted.max(initial=0.0))
    weights = float(table.weight_bytes.sum())
    return StageMemory(
        states_bytes=copies_of_weights(profile.family) * weights,
        in_flight_bytes=float(table.input_bytes[0] + kept.sum()) - saved,
        num_in_flight=num_stages_behind + 1,
        recomputed_bytes=largest,
        reserved_bytes=_reserved_bytes(table, weights),
        omitted_bytes=float(runs.max()) - largest,
    )


def copies_of_weights(family: OperatorFamily) -> int:
    """Return what weights, gradients and optimizer take, in parts of the weights."""
    return SINGLE_PRECISION_COPIES if family == "resnet" else MIXED_PRECISION_COPIES


def _omits_last_run(both: BoolArray, share: FloatArray) -> bool:
    """Tell whether the published model forgets a run of recomputed operators at a stage's end.

    It does where the last operator but one shares a buffer or holds a mask.
    """
    return len(both) > 1 and bool(both[-2]) and share[-2] != 1.0


def _reserved_bytes(table: OperatorTable, weights: float) -> float:
    """Return what the allocator reserves, by all operators but the last."""
    forward, backward = table.forward_reserved_bytes[:-1], table.backward_reserved_bytes[:-1]
    most = float(forward.max(initial=0.0) + backward.max(initial=0.0))
    return max(most, weights)
