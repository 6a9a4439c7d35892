"""Rates and latencies of links, and constants, fitted to the messages of a profile."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log2
from statistics import median
from typing import Final

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.clusters.cluster import Link
from amp_ray.clusters.constants import Constants
from amp_ray.cost.collective import RING_OVERHEAD_RANKS, start_s
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.profiles.nccl_tests import NcclTest
from amp_ray.trials.profile.points import LinkPoint, loss_position
from amp_ray.trials.profile.records import LinkPlace, ProfileRecords
from amp_ray.units import BITS_PER_BYTE, BYTES_PER_ELEMENT, GIGA, MICROSECONDS_PER_SECOND

_Link = FloatArray  # seconds per step of a message, per step of a collective, and per byte
_LEAST_LATENCY_S: Final = 1e-9  # below any link's latency; a fit at this limit means no latency

_MAX_ROUNDS: Final = 100
_DAMPING: Final = 1e-3
_DAMPING_FACTOR: Final = 4.0
_LONGEST_MOVE: Final = 2.0  # maximum change of a parameter's logarithm in one step

_LEAST_SHARE: Final = 1e-3

_MOST_ERROR: Final = 0.2
"""If one rate for all sizes has a larger median error, report rates by size."""

_LEAST_REST: Final = 0.1  # a rate is computed if at least this share of the time is no latency


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """Work and measured time of one message or collective on a link."""

    num_steps: float
    num_bytes: float  # bytes that cross the link one after another, with overheads
    start_s: float  # time before the link is used, the same for all links
    seconds: float
    collective: bool = False  # whether its steps are those of a collective


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Parameters of a link in the cost model."""

    bytes_per_s: float
    latency_s: float  # per message; per collective step if no message was measured
    collective_latency_s: float | None  # per step of a collective; None if none was measured
    error_fraction: float  # median relative error of the fit over the samples


_Sized = tuple[float, LinkSample]  # size of a message or collective in bytes, and sample


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """Fitted rate and latencies of a link."""

    place: LinkPlace
    gbit_per_s: float  # ``intra_gbit_per_s`` or ``inter_gbit_per_s``
    latency_us: float  # ``intra_latency_us`` or ``inter_latency_us``
    # ``intra_collective_us`` or ``inter_collective_us``; None if no collective was measured
    collective_us: float | None
    error_fraction: float  # median error of one rate and these latencies over all messages
    # Rate by message size in bytes; empty if one rate fits all sizes
    gbit_per_s_by_size: dict[int, float]
    apart: dict[str, LinkFit]  # separate fits to messages and to all-reduces, by kind


def link_reports(records: ProfileRecords, experiment: Experiment) -> tuple[LinkReport, ...]:
    """Fit every measured link with the cost model's formulas.

    All-reduces up to the size of a layer's largest are taken from the measured layers. There, ranks
    arrive at different times, so that one takes several times as long as in a series of them.
    """
    places = {place for place, _ in records.links}
    reports = []
    for place in sorted(places, key=lambda place: (place.scope != "intra", place.devices)):
        within = _within_layers(records, place, experiment) if place.scope == "intra" else []
        largest = max((num_bytes for num_bytes, _ in within), default=0.0)
        samples = {"all_reduce within layers": within}
        for (at, point), seconds in records.links.items():
            if at == place and (point.what == "p2p" or point.num_bytes > largest):
                sample = _sample(point, seconds, _start_s(experiment), place)
                samples.setdefault(point.what, []).append((point.num_bytes, sample))
        reports.append(_report(place, samples, experiment.constants))
    return tuple(reports)


