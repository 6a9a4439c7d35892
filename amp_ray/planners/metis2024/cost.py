"""The planner published as Metis (2024): what it says a given plan takes, by its own formulas.

Kept to check that its files are read as it reads them, and to compare. The formulas are taken as
they are, with what is wrong in them: bandwidth between nodes is never read, the groups of the
gradient all-reduce are the tensor-parallel ones, activations count as one byte per element.
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final

from amp_ray.arrays import FloatArray
from amp_ray.cost.estimate import Reason
from amp_ray.planners.metis2024.plan import DataRank, MetisPlan, MetisSetting
from amp_ray.units import GIGA, MILLISECONDS_PER_SECOND

NOT_PROFILED: Final = "not in the profile"
NO_WHOLE_TIME: Final = "no forward_backward_time_ms"

BYTES_PER_GBYTE: Final = 2**20 * MILLISECONDS_PER_SECOND
"""A link of 1 GB/s moves 2**20 bytes per millisecond to it."""

OPTIMIZER_FACTOR: Final = 2
"""It counts the measured optimizer step twice."""

NO_REST_S: Final = 1e-12
"""It takes a rest of zero for a missing one; the sum of the layers is no more exact than this."""

_BITS: Final = 64
"""More binary digits than any number of samples has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetisCost:
    """What the published planner adds up."""

    execution_s: float  # all micro-batches through all stages
    # What the whole model takes beyond its layers, in the last stage, once per micro-batch
    rest_s: float
    batch_generator_s: float
    optimizer_s: float  # the optimizer step of the slowest stage
    gradient_sync_s: float  # the gradient all-reduce of the slowest stage
    pipeline_p2p_s: float  # activations between stages, once

    @property
    def total_s(self) -> float:
        """Seconds per optimizer step."""
        return float(sum(getattr(self, part.name) for part in fields(self)))


def metis_cost(setting: MetisSetting, plan: MetisPlan) -> MetisCost | Reason:
    """Cost a plan, all of its stages.

    ``(B - 1) max(t) + sum(t)`` for ``B`` micro-batches and stage times ``t``, then what the parts
    of `MetisCost` say.

    Args:
        setting: What is given.
        plan: Any plan of the cluster, also one that loses layers or has empty stages.

    Returns:
        The cost, or why the planner drops the plan: a time that is in no profile file.

    Raises:
        ValueError: If the plan is not one of this cluster.

    References:
        Um et al., Metis, USENIX ATC 2024, and its public planner.
    """
    times = []
    for stage in range(plan.pp):
        time_s = stage_time_s(setting, plan, stage)
        if isinstance(time_s, Reason):
            return time_s
        times.append(time_s)
    rest_s = _rest_s(setting, plan)
    if isinstance(rest_s, Reason):
        return rest_s
    num_micro_batches = plan.num_micro_batches
    return MetisCost(
        execution_s=(num_micro_batches - 1) * max(times) + sum(times),
        rest_s=rest_s,
        batch_generator_s=setting.whole.batch_generator_s * num_micro_batches,
        optimizer_s=_optimizer_s(setting, plan),
        gradient_sync_s=max(_gradient_sync_s(setting, plan, stage) for stage in range(plan.pp)),
        pipeline_p2p_s=sum(_transfer_s(setting, plan, stage) for stage in range(plan.pp - 1)),
    )


def stage_time_s(setting: MetisSetting, plan: MetisPlan, stage: int) -> float | Reason:
    """Return what one micro-batch takes in one stage.

    A stage of one type was measured at its samples. In a mixed one the slowest data-parallel
    index counts; it runs the binary digits of its share one after the other, since only
    powers of two were measured.
    """
    ranks = setting.data_ranks(plan, stage)
    _, tp = plan.degrees[stage]
    if ranks is None:
        return Reason(kind=NOT_PROFILED, detail=f"stage {stage}: tp {tp}, micro-batch size 1")
    mixed = len({kind for rank in ranks for kind in rank.group_types}) > 1
    worst_s = 0.0
    for rank in ranks if mixed else ranks[:1]:
        sizes = binary_sizes(rank.samples) if mixed else (rank.samples,)
        seconds = _layers_s(setting, rank, tp, sizes, plan.bounds[stage : stage + 2])
        if seconds is None:
            detail = f"stage {stage}: {rank.device_type}, tp {tp}, {rank.samples} samples"
            return Reason(kind=NOT_PROFILED, detail=detail)
        worst_s = max(worst_s, seconds)
    return worst_s


def binary_sizes(samples: int) -> tuple[int, ...]:
    """Return the powers of two that a number is the sum of.

    Example:
        >>> binary_sizes(6), binary_sizes(0)
        ((2, 4), ())
    """
    return tuple(1 << digit for digit in range(_BITS) if samples >> digit & 1)


