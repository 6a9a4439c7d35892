"""Plans of an experiment with changed keys, and advice which change would help most."""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any, Final

from amp_ray.clusters.cluster import Node
from amp_ray.cost.estimate import Estimate
from amp_ray.errors import InputError, Where
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.yaml_text import parse_value, shown_change
from amp_ray.runtime.files import plain_values
from amp_ray.runtime.planning import Planned, plan_experiment
from amp_ray.runtime.ray.searching import AUTO, Workers
from amp_ray.search.planner import PlannerChoice
from amp_ray.search.rows import row
from amp_ray.search.run import NUM_INTERVALS, fastest_within
from amp_ray.search.space import divided_batch
from amp_ray.strategies.recompute import AUTO as AUTO_RECOMPUTE
from amp_ray.strategies.recompute import FULL
from amp_ray.strategies.zero import AUTO_STAGE
from amp_ray.units import GIB, counted

MOST_VARIANTS: Final = 1000  # maximum number of plans of one sweep; more are usually a mistake
LEAST_GAIN: Final = 0.005  # a change with a smaller one does not help
_OPEN: Final = ("recompute", "zero_stage", "sequence_parallel")  # settings that may be ``auto``
_LEFT_OPEN: Final = (AUTO_RECOMPUTE, AUTO_STAGE, "auto")
_LIMITS: Final = (
    *("max_tp", "max_pp", "max_dp", "micro_batch_sizes"),
    *("max_cost_per_iteration", "min_tokens_per_s"),
)
_SPREADING: Final = ("torch", "megatron-core", "fsdp2")  # runtimes that shard what others keep
_GRIDS: Final = ("uniform", "placement")
_DOUBLINGS: Final = 10  # of the nodes, to find a cluster that is large enough
_Change = tuple[str, tuple[str, ...]]  # description, and ``KEY=VALUE``
KNEE: Final = 0.5  # least ratio of throughput's relative gain to the devices' relative gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The plan of an experiment with changed keys, or the reason why there is none."""

    changes: tuple[str, ...]  # as ``KEY=VALUE``
    planned: Planned | None  # None if the changed experiment is invalid
    problem: str  # why there is no plan; empty if there is one

    @property
    def best(self) -> Estimate | None:
        """The best strategy; None if there is none."""
        return self.planned.ranking.best if self.planned else None

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of the best strategy; None if there is none."""
        best = self.best
        return None if best is None else best.strategy.global_batch_size / best.iteration_time_s

    def to_json(self) -> dict[str, Any]:
        """Return an entry of ``sweep --json``."""
        best, planned = self.best, self.planned
        return {
            "set": [shown_change(change) for change in self.changes],
            "num_devices": planned.experiment.cluster.num_devices if planned else None,
            "samples_per_s": self.samples_per_s,
            "row": row(best, 1, planned.experiment, planned.planner) if best and planned else None,
            "reason": self.problem or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """Plans changed experiments."""

    # Reads the experiment with ``KEY=VALUE`` changes, and chooses its planner
    load: Callable[[Sequence[str]], tuple[Experiment, PlannerChoice]]
    workers: Workers = AUTO
    num_rows: int = NUM_INTERVALS  # rows of each ranking that are needed; see `plan_experiment`

    def plan(self, changes: Sequence[str]) -> Variant:
        """Plan with some changes; an `InputError` becomes the variant's ``problem``."""
        try:
            planned = plan_experiment(
                *self.load(changes),
                num_rows=self.num_rows,
                workers=self.workers,
                progress=lambda _done, _all: None,
            )
        except InputError as error:
            return Variant(changes=tuple(changes), planned=None, problem=str(error))
        problem = ""
        if planned.ranking.best is None:
            problem = planned.why_none()
        return Variant(changes=tuple(changes), planned=planned, problem=problem)

    def plan_all(
        self, combinations: Sequence[Sequence[str]], progress: Callable[[int, int], None]
    ) -> tuple[Variant, ...]:
        """Plan every combination of changes; raise `InputError` if all of them are invalid."""
        variants = []
        for number, changes in enumerate(combinations):
            progress(number, len(combinations))
            variants.append(self.plan(changes))
        if all(variant.planned is None for variant in variants):
            raise InputError(variants[0].problem)
        return tuple(variants)

    def can_run(self, changes: Sequence[str]) -> bool:
        """Return whether some strategy can run with the changes; only lean ones are planned."""
        try:
            experiment, choice = self.load(changes)
            return fastest_within(choice.make(_lean(experiment))) is not None
        except ValueError:  # a wrong value, or no candidate within the limits
            return False