def cluster_yaml(experiment: Experiment, reports: Iterable[LinkReport]) -> str:
    """Return YAML for ``cluster.nodes`` with the measured links; others keep their values."""
    measured = {(report.place.scope, report.place.devices): report for report in reports}
    lines = ["cluster:", "  nodes:"]
    hosts = experiment.cluster.host_of_node
    for node, first in zip(experiment.cluster.nodes, hosts, strict=True):
        name = node.device.name
        figures = [f"count: {node.num_hosts}"] if node.hosts else []
        figures += [f"host: '{node.name}'"] if hosts.count(first) > 1 else []
        figures += [f"device: {name}", f"slots: {node.host_slots}"]
        links = {"intra": node.host_link or node.intra}
        links |= {} if node.first_slot else {"inter": node.inter}
        notes = [f"{scope} not measured" for scope in links if (scope, name) not in measured]
        for scope, stated in links.items():
            figures += _figures(f"{scope}_", stated, measured.get((scope, name)))
        if node.hosts:
            rack = _figures("", node.intra, measured.get(("rack", name)))
            notes += [] if ("rack", name) in measured else ["rack not measured"]
            figures.append(f"rack: {{{', '.join([f'nodes: {node.num_hosts}', *rack])}}}")
        elif node.device.rack_devices:
            figures.append("rack: {nodes: 1}")
        note = f"  # {', '.join(notes)}" if notes else ""
        lines.append(f"    - {{{', '.join(figures)}}}{note}")
    return "\n".join(lines) + "\n"


def _figures(prefix: str, stated: Link, report: LinkReport | None) -> list[str]:
    """Return keys and values of a link as measured, else as stated."""
    if report is not None:
        rate = _rates_yaml(report.gbit_per_s_by_size) or f"{report.gbit_per_s:.4g}"
        return _keys(prefix, rate, report.latency_us, report.collective_us)
    gbit = stated.bandwidth_bytes_per_s * BITS_PER_BYTE / GIGA
    latency_us = stated.latency_s * MICROSECONDS_PER_SECOND
    return _keys(prefix, f"{gbit:.4g}", latency_us, _collective_us(stated))


def _keys(prefix: str, rate: str, latency_us: float, collective_us: float | None) -> list[str]:
    figures = [f"{prefix}gbit_per_s: {rate}", f"{prefix}latency_us: {latency_us:.4g}"]
    if collective_us is not None:
        figures.append(f"{prefix}collective_us: {collective_us:.4g}")
    return figures


def links_of_tests(tests: Iterable[NcclTest], constants: Constants) -> tuple[LinkReport, ...]:
    """Fit the links that nccl-tests measured, within a node and between nodes.

    A stated latency is that of every step of a ring, and of every level of a tree over nodes.
    """
    start = constants.message_scale * constants.collective_start_s
    sized: dict[LinkPlace, dict[str, list[_Sized]]] = {}
    for test in tests:
        place = LinkPlace(scope="intra" if test.num_nodes == 1 else "inter", devices="")
        steps, share = _work(test)
        samples = [
            LinkSample(
                num_steps=steps,
                num_bytes=share * num_bytes,
                start_s=min(start, seconds),
                seconds=seconds,
                collective=test.collective != "sendrecv",
            )
            for num_bytes, seconds in test.times
        ]
        sizes = [float(num_bytes) for num_bytes, _ in test.times]
        group = sized.setdefault(place, {}).setdefault(test.collective, [])
        group += zip(sizes, samples, strict=True)
    return tuple(_report(place, samples, constants) for place, samples in sized.items())


def links_yaml(reports: Iterable[LinkReport]) -> str:
    """Return the keys of a node that tests of links tell, as YAML."""
    lines = []
    for report in reports:
        rate = _rates_yaml(report.gbit_per_s_by_size) or f"{report.gbit_per_s:.4g}"
        prefix = f"{report.place.scope}_"
        lines += _keys(prefix, rate, report.latency_us, report.collective_us)
    return "".join(f"{line}\n" for line in lines)


def _work(test: NcclTest) -> tuple[float, float]:
    """Return the steps of a test, and the bytes on its slowest link per byte of its size."""
    ranks, nodes = test.num_ranks, test.num_nodes
    overhead = 1 + RING_OVERHEAD_RANKS / ranks if nodes == 1 else 1.0
    share = (ranks - 1) / ranks
    if test.collective == "all_reduce":
        return 2.0 * (ceil(log2(nodes)) or ranks - 1), 2 * share * overhead
    if test.collective == "sendrecv":
        return 1.0, 1.0 if nodes == 1 else ranks / nodes
    if test.collective == "alltoall":
        leaving = ranks / nodes * (nodes - 1) / nodes
        return float(nodes), share if nodes == 1 else leaving
    return ranks - 1.0, share * overhead