def _layers_s(
    setting: MetisSetting,
    rank: DataRank,
    tp: int,
    sizes: tuple[int, ...],
    bounds: tuple[int, ...],
) -> float | None:
    """Add up a stage's layers over micro-batch sizes; None where one was not measured."""
    seconds = 0.0
    for size in sizes:
        table = setting.layer_s(rank.device_type, tp, size)
        if table is None:
            return None
        seconds += float(table[bounds[0] : bounds[1]].sum())
    return seconds


def _rest_s(setting: MetisSetting, plan: MetisPlan) -> float | Reason:
    """Return what the last stage takes beyond its layers, for all micro-batches."""
    last = plan.pp - 1
    _, tp = plan.degrees[last]
    size = setting.samples(plan, last)
    found = []
    for kind in sorted(set(setting.stage_types(plan)[last])):
        entry = setting.profile.entries.get((kind, tp, size))
        if entry is None:
            return Reason(kind=NOT_PROFILED, detail=f"{kind}, tp {tp}, {size} samples")
        if entry.rest_s is None or abs(entry.rest_s) < NO_REST_S:
            return Reason(kind=NO_WHOLE_TIME, detail=f"{kind}, tp {tp}, {size} samples")
        found.append(entry.rest_s)
    return plan.num_micro_batches * max(found)


def _optimizer_s(setting: MetisSetting, plan: MetisPlan) -> float:
    """Return the optimizer step of the stage with the most layers per tp."""
    per_layer_s = OPTIMIZER_FACTOR * setting.whole.optimizer_s / setting.profile.num_layers
    return max(
        per_layer_s / tp * (end - first)
        for (_, tp), (first, end) in zip(plan.degrees, pairwise(plan.bounds), strict=True)
    )


def _gradient_sync_s(setting: MetisSetting, plan: MetisPlan, stage: int) -> float:
    """Return a stage's gradient all-reduce.

    Its groups are every dp-th rank, tp of them: dp and tp are the wrong way round.
    """
    dp, tp = plan.degrees[stage]
    first = plan.first_rank[stage]
    groups = ([first + index + step * dp for step in range(tp)] for index in range(dp))
    rate = min(bytes_per_s(setting, plan, group) for group in groups)
    held = _parameter_bytes(setting, plan.bounds[stage], plan.bounds[stage + 1])
    return 2 * (dp - 1) / dp * held / tp / rate


def _transfer_s(setting: MetisSetting, plan: MetisPlan, stage: int) -> float:
    """Return the transfer of one micro-batch's activation to the next stage."""
    elements = transfer_elements(setting, plan, stage)
    ranks = list(range(plan.first_rank[stage], plan.first_rank[stage + 2]))
    return elements / bytes_per_s(setting, plan, ranks)


def transfer_elements(setting: MetisSetting, plan: MetisPlan, stage: int) -> float:
    """Return what crosses the boundary after a stage; one byte per element to this planner.

    Before the last layer it takes logits to cross.
    """
    _, tp = plan.degrees[stage]
    tokens = setting.samples(plan, stage) * setting.sequence_length
    if plan.bounds[stage + 1] == setting.profile.num_layers - 1:
        return tokens * setting.vocab_size / tp
    return float(tokens * setting.hidden_size)


def bytes_per_s(setting: MetisSetting, plan: MetisPlan, ranks: list[int]) -> float:
    """Return the rate that ranks share: of the first node of their type, or the slowest of all.

    Every node counts as large as the first one, and the rate between nodes is the one within.
    """
    types = setting.rank_types(plan)
    nodes = {rank // setting.cluster.nodes[0].num_slots for rank in ranks}
    present = {types[rank] for rank in ranks}
    if len(nodes) == 1:
        present = {types[ranks[0]]}
    rates = [
        node.intra.bandwidth_bytes_per_s
        for kind, node in zip(setting.node_types, setting.cluster.nodes, strict=True)
        if kind in present
    ]
    return (rates[0] if len(nodes) == 1 else min(rates)) / GIGA * BYTES_PER_GBYTE


def _parameter_bytes(setting: MetisSetting, first: int, end: int) -> float:
    """Add up parameters as the planner does: every middle layer counts as the second one."""
    return float(counted_parameter_bytes(setting)[first:end].sum())


def counted_parameter_bytes(setting: MetisSetting) -> FloatArray:
    """Return the parameters of every layer that the gradient all-reduce counts."""
    held = setting.whole.layer_parameter_bytes.copy()
    held[1:-1] = held[1]
    return held
