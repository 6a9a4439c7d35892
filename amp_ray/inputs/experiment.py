"""An experiment as a value: model, cluster, runtime, limits of the search, settings of trials."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, Tag
from pydantic import dataclasses as checked

from amp_ray.clusters.cluster import Cluster
from amp_ray.clusters.constants import Constants, Uncertainty
from amp_ray.errors import InputError, Where
from amp_ray.inputs.profile import ANALYTIC, Profile
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
from amp_ray.strategies.recompute import AUTO, KINDS, NO_RECOMPUTE, Recompute
from amp_ray.strategies.zero import AUTO_STAGE, AUTO_ZERO, MOST_ZERO_STAGE, Zero
from amp_ray.units import Precision

Space = Literal["uniform", "placement", "heterogeneous", "operator"]
"""Which strategies the search covers: one grid on devices in order, the grid on any devices, stages
with their own device group, tp and dp, or such stages cut between operators."""


Objective = Literal["time", "cost", "time-cost"]
"""Which strategies are best: by time, by money, or all that no other beats in both."""


def _ascending(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return each size once, in ascending order; refuse an empty list."""
    if not sizes:
        raise ValueError("a list of at least 1")
    return tuple(sorted(set(sizes)))


Ascending = Annotated[tuple[Count, ...], AfterValidator(_ascending)]
_Auto = Annotated[Literal["auto"], Tag("word")]
Degree = Annotated[_Auto | Annotated[Count, Tag("number")], by_type(str, "word", "number")]
Chunks = Annotated[_Auto | Annotated[Ascending, Tag("list")], by_type(str, "word", "list")]

DEGREES: Final = ("tp", "pp", "dp")
"""The dimensions of a grid, which published planners search."""

DIMENSIONS: Final = (
    *(*DEGREES, "cp", "ep", "zero_stage", "recompute", "virtual_stages"),
    "sequence_parallel",
)
"""The dimensions that `Experiment.only` can leave out of a search, by their keys."""

_LEAST_CONTEXT: Final = 4096
"""Least tokens of a sequence for each rank, if the search chooses cp: NVIDIA's recipes for Llama 3
divide sequences of 8,192 tokens by 2 ranks (NeMo, ``llama3_8b``, ``llama3_70b``)."""