def combinations_of(
    sets: Mapping[str, Sequence[Any]] | Iterable[str],
) -> tuple[tuple[str, ...], ...]:
    """Return all combinations of ``KEY=V1,V2,...``; the last key varies fastest.

    ``sets`` may also be a mapping from key to values.

    Example:
        >>> combinations_of(["a=1,2", "b.c=[1, 2],x"])
        (('a=1', 'b.c=[1, 2]'), ('a=1', 'b.c=x'), ('a=2', 'b.c=[1, 2]'), ('a=2', 'b.c=x'))
        >>> combinations_of({"tokens": [1e12, 1.5]})
        (('tokens=1e+12',), ('tokens=1.5',))
    """
    choices: dict[str, list[str]] = {}
    total = 1
    if isinstance(sets, Mapping):
        sets = [
            f"{key}={json.dumps(plain_values([*values]))[1:-1]}" for key, values in sets.items()
        ]
    for text in sets:
        key, _, values = text.partition("=")
        where = Where(file=f"--set {shown_change(text)}")
        if key in choices:
            raise InputError(f"key {key!r} is set twice: list its values in one --set", where=where)
        listed = parse_value(f"[{values}]", file=where.file)
        if not key or not listed:
            message = "expected KEY=VALUE,VALUE,..., such as search.space=uniform,placement"
            raise InputError(message, where=where)
        choices[key] = [f"{key}={_written(value)}" for value in listed]
        total *= len(listed)
    if total > MOST_VARIANTS:
        raise InputError(f"{total:,} combinations; a sweep plans at most {MOST_VARIANTS:,}")
    return tuple(product(*choices.values()))


def _written(value: Any) -> str:  # noqa: ANN401 - any plain value
    """Return a value as text that is read back as the same value: 1e+12 for 1000000000000.0."""
    if isinstance(value, float) and parse_value(f"{value:g}", file="") == value:
        return f"{value:g}"
    if isinstance(value, str) and parse_value(value, file="") == value:
        return value
    return json.dumps(value)


def knee(variants: Sequence[Variant]) -> Variant | None:
    """Return the largest cluster up to which more devices are worth it.

    More devices are worth it if the relative gain of samples per second is at least `KNEE` times
    the relative gain of devices. The result is None if all are worth it, or if all clusters have
    the same size.
    """
    curve = sorted(
        (variant.planned.experiment.cluster.num_devices, variant.samples_per_s, number)
        for number, variant in enumerate(variants)
        if variant.planned is not None and variant.samples_per_s is not None
    )
    if len({size for size, *_ in curve}) < len(curve):
        return None
    for (size, rate, number), (more, faster, _) in pairwise(curve):
        if faster / rate - 1 < KNEE * (more / size - 1):
            return variants[number]
    return None


