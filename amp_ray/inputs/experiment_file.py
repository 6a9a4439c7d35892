"""The keys of an experiment file: the only place that knows them, and what they mean.

Each class is one mapping of the file. Unknown keys, wrong types and wrong ranges are
refused here with the place in the file. The text below a key is what the documents say of it.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from amp_ray.clusters.cluster import Protocol
from amp_ray.inputs.experiment import Objective, Space
from amp_ray.inputs.own_program import OwnProgram
from amp_ray.inputs.section import (
    Count,
    Flag,
    Index,
    Number,
    Positive,
    Seconds,
    Section,
    Text,
    Within,
)
from amp_ray.inputs.ssh_settings import SshSettings
from amp_ray.models.model import MOST_LAYERS, LayerList
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


def _rate_kind(rate: object) -> str:
    """Tell rates by size from one rate, so that a mistake is told once."""
    return "by size" if isinstance(rate, list) else "one"


AnyLinkRate = Annotated[
    Annotated[LinkRate, Tag("one")] | Annotated[RatesBySize, Tag("by size")],
    Discriminator(_rate_kind),
]
Rate = Annotated[Number, AfterValidator(Within(1e-3, 1e5, "TFLOP/s"))]
Latency = Annotated[Number, AfterValidator(Within(1e-3, 1e6, "microseconds", or_zero=True))]
Price = Annotated[Number, AfterValidator(Within(1e-6, 1e6, "of the currency", or_zero=True))]


def _stage_kind(stage: object) -> str:
    """Tell the word from a number, so that a mistake is told once."""
    return "word" if isinstance(stage, str) else "number"


ZeroStage = Annotated[
    Annotated[Literal["auto"], Tag("word")]
    | Annotated[int, Field(ge=0, le=MOST_ZERO_STAGE, strict=True), Tag("number")],
    Discriminator(_stage_kind),
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


class ModelSection(Section):
    """``model``: a family with its figures, or a Hugging Face ``config.json``."""

    config: Text | None = None
    """A Hugging Face `config.json`. Families: gpt2, llama, t5, vit."""
    family: Text | None = None
    """Architecture. Default: needed, or `config`."""
    num_layers: Layers | None = None
    """Transformer blocks; of the encoder for t5; for wide_resnet the depth that names it: 50, 101
    or 152. Families: gpt2, llama, t5, wide_resnet. Default: needed."""
    hidden_size: Count | None = None
    """Width of a block; of the first level for transgan. Families: gpt2, llama, transgan, t5.
    Default: needed."""
    num_heads: Count | None = None
    """Attention heads; divides `hidden_size` (t5: or `head_size` is given). Families: gpt2, llama,
    transgan, t5. Default: needed."""
    sequence_length: Count | None = None
    """Tokens per sample; of the encoder for t5. Families: gpt2, llama, t5, blocks. Default: needed;
    blocks: none."""
    vocab_size: Count | None = None
    """Rows of the embedding; padded as the runtime does. Families: gpt2, llama, t5. Default:
    needed."""
    num_key_value_heads: Count | None = None
    """Heads of keys and values; divides `num_heads`. Families: llama. Default: `num_heads`."""
    feed_forward_size: Count | None = None
    """Inner width of the feed-forward part. Families: gpt2, llama, t5. Default: 4 x hidden; llama:
    8/3 x hidden, up to a multiple of 256."""
    tied_embedding: Flag | None = None
    """Whether input and output embedding are one weight. Families: gpt2, llama, t5. Default: gpt2,
    t5: true, llama: false."""
    depth: Annotated[list[Index], Field(min_length=1, max_length=16)] | None = None
    """Blocks per level, lowest first; the last one is not 0. Families: transgan. Default:
    needed."""
    bottom_width: Count | None = None
    """Side of the lowest level's picture. Families: transgan. Default: needed."""
    latent_size: Count | None = None
    """Length of the random input. Families: transgan. Default: 512."""
    window_size: Count | None = None
    """Side of an attention window in pictures of at least 4 windows a side. Families: transgan.
    Default: 16."""
    num_decoder_layers: Layers | None = None
    """Blocks of the decoder. Families: t5. Default: `num_layers`."""
    decoder_sequence_length: Count | None = None
    """Tokens of the decoder per sample. Families: t5. Default: `sequence_length`."""
    head_size: Count | None = None
    """Width of one head (`head_dim`, `d_kv`); with latent attention that of its part that is not
    rotated. Families: llama, t5. Default: hidden / heads."""
    gated_feed_forward: Flag | None = None
    """Gated GELU, as T5 v1.1 has it, instead of ReLU. Families: t5. Default: false."""
    width_factor: Count | None = None
    """Inner channels of a bottleneck over those of a plain ResNet. Families: wide_resnet. Default:
    2."""
    base_channels: Count | None = None
    """Channels of the stem, on which all others depend. Families: wide_resnet. Default: 64."""
    image_size: Count | None = None
    """Side of the picture, at least 32; for vit a multiple of `patch_size`. Families: wide_resnet,
    vit. Default: 224."""
    num_classes: Count | None = None
    """Columns of the last layer. Families: wide_resnet, vit. Default: 1000."""
    num_experts: Count | None = None
    """Routed experts of a block. Families: gpt2, llama."""
    experts_per_token: Count | None = None
    """Experts that a token goes through. Families: gpt2, llama. Default: needed with
    `num_experts`."""
    expert_feed_forward_size: Count | None = None
    """Inner width of one expert. Families: gpt2, llama. Default: `feed_forward_size`."""
    shared_feed_forward_size: Count | None = None
    """Inner width of the experts that all tokens go through, together. Families: gpt2, llama."""
    first_dense_layers: Index | None = None
    """Blocks without experts before the first one that has some. Families: gpt2, llama. Default:
    0."""
    attention_windows: Annotated[list[Index], Field(min_length=1)] | None = None
    """Tokens before it that a token attends to, by block, over and over from the first; 0 for all:
    `[128, 0]`. Only attention as one kernel is faster for it. Families: llama. Default: all
    tokens."""
    attention_bias: Flag | None = None
    """Biases of the products for queries, keys and values. Families: llama. Default: false."""
    query_key_norm: Flag | None = None
    """Queries and keys are normed head by head. Families: llama. Default: false."""
    post_norms: Flag | None = None
    """Attention and feed-forward part are normed before they are added, too. Families: llama.
    Default: false."""
    key_value_rank: Count | None = None
    """Latent attention: width of the latent of keys and values; needs `rotary_head_size`,
    `value_head_size` and `head_size`.
    Families: llama."""
    query_rank: Count | None = None
    """Width of the latent of queries; none makes them directly. Families: llama."""
    rotary_head_size: Count | None = None
    """Rotated part of a head beside `head_size`. Families: llama."""
    value_head_size: Count | None = None
    """Width of a head's values. Families: llama."""
    patch_size: Count | None = None
    """Side of a patch. Families: vit. Default: 16."""
    blocks: Annotated[list[BlockSection], Field(min_length=1, max_length=MOST_LAYERS)] | None = None
    """[The model's blocks](#blocks). Families: blocks. Default: needed."""
    layer_list: LayerList | None = None
    """Which list of layers `bounds` count in. Families: gpt2, transgan; others
    `runtime` only.
    Default: the runtime's."""


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


