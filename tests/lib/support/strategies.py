"""Hypothesis strategies for hostfiles, clusters, and parallel strategies that run on them."""

import itertools
import math

from hypothesis import strategies as st

from amp_ray.clusters.cluster import Cluster, Link, Node
from amp_ray.clusters.device import CATALOGUE
from amp_ray.inputs.hostfile import HostSlots, parse_target
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE, SELECTIVE, Recompute
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.strategies.zero import Zero

_MAX_NODES = 4
_MAX_SLOTS = 4
_MAX_DEGREE = 4
_MAX_LAYERS = 12
_MAX_SAMPLES = 8

RECOMPUTE = (
    NO_RECOMPUTE,
    SELECTIVE,
    FULL,
    Recompute(kind="selective", layers=2),
    Recompute(kind="full", layers=1),
    Recompute(kind="full", layers=3),
)

_HOST_NAMES = st.from_regex(
    r"([A-Za-z0-9_][A-Za-z0-9._-]{0,9}@)?([A-Za-z0-9_][A-Za-z0-9._-]{0,20}|\[[0-9a-f]{0,4}:[0-9a-f:.]{0,8}\])"
    r"(:[1-9][0-9]{0,3})?",
    fullmatch=True,
)
"""Names of hosts."""


def hosts() -> st.SearchStrategy[tuple[HostSlots, ...]]:
    """Draw the lines of a hostfile: at least one host, no host twice, any numbers of slots."""
    entry = st.builds(HostSlots, host=_HOST_NAMES, num_slots=st.integers(1, 999_999_999))
    lines = st.lists(
        entry, min_size=1, max_size=6, unique_by=lambda line: parse_target(line.host).machine
    )
    return lines.map(tuple)


def links() -> st.SearchStrategy[Link]:
    """Draw a link with any rate from a slow network's to a fast switch's."""
    return st.builds(
        Link, bandwidth_bytes_per_s=st.floats(1e6, 1e12), latency_s=st.floats(0.0, 1e-3)
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draw a cluster of up to four nodes with unequal devices, slots, links and hosts."""
    num_nodes = draw(st.integers(1, _MAX_NODES))
    hosts = sorted(
        draw(st.lists(st.integers(0, num_nodes), min_size=num_nodes, max_size=num_nodes))
    )
    nodes = tuple(
        Node(
            name=f"host-{host}",
            device=draw(st.sampled_from(list(CATALOGUE.values()))),
            num_slots=draw(st.integers(1, _MAX_SLOTS)),
            first_slot=index * _MAX_SLOTS,
            intra=draw(links()),
            inter=draw(links()),
        )
        for index, host in enumerate(hosts)
    )
    pairs = [(low, high) for high in range(num_nodes) for low in range(high)]
    known = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    known += [(low, high) for low, high in pairs if hosts[low] == hosts[high]]
    return Cluster(nodes=nodes, pair_links={pair: draw(links()) for pair in dict.fromkeys(known)})


def candidates() -> st.SearchStrategy[Candidate]:
    """Draw a small candidate of the uniform space."""
    degree = st.integers(1, _MAX_DEGREE)
    return st.builds(
        Candidate,
        micro_batch_size=st.integers(1, _MAX_SAMPLES),
        options=st.builds(StageOptions, tp=degree, dp=degree, recompute=st.sampled_from(RECOMPUTE)),
        pp=degree,
        num_micro_batches=st.integers(1, _MAX_SAMPLES),
    )


@st.composite
def bounds(draw: st.DrawFn, pp: int) -> tuple[int, ...]:
    """Draw cuts of a short chain into ``pp`` stages."""
    num_layers = draw(st.integers(pp, pp + _MAX_LAYERS))
    inner = st.lists(
        st.integers(1, num_layers - 1) if pp > 1 else st.nothing(),
        min_size=pp - 1,
        max_size=pp - 1,
        unique=True,
    )
    return (0, *sorted(draw(inner)), num_layers)


@st.composite
def uniform_strategies(draw: st.DrawFn) -> Strategy:
    """Draw a strategy whose stages have equal options; its ranks are on any devices."""
    candidate = draw(candidates())
    placement = draw(st.permutations(range(candidate.num_devices)))
    return Strategy.uniform(candidate, draw(bounds(candidate.pp)), tuple(placement))


def _zeros(group: int) -> st.SearchStrategy[Zero]:
    """Draw ZeRO options that shard over all ranks, or over groups of ``group`` ranks."""
    stages = st.sampled_from([(0, False), (1, False), (2, False), (3, False), (3, True)])
    return st.builds(
        lambda stage, hybrid: Zero(
            stage=stage[0], keeps_weights=stage[1], shard_ranks=group if hybrid and stage[0] else 0
        ),
        stages,
        st.booleans(),
    )


@st.composite
def strategies_on(draw: st.DrawFn, cluster: Cluster, *, uses_all: bool = False) -> Strategy:
    """Draw a strategy whose stages may differ in everything.

    Args:
        draw: Hypothesis's function to draw values.
        cluster: Cluster of the strategy.
        uses_all: Whether the strategy must use every device.
    """
    sizes = draw(_groups(cluster.num_devices, uses_all=uses_all))
    degrees = [draw(_degrees(size)) for size in sizes]
    dps = [dp for _, dp in degrees]
    cuts = draw(bounds(len(sizes)))
    samples = draw(st.integers(max(dps), max(dps) + _MAX_SAMPLES))
    zero = draw(_zeros(math.gcd(*dps)))
    told = len(set(dps)) > 1 or (max(dps) > 1 and draw(st.booleans()))
    stages = tuple(
        Stage(
            first_layer=cuts[index],
            end_layer=cuts[index + 1],
            options=StageOptions(
                tp=tp, dp=dp, recompute=draw(st.sampled_from(RECOMPUTE)), zero=zero
            ),
            shares=draw(_shares(samples, dp)) if told else None,
        )
        for index, (tp, dp) in enumerate(degrees)
    )
    devices = draw(st.permutations(range(cluster.num_devices)))
    return Strategy(
        stages=stages,
        micro_batch_size=samples,
        num_micro_batches=draw(st.integers(1, _MAX_SAMPLES)),
        placement=tuple(devices[: sum(sizes)]),
    )


@st.composite
def _groups(draw: st.DrawFn, num_devices: int, *, uses_all: bool) -> list[int]:
    """Draw each stage's number of devices; unless ``uses_all``, some devices may stay idle."""
    sizes = [draw(st.integers(1, num_devices))]
    while (left := num_devices - sum(sizes)) and (uses_all or draw(st.booleans())):
        sizes.append(draw(st.integers(1, left)))
    return sizes


@st.composite
def _degrees(draw: st.DrawFn, num_devices: int) -> tuple[int, int]:
    """Draw tp and dp whose product is a stage's number of devices."""
    tp = draw(st.sampled_from([tp for tp in range(1, num_devices + 1) if num_devices % tp == 0]))
    return tp, num_devices // tp


@st.composite
def _shares(draw: st.DrawFn, samples: int, dp: int) -> tuple[int, ...]:
    """Draw positive shares of the samples of a micro-batch."""
    inner = st.integers(1, samples - 1) if dp > 1 else st.nothing()
    cuts = draw(st.lists(inner, min_size=dp - 1, max_size=dp - 1, unique=True))
    ends = [0, *sorted(cuts), samples]
    return tuple(end - first for first, end in itertools.pairwise(ends))