def constants_yaml(records: ProfileRecords, experiment: Experiment) -> str:
    """Return YAML for the measured constants; empty if there are none.

    Memory rate and host work are medians over devices of the measured optimizer step. The loss is
    not part of the layers' times: the cost model counts it as memory traffic per logit, which is
    fitted here to the loss's measured time.
    """
    constants = _step_constants(records, experiment)
    efficiency = constants.get("memory_efficiency", experiment.constants.memory_efficiency)
    constants |= _loss_constant(records, experiment, efficiency)
    lines = [f"  {name}: {value:.4g}\n" for name, value in constants.items()]
    return "".join(["constants:\n", *lines]) if lines else ""


def _step_constants(records: ProfileRecords, experiment: Experiment) -> dict[str, float]:
    devices = {device.name: device for device in experiment.cluster.device_types}
    steps = {name: values for name, values in records.steps.items() if name in devices}
    if not steps:
        return {}
    rates = [
        float(values["memory_bytes_per_s"]) / devices[name].memory_bytes_per_s
        for name, values in steps.items()
    ]
    host = {
        # A constant of 0 cannot be calibrated: use a thousandth of the default instead
        key: max(
            median(float(values[key]) for values in steps.values()),
            getattr(Constants(), key) * _LEAST_SHARE,
        )
        for key in ("host_s_per_micro_batch", "host_s_per_iteration")
    }
    return {"memory_efficiency": median(rates), **host}


