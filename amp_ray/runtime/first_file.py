"""``amp-ray init``: write an experiment file from answers, a hostfile and the hosts' GPUs."""

import difflib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from amp_ray.clusters.device import CATALOGUE, CPU, find_device, resembles
from amp_ray.errors import InputError, printable
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.experiment_file import build_experiment
from amp_ray.inputs.hostfile import parse_hostfile
from amp_ray.inputs.model_config import read_config
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.runtime.doctor import gpus_of_hosts
from amp_ray.runtime.files import ExperimentFiles, read_text
from amp_ray.runtime.hosts.host import host_maker
from amp_ray.runtime.ray.searching import num_cpus
from amp_ray.shipped import read_shipped
from amp_ray.trials.runtime_strategy import RUNTIMES

_LOGGER = logging.getLogger(__name__)
_CPU_GBIT_PER_S: Final = 20  # first guess of the rate within a CPU host, which has no such link
_PRESETS: Final = "data/presets.yaml"
_WITHOUT_PRESET: Final = {
    "models": "a Hugging Face config.json, or its folder,",
    "clusters": "--device with --slots and --inter-gbit-per-s",
}
_CPUS: Final = "cpus"  # value of ``slots`` in a preset: the CPUs of this machine
_MOST_CPUS: Final = 8  # default maximum of slots (one process per CPU); --slots takes any number

_TEXT: Final = """\
# An experiment of amp-ray: what is trained on what. docs/experiment-file.md lists every key.
#   amp-ray plan {file}          the fastest strategies, in seconds
#   amp-ray explain {file}       why, and what would help
#   amp-ray doctor {file}        are the hosts fit for trials?
#   amp-ray tune {file}          prove it by a few real runs, learn from each
name: {name}
model: {model}
cluster:{hostfile}
  nodes:
    # inter_gbit_per_s: line rate of a node's network interfaces together, in one direction.
    # The rate within a node is the board's own, unless intra_gbit_per_s says otherwise.
    # More entries may follow: nodes need not be alike.
{nodes}
precision: {precision}        # fp16 | bf16 | fp32
optimizer: adam
# auto: the plan chooses what the runtime can do. amp-ray plan --only tp,dp,pp leaves all of it out.
zero_stage: auto       # 0 | 1 | 2 | 3: what data-parallel ranks shard
recompute: auto        # none | selective | full
sequence_parallel: auto        # true | false
runtime: {runtime}     # what trains; {runtime_note}
global_batch_size: {batch}
# tokens: 1e12         # to train on in all: adds days, device-hours and, with prices, money
# space placement and heterogeneous look further, for nodes that differ.
search: {{space: uniform, max_cp: auto, max_ep: auto, virtual_stages: auto}}
trials: {{backend: {backend}, budget: 10, steps: 20, warmup_steps: 5, timeout_s: 600}}
"""


_PROGRAM_NOTE: Final = "deepspeed and torch are amp-ray's own programs"
_COMMAND_NOTE: Final = "amp-ray tune needs its command: trials.program, docs/own-program.md"
"""What is said of a runtime: of one of ours, and of another one."""

_RUNTIME: Final = "deepspeed"
"""Training program of the file if none is named."""

_SPREADING_RUNTIME: Final = "megatron-core"
"""The same for experts and for long sequences, which `_RUNTIME` cannot spread over ranks."""

_LONG_SEQUENCE: Final = 16384
"""Tokens of a long sequence. By our cost model plans without context parallelism reach 12 to 14 %
fewer tokens/s than those of `_SPREADING_RUNTIME` at half of this length, 21 to 26 % at this one and
38 % at twice (Llama-3-8B on 32 H100, 70B on 64)."""


@cache
def presets() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the named models and clusters."""
    return dict(read_shipped(_PRESETS))


def preset(kind: str, name: str) -> dict[str, Any]:
    """Return a model or cluster by name."""
    entries = presets()[kind]
    if name not in entries:
        what = f"no {kind.removesuffix('s')} is named {name!r} ({_WITHOUT_PRESET[kind]} works too)"
        within = [entry for entry in entries if name.casefold() in entry]
        alike = within or difflib.get_close_matches(name.casefold(), entries)
        meant = f"did you mean {' or '.join(alike)}? " if alike else ""
        raise InputError(f"{what}; {meant}known: {', '.join(entries)}")
    values = dict(entries[name])
    if values.get("slots") == _CPUS:
        values["slots"] = min(_MOST_CPUS, num_cpus())
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The choices for a first experiment file."""

    name: str
    model: str  # a preset's name, or the path of a ``config.json`` or its folder
    # Entries with ``device``, ``slots``, ``inter_gbit_per_s``, ``count``, ``rack``; if a host has
    # several kinds, with ``boards``, pairs of device and number
    nodes: tuple[Mapping[str, Any], ...]
    batch: int
    sequence_length: int | None = None
    hostfile: Path | None = None  # None if the hosts do not exist yet
    runtime: str | None = None  # None: `_RUNTIME`, or `_SPREADING_RUNTIME` where it needs that


