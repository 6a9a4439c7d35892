"""The keys of an experiment file and their meaning.

Each class is one mapping of the file; those of ``search`` and ``trials`` are in `experiment`, the
figures of a model in `ModelShape`. Unknown keys, wrong types and wrong ranges are refused with the
place in the file. The docs take the text below each key.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, Tag, create_model

from amp_ray.clusters.cluster import Protocol
from amp_ray.inputs.experiment import Objective, SearchLimits, TrialSettings
from amp_ray.inputs.section import (
    Count,
    Flag,
    Index,
    Number,
    Positive,
    Section,
    Text,
    Within,
    by_type,
)
from amp_ray.models.model import MOST_LAYERS, LayerList, ModelShape
from amp_ray.strategies.recompute import RecomputeKind
from amp_ray.strategies.zero import MOST_ZERO_STAGE
from amp_ray.units import Precision

_LONGEST_NAME: Final = 100

# Ranges are wide enough for a core of a CPU, a link of 1 Mbit/s and boards ten times as large as
# those of today, and narrow enough to find bytes where GiB belong.
Memory = Annotated[Number, AfterValidator(Within(1e-3, 1e4, "GiB"))]
MemoryRate = Annotated[Number, AfterValidator(Within(0.1, 1e5, "GB/s"))]
LinkRate = Annotated[Number, AfterValidator(Within(1e-3, 1e5, "Gbit/s"))]
_Size = Annotated[int, Field(ge=1, le=10**15, strict=True)]
RatesBySize = Annotated[list[tuple[_Size, LinkRate]], Field(min_length=1)]


AnyLinkRate = Annotated[
    Annotated[LinkRate, Tag("one")] | Annotated[RatesBySize, Tag("by size")],
    by_type(list, "by size", "one"),
]
Rate = Annotated[Number, AfterValidator(Within(1e-3, 1e5, "TFLOP/s"))]
Latency = Annotated[Number, AfterValidator(Within(1e-3, 1e6, "microseconds", or_zero=True))]
Price = Annotated[Number, AfterValidator(Within(1e-6, 1e6, "of the currency", or_zero=True))]


ZeroStage = Annotated[
    Annotated[Literal["auto"], Tag("word")]
    | Annotated[int, Field(ge=0, le=MOST_ZERO_STAGE, strict=True), Tag("number")],
    by_type(str, "word", "number"),
]
Few = Annotated[int, Field(ge=1, le=10**5, strict=True)]
Samples = Annotated[int, Field(ge=1, le=10**6, strict=True)]
_Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False, strict=True)]
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS, strict=True)]


def _plain(name: str) -> str:
    """Return a name that can be shown and can become part of a file's name."""
    if not name.isprintable() or name[0] == "." or not {"/", "\\"}.isdisjoint(name):
        raise ValueError("a plain name: no '/', no '\\', no '.' in front, no control character")
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"at most {_LONGEST_NAME} characters")
    return name


Name = Annotated[Text, AfterValidator(_plain)]


class BlockSection(Section):
    """One entry of ``model.blocks``: ``repeat`` equal blocks, figures of one sample."""

    name: Name
    """For people."""
    repeat: Layers = 1
    """Equal blocks in a row."""
    parameters: _Amount
    """Of one block."""
    forward_gflops: _Amount
    """10^9 floating-point operations of the forward pass, two per multiply-add; the backward pass
    has twice as many."""
    activation_elements: _Amount
    """Kept for the backward pass; 2 bytes each at fp16 and bf16, 4 at fp32."""
    boundary_elements: Positive
    """Handed on to the next block."""
    sharded: Flag = False
    """Whether tensor parallelism divides parameters, work and activations, with an all-reduce of
    `boundary_elements` in either pass; else every rank does all of it."""


class ModelKeys(Section):
    """``model``: a family with its figures, or a Hugging Face ``config.json``."""

    config: Text | None = None
    """A Hugging Face `config.json`. Families: gpt2, llama, t5, vit."""
    layer_list: LayerList | None = None
    """Which list of layers `bounds` count in. Families: gpt2, transgan; others
    `runtime` only.
    Default: the runtime's."""


_FIGURES: Final[Mapping[str, Any]] = {
    "family": Text,
    "num_layers": Layers,
    "depth": Annotated[list[Index], Field(min_length=1, max_length=16)],
    "num_decoder_layers": Layers,
    "blocks": Annotated[list[BlockSection], Field(min_length=1, max_length=MOST_LAYERS)],
    "first_dense_layers": Index,
    "attention_windows": Annotated[list[Index], Field(min_length=1)],
}
"""Figures of a shape that are neither a count of at least 1 nor a flag."""

