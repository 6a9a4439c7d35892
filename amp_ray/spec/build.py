"""From a checked experiment file to values: names resolved, units converted, parts fitted."""

from collections.abc import Mapping
from typing import Protocol

from amp_ray.spec.build_cluster import build_cluster
from amp_ray.spec.build_runtime import build_constants, build_traits
from amp_ray.spec.experiment import Experiment, SearchLimits, TrialSettings
from amp_ray.spec.experiment_file import ExperimentFile, SearchSection, TrialsSection
from amp_ray.spec.families import build_model
from amp_ray.spec.model import Model
from amp_ray.spec.profile import ANALYTIC, Profile
from amp_ray.spec.profile_file import parse_profile
from amp_ray.spec.section import validate
from amp_ray.spec.shape import model_shape
from amp_ray.spec.traits import RuntimeTraits
from amp_ray.spec.yaml_text import Document


class Files(Protocol):
    """Reads the files that an experiment names; implemented where side effects live."""

    def text(self, name: str) -> str:
        """Return the text of one file."""
        ...

    def folder(self, name: str) -> Mapping[str, str]:
        """Return the text of every profile file of a folder, by file name."""
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
    cluster = build_cluster(document, checked, hostfile_text)
    return Experiment(
        name=checked.name,
        model=model,
        cluster=cluster,
        profile=_profile(document, checked, files, model.num_layers),
        constants=constants,
        traits=traits,
        precision=checked.precision,
        optimizer=checked.optimizer,
        zero_stage=checked.zero_stage,
        recompute=checked.recompute,
        global_batch_size=checked.global_batch_size,
        limits=_limits(checked.search),
        trials=_trials(checked.trials),
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
        )


def _profile(document: Document, checked: ExperimentFile, files: Files, num_layers: int) -> Profile:
    """Return the source of layer times."""
    section = checked.profile
    with document.at("profile", "path"):
        if section.source == "analytic":
            if section.path is None:
                return ANALYTIC
            message = f"found {section.path!r}; source 'analytic' has none, did you mean 'table'?"
            raise ValueError(message)
        if section.path is None:
            message = (
                "source 'table' needs 'path', a folder with profile.yaml and one CSV per device"
            )
            raise ValueError(message)
        return parse_profile(
            files.folder(section.path),
            folder=section.path,
            num_layers=num_layers,
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
    )


def _trials(section: TrialsSection) -> TrialSettings:
    """Return the settings of real trials."""
    return TrialSettings(
        backend=section.backend,
        budget=section.budget,
        num_steps=section.steps,
        num_warmup_steps=section.warmup_steps,
        timeout_s=section.timeout_s,
    )
