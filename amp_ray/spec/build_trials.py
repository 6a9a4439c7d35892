"""What an experiment file says of real trials: settings, and groups of hosts that run them."""

import re
from dataclasses import replace
from typing import Any

from amp_ray.errors import InputError
from amp_ray.spec.access import SshSettings
from amp_ray.spec.cluster import Cluster, Node
from amp_ray.spec.experiment import TrialSettings
from amp_ray.spec.experiment_file import PatternSection, ProgramSection, TrialsSection
from amp_ray.spec.json_text import shown
from amp_ray.spec.own_program import OwnProgram, Pattern
from amp_ray.spec.yaml_text import Document

Groups = tuple[tuple[str, ...], ...]


def split_hosts(document: Document, cluster: Cluster, num_groups: int) -> tuple[Cluster, Groups]:
    """Split a cluster into groups of consecutive nodes that run trials side by side.

    Returns:
        The cluster of the first group, which is what is planned for, and the names of the
        hosts of every group.

    Raises:
        InputError: If the nodes cannot be split into groups of equal shape.
    """
    size, rest = divmod(len(cluster.nodes), num_groups)
    where = document.where("trials", "host_groups")
    if rest or not size:
        message = f"found {num_groups}; it must divide the number of nodes, {len(cluster.nodes)}"
        raise InputError(message, where=where)
    groups = [cluster.nodes[size * i : size * (i + 1)] for i in range(num_groups)]
    for number, group in enumerate(groups):
        if [_shape(node) for node in group] != [_shape(node) for node in groups[0]]:
            message = (
                f"found {num_groups}; group {number} ({_names(group)}) has other devices, slots or "
                f"links than group 0 ({_names(groups[0])}): trials could not be compared"
            )
            raise InputError(message, where=where)
    links = {pair: link for pair, link in cluster.pair_links.items() if max(pair) < size}
    first = replace(cluster, nodes=groups[0], pair_links=links)
    return first, tuple(tuple(node.name for node in group) for group in groups)


def build_trials(document: Document, section: TrialsSection, groups: Groups) -> TrialSettings:
    """Return the settings of real trials; a pattern must be a regular expression with one group."""
    program = section.program
    return TrialSettings(
        backend=section.backend,
        budget=section.budget,
        num_steps=section.steps,
        num_warmup_steps=section.warmup_steps,
        timeout_s=section.timeout_s,
        ssh=SshSettings(**dict(section.ssh)),
        launcher=section.launcher,
        warm=section.warm,
        python=section.python,
        environment=dict(section.environment),
        host_groups=groups,
        program=None if program is None else _program(document, program),
    )


def _shape(node: Node) -> Node:
    """Return a node without its name."""
    return replace(node, name="")


def _names(nodes: tuple[Node, ...]) -> str:
    """List the nodes of a group."""
    return ", ".join(node.name for node in nodes)


def _program(document: Document, section: ProgramSection) -> OwnProgram:
    """Return the user's own program."""
    chosen: dict[str, Any] = dict(section)
    metric = section.metric
    if isinstance(metric, PatternSection):
        with document.at("trials", "program", "metric", "pattern"):
            _check_pattern(metric.pattern)
        chosen["metric"] = Pattern(pattern=metric.pattern, unit=metric.unit)
    return OwnProgram(**chosen)


def _check_pattern(pattern: str) -> None:
    """Refuse what is no regular expression with one group."""
    try:
        num_groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        message = f"found {shown(pattern)}, which is no regular expression: {error}"
        raise ValueError(message) from None
    if num_groups != 1:
        message = (
            f"found {shown(pattern)} with {num_groups} groups; expected one, around the number, as "
            "in 'time: ([0-9.]+) ms'"
        )
        raise ValueError(message)
