"""An experiment file: its keys, and the experiment that it describes.

Each class is one mapping of the file. The mappings ``search`` and ``trials`` are in `experiment`,
``model`` and ``cluster`` in `model_shape` and `cluster_section`. Unknown keys, wrong types and
wrong ranges are refused with their place in the file. The docs show the text below each key.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator, Field, Tag

from amp_ray.clusters.cluster import Cluster
from amp_ray.clusters.constants import PROGRAM_SCALE, Constants
from amp_ray.clusters.device import Device
from amp_ray.errors import InputError, Mistakes, shown
from amp_ray.inputs.cluster_section import ClusterSection, build_cluster
from amp_ray.inputs.experiment import (
    Experiment,
    Objective,
    Pattern,
    SearchLimits,
    TrialSettings,
)
from amp_ray.inputs.model_shape import ModelSection, model_shape
from amp_ray.inputs.placeholders import EXAMPLE, fill_argument, fill_text
from amp_ray.inputs.profile import ANALYTIC, Profile, parse_profile
from amp_ray.inputs.section import (
    Count,
    Flag,
    Name,
    Positive,
    Section,
    Text,
    by_type,
    validate_parts,
)
from amp_ray.inputs.yaml_text import Document, SourceLines
from amp_ray.models.families import build_model
from amp_ray.models.model import Model, ModelShape
from amp_ray.runtimes.releases import CHOICES
from amp_ray.runtimes.traits import RUNTIMES, Formats, RuntimeTraits, find_release, kernels_of
from amp_ray.strategies.recompute import (
    NO_RECOMPUTE,
    SELECTIVE,
    Recompute,
    RecomputeKind,
    RecomputeModule,
)
from amp_ray.strategies.zero import AUTO_STAGE, MOST_ZERO_STAGE, NO_ZERO, zero_of
from amp_ray.units import Precision

ZeroStage = Annotated[
    Annotated[Literal["auto"], Tag("word")]
    | Annotated[int, Field(ge=0, le=MOST_ZERO_STAGE, strict=True), Tag("number")],
    by_type(str, "word", "number"),
]

_MOST_SAMPLES: Final = 10**6


def _samples(count: int) -> int:
    if count > _MOST_SAMPLES:
        raise ValueError(f"at most {_MOST_SAMPLES:,} samples: sequences of a step, not tokens")
    return count


Samples = Annotated[int, Field(ge=1, strict=True), AfterValidator(_samples)]


def _release_name(value: object) -> object:
    """Return a release that YAML takes for a number as text: a year and month, or a version."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return f"{value:.2f}" if isinstance(value, float) and value >= _FIRST_YEAR else f"{value:g}"


_FIRST_YEAR: Final = 20  # of the century: `26.1` is 26.10, but `0.3` a version


ReleaseName = Annotated[Text, BeforeValidator(_release_name)]


class ProfileSection(Section):
    """``profile``: the source of layer times."""

    source: Literal["analytic", "table", "metis", "aceso"] = "analytic"
    """Layer times come from data sheets alone, from measurements, or from another planner's files:
    for Metis a folder of files such as `DeviceType.T4_tp1_bs1.json`, whose layers are the blocks
    and one layer at each end; for [Aceso](formats.md#acesos-files) its files, operator by
    operator."""
    path: Text | None = None
    """With `metis` and `aceso`: the folder; with `table`: a [profile](formats.md#profile), or
    `shipped:amp-2022-gpt2`, `shipped:amp-2022-transgan`."""
    model: Text | None = None
    """With `aceso`: the model's name in the files, `gpt_1_3B` for `gpt_1_3B_mbs1_tp1_algo0.csv`."""


