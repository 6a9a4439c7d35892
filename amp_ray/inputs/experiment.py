"""An experiment as a value: model, cluster, runtime, limits of the search, settings of trials."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, Tag
from pydantic import dataclasses as checked

from amp_ray.clusters.cluster import Cluster
from amp_ray.clusters.constants import Constants, Uncertainty
from amp_ray.errors import InputError, Where
from amp_ray.inputs.profile import Profile
from amp_ray.inputs.section import (
    STRICT,
    Count,
    Flag,
    Index,
    Positive,
    Seconds,
    Section,
    Text,
    by_type,
)
from amp_ray.inputs.yaml_text import SourceLines
from amp_ray.models.model import Model, ModelShape
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.strategies.candidate import StageOptions
from amp_ray.strategies.recompute import KINDS, Recompute
from amp_ray.strategies.zero import AUTO_STAGE, AUTO_ZERO, MOST_ZERO_STAGE, Zero
from amp_ray.units import Precision

Space = Literal["uniform", "placement", "heterogeneous", "operator"]
"""Which strategies are looked at: one grid on devices in order, the grid on any devices, stages
that each have their own device group, tp and dp, or such stages cut between operators."""


Objective = Literal["time", "cost", "time-cost"]
"""What is best: the least time, the least money, or whatever no other strategy beats in both."""


def _ascending(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return each size once, in order; refuse a list without any."""
    if not sizes:
        raise ValueError("a list of at least 1")
    return tuple(sorted(set(sizes)))


Ascending = Annotated[tuple[Count, ...], AfterValidator(_ascending)]


@checked.dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SearchLimits:
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
    micro_batch_sizes: Ascending | None = None
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
    virtual_stages: Ascending | None = None
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

    def problems(self, traits: RuntimeTraits, shape: ModelShape) -> Iterator[tuple[str, str]]:
        """Yield the keys that space, runtime or model cannot satisfy, each with the reason."""
        is_uniform, other = self.space == "uniform", f"the space is {self.space}"
        chunks, slices = self.virtual_stages or (traits.virtual_stages,), self.token_slices
        rules = (
            (
                "token_slices",
                slices and not is_uniform,
                f"token slices are planned in space uniform; {other}",
            ),
            (
                "token_slices",
                slices and not shape.is_causal,
                f"model family {shape.family!r} has no sequence to cut into token slices",
            ),
            (
                "per_operator",
                self.per_operator and self.space != "operator",
                f"operators are planned in space operator; {other}",
            ),
            ("virtual_stages", True, traits.why_no_chunks(chunks[-1])),
            (
                "virtual_stages",
                chunks != (1,) and not is_uniform,
                f"interleaved chunks are planned in space uniform; {other}",
            ),
            (
                "virtual_stages",
                chunks != (1,) and slices,
                "token slices cannot be added to interleaved chunks; leave one of them out",
            ),
            ("max_cp", True, traits.why_no_context(self.max_cp)),
            (
                "max_cp",
                self.max_cp > 1 and (slices or not is_uniform),
                "context parallelism is planned in space uniform, without token slices",
            ),
        )
        return ((key, reason) for key, applies, reason in rules if applies and reason)


class SshSettings(Section):
    """``trials.ssh``; what stands in a target goes first, then this, then the configuration."""

    user: Text | None = None
    """For hosts that are not written `user@host`. Default: the configuration's, else yours."""
    identities: tuple[Text, ...] = ()
    """Private keys to try, in order."""
    known_hosts: Text = "~/.ssh/known_hosts"
    """Keys of hosts that are trusted; no other is. Default: OpenSSH's files."""
    config: Text | None = "~/.ssh/config"
    """OpenSSH client configuration to follow."""
    use_agent: Flag = False
    """Whether the keys of a running ssh-agent are tried too."""
    connect_timeout_s: Seconds = 10.0
    """Limit of each step of setting up a connection."""
    python: Text = "python3"
    """Interpreter that runs the agent: 3.8 or newer, an absolute path is safest."""


BuiltIn = Literal["helper", "megatron", "deepspeed"]

SECONDS_PER_UNIT: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Units in which a log may give a time."""


class Pattern(Section):
    """``trials.program.metric`` as a mapping: where a log tells the time of an iteration."""

    pattern: Text
    """Regular expression with one group, around the number; every match in the log is an
    iteration."""
    unit: Literal["s", "ms", "us"] = "s"
    """Of that number."""


class OwnProgram(Section):
    """``trials.program``: what is run instead of the package's own training program."""

    argv: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Program and arguments, with placeholders such as `{tp}`; no shell sees them."""
    per: Literal["rank", "node"] = "rank"
    """Whether it is started once per rank, or once per host and starts the ranks itself."""
    metric: Annotated[
        Annotated[BuiltIn, Tag("built-in")] | Annotated[Pattern, Tag("pattern")],
        by_type(dict | Pattern, "pattern", "built-in"),
    ] = "helper"
    """Where iteration times come from: the Python helper, the log lines of Megatron or DeepSpeed,
    or a pattern."""
    files: tuple[Text, ...] = ()
    """Copied into the trial's folder on every host; relative to the experiment file's folder."""
    cwd: Text | None = None
    """Where it starts, on every host. Default: the trial's folder."""
    collect: tuple[Text, ...] = ()
    """Further files of the trial's folder that are brought back, such as `*.csv`."""


@checked.dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class TrialSettings:
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

    @property
    def num_steps(self) -> int:
        """Optimizer steps that are measured."""
        return self.steps

    @property
    def num_warmup_steps(self) -> int:
        """Steps before them."""
        return self.warmup_steps