def linear_fractions(variants: Sequence[Variant]) -> list[float | None]:
    """Return each variant's share of linear scaling.

    It is its samples per second and device over those of the smallest cluster that has a plan,
    among the variants that differ in keys of the cluster alone. It is None without a plan, and
    where these clusters have one size.
    """
    groups: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    keys, points = [], []
    for variant in variants:
        key = tuple(change for change in variant.changes if not change.startswith("cluster."))
        point = None
        if variant.planned is not None and variant.samples_per_s is not None:
            size = variant.planned.experiment.cluster.num_devices
            point = (size, variant.samples_per_s / size)
            groups.setdefault(key, []).append(point)
        keys.append(key)
        points.append(point)
    fractions: list[float | None] = []
    for key, point in zip(keys, points, strict=True):
        sizes = [size for size, _rate in groups.get(key, ())]
        if point is None or len(set(sizes)) < len(sizes) or len(sizes) == 1:
            fractions.append(None)
        else:
            fractions.append(point[1] / min(groups[key])[1])
    return fractions


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change and its effect on the best plan."""

    what: str  # description of the change
    is_bought: bool = False  # whether it takes other hardware
    variant: Variant
    speedup: float | None  # ratio of samples per second to today's; None if there is no plan

    def to_json(self) -> dict[str, Any]:
        """Return an entry of ``advice`` of ``explain --json``."""
        point = self.variant.to_json()
        return {
            "what": self.what,
            "set": point["set"],
            "speedup": self.speedup,
            "row": point["row"],
            "reason": point["reason"],
        }


def advise(
    variants: Variants,
    today: Variant,
    values: Mapping[str, Any],
    progress: Callable[[int, int], None],
) -> list[Advice]:
    """Plan with each of the usual changes that the file takes.

    ``today`` is the unchanged experiment's variant, ``values`` are its keys. ``progress`` gets
    (changes planned, total).

    Returns:
        First the changes that help and cost nothing, then those that need other hardware, then
        those that do not help; each by speedup, the largest first.
    """
    assert today.planned is not None
    experiment = today.planned.experiment
    free, bought = list(_settings(experiment)), list(_hardware(values, experiment))
    advice = []
    for number, (what, changes) in enumerate([*free, *bought]):
        progress(number, len(free) + len(bought))
        variant = variants.plan(changes)
        rate, before = variant.samples_per_s, today.samples_per_s
        speedup = None if rate is None or before is None else rate / before
        if variant.planned is not None:  # else the file does not take it
            is_bought = number >= len(free)
            advice.append(Advice(what=what, variant=variant, speedup=speedup, is_bought=is_bought))
    return sorted(advice, key=_by_use)


def _by_use(entry: Advice) -> tuple[object, ...]:
    rate, before = entry.variant.samples_per_s, entry.speedup
    helps = rate is not None and (before is None or before > 1 + LEAST_GAIN)
    return not helps, helps and entry.is_bought, -(before or 0.0), -(rate or 0.0), entry.what


def ways_to_fit(
    variants: Variants, today: Variant, values: Mapping[str, Any]
) -> tuple[Advice, ...]:
    """Return the smallest change of settings, and the smallest cluster, with which a plan exists.

    Settings are tried from one key to all of them, and then other training programs; nodes are
    added to the entry with the most memory per device.
    """
    assert today.planned is not None
    experiment = today.planned.experiment
    ways = [
        (what, changes)
        for what, changes in _relaxed(values, experiment)
        if variants.can_run(changes)
    ][:1]
    ways += _smallest_cluster(variants, values, experiment)
    planned = ((what, variants.plan(changes)) for what, changes in ways)
    return tuple(
        Advice(what=what, variant=variant, speedup=None)
        for what, variant in planned
        if variant.best is not None
    )


def _relaxed(values: Mapping[str, Any], experiment: Experiment) -> Iterator[_Change]:
    """Yield changes of settings that leave the search more strategies, the smallest first."""
    settings = [
        f"{key}=auto"
        for key in _OPEN
        if getattr(experiment, key) not in _LEFT_OPEN
        and (experiment.traits.sequence_parallel or key != "sequence_parallel")
    ]
    search = values.get("search") or {}
    limits = [
        f"search.{key}=null"
        for key, value in search.items()
        if key in _LIMITS and value is not None and value != "auto"
    ]
    if search.get("idle_devices") is False:
        limits.append("search.idle_devices=true")
    for change in (*settings, *limits):
        yield change, (change,)
    every = (*settings, *limits)
    if len(every) > 1:
        yield "all settings open", every
    for runtime in _SPREADING:
        if runtime != experiment.traits.name:
            yield f"runtime {runtime}", (f"runtime={runtime}", *every)


def _lean(experiment: Experiment) -> Experiment:
    """Return the experiment with the values of open settings that need the least memory."""
    if experiment.recompute == AUTO_RECOMPUTE and FULL.kind in experiment.traits.recompute:
        experiment = replace(experiment, recompute=FULL)
    if experiment.space in _GRIDS and experiment.limits.micro_batch_sizes is None:
        limits = replace(experiment.limits, micro_batch_sizes=(1,))
        experiment = replace(experiment, limits=limits)
    return experiment


def _smallest_cluster(
    variants: Variants, values: Mapping[str, Any], experiment: Experiment
) -> Iterator[_Change]:
    """Yield the change to the smallest number of nodes with which a strategy can run, if any."""
    nodes = values["cluster"]["nodes"]
    sizes_bytes = [node.device.memory_bytes for node in _of_entries(nodes, experiment)]
    index = max(range(len(nodes)), key=lambda entry: sizes_bytes[entry])
    low = nodes[index].get("count", 1)

    def with_nodes(count: int) -> tuple[str, ...]:
        hosts = ("cluster.hostfile=",) if values["cluster"].get("hostfile") else ()
        return (*hosts, f"cluster.nodes.{index}.count={count}")

    most = next((n for n in _doubled(low) if variants.can_run(with_nodes(n))), None)
    if most is None:
        return
    sizes = range(most // 2 + 1, most)  # a plan for fewer nodes is one for more nodes, too
    count = sizes.start + bisect_left(sizes, 1, key=lambda n: variants.can_run(with_nodes(n)))
    yield f"{counted(count, 'node')} instead of {low}", with_nodes(count)


def _doubled(number: int) -> list[int]:
    return [number * 2**power for power in range(1, _DOUBLINGS + 1)]


def _of_entries(nodes: Sequence[Mapping[str, Any]], experiment: Experiment) -> list[Node]:
    """Return the first node of each entry of ``cluster.nodes``."""
    ends = accumulate((node.get("count", 1) for node in nodes), initial=0)
    return [experiment.cluster.hosts[first] for first, _ in pairwise(ends)]


def _settings(experiment: Experiment) -> Iterator[_Change]:
    """Yield changes that need no other hardware."""
    if experiment.limits.idle_devices is False:
        yield "idle devices", ("search.idle_devices=true",)
    near = divided_batch(experiment)
    if near is not None:
        yield "a batch that the devices divide", (f"global_batch_size={near}",)
    if experiment.space == "uniform" and not experiment.cluster.is_even:
        yield "stages on any nodes", ("search.space=placement",)
    batch = experiment.global_batch_size
    yield "twice the batch", (f"global_batch_size={2 * batch}",)
    for what, change in experiment.other_settings():
        yield what, (change,)


def _hardware(values: Mapping[str, Any], experiment: Experiment) -> Iterator[_Change]:
    """Yield changes of the cluster."""
    nodes = values["cluster"]["nodes"]
    if len(experiment.cluster.nodes) > 1:
        yield from _faster(nodes, "inter", "between nodes")
    if max(node["slots"] for node in nodes) > 1:
        yield from _faster(nodes, "intra", "within nodes")
    yield (
        "half more memory on every device",
        tuple(
            f"cluster.nodes.{index}.memory_gib={1.5 * node.device.memory_bytes / GIB:.6g}"
            for index, node in enumerate(_of_entries(nodes, experiment))
        ),
    )
    hosts = ("cluster.hostfile=",) if values["cluster"].get("hostfile") else ()
    for index, node in enumerate(nodes):
        count = node.get("count", 1)
        name = node["device"] if isinstance(node["device"], str) else node["device"]["name"]
        more = f"cluster.nodes.{index}.count={count + 1}"
        if node.keys() & {"inter_gbit_per_s", "inter_gbyte_per_s"}:
            yield f"one more node of {node['slots']} x {name}", (*hosts, more)


def _faster(nodes: Sequence[Mapping[str, Any]], key: str, where: str) -> Iterator[_Change]:
    """Yield the change that doubles a rate of all nodes.

    Yield nothing if a node leaves the rate out, or has a table of rates.
    """
    changes = []
    for index, node in enumerate(nodes):
        names = [name for name in (f"{key}_gbit_per_s", f"{key}_gbyte_per_s") if name in node]
        if not names or not isinstance(node[names[0]], int | float):
            return
        changes.append(f"cluster.nodes.{index}.{names[0]}={2 * node[names[0]]:.6g}")
    yield f"twice the rate {where}", tuple(changes)
