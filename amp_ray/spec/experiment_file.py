"""The keys of an experiment file: the only place that knows them.

Each class is one mapping of the file. Unknown keys, wrong types and wrong ranges are
refused here with the place in the file; what the values mean is decided elsewhere.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from amp_ray.spec.access import SshSettings
from amp_ray.spec.cluster import Protocol
from amp_ray.spec.experiment import Objective, Space
from amp_ray.spec.model import MOST_LAYERS
from amp_ray.spec.own_program import BuiltIn, Per
from amp_ray.spec.recompute import RecomputeKind
from amp_ray.spec.section import Count, Flag, Index, Positive, Section, Text, Within
from amp_ray.spec.traits import LayerList
from amp_ray.spec.zero import MOST_ZERO_STAGE
from amp_ray.units import Precision

_LONGEST_NAME: Final = 100

# Ranges are wide enough for a core of a CPU, a link of 1 Mbit/s and boards ten times as large as
# those of today, and narrow enough to find bytes where GiB belong.
_Number = Annotated[float, Field(strict=True)]
Memory = Annotated[_Number, AfterValidator(Within(1e-3, 1e4, "GiB"))]
MemoryRate = Annotated[_Number, AfterValidator(Within(0.1, 1e5, "GB/s"))]
LinkRate = Annotated[_Number, AfterValidator(Within(1e-3, 1e5, "Gbit/s"))]
_Size = Annotated[int, Field(ge=1, le=10**15, strict=True)]
RatesBySize = Annotated[list[tuple[_Size, LinkRate]], Field(min_length=1)]


def _rate_kind(rate: object) -> str:
    """Tell rates by size from one rate, so that a mistake is told once."""
    return "by size" if isinstance(rate, list) else "one"


AnyLinkRate = Annotated[
    Annotated[LinkRate, Tag("one")] | Annotated[RatesBySize, Tag("by size")],
    Discriminator(_rate_kind),
]
Rate = Annotated[_Number, AfterValidator(Within(1e-3, 1e5, "TFLOP/s"))]
Latency = Annotated[_Number, AfterValidator(Within(1e-3, 1e6, "microseconds", or_zero=True))]
Seconds = Annotated[_Number, AfterValidator(Within(1e-3, 1e8, "seconds"))]
Price = Annotated[_Number, AfterValidator(Within(1e-6, 1e6, "of the currency", or_zero=True))]


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
        message = "a plain name: no '/', no '\\', no '.' in front, no control character"
        raise ValueError(message)
    if len(name) > _LONGEST_NAME:
        message = f"at most {_LONGEST_NAME} characters"
        raise ValueError(message)
    return name


Name = Annotated[Text, AfterValidator(_plain)]


class BlockSection(Section):
    """One entry of ``model.blocks``: ``repeat`` equal blocks, figures of one sample."""

    name: Name
    repeat: Layers = 1
    parameters: _Amount
    forward_gflops: _Amount
    activation_elements: _Amount
    boundary_elements: Positive
    sharded: Flag = False


class ModelSection(Section):
    """``model``: a family with its figures, or a Hugging Face ``config.json``."""

    config: Text | None = None
    family: Text | None = None
    num_layers: Layers | None = None
    hidden_size: Count | None = None
    num_heads: Count | None = None
    sequence_length: Count | None = None
    vocab_size: Count | None = None
    num_key_value_heads: Count | None = None
    feed_forward_size: Count | None = None
    tied_embedding: Flag | None = None
    depth: Annotated[list[Index], Field(min_length=1, max_length=16)] | None = None
    bottom_width: Count | None = None
    latent_size: Count | None = None
    window_size: Count | None = None
    num_decoder_layers: Layers | None = None
    decoder_sequence_length: Count | None = None
    head_size: Count | None = None
    gated_feed_forward: Flag | None = None
    width_factor: Count | None = None
    base_channels: Count | None = None
    image_size: Count | None = None
    num_classes: Count | None = None
    num_experts: Count | None = None
    experts_per_token: Count | None = None
    expert_feed_forward_size: Count | None = None
    shared_feed_forward_size: Count | None = None
    first_dense_layers: Index | None = None
    attention_windows: Annotated[list[Index], Field(min_length=1)] | None = None
    attention_bias: Flag | None = None
    query_key_norm: Flag | None = None
    post_norms: Flag | None = None
    key_value_rank: Count | None = None
    query_rank: Count | None = None
    rotary_head_size: Count | None = None
    value_head_size: Count | None = None
    patch_size: Count | None = None
    blocks: Annotated[list[BlockSection], Field(min_length=1, max_length=MOST_LAYERS)] | None = None
    layer_list: LayerList | None = None


class DeviceSection(Section):
    """``device`` as a mapping: a data sheet that the catalogue does not have."""

    name: Name
    memory_gib: Memory
    memory_gbyte_per_s: MemoryRate
    num_multiprocessors: Few = 1
    context_gib: Memory | None = None
    fp32_tflops: Rate | None = None
    fp16_tflops: Rate | None = None
    bf16_tflops: Rate | None = None
    fp8_tflops: Rate | None = None


def _kind(device: object) -> str:
    """Tell a described device from a named one, so that a mistake is told once."""
    return "described" if isinstance(device, dict | DeviceSection) else "named"


class NodeSection(Section):
    """One entry of ``cluster.nodes``: ``count`` equal nodes."""

    count: Few = 1
    device: Annotated[
        Annotated[Text, Tag("named")] | Annotated[DeviceSection, Tag("described")],
        Discriminator(_kind),
    ]
    slots: Few
    intra_gbit_per_s: AnyLinkRate | None = None
    intra_gbyte_per_s: AnyLinkRate | None = None
    inter_gbit_per_s: AnyLinkRate | None = None
    inter_gbyte_per_s: AnyLinkRate | None = None
    protocol: Protocol | None = None
    intra_latency_us: Latency | None = None
    inter_latency_us: Latency | None = None
    intra_collective_us: Latency | None = None
    inter_collective_us: Latency | None = None
    memory_gib: Memory | None = None
    nominal_memory_gib: Memory | None = None
    zone: Name | None = None
    price_per_device_hour: Price | None = None


class LinkSection(Section):
    """One entry of ``cluster.links``: what joins a single pair of nodes, or two zones."""

    between: Annotated[list[Text], Field(min_length=2, max_length=2)]
    gbit_per_s: AnyLinkRate | None = None
    gbyte_per_s: AnyLinkRate | None = None
    latency_us: Latency | None = None
    collective_us: Latency | None = None
    price_per_gbyte: Price | None = None


class ClusterSection(Section):
    """``cluster``: what the hosts are and how they are connected."""

    hostfile: Text | None = None
    nodes: Annotated[list[NodeSection], Field(min_length=1)]
    links: list[LinkSection] = Field(default_factory=list)


class ProfileSection(Section):
    """``profile``: where layer times come from."""

    source: Literal["analytic", "table", "metis", "aceso"] = "analytic"
    path: Text | None = None
    model: Text | None = None


class SearchSection(Section):
    """``search``: which strategies are looked at."""

    space: Space = "uniform"
    min_tp: Count = 1
    max_tp: Count | None = None
    max_pp: Count | None = None
    max_dp: Count | None = None
    max_cp: Count = 1
    max_ep: Count | None = None
    micro_batch_sizes: Annotated[list[Count], Field(min_length=1)] | None = None
    tp_across_nodes: Flag = False
    launchable: Flag = False
    idle_devices: Flag | None = None
    max_cost_per_iteration: Positive | None = None
    min_tokens_per_s: Positive | None = None
    batch_tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    token_slices: Flag = False
    slice_granularity: Count | None = None
    virtual_stages: Annotated[list[Count], Field(min_length=1)] | None = None


class SshSection(Section):
    """``trials.ssh``: how hosts are reached."""

    user: Text | None = None
    identities: tuple[Text, ...] = ()
    known_hosts: Text = SshSettings().known_hosts
    config: Text | None = SshSettings().config
    use_agent: Flag = False
    connect_timeout_s: Seconds = SshSettings().connect_timeout_s
    python: Text = SshSettings().python


class PatternSection(Section):
    """``trials.program.metric`` as a mapping: where a log tells the time of an iteration."""

    pattern: Text
    unit: Literal["s", "ms", "us"] = "s"


def _metric_kind(metric: object) -> str:
    """Tell a pattern from a built-in way, so that a mistake is told once."""
    return "pattern" if isinstance(metric, dict | PatternSection) else "built-in"


class ProgramSection(Section):
    """``trials.program``: the user's own training program."""

    argv: Annotated[tuple[Text, ...], Field(min_length=1)]
    per: Per = "rank"
    metric: Annotated[
        Annotated[BuiltIn, Tag("built-in")] | Annotated[PatternSection, Tag("pattern")],
        Discriminator(_metric_kind),
    ] = "helper"
    files: tuple[Text, ...] = ()
    cwd: Text | None = None
    collect: tuple[Text, ...] = ()


