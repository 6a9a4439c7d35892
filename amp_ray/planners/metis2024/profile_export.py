"""Export profiles to Metis's format, with layer costs from our cost model."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.clusters.device import Device
from amp_ray.cost.collective import NO_RING, Path
from amp_ray.cost.memory import LayerMemory
from amp_ray.cost.model import CostModel
from amp_ray.cost.roofline import Rank, device_phases
from amp_ray.cost.weights import Weights
from amp_ray.errors import InputError
from amp_ray.exports.chosen import Export
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.published_profile import Key, PublishedEntry, PublishedProfile, layer_groups
from amp_ray.planners.metis2024.inputs import metis_cluster_files
from amp_ray.planners.metis2024.profile import SUFFIX
from amp_ray.units import BYTES_PER_ELEMENT, MIB, MILLISECONDS_PER_SECOND

DEFAULT_SIZES: Final = (1, 2, 4, 8, 16)
"""Micro-batch sizes to export: Metis divides samples into powers of two and looks each one up."""


def metis_files(published: PublishedProfile, *, model_name: str) -> dict[str, str]:
    """Return a published profile in Metis's format, as text by file name.

    `amp_ray.planners.metis2024.profile.parse_metis_profile` reads the files back. Entries without
    ``forward_backward_s`` are written without that key, and Metis's planner drops them.
    """
    return {
        f"DeviceType.{kind}_tp{tp}_bs{size}{SUFFIX}": json.dumps(
            _document(entry, model_name), indent=1
        )
        + "\n"
        for (kind, tp, size), entry in sorted(published.entries.items())
    }


def published_profile(experiment: Experiment) -> PublishedProfile:
    """Return an experiment's profile in Metis's form: its own, or computed by `publish`."""
    if experiment.profile.published is not None:
        return experiment.profile.published
    try:
        return publish(experiment, sizes=metis_sizes(experiment.global_batch_size))
    except ValueError as error:
        raise InputError(str(error)) from error


def metis_sizes(global_batch_size: int) -> tuple[int, ...]:
    """Return the micro-batch sizes that its formulas look up for a batch.

    Stages of one device type look up divisors of the batch, mixed stages look up powers of two.

    Example:
        >>> metis_sizes(12)
        (1, 2, 3, 4, 6, 8, 12)
    """
    divisors = {size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0}
    powers = {1 << digit for digit in range(global_batch_size.bit_length())}
    return tuple(sorted(divisors | powers))


def publish(experiment: Experiment, *, sizes: Sequence[int] = DEFAULT_SIZES) -> PublishedProfile:
    """Return the entries that Metis's profiler would measure for an experiment.

    They cover every device type; every tp that fits its nodes and was measured or is a power of
    two; and those of ``sizes`` that a measured profile has. Layer times come from the cost model:
    measured if the profile has them, otherwise counted work on the data sheet; tensor-parallel
    all-reduces within a node are included. The loss and the host's work per micro-batch are in no
    layer but in ``forward_backward_s``, as in Metis's own files; the host's work includes making a
    micro-batch. Parameters and memory are counted: states, kept activations of one micro-batch and
    temporaries of every layer.

    Raises:
        ValueError: If the model is not an input end, blocks and an output end; if two devices
            differ in memory only, since Metis gives them one name; or if no size remains.
    """
    groups = layer_groups(experiment.model)
    if groups is None:
        raise ValueError(
            f"Metis knows one input layer, blocks in a row and one output layer; "
            f"{experiment.model.name} has others in between or lacks an end"
        )
    kinds = {device.name: _kind(device) for device in experiment.cluster.device_types}
    if len(set(kinds.values())) != len(kinds):
        raise ValueError(f"Metis does not tell {', '.join(kinds)} apart: export them one by one")
    counter = _Counter(experiment=experiment, groups=groups)
    entries: dict[Key, PublishedEntry] = {
        (_kind(device), tp, size): counter.entry(device, tp, size)
        for device in experiment.cluster.device_types
        for tp, size in _grid(experiment, device, sizes)
    }
    if not entries:
        message = f"{experiment.profile.source} has none of the micro-batch sizes {list(sizes)}"
        raise ValueError(message)
    return PublishedProfile(source=experiment.profile.source, entries=entries)


def _document(entry: PublishedEntry, model_name: str) -> dict[str, Any]:
    times_ms = {
        "forward_backward_time_ms": entry.forward_backward_s,
        "batch_generator_time_ms": entry.batch_generator_s,
        "optimizer_time_ms": entry.optimizer_s,
    }
    known_ms = {
        key: seconds * MILLISECONDS_PER_SECOND
        for key, seconds in times_ms.items()
        if seconds is not None
    }
    return {
        "model": {
            "model_name": model_name,
            "num_layers": entry.num_layers,
            "parameters": {
                "total_parameters_bytes": float(entry.layer_parameter_bytes.sum()),
                "parameters_per_layer_bytes": entry.layer_parameter_bytes.tolist(),
            },
        },
        "execution_time": {
            "total_time_ms": sum(known_ms.values()),
            **known_ms,
            "layer_compute_total_ms": (entry.layer_s * MILLISECONDS_PER_SECOND).tolist(),
        },
        "execution_memory": {
            "total_memory": float(entry.layer_memory_bytes.sum()) / MIB,
            "layer_memory_total_mb": (entry.layer_memory_bytes / MIB).tolist(),
        },
    }


def _kind(device: Device) -> str:
    """Return a device's type as Metis writes it: in capitals, without its memory."""
    return device.name.partition("-")[0].upper()