def _kind(device: object) -> str:
    """Tell a described device from a named one, so that a mistake is told once."""
    return "described" if isinstance(device, dict | DeviceSection) else "named"


class NodeSection(Section):
    """One entry of ``cluster.nodes``: ``count`` equal nodes."""

    count: Few = 1
    """How many such nodes."""
    device: Annotated[
        Annotated[Text, Tag("named")] | Annotated[DeviceSection, Tag("described")],
        Discriminator(_kind),
    ]
    """What sits in every slot."""
    slots: Few
    """Devices per node; agrees with the hostfile."""
    intra_gbit_per_s: AnyLinkRate | None = None
    """What a long all-reduce between the devices of the node reaches (bus bandwidth as NCCL's tests
    define it); the default is .79 of the line rate of the board's own links where these meet in a
    switch (NVSwitch since A100), else half (`amp_ray/clusters/catalogue.py`). As a list, the rate of a
    message or all-reduce of each size, linear in the logarithm of the size between two. A rate
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


class SearchSection(Section):
    """``search``: which strategies are looked at."""

    space: Space = "uniform"
    """`uniform`: one tp, dp and micro-batch size for all stages, rank after rank on the devices as
    they are listed. `placement`: the same, on any devices: the order of nodes over stages is chosen
    together with the cuts, and which devices stay idle. `heterogeneous`: every stage has its own
    devices, tp and dp, and may share samples out among devices of different speed, which `runtime:
    torch` launches; strategies of `placement` are in it too. `operator`: stages are cut between the
    [operators of a profile](formats.md#acesos-files), on any number of the devices in their order,
    and with `recompute: auto` each operator recomputes or not; such plans are exported, not
    launched. Without such a profile it is `heterogeneous`, cut between layers; where there are few
    plans (short chains on few devices) all of them are simulated, with what each stage
    recomputes."""
    min_tp: Count = 1
    """Smallest tensor parallel degree."""
    max_tp: Count | None = None
    """Largest one. Default: the slots of a node."""
    max_pp: Count | None = None
    """Largest pipeline parallel degree."""
    max_dp: Count | None = None
    """Largest data parallel degree."""
    max_cp: Count = 1
    """Largest context parallel degree: ranks that divide the tokens of every sequence; those are
    looked at of which twice as many divide a sequence. For runtimes that can, attention as one
    kernel, models of one causal sequence; with `space: uniform`, without `token_slices`. Layer
    times are then those of the data sheet."""
    max_ep: Count | None = None
    """Largest expert parallel degree, for models with experts on runtimes that share them out, in
    space `uniform`; 1 keeps all experts on every replica."""
    micro_batch_sizes: Annotated[list[Count], Field(min_length=1)] | None = None
    """Sizes to look at, per data-parallel rank. Default: all that divide."""
    tp_across_nodes: Flag = False
    """Whether a tensor-parallel group may span nodes."""
    launchable: Flag = False
    """Whether only what the runtime launches as it is matters: then `heterogeneous` is `placement`,
    unless the runtime is `torch`; `plan --launchable` sets it, `tune` always does."""
    idle_devices: Flag | None = None
    """Whether strategies may use fewer devices than there are. `placement` chooses which; `uniform`
    leaves out whole kinds of nodes, and of the others the last devices of the list. Never beside
    `tp_across_nodes` or `token_slices`. Default: true, but false for `uniform`."""
    max_cost_per_iteration: Positive | None = None
    """Strategies that cost more are not feasible; parts of the cluster are planned for as well."""
    min_tokens_per_s: Positive | None = None
    """Strategies that train fewer are not feasible."""
    batch_tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share by which a strategy's batch may differ from `global_batch_size`, where the devices
    divide other batches better: up to three are planned for beside it, their rows say so, and all
    are ranked by the time of a sample. To launch one, set its batch; with `launchable` the batch
    stays."""
    token_slices: Flag = False
    """Whether pipelines may pass on slices of sequences, chosen together with degrees,
    micro-batches and cuts; with `space: uniform`. Their times are those of the profile where it has
    slices (`amp-ray profile --token-slices`); else they are counted, and corrected as those of
    whole sequences are measured."""
    slice_granularity: Count | None = None
    """Slices begin at its multiples. Default: a 32nd of a sequence."""
    per_operator: Flag = False
    """Whether operators of one stage may differ in tp, dp and algorithm: mixes that are fastest for
    some worth of memory are looked at beside stages that use all operators alike; with `space:
    operator` and a profile of operators. The bound is then one of the stages that are looked at."""
    virtual_stages: Annotated[list[Count], Field(min_length=1)] | None = None
    """Chunks per stage to look at: above 1 the schedule is interleaved 1F1B, for runtimes that can
    (`torch`, `megatron-core`, `megatron-lm-2022`); with `space: uniform`, without `token_slices`. A
    single stage has one chunk; every chunk has a block. Default: the runtime's own, 1."""
    planner: Text = "amp-ray"
    """Whose predictions count in `plan`, `score`, `sweep`, `report` and `export`: `amp-ray`, or
    another name that `--cost-model` takes; on the command line it wins."""
    first_node_counts: Flag = False
    """With `--cost-model metis-2024` on nodes of unequal size: whether ranks get their types as in
    its planner, which counts as many for every node as the first one has devices, type after type,
    and cuts off what is too many. Such plans may take devices for others than they are."""


class TrialsSection(Section):
    """``trials``: how strategies are measured."""

    backend: Literal["ssh", "local"] = "ssh"
    """Where trials run: on the hosts, or all on this machine, which then plays every host."""
    budget: Index = 10
    """How many may be launched."""
    steps: Count = 20
    """Optimizer steps that are measured; our programs go on where these leave the time open."""
    warmup_steps: Index = 5
    """Steps before them."""
    timeout_s: Seconds = 600.0
    """Wall time after which a trial is given up."""
    ssh: SshSettings = SshSettings()
    """How the hosts are reached."""
    launcher: Literal["agent", "deepspeed"] = "agent"
    """What starts the ranks of a host: the agent each by itself, or one `deepspeed.launcher.launch`
    per host."""
    warm: Flag = True
    """Whether each host keeps a process that has imported torch and DeepSpeed, from which ranks are
    forked."""
    python: Text | None = None
    """Interpreter that trains: absolute, the same on every host. Default: that of the agent."""
    environment: dict[Text, Text] = Field(default_factory=dict)
    """Variables of every rank, with names of letters, digits and `_`; they win over the launcher's
    own, except those that tell ranks apart (`RANK`, `MASTER_ADDR`, ...)."""
    host_groups: Count = 1
    """Into how many equal groups of consecutive nodes the cluster is split; trials of different
    groups run side by side, and the first group is the cluster that is planned for."""
    program: OwnProgram | None = None
    """Your own training program instead of the package's."""


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
    search: SearchSection = SearchSection()
    """[Which strategies are looked at](#search)."""
    objective: Objective = "time"
    """What is best: the least time, the least money, or all strategies that no other beats in both.
    The latter two need the price of every node, and plan for parts of the cluster too: every number
    of nodes of each kind, or powers of two where that makes more than 64 parts."""
    trials: TrialsSection = TrialsSection()
    """[How strategies are measured](#trials)."""
