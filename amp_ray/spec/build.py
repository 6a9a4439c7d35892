"""From a checked experiment file to values: names resolved, units converted, parts fitted."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from amp_ray.errors import InputError
from amp_ray.spec.catalogue import find_device
from amp_ray.spec.cluster import (
    DEFAULT_INTER_LATENCY_S,
    DEFAULT_INTRA_LATENCY_S,
    Cluster,
    Link,
    Node,
)
from amp_ray.spec.constants import Constants
from amp_ray.spec.device import Device
from amp_ray.spec.experiment import Experiment, SearchLimits, TrialSettings
from amp_ray.spec.experiment_file import (
    ClusterSection,
    DeviceSection,
    ExperimentFile,
    NodeSection,
    SearchSection,
)
from amp_ray.spec.families import build_model
from amp_ray.spec.hostfile import parse_hostfile
from amp_ray.spec.model import Model
from amp_ray.spec.profile import ANALYTIC, Profile
from amp_ray.spec.profile_file import parse_profile
from amp_ray.spec.section import validate
from amp_ray.spec.shape import model_shape
from amp_ray.spec.traits import RUNTIMES, RuntimeTraits
from amp_ray.spec.yaml_text import Document, Path
from amp_ray.units import GIGA, TERA, gbit_per_s_to_bytes_per_s, gib_to_bytes, microseconds_to_s


class Files(Protocol):
    """Reads the files that an experiment names; implemented where side effects live."""

    def text(self, name: str) -> str:
        """Return the text of one file."""
        ...

    def folder(self, name: str) -> Mapping[str, str]:
        """Return the text of every file of a folder, by file name."""
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
    traits = _traits(document, checked)
    constants = _constants(document, checked)
    model = _model(document, checked, files, traits)
    cluster = _cluster(document, checked, files)
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
        trials=TrialSettings(
            backend=checked.trials.backend,
            budget=checked.trials.budget,
            num_steps=checked.trials.steps,
            num_warmup_steps=checked.trials.warmup_steps,
            timeout_s=checked.trials.timeout_s,
        ),
    )


@contextmanager
def _at(document: Document, *path: str | int) -> Iterator[None]:
    """Add a place of the experiment file to a ValueError that knows none."""
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError(str(error), where=document.where(path)) from error


def _traits(document: Document, checked: ExperimentFile) -> RuntimeTraits:
    """Return the record of the runtime, checked against what the experiment asks of it."""
    if checked.runtime not in RUNTIMES:
        message = f"found {checked.runtime!r}; expected one of {', '.join(RUNTIMES)}"
        raise InputError(message, where=document.where(("runtime",)))
    traits = RUNTIMES[checked.runtime]
    for name, value in checked.traits.items():
        chosen: dict[str, Any] = {name: _trait(document, traits, name, value)}
        traits = replace(traits, **chosen)
    if checked.zero_stage > traits.max_zero_stage:
        message = (
            f"runtime {traits.name!r} works with zero_stage up to {traits.max_zero_stage}, "
            f"found {checked.zero_stage}"
        )
        raise InputError(message, where=document.where(("zero_stage",)))
    return traits


def _trait(
    document: Document, traits: RuntimeTraits, name: str, value: float
) -> bool | int | float:
    """Return a trait that the file sets, in the type of the record's own."""
    where = document.where(("traits", name))
    own = getattr(traits, name, None)
    if name not in RuntimeTraits.__dataclass_fields__ or isinstance(own, str):
        known = [
            key
            for key in RuntimeTraits.__dataclass_fields__
            if not isinstance(getattr(traits, key), str)
        ]
        message = f"unknown trait {name!r}; those that can be set: {', '.join(known)}"
        raise InputError(message, where=where)
    if isinstance(own, bool) != isinstance(value, bool):
        message = (
            f"found {value!r}; expected {'true or false' if isinstance(own, bool) else 'a number'}"
        )
        raise InputError(message, where=where)
    return round(value) if isinstance(own, int) and not isinstance(own, bool) else value


def _constants(document: Document, checked: ExperimentFile) -> Constants:
    """Return the shipped constants with those that the file sets."""
    known = Constants.__dataclass_fields__
    for name in checked.constants:
        if name not in known:
            message = f"unknown constant {name!r}; known: {', '.join(known)}"
            raise InputError(message, where=document.where(("constants", name)))
    return replace(Constants(), **checked.constants)


def _model(
    document: Document, checked: ExperimentFile, files: Files, traits: RuntimeTraits
) -> Model:
    """Build the chain of layers that the runtime trains."""
    section = checked.model
    text = None
    if section.config is not None:
        with _at(document, "model", "config"):
            text = files.text(section.config)
    with _at(document, "model"):
        layer_list = section.layer_list or traits.layer_list
        return build_model(
            model_shape(section, text),
            layer_list=layer_list,
            vocabulary_multiple=traits.vocabulary_multiple,
        )