def experiment_text(answers: Answers, output: Path) -> str:
    """Return the text of the file, after a check that it is a valid experiment.

    Paths in it are relative to the folder of ``output``.
    """
    hosts, nodes = answers.hostfile, [*_entries(answers)]
    try:
        devices = [find_device(node["device"]) for node in nodes]
    except ValueError as error:
        raise InputError(str(error)) from None
    has_cpu = any(device.name == CPU for device in devices)
    lacks_bf16 = any(device.bf16_flops is None for device in devices)
    lines = [
        _flow({**node, **({"intra_gbit_per_s": _CPU_GBIT_PER_S} if device.name == CPU else {})})
        for node, device in zip(nodes, devices, strict=True)
    ]
    runtime = _RUNTIME if answers.runtime is None else answers.runtime
    text = _TEXT.format(
        file=" ".join(printable(output.name).split()),
        name=_flow(answers.name),
        model=_flow(_model(answers, output)),
        hostfile="" if hosts is None else f"\n  hostfile: {_flow(_relative(hosts, output))}",
        nodes="\n".join(f"    - {line}" for line in lines),
        precision="fp32" if has_cpu else "fp16" if lacks_bf16 else "bf16",
        runtime=runtime,
        runtime_note=_PROGRAM_NOTE if runtime in RUNTIMES else _COMMAND_NOTE,
        batch=answers.batch,
        backend="local" if has_cpu and hosts is None else "ssh",
    )
    experiment = built(text, output)
    shape, traits = experiment.model.shape, experiment.traits
    is_long = shape.is_causal and shape.sequence_length >= _LONG_SEQUENCE and not has_cpu
    lacks_context = is_long and traits.why_no_context(2) is not None
    if answers.runtime is not None or not (
        lacks_context or (shape.num_experts and not traits.expert_parallel)
    ):
        for note in shape.not_read:
            _LOGGER.warning("%s", note)
        return text
    return experiment_text(replace(answers, runtime=_SPREADING_RUNTIME), output)


def answers_of(
    *,
    model: str,
    cluster: str,
    nodes: int,
    batch: int,
    runtime: str | None = None,
    sequence_length: int | None = None,
) -> Answers:
    """Return the answers for a model and a cluster of the presets; "" names no cluster.

    Raises:
        InputError: If a name is unknown.
    """
    node = {**(preset("clusters", cluster) if cluster else {}), "count": nodes}
    return Answers(
        name=Path(model).absolute().name.removesuffix(".json"),
        model=model,
        nodes=(node,),
        batch=batch,
        runtime=runtime,
        sequence_length=sequence_length,
    )


def keys_of_presets(answers: Answers) -> Mapping[str, Any]:
    """Return the keys of the file that `init` writes, with paths.

    Raises:
        InputError: If a name is unknown, or a number is wrong.
    """
    file = Path("experiment")
    return parse_yaml(experiment_text(answers, file), file=str(file)).values


def built(text: str, output: Path) -> Experiment:
    """Build the experiment from the text of a file that will be written to ``output``."""
    return build_experiment(parse_yaml(text, file=str(output)), ExperimentFiles(base=output.parent))


def hosts_of(path: Path) -> list[tuple[int, int | None]]:
    """Return the runs of equal hosts in a hostfile: their number, and slots, if stated."""
    slots = [host.num_slots for host in parse_hostfile(read_text(path), file=str(path))]
    return [(len(list(run)), count) for count, run in groupby(slots)]


