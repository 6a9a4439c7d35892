"""From a checked experiment file to values: names resolved, units converted, parts fitted."""

import itertools
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Final, Protocol

from amp_ray.errors import InputError, Mistakes
from amp_ray.spec.build_cluster import build_cluster
from amp_ray.spec.build_runtime import build_constants, build_traits, check_zero_stage
from amp_ray.spec.build_trials import Groups, build_trials, split_hosts
from amp_ray.spec.cluster import Cluster
from amp_ray.spec.constants import Constants
from amp_ray.spec.device import Device
from amp_ray.spec.experiment import Experiment, SearchLimits, TrialSettings
from amp_ray.spec.experiment_file import ExperimentFile, SearchSection
from amp_ray.spec.families import build_model
from amp_ray.spec.model import Model
from amp_ray.spec.profile import ANALYTIC, Profile
from amp_ray.spec.profile_file import parse_profile
from amp_ray.spec.section import validate_parts
from amp_ray.spec.shape import model_shape
from amp_ray.spec.traits import RuntimeTraits
from amp_ray.spec.width import Kernels
from amp_ray.spec.yaml_text import Document, Places

_PROFILE_FOLDERS: Final = {
    "table": "a folder with profile.yaml and one CSV per device",
    "metis": "a folder with files such as DeviceType.A100_tp1_bs1.json",
}
"""What a path leads to, by source."""


class Files(Protocol):
    """Reads the files that an experiment names; implemented where side effects live."""

    def text(self, name: str) -> str:
        """Return the text of one file."""
        ...

    def folder(self, name: str) -> Mapping[str, str]:
        """Return the text of every profile file of a folder, by file name."""
        ...

    def foreign_profile(
        self, source: str, name: str, model: Model, devices: Iterable[Device]
    ) -> Profile:
        """Return a profile in another planner's format, of this model and all of these devices."""
        ...


def build_experiment(document: Document, files: Files) -> Experiment:
    """Check a document and build the experiment that it describes.

    Raises:
        InputError: With file, line and key, for whatever does not fit; one line per mistake.
    """
    checked, wrong = validate_parts(ExperimentFile, document)
    builder = _Builder(document, files, checked, wrong)
    mistakes = Mistakes()
    for part in itertools.chain.from_iterable(wrong.values()):
        mistakes.add(part)
    for build in (
        lambda: builder.zero_stage,
        lambda: builder.constants,
        lambda: builder.model,
        lambda: builder.trials,
        lambda: builder.profile,
    ):
        with mistakes.collect():
            build()
    mistakes.check()
    return builder.experiment()


class _Builder:
    """Builds the parts of an experiment, each when it is asked for.

    A part that cannot be built raises its own mistakes, and so does every part that depends on it:
    told once, they are no mistakes that follow from others.
    """

    def __init__(
        self,
        document: Document,
        files: Files,
        checked: ExperimentFile,
        wrong: Mapping[str, tuple[InputError, ...]],
    ) -> None:
        """Remember what stands in the file, and which keys at its top are wrong."""
        self._document = document
        self._files = files
        self._checked = checked
        self._wrong = wrong

    def _need(self, *keys: str) -> ExperimentFile:
        """Return what stands in the file, where these keys are right."""
        for key in keys:
            if key in self._wrong:
                raise self._wrong[key][0]
        return self._checked

    @cached_property
    def traits(self) -> RuntimeTraits:
        """What the runtime does."""
        return build_traits(self._document, self._need("runtime", "traits"))

    @cached_property
    def zero_stage(self) -> int:
        """The ZeRO stage."""
        zero_stage = self._need("zero_stage").zero_stage
        return check_zero_stage(self._document, zero_stage, self.traits)

    @cached_property
    def constants(self) -> Constants:
        """Constants of the cost model."""
        return build_constants(self._document, self._need("constants"))

    @cached_property
    def model(self) -> Model:
        """The chain of layers that the runtime trains."""
        section, traits = self._need("model").model, self.traits
        text = _text(self._document, self._files, section.config, "model", "config")
        with self._document.at("model"):
            return build_model(
                model_shape(section, text),
                layer_list=section.layer_list or traits.layer_list,
                vocabulary_multiple=traits.vocabulary_multiple,
                kernels=Kernels(fused_attention=traits.fused_attention, dropout=traits.dropout),
            )

    @cached_property
    def hosts(self) -> tuple[Cluster, Groups]:
        """The cluster that is planned for, and the hosts of every group."""
        checked = self._need("cluster", "precision")
        hostfile = checked.cluster.hostfile
        text = _text(self._document, self._files, hostfile, "cluster", "hostfile")
        whole = build_cluster(self._document, checked, text)
        return split_hosts(self._document, whole, self._need("trials").trials.host_groups)

    @cached_property
    def trials(self) -> TrialSettings:
        """Settings of real trials."""
        return build_trials(self._document, self._need("trials").trials, self.hosts[1])

    @cached_property
    def profile(self) -> Profile:
        """The source of layer times."""
        model, (cluster, _) = self.model, self.hosts
        checked = self._need("profile", "precision")
        return _profile(self._document, checked, self._files, model, cluster)

    def experiment(self) -> Experiment:
        """Return the whole."""
        checked, document = self._checked, self._document
        return Experiment(
            name=checked.name,
            model=self.model,
            cluster=self.hosts[0],
            profile=self.profile,
            constants=self.constants,
            traits=self.traits,
            precision=checked.precision,
            optimizer=checked.optimizer,
            zero_stage=self.zero_stage,
            recompute=checked.recompute,
            global_batch_size=checked.global_batch_size,
            limits=_limits(checked.search),
            trials=self.trials,
            space=checked.search.space,
            names_hosts=checked.cluster.hostfile is not None,
            places=Places(file=document.file, lines=document.lines),
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
    """Return the source of layer times."""
    section = checked.profile
    with document.at("profile", "path"):
        if section.source == "analytic":
            if section.path is None:
                return ANALYTIC
            message = f"found {section.path!r}; source 'analytic' has none, did you mean 'table'?"
            raise ValueError(message)
        if section.path is None:
            message = f"source {section.source!r} needs 'path', {_PROFILE_FOLDERS[section.source]}"
            raise ValueError(message)
        if section.source != "table":
            return files.foreign_profile(section.source, section.path, model, cluster.device_types)
        return parse_profile(
            files.folder(section.path),
            folder=section.path,
            num_layers=model.num_layers,
            precision=checked.precision,
        )


def _limits(section: SearchSection) -> SearchLimits:
    """Return the limits of the search."""
    sizes = section.micro_batch_sizes
    return SearchLimits(
        min_tp=section.min_tp,
        max_tp=section.max_tp,
        max_pp=section.max_pp,
        max_dp=section.max_dp,
        micro_batch_sizes=None if sizes is None else tuple(sorted(set(sizes))),
        tp_across_nodes=section.tp_across_nodes,
        launchable=section.launchable,
    )
