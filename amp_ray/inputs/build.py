"""Build values from a checked experiment file: names resolved, units converted."""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Final, Protocol

from amp_ray.clusters.cluster import Cluster, Node
from amp_ray.clusters.constants import PROGRAM_SCALE, Constants
from amp_ray.clusters.device import Device
from amp_ray.errors import InputError, Mistakes, shown
from amp_ray.inputs.build_cluster import build_cluster
from amp_ray.inputs.experiment import Experiment, SearchLimits, TrialSettings
from amp_ray.inputs.experiment_file import ExperimentFile, ProfileSection
from amp_ray.inputs.model_shape import model_shape
from amp_ray.inputs.own_program import Pattern
from amp_ray.inputs.profile import ANALYTIC, Profile
from amp_ray.inputs.profile_file import parse_profile
from amp_ray.inputs.section import validate_parts
from amp_ray.inputs.yaml_text import Document, SourceLines
from amp_ray.models.families import build_model
from amp_ray.models.model import Model
from amp_ray.runtimes.traits import RUNTIMES, RuntimeTraits, kernels_of
from amp_ray.strategies.recompute import Recompute
from amp_ray.strategies.zero import AUTO_STAGE, NO_ZERO, zero_of
from amp_ray.units import Precision

_PROFILE_FOLDERS: Final = {
    "table": "a folder with profile.yaml and one CSV per device",
    "metis": "a folder with files such as DeviceType.A100_tp1_bs1.json",
    "aceso": "a folder with files such as gpt_1_3B_mbs1_tp1_algo0.csv",
}
"""What ``profile.path`` must lead to, by source."""

_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)

_LARGEST: Final = 10**15
"""Largest value of a trait: more bytes than any cluster has."""

Groups = tuple[tuple[str, ...], ...]


class Files(Protocol):
    """Reads the files that an experiment names; implemented where side effects live."""

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
        """Return a profile in another planner's format, of this model and all of these devices.

        ``profiled`` is the model's name in a folder that has several.
        """
        ...