@checked.dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SearchLimits:
    """``search``: the strategies that the search covers."""

    space: Space = "uniform"
    """`uniform`: one tp, dp and micro-batch size for all stages, with ranks on the devices in their
    listed order. `placement`: the same on any devices: the search chooses the order of nodes over
    stages, and the devices that stay idle, together with the cuts. `heterogeneous`: every stage has
    its own devices, tp and dp, and may divide samples unevenly among devices of different speed,
    which `runtime: torch` launches; this space includes the strategies of `placement`. `operator`:
    stages are cut between the [operators of a profile](formats.md#acesos-files), on any number of
    devices in their order, and with `recompute: auto` each operator is recomputed or not; such
    plans are exported, not launched. Without such a profile it is `heterogeneous`, cut between
    layers; if there are few plans (short chains on few devices) all of them are simulated, with the
    recompute of each stage."""
    min_tp: Count = 1
    """Smallest tensor parallel degree."""
    max_tp: Count | None = None
    """Largest tensor parallel degree. Default: the devices of a node or rack."""
    max_pp: Count | None = None
    """Largest pipeline parallel degree."""
    max_dp: Count | None = None
    """Largest data parallel degree."""
    max_cp: Degree = "auto"
    """Largest context parallel degree: ranks that divide the tokens of every sequence. A degree is
    tried if twice that number divides the sequence. It needs a runtime that supports it, attention
    as one kernel, and a model of one causal sequence; with `space: uniform`, without
    `token_slices`. Layer times are then those of the data sheet. `auto`: the ranks that leave each
    4,096 tokens, wherever that is possible and no times are measured."""
    max_ep: Degree = "auto"
    """Largest expert parallel degree, for models with experts on runtimes that distribute experts,
    in space `uniform`; 1 keeps all experts on every replica. `auto`: no limit."""
    micro_batch_sizes: Ascending | None = None
    """Sizes to try, per data-parallel rank. Default: all that divide."""
    tp_across_nodes: Flag = False
    """Whether a tensor-parallel group may span nodes that no rack joins."""
    launchable: Flag = False
    """Whether to plan only strategies that the runtime can launch: then `heterogeneous` means
    `placement`, unless the runtime is `torch`. `plan --launchable` sets it, `tune` always does."""
    idle_devices: Flag | None = None
    """Whether strategies may use fewer devices than there are. `placement` chooses which; `uniform`
    leaves out whole nodes, the last ones of each kind, and what fills no tensor-parallel group; the
    row is shown if none with all devices is faster. Not possible with `tp_across_nodes` or
    `token_slices`. Default: true."""
    max_cost_per_iteration: Positive | None = None
    """Strategies that cost more are not feasible; plans then also cover parts of the cluster."""
    min_tokens_per_s: Positive | None = None
    """Strategies that train fewer tokens per second are not feasible."""
    batch_tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction by which a strategy's batch may differ from `global_batch_size`, if the devices
    divide other batches better. Up to three other batches are planned too; their rows name the
    batch, and all are ranked by the time of a sample. To launch one, set its batch; with
    `launchable` the batch does not change."""
    token_slices: Flag = False
    """Whether pipelines may pass on slices of sequences, chosen together with degrees,
    micro-batches and cuts; with `space: uniform`. Slice times come from the profile if it has
    slices (`amp-ray profile --token-slices`); otherwise they are counted, and corrected by the
    measurements of whole sequences."""
    slice_granularity: Count | None = None
    """Slices begin at multiples of this number of tokens. Default: a 32nd of a sequence."""
    per_operator: Flag | None = None
    """Whether operators of one stage may differ in tp, dp and algorithm. The search then also tries
    mixes that are fastest for some price of memory, besides stages that use all operators alike;
    with `space: operator` and a profile of operators. The bound also covers mixes that are not
    tried. Default: false, but with `--cost-model aceso-2024` true if the profile measures two
    algorithms."""
    virtual_stages: Chunks = "auto"
    """Chunks per stage to try: above 1 the schedule is interleaved 1F1B, for runtimes that support
    it (`torch`, `megatron-core`, `megatron-lm-2022`); with `space: uniform`, without
    `token_slices`. A single stage has one chunk; every chunk has a block. `auto`: the powers of two
    and the divisors of a stage's number of blocks, wherever that is possible."""
    planner: Text = "amp-ray"
    """Planner of `plan`, `score`, `sweep`, `report` and `export`: `amp-ray`, or another name that
    `--cost-model` takes. The option on the command line has priority."""
    first_node_counts: Flag = False
    """With `--cost-model metis-2024` on nodes of unequal size: whether ranks get their types as in
    Metis's planner. It counts as many ranks for every node as the first node has devices, type
    after type, and cuts off the ranks beyond the devices. Such plans may mistake the type of a
    device."""

    def problems(self, traits: RuntimeTraits, shape: ModelShape) -> Iterator[tuple[str, str]]:
        """Yield the keys that space, runtime or model cannot satisfy, each with the reason."""
        is_uniform, other = self.space == "uniform", f"the space is {self.space}"
        chunks = (1,) if self.virtual_stages == "auto" else self.virtual_stages
        cp, slices = 1 if self.max_cp == "auto" else self.max_cp, self.token_slices
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
                bool(self.per_operator) and self.space != "operator",
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
            ("max_cp", True, traits.why_no_context(cp)),
            (
                "max_cp",
                cp > 1 and (slices or not is_uniform),
                "context parallelism is planned in space uniform, without token slices",
            ),
        )
        return ((key, reason) for key, applies, reason in rules if applies and reason)