class RecomputeSection(Section):
    """``recompute`` as a mapping: parts of a block that the backward pass computes again."""

    modules: Annotated[
        tuple[Literal["core_attn", "mlp", "moe_act", "layernorm", "mla_up_proj"], ...],
        Field(min_length=1),
    ]
    """Some of `core_attn` (the attention core), `mlp` (the feed-forward part of blocks without
    experts), `moe_act` (activations of experts), `layernorm`, `mla_up_proj` (products that make
    queries, keys and values from latents): Megatron-LM's `--recompute-modules`."""


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
    precision: Annotated[
        Annotated[Precision, Tag("word")] | Annotated[Formats, Tag("mapping")],
        by_type(dict | Formats, "mapping", "word"),
    ] = "fp16"
    """Precision of weights and activations; every device of the cluster must support it. `fp8`:
    products of linear layers in blocks run in 8-bit floats; all other work, and all that is kept,
    is bf16, as in Transformer Engine; for runtimes that support it (`megatron-core`, `torch`).
    `nvfp4`: the same in 4-bit floats with a scale for every 16, on Blackwell (`megatron-core`). As
    a mapping also [what is kept in which format](#precision)."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer, which decides the state kept and updated per parameter."""
    zero_stage: ZeroStage | None = None
    """What data-parallel ranks shard instead of each holding all: 1 optimizer states, 2 also
    gradients, 3 also weights (FSDP); `auto` lets the search choose. A stage that the runtime does
    not support, alone or in a pipeline, is refused. Default: `auto`; in space `operator` the
    runtime's lowest."""
    shard_ranks: Count | None = None
    """Number of data-parallel ranks that shard together (HSDP: as many as a node has), each such
    group with a full copy; `auto` tries both all ranks and a node if the runtime supports it.
    Default: all data-parallel ranks."""
    reshard_after_forward: Flag | None = None
    """With ZeRO 3, whether gathered weights are dropped after the forward pass and gathered again
    for the backward pass; a pipeline gathers them once per step and keeps them. Default: true
    without a pipeline."""
    recompute: Annotated[
        Annotated[RecomputeKind, Tag("word")] | Annotated[RecomputeSection, Tag("mapping")],
        by_type(dict | RecomputeSection, "mapping", "word"),
    ] = "auto"
    """What every block recomputes in the backward pass: nothing, the attention core (scores,
    softmax, dropout, context), or the whole block; `per-operator`: all but every other product and
    attention (torchtitan's selective checkpoint); as a mapping [parts of a block](#recompute).
    `auto` lets the search choose for every stage, by time and memory, including the number of its
    blocks that recompute."""
    loss_chunks: Annotated[
        Annotated[Literal["auto"], Tag("word")] | Annotated[Count, Tag("number")],
        by_type(str, "word", "number"),
    ] = 1
    """Number of parts in which the last stage computes logits, loss and their gradients, so that
    logits of one part live at a time; `auto`: as many as make logits no larger than the stream."""
    sequence_parallel: Flag | Literal["auto"] = "auto"
    """Whether tensor-parallel ranks divide the tokens where they do not divide the width (norms,
    dropout, residual stream), as in Megatron-LM: this takes less memory, and gathers and scatters
    replace all-reduces. `auto`: on if the runtime supports it and tp, above 1, divides the tokens
    of a sample, but off with `search.token_slices`; in space `heterogeneous` tried with
    one tp and dp for all stages, and in single stages of the fastest plans; in `operator` never."""
    runtime: Text = "deepspeed"
    """Program that trains, see [runtimes](#runtime-traits-and-constants)."""
    release: ReleaseName | None = None
    """Release of that program: a bundle of traits with a date, see
    [releases](runtimes.md#releases). Default: the newest."""
    traits: dict[Text, Any] = Field(default_factory=dict)
    """Single traits of the runtime to change. Default: the runtime's."""
    constants: dict[Text, Positive] = Field(default_factory=dict)
    """Single constants of the cost model to change. Default: shipped."""
    global_batch_size: Samples
    """Samples per optimizer step."""
    tokens: Positive | None = None
    """Total number of tokens to train on: rows then have days, device-hours and, with
    `price_per_device_hour`, money."""
    search: SearchLimits = SearchLimits()
    """[The strategies that the search covers](#search)."""
    objective: Objective = "time"
    """Which strategies are best: the fastest, the cheapest, or all that no other beats in both. The
    latter two need the price of every node, and also plan for parts of the cluster: every number of
    nodes of each kind, or powers of two if that makes more than 64 parts."""
    trials: TrialSettings = TrialSettings()
    """[How strategies are measured](#trials)."""


# ------------------------------------------------------------------------------- building

_PROFILE_FOLDERS: Final = {
    "table": "a folder with profile.yaml and one CSV per device",
    "metis": "a folder with files such as DeviceType.A100_tp1_bs1.json",
    "aceso": "a folder with files such as gpt_1_3B_mbs1_tp1_algo0.csv",
}
"""Kind of file or folder that ``profile.path`` must name, by source."""

