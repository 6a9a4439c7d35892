"""Releases of training programs, and choices that set several traits at once.

All are rows of ``releases.yaml``: a release is a bundle of traits with its date and source; a
dispatcher and a recipe of 8-bit floats are named by a trait.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, get_args

from pydantic import BaseModel

from amp_ray.clusters.device import Device
from amp_ray.shipped import Table

DispatcherName = Literal["auto", "nccl", "alltoall", "deepep", "hybridep"]
Fp8RecipeName = Literal["auto", "delayed", "tensorwise", "mxfp8"]
FormatName = Literal["bf16", "tensorwise", "mxfp8"]
AttentionFormat = Literal["auto", "bf16", "fp8"]
CudaGraphs = Literal["auto", "none", "attention", "step"]
ContextExchange = Literal["none", "ring", "all-gather", "all-to-all", "both"]


class Dispatcher(BaseModel, extra="forbid", frozen=True):
    """What sends tokens to their experts and back."""

    kernels: int = 0
    """Kernels of a forward pass, without the router's; 0 if unknown, and then all-to-alls add to
    the host's time."""
    waiting_kernels: int = 0
    """Those of them for which the device waits, because the host has just waited for it."""
    waits_for_tokens: bool = False
    """Whether the host waits until tokens for experts have arrived."""
    sends_tokens_once: bool = False
    """Whether a token is sent once to each node and to each rank that has experts for it."""
    multiprocessors: int = 24
    """Multiprocessors that it takes while it runs beside computation."""


Launches = tuple[float, float]
"""The host's work in both passes, in launches: a dense block of plain modules has 15 in either
(`host_backward_ratio` prices those of the backward pass)."""


class HostWork(BaseModel, extra="forbid", frozen=True):
    """Host work of the modules of a block with experts in one format."""

    attention: Launches
    """All before the router: attention, norms, residuals."""
    router: Launches
    dispatchers: dict[DispatcherName, Launches]
    """Dispatch and combine."""
    experts: Launches
    """Both products and the activation between them, without what `each` expert adds."""
    each: Launches
    fused: Launches
    """The same as one operation, for any number of experts."""


class Fp8Recipe(BaseModel, extra="forbid", frozen=True):
    """How operands of products in 8-bit floats are scaled."""

    reads_for_scales: bool = False
    """Whether operands are read once more for their scale, before they are cast."""
    gathered_bytes: float = 1.0
    """Bytes of a weight in the gather of updated weights in 8-bit floats."""


class Release(BaseModel, extra="forbid", frozen=True):
    """A named bundle of traits of one runtime."""

    date: str
    """Year and month."""
    source: str
    traits: dict[str, Any] = {}
    """Traits that it sets in the record of the runtime."""


class _Releases(Table):
    """The file `releases.yaml`, which describes its fields."""

    file = "runtimes/releases.yaml"
    dispatchers: dict[DispatcherName, Dispatcher]
    host_work: dict[FormatName, HostWork]
    fp8_recipes: dict[Fp8RecipeName, Fp8Recipe]
    releases: dict[str, dict[str, Release]]


_TABLE: Final = _Releases.shipped()

DISPATCHERS: Final[Mapping[DispatcherName, Dispatcher]] = _TABLE.dispatchers

HOST_WORK: Final[Mapping[FormatName, HostWork]] = _TABLE.host_work
"""Host work of modules by format; of 8-bit floats with scales by tensor or by block."""

FP8_RECIPES: Final[Mapping[Fp8RecipeName, Fp8Recipe]] = _TABLE.fp8_recipes

RELEASES: Final[Mapping[str, Mapping[str, Release]]] = _TABLE.releases
"""Releases by runtime and name, the newest first."""

_OF_EXPERTS: Final = frozenset({"dispatcher", "expert_parallel", "fused_experts", "fused_router"})
"""Traits of releases that mean nothing for models without experts."""

_OF_FP8: Final = frozenset({"attention_format"})
"""Traits of releases that mean nothing where products are not in 8-bit floats."""


def oldest_alike(runtime: str, release: str, *, has_experts: bool, in_fp8: bool) -> str:
    """Return the oldest release of a runtime with the traits of this one, as far as a model asks.

    Predictions by these releases are the same, so that a time of one backs those of the others.
    ``in_fp8``: whether products are in 8-bit floats.
    """
    ignored = frozenset() if has_experts else _OF_EXPERTS
    ignored |= frozenset() if in_fp8 else _OF_FP8
    plain = {
        name: {key: value for key, value in each.traits.items() if key not in ignored}
        for name, each in RELEASES.get(runtime, {}).items()
    }
    return next((name for name in reversed(plain) if plain[name] == plain.get(release)), release)


CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "dispatcher": get_args(DispatcherName),
    "fp8_recipe": get_args(Fp8RecipeName),
    "attention_format": get_args(AttentionFormat),
    "cuda_graphs": get_args(CudaGraphs),
    "context_parallel": get_args(ContextExchange),
}
"""Traits that are names, with their values."""


def fp8_recipe_on(recipe: Fp8RecipeName, devices: Iterable[Device]) -> Fp8RecipeName:
    """Return the recipe that ``auto`` means on some devices; other recipes are returned as given.

    Megatron-Bridge's recipes of August 2026 scale by blocks of 32 on Blackwell, else by tensor.
    """
    if recipe != "auto":
        return recipe
    return "mxfp8" if all(device.scales_blocks for device in devices) else "tensorwise"