class SshSettings(Section):
    """``trials.ssh``; a target's settings have priority, then these, then the SSH configuration."""

    user: Text | None = None
    """For hosts that are not written `user@host`. Default: the configuration's user, else yours."""
    identities: tuple[Text, ...] = ()
    """Private keys to try, in order."""
    known_hosts: Text = "~/.ssh/known_hosts"
    """Keys of trusted hosts; other hosts are refused. Default: OpenSSH's files."""
    config: Text | None = "~/.ssh/config"
    """OpenSSH client configuration to follow."""
    use_agent: Flag = False
    """Whether to try the keys of a running ssh-agent too."""
    connect_timeout_s: Seconds = 10.0
    """Limit on each step of setting up a connection."""
    python: Text = "python3"
    """Interpreter that runs the agent: 3.8 or newer, an absolute path is safest."""


BuiltIn = Literal["helper", "megatron", "deepspeed"]

SECONDS_PER_UNIT: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Seconds per unit in which a log may give a time."""


class Pattern(Section):
    """``trials.program.metric`` as a mapping: the log lines with the time of an iteration."""

    pattern: Text
    """Regular expression with one group, which contains the number; every match in the log is an
    iteration."""
    unit: Literal["s", "ms", "us"] = "s"
    """Unit of that number."""


class OwnProgram(Section):
    """``trials.program``: the program to run instead of the package's own training program."""

    argv: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Program and arguments, with placeholders such as `{tp}`; no shell interprets them."""
    per: Literal["rank", "node"] = "rank"
    """Whether the program is started once per rank, or once per host to start the ranks itself."""
    metric: Annotated[
        Annotated[BuiltIn, Tag("built-in")] | Annotated[Pattern, Tag("pattern")],
        by_type(dict | Pattern, "pattern", "built-in"),
    ] = "helper"
    """Source of iteration times: the Python helper, the log lines of Megatron or DeepSpeed, or a
    pattern."""
    files: tuple[Text, ...] = ()
    """Files to copy into the trial's folder on every host; relative to the folder of the
    experiment file."""
    cwd: Text | None = None
    """Working directory on every host. Default: the trial's folder."""
    collect: tuple[Text, ...] = ()
    """Further files of the trial's folder to bring back, such as `*.csv`."""


@checked.dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class TrialSettings:
    """``trials``: how strategies are measured."""

    backend: Literal["ssh", "local"] = "ssh"
    """Where trials run: on the hosts, or all on this machine, which then acts as every host."""
    budget: Index = 10
    """Largest number of trials."""
    steps: Count = 20
    """Number of measured optimizer steps; our programs run more if these are too few."""
    warmup_steps: Index = 5
    """Steps before the measured ones."""
    timeout_s: Seconds = 600.0
    """Wall time after which a trial is stopped."""
    ssh: SshSettings = SshSettings()
    """How the hosts are reached."""
    launcher: Literal["agent", "deepspeed"] = "agent"
    """How the ranks of a host start: by the agent, one by one, or by one
    `deepspeed.launcher.launch` per host."""
    warm: Flag = True
    """Whether each host keeps a process that has imported torch and DeepSpeed, and forks ranks from
    it."""
    python: Text | None = None
    """Interpreter for training: an absolute path, the same on every host. Default: the agent's."""
    environment: dict[Text, Text] = Field(default_factory=dict)
    """Variables of every rank, with names of letters, digits and `_`. They have priority over the
    launcher's own, except those that tell ranks apart (`RANK`, `MASTER_ADDR`, ...)."""
    host_groups: Count = 1
    """Number of equal groups of consecutive nodes into which the cluster is split. Trials of
    different groups run side by side, and plans are made for the first group."""
    program: OwnProgram | None = None
    """Your own training program instead of the package's."""

    @property
    def num_steps(self) -> int:
        """Number of measured optimizer steps."""
        return self.steps

    @property
    def num_warmup_steps(self) -> int:
        """Steps before the measured ones."""
        return self.warmup_steps


