"""The spaces: which candidates of an experiment are looked at."""

from amp_ray.spec.candidate import AnyCandidate, Candidate, GroupsCandidate, StageOptions
from amp_ray.spec.cluster import Cluster
from amp_ray.spec.experiment import Experiment, SearchLimits
from amp_ray.units import counted


def candidates_of(experiment: Experiment) -> tuple[AnyCandidate, ...]:
    """Enumerate the candidates of an experiment's space.

    Most runtimes launch no stages that differ in tp or dp: where only what can be launched matters,
    the heterogeneous space is then that of placements, and of the groups that turn out to be one
    grid on some of the devices.

    Raises:
        ValueError: If the limits leave nothing, with the limit that did it.
    """
    if experiment.space == "operator":
        message = (
            "cost model amp-ray estimates layers; search.space operator is planned by "
            "--cost-model aceso-2024"
        )
        raise ValueError(message)
    if experiment.space != "heterogeneous":
        return uniform_candidates(experiment)
    groups = group_candidates(experiment)
    only_grids = experiment.limits.launchable and not experiment.traits.unequal_stages
    return (*uniform_candidates(experiment), *groups) if only_grids else groups


def group_candidates(experiment: Experiment) -> tuple[GroupsCandidate, ...]:
    """Enumerate how the batch can be cut into micro-batches, where stages choose all else.

    Returns:
        Candidates by micro-batch size, ascending. ``micro_batch_sizes`` limits what one
        data-parallel rank takes, so it is no limit here.
    """
    batch = experiment.global_batch_size
    return tuple(
        GroupsCandidate(
            micro_batch_size=size,
            num_micro_batches=batch // size,
            recompute=experiment.recompute,
        )
        for size in _divisors(batch)
    )


def uniform_candidates(experiment: Experiment) -> tuple[Candidate, ...]:
    """Enumerate all candidates of an experiment within the user's limits.

    The product tp x dp x pp is the number of devices, dp times the micro-batch size divides
    the global batch, and tensor-parallel groups stay inside a node unless the limits allow
    more. Order: micro-batch size, tp, dp, each ascending.

    Returns:
        Candidates in that order; none twice.

    Raises:
        ValueError: If the limits leave nothing, with the limit that did it.
    """
    limits, num_devices = experiment.limits, experiment.cluster.num_devices
    tps = [tp for tp in _divisors(num_devices) if _allows_tp(tp, experiment.cluster, limits)]
    candidates = [
        Candidate(
            micro_batch_size=size,
            options=StageOptions(tp=tp, dp=dp, recompute=experiment.recompute),
            pp=num_devices // (tp * dp),
            num_micro_batches=experiment.global_batch_size // (dp * size),
        )
        for tp in tps
        for dp in _divisors(num_devices // tp)
        if experiment.global_batch_size % dp == 0
        for size in _divisors(experiment.global_batch_size // dp)
        if _allows(dp, num_devices // (tp * dp), size, limits)
    ]
    if not candidates:
        raise ValueError(_why_empty(experiment, tps))
    return tuple(sorted(candidates))


def _allows_tp(tp: int, cluster: Cluster, limits: SearchLimits) -> bool:
    """Tell whether tensor-parallel groups of this size fit the limits and the nodes."""
    if tp < limits.min_tp or (limits.max_tp is not None and tp > limits.max_tp):
        return False
    return limits.tp_across_nodes or all(node.num_slots % tp == 0 for node in cluster.nodes)


def _allows(dp: int, pp: int, size: int, limits: SearchLimits) -> bool:
    """Tell whether the other degrees fit the limits."""
    within_dp = limits.max_dp is None or dp <= limits.max_dp
    within_pp = limits.max_pp is None or pp <= limits.max_pp
    within_size = limits.micro_batch_sizes is None or size in limits.micro_batch_sizes
    return within_dp and within_pp and within_size


def _why_empty(experiment: Experiment, tps: list[int]) -> str:
    """Name what left no candidate."""
    limits, cluster = experiment.limits, experiment.cluster
    batch = experiment.global_batch_size
    head = (
        f"no candidate for {counted(cluster.num_devices, 'device')} and global_batch_size {batch}"
    )
    if not tps:
        slots = sorted({node.num_slots for node in cluster.nodes})
        given = _given(min_tp=limits.min_tp, max_tp=limits.max_tp)
        return (
            f"{head}: no tp within {given} divides the slots of every node "
            f"({', '.join(map(str, slots))}); widen the limits or set search.tp_across_nodes: true"
        )
    sizes = limits.micro_batch_sizes
    given = _given(
        max_dp=limits.max_dp,
        max_pp=limits.max_pp,
        micro_batch_sizes=None if sizes is None else list(sizes),
    )
    return (
        f"{head}: with tp {', '.join(map(str, tps))} and {given} no dp x micro-batch "
        "size divides the batch; widen the limits or change the batch"
    )


def _given(**limits: object) -> str:
    """Name the limits that are set."""
    return ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None)


def _divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
