"""Where the ranks of a strategy run: hosts and slots."""

from collections.abc import Sequence

from amp_ray.errors import InputError
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import Strategy
from amp_ray.trials.launch import slots_by_host

Place = tuple[str, int]
"""Host and slot."""


def placement(
    experiment: Experiment, strategy: Strategy, hosts: Sequence[str]
) -> tuple[Place, ...]:
    """Return host and slot of every rank.

    On one machine that plays all hosts, slots are numbered through, over all groups of hosts.

    Raises:
        InputError: If there are not as many hosts as nodes.
    """
    cluster, trials = experiment.cluster, experiment.trials
    if len(hosts) != len(cluster.nodes):
        message = (
            f"the cluster has {len(cluster.nodes)} nodes, found {len(hosts)} hosts to play them: "
            f"{', '.join(hosts)}"
        )
        raise InputError(message)
    group = trials.host_groups.index(tuple(hosts)) if tuple(hosts) in trials.host_groups else 0
    is_local = trials.backend == "local"
    return tuple(
        (
            hosts[cluster.node_of_device[device]],
            group * cluster.num_devices + device if is_local else cluster.slot_of_device[device],
        )
        for device in strategy.placement
    )


def hostfile_text(places: Sequence[Place]) -> str:
    r"""Return a hostfile with the hosts and the number of ranks of each.

    Example:
        >>> hostfile_text([("b", 1), ("a", 0), ("b", 0)])
        'b slots=2\na slots=1\n'
    """
    return "".join(f"{host} slots={len(slots)}\n" for host, slots in slots_by_host(places).items())