def build_experiment(document: Document, files: Files) -> Experiment:
    """Check a document and build the experiment that it describes.

    Raises:
        InputError: With file, line and key, for whatever does not fit; one line per mistake.
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
    """Builds the parts of an experiment, each when it is asked for.

    A part that cannot be built raises its mistakes, and so does every part that depends on it.
    `Mistakes` keeps each mistake once, so no mistake that follows from another is reported.
    """

    def __init__(self, document: Document, files: Files, checked: ExperimentFile) -> None:
        """Take the keys of the file; reading a key with a mistake raises that mistake."""
        self._document, self._files, self._checked = document, files, checked

    @cached_property
    def traits(self) -> RuntimeTraits:
        """The runtime's record, changed by the traits in the file."""
        return build_traits(self._document, self._checked)

    @cached_property
    def precision(self) -> Precision:
        """Precision of training, which the runtime must have."""
        chosen = self._checked.precision
        self._document.refuse(self.traits.why_no_precision(chosen), "precision")
        return chosen

    @cached_property
    def zero_stage(self) -> int:
        """The ZeRO stage."""
        return check_zero_stage(self._document, self._checked, self.traits)

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether tensor-parallel ranks divide tokens too."""
        checked = self._checked
        chosen, may = checked.sequence_parallel, self.traits.sequence_parallel
        space = checked.search.space
        is_grid = space in {"uniform", "placement"}
        has_tokens = self.model.shape.divides_tokens(1)
        if chosen is not True:
            may = may and not checked.search.token_slices
            has_grids = is_grid or space == "heterogeneous"  # beside stages that do not divide them
            return chosen == "auto" and may and has_grids and has_tokens
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
        """Total number of tokens to train on."""
        tokens = self._checked.tokens
        if tokens is not None and not self.model.shape.num_tokens:
            message = f"found {tokens:g}; family {self.model.shape.family!r} has no tokens"
            self._document.refuse(message, "tokens")
        return tokens

    @cached_property
    def constants(self) -> Constants:
        """Constants of the cost model."""
        return build_constants(self._document, self._checked)

    @cached_property
    def model(self) -> Model:
        """The chain of layers that the runtime trains."""
        section, traits = self._checked.model, self.traits
        text = _text(self._document, self._files, section.config, "model", "config")
        with self._document.at("model"):
            return build_model(
                model_shape(section, text),
                layer_list=section.layer_list or traits.layer_list,
                vocabulary_multiple=traits.vocabulary_multiple,
                kernels=kernels_of(traits),
            )

    @cached_property
    def hosts(self) -> tuple[Cluster, Groups]:
        """The cluster that is planned for, and the hosts of every group."""
        hostfile = self._checked.cluster.hostfile
        text = _text(self._document, self._files, hostfile, "cluster", "hostfile")
        whole = build_cluster(self._document, self._checked, text)
        return split_hosts(self._document, whole, self._checked.trials.host_groups)

    @cached_property
    def trials(self) -> TrialSettings:
        """Settings of real trials; the number of groups must divide the hosts."""
        settings, _ = self._checked.trials, self.hosts
        check_trials(self._document, settings)
        return settings

    @cached_property
    def profile(self) -> Profile:
        """The source of layer times."""
        model, (cluster, _) = self.model, self.hosts
        return _profile(self._document, self._checked, self._files, model, cluster)

    def experiment(self) -> Experiment:
        """Return the whole."""
        checked, document = self._checked, self._document
        _check_search(checked.search, document, self.traits, self.model)
        return Experiment(
            name=checked.name,
            model=self.model,
            cluster=self.hosts[0],
            profile=self.profile,
            constants=self.constants,
            traits=self.traits,
            precision=self.precision,
            optimizer=checked.optimizer,
            zero_stage=self.zero_stage,
            shard_ranks=checked.shard_ranks or 0,
            reshard_after_forward=checked.reshard_after_forward,
            recompute=Recompute(kind=checked.recompute),
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


def _text(document: Document, files: Files, name: str | None, *path: str) -> str | None:
    """Return the text of a file that the experiment names at ``path``, if it does."""
    if name is None:
        return None
    with document.at(*path):
        return files.text(name)


def _profile(
    document: Document, checked: ExperimentFile, files: Files, model: Model, cluster: Cluster
) -> Profile:
    section, precision = checked.profile, checked.precision
    _check_profiled(document, section)
    if section.source == "analytic" and section.path is None:
        return ANALYTIC
    with document.at("profile", "path"):
        if section.source == "analytic":
            message = f"found {section.path!r}; source 'analytic' has none, did you mean 'table'?"
            raise ValueError(message)
        if section.path is None:
            message = f"source {section.source!r} needs 'path', {_PROFILE_FOLDERS[section.source]}"
            raise ValueError(message)
        if section.source != "table":
            return files.foreign_profile(
                section.source, section.path, model, cluster.device_types, section.model
            )
        return parse_profile(
            files.folder(section.path),
            folder=section.path,
            num_layers=model.num_layers,
            precision=precision,
            sequence_length=model.shape.sequence_length,
        )


def _check_profiled(document: Document, section: ProfileSection) -> None:
    """Refuse a name of the profiled model that is unused, and a missing one that is needed."""
    reason = None
    if section.source == "aceso" and section.model is None:
        reason = (
            "source 'aceso' needs 'model', its name in the files: gpt_1_3B for "
            "gpt_1_3B_mbs1_tp1_algo0.csv"
        )
    elif section.source != "aceso" and section.model is not None:
        reason = f"found {shown(section.model)}; only source 'aceso' has models by name"
    document.refuse(reason, "profile", "model")


def _check_search(
    limits: SearchLimits, document: Document, traits: RuntimeTraits, model: Model
) -> None:
    """Refuse dimensions that the space, the runtime or the model does not have."""
    space, chunks = limits.space, limits.virtual_stages or (traits.virtual_stages,)
    reason = None
    if limits.token_slices and space != "uniform":
        reason = f"token slices are planned in space uniform; the space is {space}"
    elif limits.token_slices and not model.shape.is_causal:
        reason = f"model family {model.shape.family!r} has no sequence to cut into token slices"
    document.refuse(reason, "search", "token_slices")
    if limits.per_operator and space != "operator":
        reason = f"operators are planned in space operator; the space is {space}"
    document.refuse(reason, "search", "per_operator")
    if chunks != (1,):
        reason = traits.why_no_chunks(chunks[-1])
        if reason is None and space != "uniform":
            reason = f"interleaved chunks are planned in space uniform; the space is {space}"
        if reason is None and limits.token_slices:
            reason = "token slices cannot be added to interleaved chunks; leave one of them out"
    document.refuse(reason, "search", "virtual_stages")
    if limits.max_cp > 1:
        reason = traits.why_no_context(limits.max_cp)
        if reason is None and (space != "uniform" or limits.token_slices):
            reason = "context parallelism is planned in space uniform, without token slices"
    document.refuse(reason, "search", "max_cp")


def build_traits(document: Document, checked: ExperimentFile) -> RuntimeTraits:
    """Return the runtime's record with the traits that the file sets; refuse unknown ones."""
    if checked.runtime not in RUNTIMES:
        close = [name for name in RUNTIMES if name.startswith(f"{checked.runtime}-")]
        hint = f", did you mean {close[0]!r}?" if close else ""
        message = f"found {checked.runtime!r}; expected one of {', '.join(RUNTIMES)}{hint}"
        document.refuse(message, "runtime")
    traits = RUNTIMES[checked.runtime]
    chosen: dict[str, Any] = {}
    mistakes = Mistakes()
    for name, value in checked.traits.items():
        with mistakes.collect(), document.at("traits", name):
            chosen[name] = _trait(traits, name, value)
    mistakes.check()
    with document.at("traits"):
        return replace(traits, **chosen)