_NEEDS: Final = {
    "fused_experts": "kernels of fused experts need a model with experts and fp8 with scales of "
    "blocks (B200, B300, GB200, GB300), or nvfp4 by a release whose fused_formats have it",
    "attention_format": "attention in fp8 needs precision fp8",
    "dispatcher": "DeepEP runs on no racks with one NVLink domain",
    "fp8_bytes_per_parameter": "boards that multiply any layout keep one copy",
    "cuda_graphs": "a graph of the whole step needs fused experts, since the host waits for others",
}
"""What a trait needs of boards, precision and model."""

_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)

_LARGEST: Final = 10**15
"""Largest value of a trait: more bytes than any cluster has."""

Groups = tuple[tuple[str, ...], ...]


class Files(Protocol):
    """Reads the files that an experiment names; code with side effects implements it."""

    def text(self, name: str) -> str:
        """Return the text of one file."""
        ...

    def folder(self, name: str) -> Mapping[str, str]:
        """Return the text of every profile file of a folder, by file name."""
        ...

    def foreign_profile(
        self,
        source: str,
        name: str,
        model: Model,
        devices: Iterable[Device],
        profiled: str | None = None,
    ) -> Profile:
        """Return a profile in another planner's format, for this model and all of these devices.

        ``profiled`` is the name of the model in a folder with several models.
        """
        ...


def build_experiment(document: Document, files: Files) -> Experiment:
    """Check a document and build the experiment that it describes.

    Raises:
        InputError: With file, line and key of every mistake; one line each.
    """
    checked, wrong = validate_parts(ExperimentFile, document)
    builder = _Builder(document, files, checked)
    mistakes = Mistakes()
    for mistake in itertools.chain.from_iterable(wrong.values()):
        mistakes.add(mistake)
    for part in (
        *("precision", "zero_stage", "sequence_parallel", "constants", "tokens"),
        *("model", "trials", "profile"),
    ):
        with mistakes.collect():
            getattr(builder, part)
    mistakes.check()
    return builder.experiment()


