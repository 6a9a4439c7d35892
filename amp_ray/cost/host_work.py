"""The host's launches in a layer: one for each kernel, or what a module was measured to take.

Modules of Megatron-core and Transformer Engine occupy the host longer than the launches of their
kernels, most of all in 8-bit floats and with many experts, which are prepared one by one in Python;
and some of them less than their many small kernels of PyTorch (`HOST_WORK`).
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from amp_ray.cost.roofline import Rank, cast_operands
from amp_ray.models.model import Layer, count_kernels
from amp_ray.models.operator import Gemm, Operator
from amp_ray.runtimes.releases import HOST_WORK, HostWork, Launches
from amp_ray.runtimes.traits import RuntimeTraits

Module = Literal["attention", "router", "dispatcher", "experts", "rest"]

CAPTURED: Final[tuple[Module, ...]] = ("attention", "router")
"""Modules that CUDA graphs of the scope ``attention`` start in one launch."""

_SMALL_KERNELS: Final[tuple[Module, ...]] = ("router", "dispatcher")
"""Modules whose kernels are PyTorch's own, each a fraction of the launch of a plain module."""


def host_launches(
    layer: Layer, traits: RuntimeTraits, rank: Rank, ratio: float, *, is_measured: bool
) -> Launches:
    """Return the launches of both passes, without collectives, loops and additions to gradients.

    A backward pass has ``ratio`` launches for each of the forward pass. Where a measurement of the
    layer exists (``is_measured``), the work of modules is in it, without that of the dispatcher.
    """
    work = _module_work(layer, traits, rank)
    if is_measured:
        work = {name: each for name, each in work.items() if name == "dispatcher"}
    captured = CAPTURED if traits.cuda_graphs == "attention" and layer.experts else ()
    forward = backward = float(bool(captured))
    backward *= ratio
    for name, operators in modules(layer).items():
        if name not in captured:
            here = _launches(operators, traits, rank, ratio)
            if name in work:
                measured = work[name][0], ratio * work[name][1]
                more = max(here[0], measured[0]), max(here[1], measured[1])
                here = measured if name in _SMALL_KERNELS else more
            forward, backward = forward + here[0], backward + here[1]
    return forward, backward


def modules(layer: Layer) -> Mapping[Module, Sequence[Operator]]:
    """Return the operators of a layer by module; all are ``rest`` in one without experts."""
    operators = layer.measurable
    if layer.experts is None:
        return {"rest": operators}
    names = [op.name for op in operators]
    router, dispatch, combine = map(names.index, ("router", "dispatch", "combine"))
    return {
        "attention": operators[:router],
        "router": operators[router:dispatch],
        "dispatcher": (operators[dispatch], operators[combine]),
        "experts": operators[dispatch + 1 : combine],
        "rest": operators[combine + 1 :],
    }


def waiting_launches(traits: RuntimeTraits, rank: Rank) -> float:
    """Return the launches for which the device waits in a layer whose tokens are dispatched."""
    sender = traits.dispatch
    if not sender.kernels:
        return 0.0
    whole = _format(traits, rank).dispatchers[traits.dispatcher][0]
    return whole * sender.waiting_kernels / sender.kernels


def _module_work(layer: Layer, traits: RuntimeTraits, rank: Rank) -> Mapping[Module, Launches]:
    """Return the measured work of the modules that a program has."""
    if layer.experts is None:
        return {}
    table, work = _format(traits, rank), dict[Module, Launches]()
    if layer.exchanges and traits.dispatch.kernels:
        work["dispatcher"] = table.dispatchers[traits.dispatcher]
    if not traits.expert_streams:  # grouped products of another program
        return work
    held = next(
        op.batch // (rank.tp if op.shard == "batch" else 1) for op in layer.gemms if op.is_expert
    )
    experts = table.experts[0] + held * table.each[0], table.experts[1] + held * table.each[1]
    if traits.fused_experts:
        experts = table.fused
    return {**work, "attention": table.attention, "router": table.router, "experts": experts}


def _format(traits: RuntimeTraits, rank: Rank) -> HostWork:
    """Return the measurement that is nearest to a format: by tensor, or by block as NVFP4 is."""
    if rank.narrow is None:
        return HOST_WORK["bf16"]
    by_block = rank.precision == "nvfp4" or traits.fp8_recipe == "mxfp8"
    return HOST_WORK["mxfp8" if by_block else "tensorwise"]


def _launches(
    operators: Sequence[Operator], traits: RuntimeTraits, rank: Rank, ratio: float
) -> Launches:
    """Return the launches of both passes by count: kernels, and casts of products' operands."""
    kernels = count_kernels(operators) * traits.launches_per_kernel
    casts = [cast_operands(op, rank) for op in operators if isinstance(op, Gemm)]
    return (
        kernels + sum(each[0] for each in casts),
        ratio * kernels + sum(each[1] for each in casts),
    )
