"""From a checked experiment file to values: names resolved, units converted, parts fitted."""

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from amp_ray.spec.build_cluster import build_cluster
from amp_ray.spec.build_runtime import build_constants, build_traits
from amp_ray.spec.build_trials import build_trials, split_hosts
from amp_ray.spec.cluster import Cluster
from amp_ray.spec.device import Device
from amp_ray.spec.experiment import Experiment, SearchLimits
from amp_ray.spec.experiment_file import ExperimentFile, SearchSection
from amp_ray.spec.families import build_model
from amp_ray.spec.model import Model
from amp_ray.spec.profile import ANALYTIC, Profile
from amp_ray.spec.profile_file import parse_profile
from amp_ray.spec.section import validate
from amp_ray.spec.shape import model_shape
from amp_ray.spec.traits import RuntimeTraits
from amp_ray.spec.width import Kernels
from amp_ray.spec.yaml_text import Document

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
        """Return a profile in another planner's format.

        Args:
            source: Whose format.
            name: Of the folder.
            model: What the profile must be of.
            devices: Types that it must cover.
        """
        ...


def build_experiment(document: Document, files: Files) -> Experiment:
    """Check a document and build the experiment that it describes.

    Args:
        document: The parsed experiment file.
        files: Reader of the hostfile, the profile and a model configuration.

    Raises:
        InputError: With file, line and key, for whatever does not fit.
    """
    checked = validate(ExperimentFile, document)
    traits = build_traits(document, checked)
    constants = build_constants(document, checked)
    model = _model(document, checked, files, traits)
    hostfile_text = _text(document, files, checked.cluster.hostfile, "cluster", "hostfile")
    whole = build_cluster(document, checked, hostfile_text)
    cluster, groups = split_hosts(document, whole, checked.trials.host_groups)
    return Experiment(
        name=checked.name,
        model=model,
        cluster=cluster,
        profile=_profile(document, checked, files, model, cluster),
        constants=constants,
        traits=traits,
        precision=checked.precision,
        optimizer=checked.optimizer,
        zero_stage=checked.zero_stage,
        recompute=checked.recompute,
        global_batch_size=checked.global_batch_size,
        limits=_limits(checked.search),
        trials=build_trials(document, checked.trials, groups),
        space=checked.search.space,
        document=document,
    )


def _text(document: Document, files: Files, name: str | None, *path: str) -> str | None:
    """Return the text of a file that the experiment names at ``path``, if it does."""
    if name is None:
        return None
    with document.at(*path):
        return files.text(name)


def _model(
    document: Document, checked: ExperimentFile, files: Files, traits: RuntimeTraits
) -> Model:
    """Build the chain of layers that the runtime trains."""
    section = checked.model
    text = _text(document, files, section.config, "model", "config")
    with document.at("model"):
        return build_model(
            model_shape(section, text),
            layer_list=section.layer_list or traits.layer_list,
            vocabulary_multiple=traits.vocabulary_multiple,
            kernels=Kernels(fused_attention=traits.fused_attention, dropout=traits.dropout),
        )


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