class _Builder:
    """Builds the parts of an experiment on demand.

    A part that cannot be built raises its mistakes, and so does every part that depends on it.
    `Mistakes` keeps each mistake only once, so dependent parts add no further messages.
    """

    def __init__(self, document: Document, files: Files, checked: ExperimentFile) -> None:
        """Keep the keys of the file; reading a key with a mistake raises that mistake."""
        self._document, self._files, self._checked = document, files, checked

    @cached_property
    def traits(self) -> RuntimeTraits:
        """The runtime's traits, with the changes in the file."""
        checked, document = self._checked, self._document
        if checked.runtime not in RUNTIMES:
            close = [name for name in RUNTIMES if name.startswith(f"{checked.runtime}-")]
            hint = f", did you mean {close[0]!r}?" if close else ""
            message = f"found {checked.runtime!r}; expected one of {', '.join(RUNTIMES)}{hint}"
            document.refuse(message, "runtime")
        traits = RUNTIMES[checked.runtime]
        if checked.release is not None:
            with document.at("release"):
                traits = find_release(checked.runtime, checked.release)
        chosen: dict[str, Any] = {}
        mistakes = Mistakes()
        for name, value in checked.traits.items():
            with mistakes.collect(), document.at("traits", name):
                chosen[name] = _trait(traits, name, value)
        mistakes.check()
        with document.at("traits"):
            traits = replace(traits, **chosen)
        with document.at("recompute"):
            traits = traits.with_modules(self._modules)
        with document.at("loss_chunks"):
            traits = traits.with_loss_chunks(checked.loss_chunks)
        if traits.offloaded_blocks:
            traits = traits.with_offloaded(traits.offloaded_blocks)
        document.refuse(traits.why_no_formats(self._formats), "precision")
        kept: RuntimeTraits = traits.with_formats(self._formats)
        return kept

    @property
    def _modules(self) -> tuple[RecomputeModule, ...]:
        """Parts of a block beside the attention core that the file names."""
        chosen = self._checked.recompute
        named = chosen.modules if isinstance(chosen, RecomputeSection) else ()
        return tuple([name for name in named if name != "core_attn"])

    @property
    def _recompute(self) -> Recompute:
        """The kind of recompute; the attention core alone is a kind, other parts are traits."""
        chosen = self._checked.recompute
        if isinstance(chosen, RecomputeSection):
            return SELECTIVE if "core_attn" in chosen.modules else NO_RECOMPUTE
        return Recompute(kind=chosen)

    @cached_property
    def _formats(self) -> Formats:
        """Precision of training, and what is kept in narrower formats than usual."""
        chosen = self._checked.precision
        return chosen if isinstance(chosen, Formats) else Formats(compute=chosen)

    @cached_property
    def precision(self) -> Precision:
        """Precision of training; the runtime must support it."""
        chosen = self._formats.compute
        self._document.refuse(self.traits.why_no_precision(chosen), "precision")
        return chosen

    @cached_property
    def zero_stage(self) -> int:
        checked, document, traits = self._checked, self._document, self.traits
        shard_ranks, reshard = checked.shard_ranks, checked.reshard_after_forward
        stage = "auto" if checked.zero_stage is None else checked.zero_stage
        if stage != "auto" and not traits.min_zero_stage <= stage <= traits.max_zero_stage:
            kept = ", ".join(f"{name} {key}" for key, name in traits.formats.kept.items())
            message = f"runtime {traits.name!r} works with zero_stage {traits.zero_stages}"
            message += f" if it keeps {kept}" if kept else ""
            document.refuse(f"found {stage}; {message}", "zero_stage")
        space = checked.search.space
        if checked.zero_stage is None and space == "operator":
            stage = 0
        if stage == "auto" and space != "operator":
            if shard_ranks is not None:
                message = "zero_stage auto chooses it: set zero_stage too, or leave shard_ranks out"
                document.refuse(message, "shard_ranks")
            return AUTO_STAGE
        if space in {"heterogeneous", "operator"} and (stage not in {0, 1} or shard_ranks):
            message = (
                f"found {stage}; stages with device groups of their own share out optimizer states "
                "alone: zero_stage 0 or 1, no shard_ranks; search.space uniform and placement have "
                "all"
            )
            document.refuse(message, "zero_stage")
        assert stage != "auto", "space operator refuses it"
        with document.at("shard_ranks" if shard_ranks else "reshard_after_forward"):
            zero = zero_of(stage, shard_ranks, reshard=reshard, otherwise=NO_ZERO)
            why = traits.why_no_zero(zero, pp=1)
            if why is not None:
                raise ValueError(why)
        return stage

    @cached_property
    def sequence_parallel(self) -> bool | Literal["auto"]:
        """Whether tensor-parallel ranks also divide tokens; ``auto`` if the file leaves it open."""
        checked = self._checked
        chosen, may = checked.sequence_parallel, self.traits.sequence_parallel
        space = checked.search.space
        is_grid = space in {"uniform", "placement"}
        has_tokens = self.model.shape.divides_tokens(1)
        if chosen is not True:
            may = may and not checked.search.token_slices
            has_grids = is_grid or space == "heterogeneous"  # plans of a grid exist beside others
            is_open = chosen == "auto" and may and has_grids and has_tokens
            return "auto" if is_open else False
        reason = None
        if not may:
            able = [traits.name for traits in RUNTIMES.values() if traits.sequence_parallel]
            reason = (
                f"runtime {self.traits.name!r} has no sequence parallelism, "
                f"expected false, auto, or one of the runtimes {', '.join(able)}"
            )
        elif not is_grid:
            reason = f"it is planned in spaces uniform and placement, not in {space}"
        elif not has_tokens:
            reason = f"family {self.model.shape.family!r} has no tokens to divide"
        self._document.refuse(reason and f"found true; {reason}", "sequence_parallel")
        return True

    @cached_property
    def tokens(self) -> float | None:
        tokens = self._checked.tokens
        if tokens is not None and not self.model.shape.num_tokens:
            message = f"found {tokens:g}; family {self.model.shape.family!r} has no tokens"
            self._document.refuse(message, "tokens")
        return tokens

    @cached_property
    def constants(self) -> Constants:
        """The shipped constants, with the runtime's own and the changes in the file."""
        values, names = self._checked.constants, Constants.__dataclass_fields__
        mistakes = Mistakes()
        for name in values:
            if name not in names:
                message = f"unknown constant {name!r}; known: {', '.join(names)}"
                where = self._document.where("constants", name)
                mistakes.add(InputError(message, where=where))
        mistakes.check()
        scale = {PROGRAM_SCALE: values.get(PROGRAM_SCALE, 1.0)}
        shipped = self.traits_on_boards.constants
        return replace(shipped, **{**values, PROGRAM_SCALE: 1.0}).moved(scale)

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        section = self._checked.model
        text = self._text(section.config, "model", "config")
        with self._document.at("model"):
            return model_shape(section, text)

    @cached_property
    def model(self) -> Model:
        section, traits = self._checked.model, self.traits_on_boards
        with self._document.at("model"):
            return build_model(
                self.shape,
                layer_list=section.layer_list or traits.layer_list,
                vocabulary_multiple=traits.vocabulary_multiple,
                kernels=kernels_of(traits),
            )

    @cached_property
    def hosts(self) -> tuple[Cluster, Groups]:
        hostfile = self._checked.cluster.hostfile
        text = self._text(hostfile, "cluster", "hostfile")
        checked = self._checked
        whole = build_cluster(self._document, checked.cluster, self._formats.compute, text)
        return _split_hosts(self._document, whole, checked.trials.host_groups)

    @cached_property
    def traits_on_boards(self) -> RuntimeTraits:
        """The traits as the boards and the model decide.

        Attention has separate kernels if a board lacks the runtime's fused one.

        Raises:
            InputError: If the runtime has no attention for a board.
        """
        traits = self.traits
        try:
            types = self.hosts[0].device_types
        except InputError:  # raised where the cluster is needed; the model's mistakes count too
            return traits
        traits = self._settled(types)
        if traits.fuses_older_attention or "fused_attention" in self._checked.traits:
            return traits
        lacking = [device.name for device in types if not device.has_flash_attention]
        if lacking and traits.needs_flash_attention:
            with self._document.at("runtime"):
                raise ValueError(
                    f"found {traits.name}, whose only attention is FlashAttention-2; "
                    f"{', '.join(lacking)} has none (compute capability below 8.0): "
                    "choose another runtime, such as torch or megatron-core"
                )
        return replace(traits, fused_attention=False) if lacking else traits

    def _settled(self, types: Sequence[Device]) -> RuntimeTraits:
        """Return the traits on some boards; refuse one that the file sets and they cannot have."""
        settled = self.traits.on_boards(types, self._formats.compute, self.shape.num_experts)
        for name in self._checked.traits:
            chosen, possible = getattr(self.traits, name), getattr(settled, name)
            if chosen not in {"auto", 0, possible}:
                boards = ", ".join(device.name for device in types)
                message = f"found {shown(chosen)}; {_NEEDS[name]}: on {boards} {shown(possible)}"
                self._document.refuse(message, "traits", name)
        return settled

    @cached_property
    def trials(self) -> TrialSettings:
        """Settings of real trials; the number of groups must divide the hosts."""
        settings, _ = self._checked.trials, self.hosts
        program = settings.program
        if program is not None and isinstance(program.metric, Pattern):
            with self._document.at("trials", "program", "metric", "pattern"):
                _check_pattern(program.metric.pattern)
        for index, word in enumerate(program.argv if program is not None else ()):
            with self._document.at("trials", "program", "argv", index):
                fill_argument(word, EXAMPLE)
        for name, value in settings.environment.items():
            with self._document.at("trials", "environment", name):
                _check_variable(name, value)
                if program is not None:
                    fill_text(value, EXAMPLE)
        return settings

    @cached_property
    def profile(self) -> Profile:
        model, (cluster, _), section = self.model, self.hosts, self._checked.profile
        precision = self._formats.compute
        _check_profiled(self._document, section)
        if section.source == "analytic" and section.path is None:
            return ANALYTIC
        with self._document.at("profile", "path"):
            if section.source == "analytic":
                message = f"found {section.path!r}; source 'analytic' has none"
                raise ValueError(f"{message}, did you mean 'table'?")
            if section.path is None:
                needed = _PROFILE_FOLDERS[section.source]
                raise ValueError(f"source {section.source!r} needs 'path', {needed}")
            if section.source != "table":
                return self._files.foreign_profile(
                    section.source, section.path, model, cluster.device_types, section.model
                )
            return parse_profile(
                self._files.folder(section.path),
                folder=section.path,
                num_layers=model.num_layers,
                precision=precision,
                sequence_length=model.shape.sequence_length,
            )

    def _text(self, name: str | None, *path: str) -> str | None:
        """Return the text of the file that the experiment names at ``path``, or None."""
        if name is None:
            return None
        with self._document.at(*path):
            return self._files.text(name)

    def experiment(self) -> Experiment:
        checked, document = self._checked, self._document
        for key, reason in checked.search.problems(self.traits_on_boards, self.model.shape):
            document.refuse(reason, "search", key)
        return Experiment(
            name=checked.name,
            model=self.model,
            cluster=self.hosts[0],
            profile=self.profile,
            constants=self.constants,
            traits=self.traits_on_boards,
            precision=self.precision,
            optimizer=checked.optimizer,
            zero_stage=self.zero_stage,
            shard_ranks=checked.shard_ranks or 0,
            reshard_after_forward=checked.reshard_after_forward,
            recompute=self._recompute,
            sequence_parallel=self.sequence_parallel,
            global_batch_size=checked.global_batch_size,
            limits=checked.search,
            trials=self.trials,
            objective=checked.objective,
            tokens=self.tokens,
            names_hosts=checked.cluster.hostfile is not None,
            host_groups=self.hosts[1],
            source=SourceLines(file=document.file, lines=document.lines, changes=document.changes),
        )