if TYPE_CHECKING:

    class ModelSection(ModelKeys):
        """The keys of `ModelKeys`, and the figures of `ModelShape`."""

        def __init__(self, **figures: object) -> None: ...

else:
    ModelSection = create_model(
        "ModelSection",
        __base__=ModelKeys,
        **{
            figure.name: (
                _FIGURES.get(figure.name, Flag if figure.type is bool else Count) | None,
                None,
            )
            for figure in fields(ModelShape)
            if figure.name != "not_counted"
        },
    )


class DeviceSection(Section):
    """``device`` as a mapping: a data sheet that the catalogue does not have."""

    name: Name
    """Also the name of its table in a profile."""
    memory_gib: Memory
    """Memory that processes can allocate."""
    memory_gbyte_per_s: MemoryRate
    """Peak bandwidth of the memory."""
    num_multiprocessors: Few = 1
    """Units over which a matrix product is spread."""
    context_gib: Memory | None = None
    """Memory of a process before its first tensor; of a GPU the runtime's record tells it, of the
    catalogue's `cpu` it is 0.39. Default: the runtime's `context_bytes`."""
    fp32_tflops: Rate | None = None
    """Dense peak rate; that of `precision` is needed."""
    fp16_tflops: Rate | None = None
    """Dense peak rate; that of `precision` is needed."""
    bf16_tflops: Rate | None = None
    """Dense peak rate; that of `precision` is needed."""
    fp8_tflops: Rate | None = None
    """Dense peak rate; that of `precision` is needed."""


class NodeSection(Section):
    """One entry of ``cluster.nodes``: ``count`` equal nodes."""

    count: Few = 1
    """How many such nodes."""
    device: Annotated[
        Annotated[Text, Tag("named")] | Annotated[DeviceSection, Tag("described")],
        by_type(dict | DeviceSection, "described", "named"),
    ]
    """What sits in every slot."""
    slots: Few
    """Devices per node; agrees with the hostfile."""
    intra_gbit_per_s: AnyLinkRate | None = None
    """What a long all-reduce between the devices of the node reaches (bus bandwidth as NCCL's tests
    define it); the default is .79 of the line rate of the board's own links where these meet in a
    switch (NVSwitch since A100), else half (`amp_ray/clusters/catalogue.py`). As a list, the rate
    of a message or all-reduce of each size, linear in the logarithm of the size between two. A rate
    below a quarter of the default gets a warning. Default: what boards of the catalogue reach."""
    intra_gbyte_per_s: AnyLinkRate | None = None
    """The same in GB/s."""
    inter_gbit_per_s: AnyLinkRate | None = None
    """Line rate of the node's network interfaces together, in one direction. Default: needed."""
    inter_gbyte_per_s: AnyLinkRate | None = None
    """The same in GB/s."""
    protocol: Protocol | None = None
    """Of the network: TCP reaches .95 of the line rate and at most 38 Gbit/s, RDMA .96; EFA (AWS)
    .85, with 75 us for each step of a collective; where it is not stated .85 (`nic_efficiency`).
    Default: unknown."""
    intra_latency_us: Latency | None = None
    """Latency of a message within the node. Default: 8."""
    inter_latency_us: Latency | None = None
    """The same between nodes. Default: 25."""
    intra_collective_us: Latency | None = None
    """Latency of one step of a collective within the node (gloo's takes twice as long as a
    message). Default: that of a message."""
    inter_collective_us: Latency | None = None
    """The same between nodes. Default: that of a message."""
    memory_gib: Memory | None = None
    """Memory that processes can allocate per device. Default: the device's."""
    nominal_memory_gib: Memory | None = None
    """Memory that the board is sold with, which `--cost-model metis-2024` counts with. Default:
    `memory_gib`."""
    zone: Name | None = None
    """Region or data centre of the node, see `links`."""
    price_per_device_hour: Price | None = None
    """What one device costs in an hour; where all nodes have a price, rows tell the
    [cost](formats.md#results) of an iteration."""


class LinkSection(Section):
    """One entry of ``cluster.links``: what joins a single pair of nodes, or two zones."""

    between: Annotated[list[Text], Field(min_length=2, max_length=2)]
    """Two hosts as in the hostfile, or `node0`, ...; or two zones."""
    gbit_per_s: AnyLinkRate | None = None
    """Rate in one direction. Default: needed."""
    gbyte_per_s: AnyLinkRate | None = None
    """The same in GB/s."""
    latency_us: Latency | None = None
    """Latency of a message. Default: 25."""
    collective_us: Latency | None = None
    """Latency of one step of a collective. Default: that of a message."""
    price_per_gbyte: Price | None = None
    """Zones: what 10^9 bytes cost that leave either for the other. Default: 0."""


