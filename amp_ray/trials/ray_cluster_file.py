"""Ray cluster files of older versions: outdated keys and their replacements."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from amp_ray.errors import Where
from amp_ray.inputs.yaml_text import Document, parse_yaml

_REFUSED: Final[Mapping[str, str]] = {
    "head_node": (
        "make it a node type: its keys go into node_config of an entry of available_node_types "
        "with max_workers: 0, which head_node_type names"
    ),
    "worker_nodes": (
        "make it a node type: its keys go into node_config of an entry of available_node_types, "
        "with min_workers and max_workers of its own"
    ),
    "initial_workers": "write min_workers in each node type: that many start, and stay",
    "autoscaling_mode": (
        "write upscaling_speed: 1.0 for 'default', a large one such as 100 for 'aggressive'"
    ),
    "target_utilization_fraction": (
        "write upscaling_speed as 1 / fraction - 1: 0.8 becomes 0.25, 0.5 becomes 1.0"
    ),
}
"""Keys that ``ray up`` now refuses without naming the replacement, with that replacement.

Source: ray-schema.json, prepare_config and StandardAutoscaler.reset of Ray 2.60.
"""

_LOCAL_REFUSED: Final[Mapping[str, str]] = {
    "head_node": "remove it: provider.head_ip names the head, and nothing is launched",
    "worker_nodes": "remove it: provider.worker_ips names the workers, and nothing is launched",
    "initial_workers": "remove it: all of provider.worker_ips start",
}
"""Refused keys for on-premise clusters (provider ``local``), which may not have node types."""

_IGNORED: Final = "ignored without a word: write min_workers in each node type instead"
_IGNORED_ON_AWS: Final = f"{_IGNORED}, and max_workers here, which is 2 where nobody says so"
# Keys of Ray's cluster launcher that an experiment file does not have
_OF_A_CLUSTER: Final = frozenset({"cluster_name", "provider", "auth"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OldKey:
    """A key that current Ray no longer supports."""

    key: str
    where: Where
    advice: str

    def __str__(self) -> str:
        return f"{self.where}: {self.advice}"


def is_ray_cluster(document: Document) -> bool:
    r"""Return whether a YAML file is for Ray's cluster launcher, of any version.

    Example:
        >>> is_ray_cluster(parse_yaml("cluster_name: a\nprovider: {type: aws}", file="x.yaml"))
        True
        >>> is_ray_cluster(parse_yaml("name: a\nmodel: {family: gpt2}", file="x.yaml"))
        False
    """
    keys = document.values.keys() & _OF_A_CLUSTER
    return len(keys) > 1 or (bool(keys) and bool(document.values.keys() & _REFUSED.keys()))


def explain_old_keys(text: str, *, file: str) -> tuple[OldKey, ...]:
    r"""Return the keys of a Ray cluster file that current Ray no longer supports.

    Keys are in the file's order; the result is empty for a current file.

    Example:
        >>> text = "provider: {type: aws}\nmax_workers: 3\ninitial_workers: 3"
        >>> print(*explain_old_keys(text, file="old.yaml"))
        old.yaml:3: initial_workers: write min_workers in each node type: that many start, and stay
    """
    document = parse_yaml(text, file=file)
    advice = _advice(document)
    return tuple(
        OldKey(key=key, where=document.where(key), advice=advice[key])
        for key in document.values
        if key in advice
    )


def _advice(document: Document) -> Mapping[str, str]:
    """Return the replacement of each outdated key, for the file's provider."""
    provider = document.values.get("provider")
    match provider.get("type") if isinstance(provider, Mapping) else None:
        case "local":
            return {**_REFUSED, **_LOCAL_REFUSED}
        case "aws" if "max_workers" not in document.values:
            return {**_REFUSED, "min_workers": _IGNORED_ON_AWS}
        case _:
            return {**_REFUSED, "min_workers": _IGNORED}