def boards_of(node: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return device and number of each kind of boards in a host of an entry."""
    return node.get("boards") or [(node["device"], node["slots"])]


def _entries(answers: Answers) -> Iterator[Mapping[str, Any]]:
    """Yield the entries to write: of hosts with several kinds of boards one for each kind."""
    path, first = answers.hostfile, 0
    for node in answers.nodes:
        begin, first = first, first + node["count"]
        if "boards" not in node:
            yield node
            continue
        hosts = () if path is None else parse_hostfile(read_text(path), file=str(path))
        shared = {key: node[key] for key in node if key not in ("count", "boards")}
        for number in range(begin, first):
            name = hosts[number].host if hosts else f"node{number}"
            for device, slots in boards_of(node):
                yield {"host": name, **shared, "device": device, "slots": slots}


def nodes_of_hosts(answers: Answers, output: Path) -> tuple[Mapping[str, Any], ...]:
    """Ask the hosts of the hostfile for their GPUs; return entries with device and slots.

    Slots that neither the hostfile nor the answers state are all GPUs of the host.
    """
    assert answers.hostfile is not None
    plain = [{**node, "device": CPU, "slots": node.get("slots", 1)} for node in answers.nodes]
    for entry in plain:
        entry.setdefault("inter_gbit_per_s", _CPU_GBIT_PER_S)
    experiment = built(experiment_text(replace(answers, nodes=tuple(plain)), output), output)
    gpus_of_host = gpus_of_hosts(experiment, host_maker(experiment))
    nodes = [node for node in answers.nodes for _ in range(node["count"])]
    entries: list[dict[str, Any]] = []
    for node, host in zip(nodes, experiment.cluster.host_names, strict=True):
        gpus = gpus_of_host[host]
        number = node.get("slots", len(gpus) or 1)
        names = [catalogued(gpu["name"], gpu["memory_bytes"]) for gpu in gpus[:number]]
        if None in names:
            listed = ", ".join(sorted({gpu["name"] for gpu in gpus}))
            raise InputError(
                f"host {host} has {listed}: name one board of the catalogue by --device"
            )
        kinds = [(name, len([*run])) for name, run in groupby(names)] or [(CPU, number)]
        boards = {"boards": kinds} if len(kinds) > 1 else {}
        entries.append({**node, "device": kinds[0][0], "slots": number, "count": 1, **boards})
    return tuple({**entry, "count": len([*run])} for entry, run in groupby(entries))


def usual_gbit_per_s(device: str, slots: int) -> float | None:
    """Return the network of a node with so many boards, by the first preset that has the board."""
    for entry in presets()["clusters"].values():
        if entry["device"] == find_device(device).name and "inter_gbit_per_s" in entry:
            share = 1.0 if entry["slots"] == _CPUS else slots / entry["slots"]
            rate = entry["inter_gbit_per_s"] * share
            return int(rate) if rate == int(rate) else float(rate)
    return None


def catalogued(name: str, num_bytes: float | None) -> str | None:
    """Return the catalogue's device that has a similar name and the closest memory size."""
    alike = [device for device in CATALOGUE.values() if resembles(device.name, name)]
    if not alike:
        return None
    memory_bytes = num_bytes or 0.0
    return min(alike, key=lambda device: abs(device.memory_bytes - memory_bytes)).name


def longest_sequence(config: Path) -> int | None:
    """Return the most tokens of a sequence that a configuration names, if it names any."""
    length = read_config(read_text(config), str(config))[0].get("sequence_length")
    return length if isinstance(length, int) else None


def config_of(model: str) -> Path | None:
    """Return the configuration that a model names, itself or by its folder; None for a preset."""
    if model.endswith(".json"):
        return Path(model)
    is_folder = model not in presets()["models"] and os.path.isdir(model)  # noqa: PTH112 - of any name
    return Path(model) / "config.json" if is_folder else None


def _model(answers: Answers, output: Path) -> dict[str, Any]:
    config = config_of(answers.model)
    if config is not None:
        figures: dict[str, Any] = {"config": _relative(config, output)}
    else:
        figures = {"name": answers.model, **preset("models", answers.model)}
    if answers.sequence_length is not None:
        figures["sequence_length"] = answers.sequence_length
    return figures


def _relative(path: Path, output: Path) -> str:
    return os.path.relpath(path, output.parent)


def _is_plain(text: str) -> bool:
    """Return whether YAML takes a text for a text without quotes."""
    has_words = text.replace("-", "").replace("_", "").isalnum()
    return has_words and parse_yaml(f"text: {text}", file="").values["text"] == text


def _flow(value: Any) -> str:  # noqa: ANN401 - any plain value
    """Return a value as one line of YAML; quote texts that could mean something else."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not _is_plain(value):
        return "'" + value.replace("'", "''") + "'"
    return str(value)