def _check_profiled(document: Document, section: ProfileSection) -> None:
    """Refuse the name of a profiled model that is unused, or missing where it is needed."""
    reason = None
    if section.source == "aceso" and section.model is None:
        reason = (
            "source 'aceso' needs 'model', its name in the files: gpt_1_3B for "
            "gpt_1_3B_mbs1_tp1_algo0.csv"
        )
    elif section.source != "aceso" and section.model is not None:
        reason = f"found {shown(section.model)}; only source 'aceso' has models by name"
    document.refuse(reason, "profile", "model")


def _trait(traits: RuntimeTraits, name: str, value: object) -> bool | float | str:
    """Return a trait's new value; refuse a type other than that of the runtime's value."""
    if name in CHOICES:
        if value in CHOICES[name]:
            return str(value)
        raise ValueError(f"found {shown(value)}; expected one of {', '.join(CHOICES[name])}")
    names = [trait.name for trait in fields(traits)]
    numbers = [key for key in names if not isinstance(getattr(traits, key), str | tuple | Formats)]
    if name not in numbers:
        able = ", ".join((*CHOICES, *numbers))
        raise ValueError(f"unknown trait {name!r}; those that can be set: {able}")
    default = getattr(traits, name)
    is_flag = isinstance(value, bool)
    if isinstance(default, bool):
        if is_flag:
            return bool(value)
        expected = "true or false"
    elif isinstance(default, int):
        if isinstance(value, int) and not is_flag and 0 <= value <= _LARGEST:
            return value
        expected = f"an integer from 0 to {_LARGEST:g}"
    else:
        if isinstance(value, int | float) and not is_flag and 0 <= value <= _LARGEST:
            return float(value)
        expected = f"a number from 0 to {_LARGEST:g}"
    raise ValueError(f"found {shown(value)}; expected {expected}")