NO_SOURCE: Final = SourceLines(file="experiment")
"""Source of an experiment that was built from values, not from a file."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experiment:
    """The planning problem: a model on a cluster under a runtime.

    Args:
        global_batch_size: Samples per optimizer step.
        sequence_parallel: Whether tensor-parallel ranks also divide tokens, where they can;
            ``auto`` if they do because the file leaves it open.
        planner: Planner of commands that name none.
        tokens: Total number of tokens to train on, if the file states it.
        uncertainty: Uncertainty of the constants after a calibration; None means the priors.
        names_hosts: Whether a hostfile names the nodes.
        host_groups: Names of the hosts of every group; plans are made for the first group. Empty
            means that all hosts are one group.
        zero_stage: 0 to 3, or `AUTO_STAGE` to let the search choose.
        shard_ranks: Data-parallel ranks of a shard group; 0 if unset, which means all of them or
            the choice of the search.
        reshard_after_forward: Whether weights are gathered again for the backward pass; None if
            unset, which means yes without a pipeline.
        source: Places of the experiment's keys in the file, for later error messages.
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
    sequence_parallel: bool | Literal["auto"] = False
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
    def default_virtual_stages(self) -> int:
        """Chunks per stage of a strategy in several stages that does not set them."""
        chosen = self.limits.virtual_stages
        return self.traits.virtual_stages if chosen == "auto" else chosen[0]

    def virtual_stages(self, blocks_per_stage: int) -> tuple[int, ...]:
        """Return the numbers of chunks to search for stages of so many blocks, ascending."""
        chosen, traits = self.limits.virtual_stages, self.traits
        if chosen != "auto":
            return chosen
        able = traits.why_no_chunks(2) is None
        if not able or self.space != "uniform" or self.limits.token_slices:
            return (traits.virtual_stages,)
        numbers = range(1, max(1, blocks_per_stage) + 1)
        return tuple(n for n in numbers if not n & (n - 1) or not blocks_per_stage % n)

    @property
    def max_cp(self) -> int:
        """Largest context parallel degree to search."""
        chosen, shape = self.limits.max_cp, self.model.shape
        if chosen != "auto":
            return chosen
        able = self.space == "uniform" and not self.limits.token_slices and shape.is_causal
        if not able or self.traits.why_no_context(2) or self.profile != ANALYTIC:
            return 1
        return max(1, shape.sequence_length // _LEAST_CONTEXT)

    def only(self, dimensions: Sequence[str]) -> "Experiment":
        """Return an experiment whose search leaves out all dimensions but these.

        A dimension that is left out is off, or as the file sets it; the search then still chooses
        cuts and micro-batches.

        Raises:
            ValueError: If there is no dimension of a name.
        """
        unknown = [name for name in dimensions if name not in DIMENSIONS]
        if unknown:
            raise ValueError(f"found {unknown[0]!r}; expected some of {', '.join(DIMENSIONS)}")
        limits, traits = self.limits, self.traits
        off: dict[str, Any] = {
            "max_tp": limits.min_tp,
            "max_pp": 1,
            "max_dp": 1,
            "max_cp": 1,
            "max_ep": 1,
            "virtual_stages": (self.default_virtual_stages,),
        }
        kept = {name for name in off if name.removeprefix("max_") in dimensions}
        return replace(
            self,
            limits=replace(limits, **{name: off[name] for name in off if name not in kept}),
            zero_stage=traits.min_zero_stage
            if self.zero_stage == AUTO_STAGE and "zero_stage" not in dimensions
            else self.zero_stage,
            recompute=NO_RECOMPUTE
            if self.recompute == AUTO and "recompute" not in dimensions
            else self.recompute,
            sequence_parallel=self.sequence_parallel is True
            if "sequence_parallel" not in dimensions
            else self.sequence_parallel,
        )

    @property
    def may_idle(self) -> bool:
        """Whether strategies may leave devices idle; if so, groups stay within a node."""
        refused = self.limits.idle_devices is False
        return not (refused or self.limits.tp_across_nodes or self.limits.token_slices)

    def stage_options(self, tp: int, dp: int, **fields: Any) -> StageOptions:  # noqa: ANN401 - by field
        """Return the options of stages; the experiment supplies options that are left out."""
        options = StageOptions(tp=tp, dp=dp, **{"recompute": self.recompute, **fields})
        if "sequence_parallel" in fields or not self.sequence_parallel or tp == 1:
            return options
        divides = self.model.shape.divides_tokens(options.token_ranks)
        return replace(options, sequence_parallel=divides)

    def head_ranks(self, tp: int, cp: int) -> int:
        """Return how many of the ``cp`` ranks of a sequence divide the heads of its attention.

        With ``all-to-all`` all do. With ``both`` as many neighbours as a node and the heads of keys
        and values have room for: the largest divisor of ``cp``.
        """
        if self.traits.context_parallel != "both":
            return cp if self.traits.context_parallel == "all-to-all" else 1
        heads = self.model.shape.num_key_value_heads // tp
        most = min(node.num_slots for node in self.cluster.nodes) // tp
        fits = (cp % ranks == 0 and heads % ranks == 0 for ranks in range(1, min(cp, most) + 1))
        return max((ranks for ranks, fit in enumerate(fits, start=1) if fit), default=1)

    def why_no_heads(self, options: StageOptions) -> str | None:
        """Say that ranks of a sequence cannot divide its heads; None if they can, or need not."""
        heads, is_divided = self.model.shape.num_key_value_heads, options.cp > 1
        is_divided &= self.traits.context_parallel == "all-to-all"
        if not is_divided or heads % options.token_ranks == 0:
            return None
        return (
            f"context_parallel all-to-all: tp {options.tp} x cp {options.cp} must divide the "
            f"{heads} heads of keys and values; choose another cp, or ring"
        )

    @property
    def program_settings(self) -> dict[str, Any]:
        """Return the settings, besides traits, that constants of the cost model depend on."""
        return {
            "precision": self.precision,
            **self.traits.formats.kept,
            "optimizer": self.optimizer,
            "zero_stage": self.zero_stage,
        }

    def other_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings that may be worth a try: a description, and the change of the file."""
        for kind in KINDS:
            if kind != self.recompute.kind and kind in {*self.traits.recompute, AUTO.kind}:
                yield f"recompute {kind}", f"recompute={kind}"
        if self.zero_stage == 0:
            yield "optimizer sharded over replicas (ZeRO-1)", "zero_stage=1"
        for change, _ in self.traits.other_settings():
            yield "another setting of the program", change

    @property
    def counts_money(self) -> bool:
        """Whether the objective counts money."""
        return self.objective != "time" or self.limits.max_cost_per_iteration is not None

    @property
    def varies_batch(self) -> bool:
        """Whether the search covers nearby batch sizes too, ranking all by the time of a sample."""
        return self.limits.batch_tolerance > 0 and not self.limits.launchable

    @property
    def money_key(self) -> str:
        """Key that makes the search count money, for messages."""
        if self.objective == "time":
            return "search.max_cost_per_iteration"
        return f"objective {self.objective!r}"

    @property
    def is_trained(self) -> bool:
        """Whether the model can be trained by a program: ours, or the user's."""
        return self.model.shape.is_trained or self.trials.program is not None

    def zero(self, pp: int) -> Zero:
        """Return the ZeRO options for a number of stages; some may be left to the search.

        By default weights are not gathered again in a pipeline, which would gather them for every
        micro-batch.
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
    names = experiment.cluster.host_names
    unknown = [host for host in hosts if host not in names]
    if unknown:
        message = f"--without {unknown[0]}: the hosts are {', '.join(names)}"
        raise InputError(message, where=experiment.where("cluster"))
    kept = [name for name in names if name not in hosts]
    if not kept:
        raise InputError("--without leaves no host", where=experiment.where("cluster"))
    return replace(experiment, cluster=experiment.cluster.of_hosts(kept))


def launchable_only(experiment: Experiment) -> Experiment:
    """Return an experiment whose search covers only launchable strategies."""
    return replace(experiment, limits=replace(experiment.limits, launchable=True))