def _loss_constant(
    records: ProfileRecords, experiment: Experiment, efficiency: float
) -> dict[str, float]:
    loss = loss_position(experiment.model)
    logits = experiment.model.layers[-1].logits
    devices = {device.name: device for device in experiment.cluster.device_types}
    traffic = sorted(
        (float(values["forward_s"]) + float(values["backward_s"]))
        * devices[device].memory_bytes_per_s
        * efficiency
        * point.tp
        / (logits * point.micro_batch_size)
        for (device, point), values in records.layers.items()
        if point.layer == loss and device in devices
    )
    return {"loss_bytes_per_logit": traffic[len(traffic) // 2]} if traffic else {}


def _rates_yaml(gbit_per_s_by_size: Mapping[int, float]) -> str:
    """Return rates by size as a YAML list of pairs; empty if there are none."""
    entries = [f"[{size}, {gbit:.4g}]" for size, gbit in gbit_per_s_by_size.items()]
    return f"[{', '.join(entries)}]" if entries else ""


def _rates_by_size(sized: Sequence[_Sized]) -> tuple[dict[bool, float], dict[int, float]]:
    """Return latencies per step, of messages (False) and collectives (True), and bytes/s by size.

    The smallest messages give the latency. A larger message's time minus its latency gives the rate
    for its size. On a busy machine this difference is easily too short for small messages, so no
    rate may exceed the rate of a larger message.
    """
    steps_s: dict[bool, float] = {}
    for _, sample in sized:
        step_s = max(0.0, (sample.seconds - sample.start_s) / sample.num_steps)
        steps_s[sample.collective] = min(step_s, steps_s.get(sample.collective, step_s))
    bytes_per_s: dict[int, list[float]] = {}
    for num_bytes, sample in sized:
        rest_s = sample.seconds - sample.start_s - sample.num_steps * steps_s[sample.collective]
        if rest_s > _LEAST_REST * sample.seconds:
            bytes_per_s.setdefault(int(num_bytes), []).append(sample.num_bytes / rest_s)
    rate, rates = inf, dict.fromkeys(sorted(bytes_per_s), 0.0)
    for size in reversed(rates):
        rate = rates[size] = min(rate, median(bytes_per_s[size]))
    return steps_s, rates


def _report(
    place: LinkPlace, sized: Mapping[str, Sequence[_Sized]], constants: Constants
) -> LinkReport:
    """Fit a rate and latencies to one link, or rates by size if one rate has too large an error."""
    samples = {what: [sample for _, sample in group] for what, group in sized.items()}
    fit = fit_link([sample for group in samples.values() for sample in group])
    rates: dict[int, float] = {}
    if fit.error_fraction > _MOST_ERROR:
        steps_s, rates = _rates_by_size([pair for group in sized.values() for pair in group])
        fit = replace(
            fit,
            bytes_per_s=max(rates.values(), default=fit.bytes_per_s),
            latency_s=steps_s.get(False, steps_s.get(True, fit.latency_s)),
            collective_latency_s=steps_s.get(True),
        )
    share = constants.nic_efficiency if place.scope == "inter" else constants.intra_efficiency
    gbit = BITS_PER_BYTE / GIGA / share
    collective_s = fit.collective_latency_s
    microseconds = MICROSECONDS_PER_SECOND / constants.latency_scale
    return LinkReport(
        place=place,
        gbit_per_s=fit.bytes_per_s * gbit,
        latency_us=fit.latency_s * microseconds,
        collective_us=None if collective_s is None else collective_s * microseconds,
        error_fraction=fit.error_fraction,
        gbit_per_s_by_size={size: rate * gbit for size, rate in rates.items()},
        apart={what: fit_link(group) for what, group in samples.items() if group},
    )


def _collective_us(stated: Link) -> float | None:
    stated_s = stated.collective_latency_s
    return None if stated_s is None else stated_s * MICROSECONDS_PER_SECOND


def _start_s(experiment: Experiment) -> float:
    """Return the time that a message takes before it reaches the link."""
    return start_s(experiment.constants, experiment.traits)


def _within_layers(
    records: ProfileRecords, place: LinkPlace, experiment: Experiment
) -> list[tuple[float, LinkSample]]:
    """Return for each measured layer the size of its largest all-reduce, and a sample.

    The sample has the work and time of all of the layer's all-reduces together.
    """
    sized = []
    layers = experiment.model.layers
    for (device, point), values in records.layers.items():
        if device != place.devices or point.tp == 1 or point.layer >= len(layers):
            continue
        layer = layers[point.layer]
        width = BYTES_PER_ELEMENT[experiment.precision] * point.micro_batch_size
        sizes = [
            elements * width
            for direction in ("forward", "backward")
            for elements in layer.all_reduce_elements(direction)
        ]
        seconds = float(values["all_reduce_s"])
        if sizes and seconds > 0:
            steps, volume = _ring(point.tp, sum(sizes), place)
            sample = LinkSample(
                num_steps=steps * len(sizes),
                num_bytes=volume,
                start_s=_start_s(experiment) * len(sizes),
                seconds=seconds,
                collective=True,
            )
            sized.append((max(sizes), sample))
    return sized


def _sample(point: LinkPoint, seconds: float, start: float, place: LinkPlace) -> LinkSample:
    """Return a message or all-reduce as a sample: steps and bytes of the cost model, and time."""
    steps, volume = 1.0, float(point.num_bytes)
    if point.what == "all_reduce":
        steps, volume = _ring(point.num_ranks, point.num_bytes, place)
    return LinkSample(
        num_steps=steps,
        num_bytes=volume,
        start_s=start,
        seconds=seconds,
        collective=point.what == "all_reduce",
    )


def _ring(num_ranks: int, num_bytes: float, place: LinkPlace) -> tuple[float, float]:
    """Return the steps and bytes of a ring all-reduce, as ``amp_ray.cost`` computes them."""
    steps = 2.0 * (num_ranks - 1)
    overhead = 1.0 if place.scope == "inter" else 1 + RING_OVERHEAD_RANKS / num_ranks
    return steps, steps / num_ranks * num_bytes * overhead


def fit_link(samples: Sequence[LinkSample]) -> LinkFit:
    """Fit bandwidth and latencies: least squares of the logarithm of predicted / measured time.

    Small messages determine the latencies, large ones the bandwidth. The logarithm weights a
    prediction of half the time and one of double the time equally; a relative error would favour
    predictions that are too short. Collective steps have a separate latency, since gloo's ranks
    wait for each other at every step.

    Raises:
        ValueError: If there is no sample, or a time that is not positive.

    Example:
        >>> samples = [
        ...     LinkSample(num_steps=1, num_bytes=n, start_s=0.5, seconds=0.5 + 2 + n / 10)
        ...     for n in (1, 10, 100)
        ... ]
        >>> fit = fit_link(samples)
        >>> round(fit.bytes_per_s, 6), round(fit.latency_s, 6)
        (10.0, 2.0)
    """
    if not samples or min(sample.seconds for sample in samples) <= 0:
        raise ValueError(f"a link is fitted to positive times, found {list(samples)}")
    arrays = _Samples.of(samples)
    link = _first_guess(samples)
    errors, damping = arrays.errors(link), _DAMPING
    for _ in range(_MAX_ROUNDS):
        trial = arrays.step(link, damping)
        trial_errors = arrays.errors(trial)
        if trial_errors @ trial_errors < errors @ errors:
            link, errors, damping = trial, trial_errors, damping / _DAMPING_FACTOR
        else:
            damping *= _DAMPING_FACTOR
    *latencies_s, s_per_byte = link.tolist()
    message_s, collective_s = (
        latency_s if latency_s > _LEAST_LATENCY_S else 0.0 for latency_s in latencies_s
    )
    has_collectives = any(sample.collective for sample in samples)
    has_messages = not all(sample.collective for sample in samples)
    return LinkFit(
        bytes_per_s=1 / s_per_byte,
        latency_s=message_s if has_messages else collective_s,
        collective_latency_s=collective_s if has_collectives else None,
        error_fraction=float(np.median(np.abs(np.expm1(errors)))),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Samples:
    # Coefficients of the three parameters of ``_Link``, shape ``(num_samples, 3)``
    counts: FloatArray
    start_s: FloatArray  # shape ``(num_samples,)``
    seconds: FloatArray  # shape ``(num_samples,)``

    @classmethod
    def of(cls, samples: Sequence[LinkSample]) -> "_Samples":
        rows = [
            (0.0, sample.num_steps, sample.num_bytes)
            if sample.collective
            else (sample.num_steps, 0.0, sample.num_bytes)
            for sample in samples
        ]
        return cls(
            counts=np.array(rows, dtype=np.float64),
            start_s=np.array([sample.start_s for sample in samples]),
            seconds=np.array([sample.seconds for sample in samples]),
        )

    def errors(self, link: _Link) -> FloatArray:
        ratios: FloatArray = (self.start_s + self.counts @ link) / self.seconds
        return np.log(ratios)

    def step(self, link: _Link, damping: float) -> _Link:
        """Take a Levenberg-Marquardt step in the parameters' logarithms, which stay positive."""
        slopes = self.counts * link / (self.start_s + self.counts @ link)[:, None]
        matrix = slopes.T @ slopes + damping * np.eye(len(link))
        moves = np.linalg.solve(matrix, -slopes.T @ self.errors(link))
        moved: FloatArray = link * np.exp(np.clip(moves, -_LONGEST_MOVE, _LONGEST_MOVE))
        moved[:2] = np.maximum(moved[:2], _LEAST_LATENCY_S)
        return moved


def _first_guess(samples: Sequence[LinkSample]) -> _Link:
    """Return a start for the fit: latencies of the smallest samples, bandwidth of the largest."""
    large = max(samples, key=lambda sample: sample.num_bytes)
    latencies = []
    for collective in (False, True):
        kind = [sample for sample in samples if sample.collective is collective] or samples
        small = min(kind, key=lambda sample: sample.num_bytes / sample.num_steps)
        latencies.append((small.seconds - small.start_s) / small.num_steps)
    guess = np.maximum([*latencies, large.seconds / large.num_bytes], 0.0)
    guess[:2] = np.maximum(guess[:2], _LEAST_LATENCY_S)
    return guess
