"""Whether a plan of Metis (2024) can run at all, which its planner does not check."""

from itertools import pairwise
from typing import Final

from amp_ray.arrays import FloatArray
from amp_ray.cost.estimate import Reason
from amp_ray.planners.metis2024.cost import NOT_PROFILED
from amp_ray.planners.metis2024.plan import DataRank, MetisPlan, MetisSetting
from amp_ray.units import GIB

LAYERS_LOST: Final = "layers lost"
EMPTY_STAGE: Final = "empty stage"
SAMPLES_LOST: Final = "samples lost"
OUT_OF_MEMORY: Final = "out of memory"


def metis_defects(setting: MetisSetting, plan: MetisPlan) -> tuple[Reason, ...]:
    """Tell why a plan cannot run.

    Every layer must be in a stage, every stage have one, every sample be taken, and every
    device hold what was measured for its layers: whole, at its samples, by itself. The planner
    compares sums over stages, and loses layers where no stage holds more than half of one.

    Returns:
        Reasons; none for a plan that can run.

    Raises:
        ValueError: If the plan is not one of this cluster.
    """
    return (
        *_layer_defects(setting, plan),
        *_sample_defects(setting, plan),
        *_memory(setting, plan),
    )


def _layer_defects(setting: MetisSetting, plan: MetisPlan) -> list[Reason]:
    found = []
    num_layers = setting.profile.num_layers
    if (plan.bounds[0], plan.bounds[-1]) != (0, num_layers):
        detail = f"bounds {plan.bounds[0]} to {plan.bounds[-1]} of {num_layers} layers"
        found.append(Reason(kind=LAYERS_LOST, detail=detail))
    empty = [stage for stage, (first, end) in enumerate(pairwise(plan.bounds)) if first == end]
    if empty:
        found.append(Reason(kind=EMPTY_STAGE, detail=f"stage {', '.join(map(str, empty))}"))
    return found


def _sample_defects(setting: MetisSetting, plan: MetisPlan) -> list[Reason]:
    """Find samples that no stage takes, because a division was rounded down."""
    found = []
    for stage in range(plan.pp):
        ranks = setting.data_ranks(plan, stage)
        if ranks is None:
            continue
        taken = plan.num_micro_batches * sum(rank.samples for rank in ranks)
        if taken != setting.global_batch_size:
            detail = f"stage {stage} takes {taken} of {setting.global_batch_size}"
            found.append(Reason(kind=SAMPLES_LOST, detail=detail))
    return found


def _memory(setting: MetisSetting, plan: MetisPlan) -> list[Reason]:
    """Find devices that cannot hold their layers, the worst one of each stage."""
    found = []
    for stage in range(plan.pp):
        ranks = setting.data_ranks(plan, stage)
        _, tp = plan.degrees[stage]
        if ranks is None:
            detail = f"stage {stage}: tp {tp}, micro-batch size 1"
            found.append(Reason(kind=NOT_PROFILED, detail=detail))
            continue
        reasons = [
            reason
            for rank in sorted(set(ranks), key=lambda rank: -rank.samples)
            for reason in [_of_rank(setting, plan, stage, rank)]
            if reason is not None
        ]
        found += reasons[:1]
    return found


def _of_rank(setting: MetisSetting, plan: MetisPlan, stage: int, rank: DataRank) -> Reason | None:
    """Tell whether the devices of one data-parallel index hold the stage's layers."""
    if rank.samples == 0:
        return None
    held = rank_memory(setting, plan, stage, rank)
    if held is None:
        _, tp = plan.degrees[stage]
        detail = f"stage {stage}: {rank.device_type}, tp {tp}, {rank.samples} samples"
        return Reason(kind=NOT_PROFILED, detail=detail)
    needed, smallest, limit = held
    if needed <= limit:
        return None
    detail = (
        f"stage {stage} needs {needed / GIB:.1f} GiB of {limit / GIB:.1f} ({smallest}, "
        f"{rank.samples} samples)"
    )
    return Reason(kind=OUT_OF_MEMORY, detail=detail)


def rank_memory(
    setting: MetisSetting, plan: MetisPlan, stage: int, rank: DataRank
) -> tuple[float, str, int] | None:
    """Return what the devices of one data-parallel index need and have.

    Returns:
        Bytes that are needed, the type with the least memory, and its bytes; None where no
        measured size holds the samples.
    """
    _, tp = plan.degrees[stage]
    first, end = plan.bounds[stage : stage + 2]
    table = _layer_memory(setting, rank, tp)
    if table is None:
        return None
    smallest = min(sorted(set(rank.group_types)), key=setting.memory_bytes.__getitem__)
    return float(table[first:end].sum()), smallest, setting.memory_bytes[smallest]


def _layer_memory(setting: MetisSetting, rank: DataRank, tp: int) -> FloatArray | None:
    """Return the memory of all layers at the smallest measured size that holds the samples."""
    sizes = setting.profile.sizes(rank.device_type, tp)
    enough = [size for size in sizes if size >= rank.samples]
    if not enough:
        return None
    return setting.profile.entries[rank.device_type, tp, enough[0]].layer_memory_bytes