class TrialsSection(Section):
    """``trials``: how strategies are measured."""

    backend: Literal["ssh", "local"] = "ssh"
    budget: Index = 10
    steps: Count = 20
    warmup_steps: Index = 5
    timeout_s: Seconds = 600.0
    ssh: SshSection = SshSection()
    launcher: Literal["agent", "deepspeed"] = "agent"
    warm: Flag = True
    python: Text | None = None
    environment: dict[Text, Text] = Field(default_factory=dict)
    host_groups: Count = 1
    program: ProgramSection | None = None


class ExperimentFile(Section):
    """The whole file."""

    name: Name
    model: ModelSection
    cluster: ClusterSection
    profile: ProfileSection = ProfileSection()
    precision: Precision = "fp16"
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    zero_stage: ZeroStage | None = None
    shard_ranks: Count | None = None
    reshard_after_forward: Flag | None = None
    recompute: RecomputeKind = "none"
    sequence_parallel: Flag | Literal["auto"] = "auto"
    runtime: Text = "deepspeed"
    traits: dict[Text, Any] = Field(default_factory=dict)
    constants: dict[Text, Positive] = Field(default_factory=dict)
    global_batch_size: Samples
    tokens: Positive | None = None
    search: SearchSection = SearchSection()
    objective: Objective = "time"
    trials: TrialsSection = TrialsSection()