def _grid(
    experiment: Experiment, device: Device, sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield each (tp, micro-batch size) to compute for a device."""
    most = max(node.num_slots for node in experiment.cluster.nodes if node.device == device)
    measured = experiment.profile.tables.get(device.name)
    if measured is not None:
        yield from ((tp, size) for tp, size in measured if tp <= most and size in sizes)
        return
    tp = 1
    while tp <= most:
        yield from ((tp, size) for size in sizes)
        tp *= 2


@dataclass(frozen=True, kw_only=True, eq=False)
class _Counter:
    experiment: Experiment
    groups: Sequence[range]  # layers of the model that make up each layer of Metis

    def entry(self, device: Device, tp: int, size: int) -> PublishedEntry:
        experiment = self.experiment
        rank = Rank(device=device, tp=tp, micro_batch_size=size, precision=experiment.precision)
        table, _ = self._cost_model.layer_costs.table(rank, self._ring(device, tp), "none")
        loss_s = np.array(
            [
                phases.forward_s + phases.backward_s
                for layer in experiment.model.layers
                for phases in [device_phases(layer.added, rank, experiment.constants)]
            ]
        )
        both_s = table[0] + table[1]
        return PublishedEntry(
            layer_s=self._grouped(np.maximum(0.0, both_s - loss_s)),
            layer_memory_bytes=self._grouped(self._memory_bytes(rank)),
            layer_parameter_bytes=self._grouped(self._parameter_bytes),
            forward_backward_s=float(both_s.sum()) + experiment.constants.host_s_per_micro_batch,
            optimizer_s=self._cost_model.step_end.optimizer_s(self._held(tp), 1, device),
            batch_generator_s=0.0,
        )

    def _grouped(self, values: FloatArray) -> FloatArray:
        return np.array([values[group].sum() for group in self.groups])

    def _ring(self, device: Device, tp: int) -> Path:
        """Return the path of a tensor-parallel all-reduce on the largest node with a device."""
        if tp == 1:
            return NO_RING
        cluster = self.experiment.cluster
        nodes = [index for index, node in enumerate(cluster.nodes) if node.device == device]
        largest = max(nodes, key=lambda index: cluster.nodes[index].num_slots)
        first = cluster.node_of_device.index(largest)
        return self._cost_model.topology.rings([range(first, first + tp)]).paths[0]

    def _memory_bytes(self, rank: Rank) -> FloatArray:
        """Return states, kept activations and temporaries of every layer."""
        experiment = self.experiment
        layers = LayerMemory(model=experiment.model, rank=rank, traits=experiment.traits)
        per = experiment.traits.bytes_per_parameter(experiment.precision)
        states = (
            per.kept + per.master + experiment.traits.optimizer(experiment.optimizer).moment_bytes
        )
        held = np.diff(Weights(model=experiment.model, tp=rank.tp).prefix)
        activations = [
            layers.kept_bytes(layer, "none") + layers.temporary_bytes(layer, "none")
            for layer in experiment.model.layers
        ]
        needed: FloatArray = states * held + np.array(activations)
        return needed

    def _held(self, tp: int) -> float:
        """Return the number of parameters of the whole model that one rank holds."""
        whole = Weights(model=self.experiment.model, tp=tp)
        return float(whole.of_stages((0, self.experiment.model.num_layers))[0])

    @cached_property
    def _parameter_bytes(self) -> FloatArray:
        """Bytes of the weights of every layer, before tp divides them."""
        width = BYTES_PER_ELEMENT[self.experiment.precision]
        layers = self.experiment.model.layers
        return np.array([float(width * layer.num_parameters) for layer in layers])

    @cached_property
    def _cost_model(self) -> CostModel:
        """The cost model of `amp_ray`, with the optimizer step that Metis assumes: without ZeRO."""
        return CostModel(experiment=replace(self.experiment, zero_stage=0))


def export_inputs(experiment: Experiment) -> tuple[Export, str]:
    """Return hostfile, cluster file and profile, and a note on them, for ``--to metis``."""
    published = published_profile(experiment)
    profile = metis_files(published, model_name=experiment.model.name)
    files = {
        **metis_cluster_files(experiment.cluster),
        **{f"profile/{name}": text for name, text in profile.items()},
    }
    title = (
        f"hostfile, clusterfile.json and {len(profile)} profile files of "
        f"{published.num_layers} layers"
    )
    return Export(files=files), title