def _split_hosts(document: Document, cluster: Cluster, num_groups: int) -> tuple[Cluster, Groups]:
    """Return the cluster of one of the equal groups for trials, and the hosts of every group."""
    names = cluster.host_names
    size, rest = divmod(len(names), num_groups)
    where = document.where("trials", "host_groups")
    if rest or not size:
        message = f"found {num_groups}; it must divide the number of nodes, {len(names)}"
        raise InputError(message, where=where)
    groups = [cluster.of_hosts(names[size * i : size * (i + 1)]) for i in range(num_groups)]
    first = groups[0]
    for number, group in enumerate(groups):
        if [node.nameless for node in group.nodes] != [node.nameless for node in first.nodes]:
            message = (
                f"found {num_groups}; group {number} ({_names(group)}) has other devices, slots or "
                f"links than group 0 ({_names(first)}): trials could not be compared"
            )
            raise InputError(message, where=where)
    return first, tuple(group.host_names for group in groups)


def _check_variable(name: str, value: str) -> None:
    """Refuse a name that is invalid in a shell, and a value that a variable cannot hold."""
    if _VARIABLE.fullmatch(name) is None:
        message = f"found {shown(name)}; a variable's name has letters A-Z and a-z, digits"
        raise ValueError(f"{message} and '_', with no digit in front")
    if "\0" in value:
        raise ValueError("no variable can hold a zero byte")


def _names(cluster: Cluster) -> str:
    return ", ".join(cluster.host_names)


def _check_pattern(pattern: str) -> None:
    """Refuse a pattern that is not a regular expression with one group."""
    try:
        num_groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        message = f"found {shown(pattern)}, which is no regular expression: {error}"
        raise ValueError(message) from None
    if num_groups != 1:
        raise ValueError(
            f"found {shown(pattern)} with {num_groups} groups; expected one, around the number, as "
            "in 'time: ([0-9.]+) ms'"
        )
