"""Small experiments for tests: from a few figures to an `Experiment`, without a file."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from amp_ray import guests
from amp_ray.clusters.cluster import Cluster
from amp_ray.clusters.device import Device
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.experiment_file import build_experiment
from amp_ray.inputs.profile import Profile
from amp_ray.inputs.yaml_text import Document, parse_yaml
from amp_ray.models.model import Model
from amp_ray.runtimes.traits import RUNTIMES

TEXT_MODEL = """\
model: {family: gpt2, num_layers: 6, hidden_size: 256, num_heads: 8, sequence_length: 128,
        vocab_size: 1024}
"""
PICTURE_MODEL = """\
model: {family: transgan, depth: [2, 0, 2], hidden_size: 64, num_heads: 4, bottom_width: 2,
        latent_size: 13, window_size: 2}
"""
SMALL = f"""\
name: small
{TEXT_MODEL}\
cluster:
  nodes:
    - {{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}}
global_batch_size: 8
"""
"""Experiment with four T4 on two nodes, analytic layer times, and the default runtime."""
MIXED_HOST = (
    "{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}",
    """{host: big, device: T4, slots: 2, inter_gbit_per_s: 10}
    - {host: big, device: V100-32, slots: 1}
    - {device: T4, slots: 3, inter_gbit_per_s: 10}""",
)
"""Part of `SMALL` and its replacement with boards of two kinds in the first of two hosts."""
SLOW_HOST = (
    "global_batch_size: 8\n",
    "global_batch_size: 8\nconstants: {host_s_per_iteration: 0.015}\n",
)
"""Part of `SMALL` and its replacement with which its strategies are nearly equally fast."""
LONG = """\
name: long
model: {family: llama, num_layers: 8, hidden_size: 4096, num_heads: 32, sequence_length: 8192,
        vocab_size: 32000}
cluster:
  nodes: [{count: 1, device: A100-80, slots: 4, intra_gbit_per_s: 2400, inter_gbit_per_s: 100}]
runtime: torch
"""
"""Experiment with four A100 on one node and 8192 tokens; tests add the batch and the search."""


class MemoryFiles:
    """Files that exist only in the memory of a test.

    Args:
        files: Text by path; ``folder`` lists the paths that begin with a folder's name.
    """

    def __init__(self, files: Mapping[str, str] | None = None) -> None:
        """Keep the files."""
        self._files = dict(files or {})

    def text(self, name: str) -> str:
        """Return the text of one file."""
        return self._files[name]

    def folder(self, name: str) -> Mapping[str, str]:
        """Return the files of a folder by their names in it."""
        return {
            path.removeprefix(f"{name}/"): text
            for path, text in self._files.items()
            if path.startswith(f"{name}/")
        }

    def foreign_profile(
        self,
        source: str,
        name: str,
        model: Model,
        devices: Iterable[Device],
        profiled: str | None = None,
    ) -> Profile:
        """Return a profile in another planner's format."""
        profile: Profile = guests.load(guests.PROFILES[source], source)(
            self.folder(name), folder=name, profiled=profiled, model=model, devices=devices
        )
        return profile


def llama_8b(sequence_length: int = 8192) -> str:
    """Return the key ``model`` of an experiment file for Llama 3 with 8 billion parameters."""
    return f"""model:
  family: llama
  num_layers: 32
  hidden_size: 4096
  num_heads: 32
  num_key_value_heads: 8
  feed_forward_size: 14336
  vocab_size: 128256
  sequence_length: {sequence_length}"""


def experiment_from(text: str, files: Mapping[str, str] | None = None) -> Experiment:
    """Build an experiment from YAML text; dimensions that it leaves out are off, not `auto`.

    Args:
        text: The experiment file.
        files: Text of the files that it names, by path.
    """
    return build_experiment(plain_document(text), MemoryFiles(files))


def plain_document(text: str) -> Document:
    """Read YAML text; switch off the dimensions that it leaves out."""
    document = parse_yaml(text, file="test.yaml")
    values, search = dict(document.values), document.values.get("search", {})
    traits = RUNTIMES.get(values.get("runtime", "deepspeed"))
    if traits is not None:
        values.setdefault("zero_stage", traits.min_zero_stage)
    values.setdefault("recompute", "none")
    if isinstance(search, Mapping):
        idle = {} if search.get("space", "uniform") != "uniform" else {"idle_devices": False}
        values["search"] = {"max_cp": 1, "virtual_stages": [1], **idle, **search}
    return replace(document, values=values)


def experiment_on(
    cluster: Cluster, *, num_layers: int, global_batch_size: int, **changes: object
) -> Experiment:
    """Return the small experiment on another cluster, with a chain of layers as its model.

    Args:
        cluster: Cluster of the experiment.
        num_layers: Number of layers of the chain.
        global_batch_size: Samples per step.
        changes: Further fields of the experiment.
    """
    small = _small()
    others: dict[str, Any] = {"zero_stage": 0, **changes}
    return replace(
        small,
        cluster=cluster,
        model=replace(small.model, layers=small.model.layers[:1] * num_layers),
        global_batch_size=global_batch_size,
        **others,
    )


@cache
def _small() -> Experiment:
    return small_experiment()


def small_experiment(*replacements: tuple[str, str]) -> Experiment:
    """Build the small experiment, with parts of its text replaced.

    Args:
        replacements: Pairs of a text in `SMALL` and its replacement.

    Raises:
        ValueError: If `SMALL` does not contain a text to replace.
    """
    text = SMALL
    for old, new in replacements:
        if old not in text:
            message = f"the small experiment has no {old!r}"
            raise ValueError(message)
        text = text.replace(old, new)
    return experiment_from(text)