class ClusterSection(Section):
    """``cluster``: what the hosts are and how they are connected."""

    hostfile: Text | None = None
    """Names of the hosts, in the order of the nodes; without it they are `node0`, `node1`, ..., for
    planning alone."""
    nodes: Annotated[list[NodeSection], Field(min_length=1)]
    """What the hosts are."""
    links: list[LinkSection] = Field(default_factory=list)
    """What joins single pairs of nodes, or two zones."""


class ProfileSection(Section):
    """``profile``: where layer times come from."""

    source: Literal["analytic", "table", "metis", "aceso"] = "analytic"
    """From data sheets alone, measured, or measured for Metis: a folder of files such as
    `DeviceType.T4_tp1_bs1.json`, whose layers count the blocks and one layer at each end; or for
    [Aceso](formats.md#acesos-files), operator by operator."""
    path: Text | None = None
    """With `metis` and `aceso`: the folder; with `table`: a [profile](formats.md#profile), or
    `shipped:amp-2022-gpt2`, `shipped:amp-2022-transgan`."""
    model: Text | None = None
    """With `aceso`: the model's name in the files, `gpt_1_3B` for `gpt_1_3B_mbs1_tp1_algo0.csv`."""


class ExperimentFile(Section):
    """The whole file."""

    name: Name
    """Name of the experiment, in tables and results: up to 100 characters, no slashes of either
    kind, no `.` in front."""
    model: ModelSection
    """[What is trained](#model). Default: needed."""
    cluster: ClusterSection
    """[Where it is trained](#cluster). Default: needed."""
    profile: ProfileSection = ProfileSection()
    """[Where layer times come from](#profile)."""
    precision: Precision = "fp16"
    """Of weights and activations; every device of the cluster must compute in it. `fp8`: products
    of linear layers in blocks run in 8-bit floats, all else and what is kept is bf16, as with
    Transformer Engine; for runtimes that can (`megatron-core`, `torch`)."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """What is kept and touched per parameter."""
    zero_stage: ZeroStage | None = None
    """What data-parallel ranks share out instead of each holding all: 1 optimizer states, 2
    gradients too, 3 weights too (FSDP); `auto` lets the search choose. What a runtime cannot do,
    alone or in a pipeline, is refused. Default: the runtime's lowest."""
    shard_ranks: Count | None = None
    """So many of them share (HSDP: as many as a node has), each such group with a copy of all; with
    `auto` both all and a node are tried where the runtime can. Default: all data-parallel ranks."""
    reshard_after_forward: Flag | None = None
    """With ZeRO 3, whether gathered weights are dropped after the forward pass and gathered again
    for the backward pass; a pipeline gathers them once per step and keeps them. Default: true
    without a pipeline."""
    recompute: RecomputeKind = "none"
    """What every block computes again in the backward pass: nothing, the attention core (scores,
    softmax, dropout, context), or all of it; `auto` lets the search choose for every stage, by time
    and memory, also in how many of its blocks."""
    sequence_parallel: Flag | Literal["auto"] = "auto"
    """Whether tensor-parallel ranks divide the tokens where they do not divide the width (norms,
    dropout, residual stream), as Megatron-LM does: less memory, gathers and scatters instead of
    all-reduces; `auto`: wherever the runtime can and tp, above 1, divides the tokens of a sample,
    but not where `search.token_slices` cuts them; in space `heterogeneous` in the plans with one tp
    and dp for all stages, in `operator` never."""
    runtime: Text = "deepspeed"
    """Which program trains, see [runtimes](#runtime-traits-and-constants)."""
    traits: dict[Text, Any] = Field(default_factory=dict)
    """Single traits of the runtime that differ. Default: the runtime's."""
    constants: dict[Text, Positive] = Field(default_factory=dict)
    """Single constants of the cost model that differ. Default: shipped."""
    global_batch_size: Samples
    """Samples per optimizer step."""
    tokens: Positive | None = None
    """Tokens to train on in all: rows then tell days, device-hours and, with
    `price_per_device_hour`, money."""
    search: SearchLimits = SearchLimits()
    """[Which strategies are looked at](#search)."""
    objective: Objective = "time"
    """What is best: the least time, the least money, or all strategies that no other beats in both.
    The latter two need the price of every node, and plan for parts of the cluster too: every number
    of nodes of each kind, or powers of two where that makes more than 64 parts."""
    trials: TrialSettings = TrialSettings()
    """[How strategies are measured](#trials)."""
