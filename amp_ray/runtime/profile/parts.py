"""Parts of a profile: a device type or a link, with its points to measure and its hosts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Final

from amp_ray.clusters.cluster import Cluster, Node
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.experiment_file import build_experiment
from amp_ray.models.model import TRAINED
from amp_ray.runtime.files import ExperimentFiles, document_of
from amp_ray.search.space import uniform_candidates
from amp_ray.search.token_slices import granules_of
from amp_ray.trials.profile.points import (
    LayerPoint,
    LinkPoint,
    fitting_tps,
    layer_points,
    link_points,
    slice_points,
    thinned,
)
from amp_ray.trials.profile.records import LinkPlace
from amp_ray.trials.runtime_strategy import untrained_part
from amp_ray.units import NARROW

_LINK_PAIR: Final = 2  # number of hosts at the ends of a link


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Points of a device type or link, measured on the same hosts one after the other."""

    place: LinkPlace
    nodes: tuple[Node, ...]
    slots: int
    links: tuple[LinkPoint, ...]
    layers: tuple[LayerPoint, ...] = ()
    step: bool = False

    @property
    def name(self) -> str:
        """Name for messages and folders."""
        return "-".join([self.place.scope, *(node.device.name for node in self.nodes)])

    @property
    def places(self) -> list[tuple[str, int]]:
        """Host and slot per rank."""
        return [
            (node.name, node.first_slot + slot) for node in self.nodes for slot in range(self.slots)
        ]


def load_unprofiled(path: Path, changes: Iterable[str] = ()) -> Experiment:
    """Read an experiment file, but not its profile, which may not exist yet."""
    document = document_of(path, changes)
    values = {key: value for key, value in document.values.items() if key != "profile"}
    return build_experiment(replace(document, values=values), ExperimentFiles(base=path.parent))


def profile_parts(
    experiment: Experiment, *, is_local: bool, token_slices: bool = False
) -> tuple[Part, ...]:
    """Return the parts of a profile: device types first, then links between hosts.

    With ``is_local`` all hosts are this machine, and no links between hosts are measured.
    ``token_slices`` adds slices of sequences.

    Raises:
        InputError: If the runtime trains another list of layers than the training program, or
            the devices' names or number do not suit.
    """
    shape = experiment.model.shape
    if not shape.is_trained:
        message = (
            f"our training program, which measures layers, trains {', '.join(TRAINED)}, not "
            f"{untrained_part(shape)}; plan with an analytic profile, or give times as a table"
        )
        raise InputError(message, where=experiment.where("model"))
    if any(candidate.options.spreads_experts for candidate in uniform_candidates(experiment)):
        message = (
            "experts that several ranks share out are not measured: what a rank computes depends "
            "on the tokens of the others; set search.max_ep to 1, or plan with an analytic profile"
        )
        raise InputError(message, where=experiment.where("model"))
    if experiment.precision in NARROW:
        message = (
            f"layers are not measured in {experiment.precision}; plan with an analytic profile, or "
            "profile bf16"
        )
        raise InputError(message, where=experiment.where("precision"))
    if experiment.traits.layer_list != "runtime":
        raise InputError(
            f"runtime {experiment.traits.name!r} has the layer list "
            f"{experiment.traits.layer_list!r}; only that of runtime 'deepspeed' can be measured"
        )
    if token_slices and not shape.is_causal:
        message = f"model family {shape.family!r} has no sequence to cut into token slices"
        raise InputError(message, where=experiment.where("model"))
    chosen: dict[str, Node] = {}
    for node in experiment.cluster.hosts:
        _check_name(node.device.name)
        largest = chosen.setdefault(node.device.name, node)
        if node.num_slots > largest.num_slots:
            chosen[node.device.name] = node
    if is_local and len(chosen) > 1 and len(experiment.cluster.host_names) > 1:
        raise InputError(
            f"this machine has one type of device, but the experiment names {', '.join(chosen)}; "
            "profile over SSH, or one type per experiment file into the same folder"
        )
    within = [_device_part(experiment, node, token_slices=token_slices) for node in chosen.values()]
    return (*within, *([] if is_local else _between(experiment.cluster, chosen)))


def _device_part(experiment: Experiment, node: Node, *, token_slices: bool) -> Part:
    """Return the points of a device type that a search may need, on one of its hosts."""
    model = experiment.model
    candidates = uniform_candidates(experiment)
    tps = fitting_tps(model, {candidate.options.tp for candidate in candidates}, node.num_slots)
    pairs = [
        (tp, size)
        for tp in tps
        for size in thinned(
            candidate.micro_batch_size for candidate in candidates if candidate.options.tp == tp
        )
    ]
    layers = layer_points(model, pairs)
    if token_slices:
        layers += slice_points(model, granules_of(experiment).granularity, pairs)
    return Part(
        place=LinkPlace(scope="intra", devices=node.device.name),
        nodes=(node,),
        slots=node.num_slots,
        links=link_points(node.num_slots),
        layers=layers,
        step=True,
    )


def _between(cluster: Cluster, chosen: Mapping[str, Node]) -> Iterable[Part]:
    """Yield a link per pair of device types: between one host of each, with one rank per host.

    Hosts of one rack and hosts that only the network joins are measured apart.
    """
    rack_of = {name: index for index, node in enumerate(cluster.nodes) for name in node.host_names}
    for low, high in combinations_with_replacement(sorted(chosen), _LINK_PAIR):
        first = chosen[low]
        hosts = [
            host for host in cluster.hosts if host.device.name == high and host.name != first.name
        ]
        devices = "+".join(dict.fromkeys([low, high]))
        for scope, is_near in (("rack", True), ("inter", False)):
            place = LinkPlace(scope=scope, devices=devices)
            for other in hosts:
                if (rack_of[first.name] == rack_of[other.name]) is is_near:
                    links = link_points(_LINK_PAIR)
                    yield Part(place=place, nodes=(first, other), slots=1, links=links)
                    break


def _check_name(name: str) -> None:
    """Refuse a device name that cannot be used for a file and a column."""
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise InputError(
            f"device {name!r} gives its name to a file of the profile: use letters, digits, '-', "
            "'_' and '.' only"
        )