NO_SOURCE: Final = SourceLines(file="experiment")
"""Of an experiment that was built from values."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experiment:
    """The planning problem: a model on a cluster under a runtime.

    Args:
        global_batch_size: Samples per optimizer step.
        sequence_parallel: Whether tensor-parallel ranks divide tokens too, where they can.
        planner: Planner of commands that name no other.
        tokens: Total number of tokens to train on, if the file states it.
        uncertainty: Of the constants, after a calibration; None for the priors.
        names_hosts: Whether a hostfile names the nodes.
        host_groups: Names of the hosts of every group; the first group is the cluster that is
            planned for. Empty means that all hosts are one group.
        zero_stage: 0 to 3, or `AUTO_STAGE` for the search to choose.
        shard_ranks: Data-parallel ranks of a shard group; 0 if unset: all of them, or the choice of
            the search.
        reshard_after_forward: Whether weights are gathered again for the backward pass; None if
            unset, which means yes without a pipeline.
        source: Places of its keys in the file, for later error messages.
    """

    name: str
    model: Model
    cluster: Cluster
    profile: Profile
    constants: Constants
    traits: RuntimeTraits
    precision: Precision
    optimizer: str
    zero_stage: int
    recompute: Recompute
    global_batch_size: int
    limits: SearchLimits
    trials: TrialSettings
    sequence_parallel: bool = False
    objective: Objective = "time"
    tokens: float | None = None
    uncertainty: Uncertainty | None = None
    names_hosts: bool = True
    host_groups: tuple[tuple[str, ...], ...] = ()
    shard_ranks: int = 0
    reshard_after_forward: bool | None = None
    source: SourceLines = NO_SOURCE

    @property
    def space(self) -> Space:
        """The space of strategies that the search covers."""
        return self.limits.space

    @property
    def planner(self) -> str:
        """Name of the planner for commands that name none."""
        return self.limits.planner

    @property
    def virtual_stages(self) -> tuple[int, ...]:
        """Numbers of chunks per stage in the search; by default the runtime's."""
        return self.limits.virtual_stages or (self.traits.virtual_stages,)

    @property
    def may_idle(self) -> bool:
        """Whether strategies may leave devices idle; then groups stay within a node."""
        chosen = self.limits.idle_devices
        allowed = self.space != "uniform" if chosen is None else chosen
        return allowed and not (self.limits.tp_across_nodes or self.limits.token_slices)

    def stage_options(self, tp: int, dp: int, **others: Any) -> StageOptions:  # noqa: ANN401 - by field
        """Return the options of stages; the experiment supplies those that are left out."""
        options = StageOptions(tp=tp, dp=dp, **{"recompute": self.recompute, **others})
        if "sequence_parallel" in others or not self.sequence_parallel or tp == 1:
            return options
        divides = self.model.shape.divides_tokens(options.token_ranks)
        return replace(options, sequence_parallel=divides)

    @property
    def program_settings(self) -> dict[str, Any]:
        """Return what constants of the cost model depend on beside the runtime's traits."""
        return {
            "precision": self.precision,
            "optimizer": self.optimizer,
            "zero_stage": self.zero_stage,
        }

    def other_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings that may be worth a try: what they are, and the change of the file."""
        for kind in KINDS:
            if kind != self.recompute.kind:
                yield f"recompute {kind}", f"recompute={kind}"
        if self.zero_stage == 0:
            yield "optimizer sharded over replicas (ZeRO-1)", "zero_stage=1"

    @property
    def counts_money(self) -> bool:
        """Whether the objective counts money."""
        return self.objective != "time" or self.limits.max_cost_per_iteration is not None

    @property
    def varies_batch(self) -> bool:
        """Whether plans of nearby batch sizes count, and all are ranked by the time of a sample."""
        return self.limits.batch_tolerance > 0 and not self.limits.launchable

    @property
    def money_key(self) -> str:
        """The key that makes money count, as messages name it."""
        if self.objective == "time":
            return "search.max_cost_per_iteration"
        return f"objective {self.objective!r}"

    @property
    def is_trained(self) -> bool:
        """Whether a training program can train the model: ours, or the user's."""
        return self.model.shape.is_trained or self.trials.program is not None

    def zero(self, pp: int) -> Zero:
        """Return the ZeRO options for a number of stages, or that the search chooses them.

        A pipeline would gather weights again for every micro-batch, so there they stay by default.
        """
        if self.zero_stage == AUTO_STAGE:
            return AUTO_ZERO
        keeps = pp > 1 if self.reshard_after_forward is None else not self.reshard_after_forward
        return Zero(
            stage=self.zero_stage,
            shard_ranks=self.shard_ranks,
            keeps_weights=keeps and self.zero_stage == MOST_ZERO_STAGE,
        )

    def where(self, *path: str | int) -> Where:
        """Return the place of a key in the file that the experiment was built from."""
        return self.source.where(*path)


def without_hosts(experiment: Experiment, hosts: Sequence[str]) -> Experiment:
    """Return an experiment on its cluster without some hosts."""
    if not hosts:
        return experiment
    names = [node.name for node in experiment.cluster.nodes]
    unknown = [host for host in hosts if host not in names]
    if unknown:
        message = f"--without {unknown[0]}: the hosts are {', '.join(names)}"
        raise InputError(message, where=experiment.where("cluster"))
    kept = [index for index, name in enumerate(names) if name not in hosts]
    if not kept:
        raise InputError("--without leaves no host", where=experiment.where("cluster"))
    return replace(experiment, cluster=experiment.cluster.part(kept))


def launchable_only(experiment: Experiment) -> Experiment:
    """Return an experiment whose search covers only launchable strategies."""
    return replace(experiment, limits=replace(experiment.limits, launchable=True))