def _cluster(document: Document, checked: ExperimentFile, files: Files) -> Cluster:
    """Build the cluster; host names and slots come from the hostfile where there is one."""
    section = checked.cluster
    described = [
        (entry, index) for index, entry in enumerate(section.nodes) for _ in range(entry.count)
    ]
    names = [f"node{index}" for index in range(len(described))]
    if section.hostfile is not None:
        names = _host_names(document, section, described, files)
    nodes = []
    for name, (entry, index) in zip(names, described, strict=True):
        path: Path = ("cluster", "nodes", index)
        with _at(document, *path, "device"):
            device = _device(entry)
            device.peak_flops(checked.precision)
        nodes.append(_node(name, entry, device))
    with _at(document, "cluster"):
        return Cluster(nodes=tuple(nodes), pair_links=_pair_links(section, names))


def _host_names(
    document: Document,
    section: ClusterSection,
    described: list[tuple[NodeSection, int]],
    files: Files,
) -> list[str]:
    """Return the hostfile's names in order, checked against what ``nodes`` describes."""
    file = str(section.hostfile)
    with _at(document, "cluster", "hostfile"):
        hosts = parse_hostfile(files.text(file), file=file)
    if len(hosts) != len(described):
        message = (
            f"hostfile {file!r} names {len(hosts)} hosts and cluster.nodes describes "
            f"{len(described)}: they are matched in order, so the counts must be equal"
        )
        raise InputError(message, where=document.where(("cluster", "nodes")))
    for host, (entry, index) in zip(hosts, described, strict=True):
        if host.num_slots != entry.slots:
            message = (
                f"host {host.host!r} has slots={host.num_slots} in {file!r}, but {entry.slots} here"
            )
            raise InputError(message, where=document.where(("cluster", "nodes", index, "slots")))
    return [host.host for host in hosts]


def _device(entry: NodeSection) -> Device:
    """Return the data sheet of a node's devices."""
    if isinstance(entry.device, str):
        device = find_device(entry.device)
    else:
        device = _described_device(entry.device)
    if entry.memory_gib is None:
        return device
    return replace(device, memory_bytes=gib_to_bytes(entry.memory_gib))


def _described_device(section: DeviceSection) -> Device:
    """Return a data sheet that the experiment file spells out."""
    rates = {
        precision: None if value is None else value * TERA
        for precision, value in (
            ("fp32", section.fp32_tflops),
            ("fp16", section.fp16_tflops),
            ("bf16", section.bf16_tflops),
        )
    }
    if all(rate is None for rate in rates.values()):
        message = f"device {section.name!r} needs fp32_tflops, fp16_tflops or bf16_tflops"
        raise ValueError(message)
    return Device(
        name=section.name,
        memory_bytes=gib_to_bytes(section.memory_gib),
        memory_bytes_per_s=section.memory_gbyte_per_s * GIGA,
        num_multiprocessors=section.num_multiprocessors,
        fp32_flops=rates["fp32"],
        fp16_flops=rates["fp16"],
        bf16_flops=rates["bf16"],
        source="the experiment file",
    )


def _node(name: str, entry: NodeSection, device: Device) -> Node:
    """Return one node with its links in SI units."""
    return Node(
        name=name,
        device=device,
        num_slots=entry.slots,
        intra=_link(entry.intra_gbit_per_s, entry.intra_latency_us, DEFAULT_INTRA_LATENCY_S),
        inter=_link(entry.inter_gbit_per_s, entry.inter_latency_us, DEFAULT_INTER_LATENCY_S),
    )


def _link(gbit_per_s: float, latency_us: float | None, default_latency_s: float) -> Link:
    """Return a link in SI units."""
    return Link(
        bandwidth_bytes_per_s=gbit_per_s_to_bytes_per_s(gbit_per_s),
        latency_s=default_latency_s if latency_us is None else microseconds_to_s(latency_us),
    )


def _pair_links(section: ClusterSection, names: list[str]) -> dict[tuple[int, int], Link]:
    """Return the links of single node pairs by node index."""
    links: dict[tuple[int, int], Link] = {}
    for entry in section.links:
        unknown = [name for name in entry.between if name not in names]
        if unknown:
            message = f"links: host {unknown[0]!r} is not one of {', '.join(names)}"
            raise ValueError(message)
        low, high = sorted(names.index(name) for name in entry.between)
        links[low, high] = _link(entry.gbit_per_s, entry.latency_us, DEFAULT_INTER_LATENCY_S)
    return links


def _profile(document: Document, checked: ExperimentFile, files: Files, num_layers: int) -> Profile:
    """Return the source of layer times."""
    if checked.profile.source == "analytic":
        return ANALYTIC
    with _at(document, "profile", "path"):
        if checked.profile.path is None:
            message = (
                "source 'table' needs 'path', a folder with profile.yaml and one CSV per device"
            )
            raise ValueError(message)
        return parse_profile(
            files.folder(checked.profile.path), folder=checked.profile.path, num_layers=num_layers
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
