"""The keys of an experiment file: the only place that knows them.

Each class is one mapping of the file. Unknown keys, wrong types and wrong ranges are
refused here with the place in the file; what the values mean is decided elsewhere.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from amp_ray.spec.access import SshSettings
from amp_ray.spec.experiment import Space
from amp_ray.spec.own_program import BuiltIn, Per
from amp_ray.spec.section import Count, Flag, Index, Positive, Section, Text
from amp_ray.spec.traits import LayerList
from amp_ray.units import Precision

# Figures beyond these are a slip of the unit, e.g. bytes where GiB belong.
Few = Annotated[int, Field(ge=1, le=10**5, strict=True)]
Figure = Annotated[float, Field(gt=0, le=10**6, strict=True)]
Microseconds = Annotated[float, Field(ge=0, le=10**6, strict=True)]


class ModelSection(Section):
    """``model``: a family with its figures, or a Hugging Face ``config.json``."""

    config: Text | None = None
    family: Text | None = None
    num_layers: Few | None = None
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
    layer_list: LayerList | None = None


class DeviceSection(Section):
    """``device`` as a mapping: a data sheet that the catalogue does not have."""

    name: Text
    memory_gib: Figure
    memory_gbyte_per_s: Figure
    num_multiprocessors: Few = 1
    context_gib: Figure | None = None
    fp32_tflops: Figure | None = None
    fp16_tflops: Figure | None = None
    bf16_tflops: Figure | None = None


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
    intra_gbit_per_s: Figure
    inter_gbit_per_s: Figure
    intra_latency_us: Microseconds | None = None
    inter_latency_us: Microseconds | None = None
    intra_collective_us: Microseconds | None = None
    inter_collective_us: Microseconds | None = None
    memory_gib: Figure | None = None


class LinkSection(Section):
    """One entry of ``cluster.links``: what is known about a single pair of nodes."""

    between: Annotated[list[Text], Field(min_length=2, max_length=2)]
    gbit_per_s: Figure
    latency_us: Microseconds | None = None
    collective_us: Microseconds | None = None


class ClusterSection(Section):
    """``cluster``: what the hosts are and how they are connected."""

    hostfile: Text | None = None
    nodes: Annotated[list[NodeSection], Field(min_length=1)]
    links: list[LinkSection] = Field(default_factory=list)


class ProfileSection(Section):
    """``profile``: where layer times come from."""

    source: Literal["analytic", "table", "metis"] = "analytic"
    path: Text | None = None


class SearchSection(Section):
    """``search``: which strategies are looked at."""

    space: Space = "uniform"
    min_tp: Count = 1
    max_tp: Count | None = None
    max_pp: Count | None = None
    max_dp: Count | None = None
    micro_batch_sizes: Annotated[list[Count], Field(min_length=1)] | None = None
    tp_across_nodes: Flag = False
    launchable: Flag = False


class SshSection(Section):
    """``trials.ssh``: how hosts are reached."""

    user: Text | None = None
    identities: list[Text] = Field(default_factory=list)
    known_hosts: Text = SshSettings().known_hosts
    config: Text | None = SshSettings().config
    use_agent: Flag = False
    connect_timeout_s: Positive = SshSettings().connect_timeout_s
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

    argv: Annotated[list[Text], Field(min_length=1)]
    per: Per = "rank"
    metric: Annotated[
        Annotated[BuiltIn, Tag("built-in")] | Annotated[PatternSection, Tag("pattern")],
        Discriminator(_metric_kind),
    ] = "helper"
    files: list[Text] = Field(default_factory=list)
    cwd: Text | None = None
    collect: list[Text] = Field(default_factory=list)


class TrialsSection(Section):
    """``trials``: how strategies are measured."""

    backend: Literal["ssh", "local"] = "ssh"
    budget: Index = 10
    steps: Count = 20
    warmup_steps: Index = 5
    timeout_s: Positive = 600.0
    ssh: SshSection = SshSection()
    launcher: Literal["agent", "deepspeed"] = "agent"
    warm: Flag = True
    python: Text | None = None
    environment: dict[Text, Text] = Field(default_factory=dict)
    host_groups: Count = 1
    program: ProgramSection | None = None


class ExperimentFile(Section):
    """The whole file."""

    name: Text
    model: ModelSection
    cluster: ClusterSection
    profile: ProfileSection = ProfileSection()
    precision: Precision = "fp16"
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    zero_stage: Annotated[int, Field(ge=0, le=3, strict=True)] = 0
    recompute: Literal["none", "full"] = "none"
    runtime: Text = "deepspeed"
    traits: dict[Text, Any] = Field(default_factory=dict)
    constants: dict[Text, Positive] = Field(default_factory=dict)
    global_batch_size: Count
    search: SearchSection = SearchSection()
    trials: TrialsSection = TrialsSection()