def check_zero_stage(document: Document, checked: ExperimentFile, traits: RuntimeTraits) -> int:
    """Return the ZeRO stage; refuse one that the runtime does not have."""
    shard_ranks, reshard = checked.shard_ranks, checked.reshard_after_forward
    stage = traits.min_zero_stage if checked.zero_stage is None else checked.zero_stage
    if stage != "auto" and not traits.min_zero_stage <= stage <= traits.max_zero_stage:
        message = f"runtime {traits.name!r} works with zero_stage {traits.zero_stages}"
        document.refuse(f"found {stage}; {message}", "zero_stage")
    space = checked.search.space
    if stage == "auto" and space != "operator":
        return AUTO_STAGE
    if space in {"heterogeneous", "operator"} and (stage not in {0, 1} or shard_ranks):
        message = (
            f"found {stage}; stages with device groups of their own share out optimizer states "
            "alone: zero_stage 0 or 1, no shard_ranks; search.space uniform and placement have all"
        )
        document.refuse(message, "zero_stage")
    assert stage != "auto", "space operator refuses it"
    key = "shard_ranks" if shard_ranks else "reshard_after_forward"
    with document.at(key):
        zero = zero_of(
            stage,
            shard_ranks,
            reshard=reshard,
            otherwise=NO_ZERO,
        )
        why = traits.why_no_zero(zero, pp=1)
        if why is not None:
            raise ValueError(why)
    return stage


def build_constants(document: Document, checked: ExperimentFile) -> Constants:
    """Return the shipped constants with those that the file sets; refuse unknown ones."""
    names = Constants.__dataclass_fields__
    mistakes = Mistakes()
    for name in checked.constants:
        with mistakes.collect():
            if name not in names:
                message = f"unknown constant {name!r}; known: {', '.join(names)}"
                raise InputError(message, where=document.where("constants", name))
    mistakes.check()
    scale = {PROGRAM_SCALE: checked.constants.get(PROGRAM_SCALE, 1.0)}
    return replace(Constants(), **{**checked.constants, PROGRAM_SCALE: 1.0}).moved(scale)


def _trait(traits: RuntimeTraits, name: str, value: object) -> bool | int | float:
    """Return a trait's new value if its type is that of the record's value."""
    names = [trait.name for trait in fields(traits)]
    numbers = [key for key in names if not isinstance(getattr(traits, key), str | tuple)]
    if name not in numbers:
        raise ValueError(f"unknown trait {name!r}; those that can be set: {', '.join(numbers)}")
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


def split_hosts(document: Document, cluster: Cluster, num_groups: int) -> tuple[Cluster, Groups]:
    """Split a cluster into groups of consecutive, equal nodes that run trials side by side.

    Returns:
        The cluster of the first group, for which plans are made, and the host names of every group.
    """
    size, rest = divmod(len(cluster.nodes), num_groups)
    where = document.where("trials", "host_groups")
    if rest or not size:
        message = f"found {num_groups}; it must divide the number of nodes, {len(cluster.nodes)}"
        raise InputError(message, where=where)
    groups = [cluster.nodes[size * i : size * (i + 1)] for i in range(num_groups)]
    for number, group in enumerate(groups):
        if [node.nameless for node in group] != [node.nameless for node in groups[0]]:
            message = (
                f"found {num_groups}; group {number} ({_names(group)}) has other devices, slots or "
                f"links than group 0 ({_names(groups[0])}): trials could not be compared"
            )
            raise InputError(message, where=where)
    links = {pair: link for pair, link in cluster.pair_links.items() if max(pair) < size}
    first = replace(cluster, nodes=groups[0], pair_links=links)
    return first, tuple(tuple(node.name for node in group) for group in groups)


def check_trials(document: Document, settings: TrialSettings) -> None:
    """Refuse a pattern that is no regular expression with one group, and unusable variables."""
    program = settings.program
    if program is not None and isinstance(program.metric, Pattern):
        with document.at("trials", "program", "metric", "pattern"):
            _check_pattern(program.metric.pattern)
    _check_variables(document, settings.environment)


def _check_variables(document: Document, environment: Mapping[str, str]) -> None:
    """Refuse names of variables that a shell refuses, and values that no variable can hold."""
    for name, value in environment.items():
        with document.at("trials", "environment", name):
            if _VARIABLE.fullmatch(name) is None:
                message = f"found {shown(name)}; a variable's name has letters A-Z and a-z, digits"
                raise ValueError(f"{message} and '_', with no digit in front")
            if "\0" in value:
                raise ValueError("no variable can hold a zero byte")


def _names(nodes: tuple[Node, ...]) -> str:
    return ", ".join(node.name for node in nodes)


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
