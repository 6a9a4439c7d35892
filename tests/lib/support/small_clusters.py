"""Random small clusters of mixed devices, each with a model and a runtime: drawn by seed alone."""

import random
from collections.abc import Iterator
from typing import Final

from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.experiment_file import build_experiment
from amp_ray.inputs.yaml_text import parse_yaml
from support.better_clusters import DEVICES
from support.experiments import MemoryFiles

RUNTIMES: Final = (
    *("torch",) * 6,
    *("deepspeed",) * 4,
    *("megatron-core",) * 3,
    *("nanotron", "fsdp2"),
)
"""Runtimes that take any cuts; they differ in the dimensions that are `auto` by default."""

BATCHES: Final = (7, 8, 12, 16, 22, 24, 30, 32, 36, 60, 64, 96)
"""Batch sizes with few divisors and with many."""

_OLD: Final = ("T4", "P100", "V100")
"""Boards on which nanotron cannot run: they have no FlashAttention-2."""

BUSY: Final = "idle_devices: false"
"""Limit that forbids idle devices."""


def small_cluster(seed: int, *, most_devices: int = 10, all_busy: bool = False) -> Experiment:
    """Draw an experiment on 2 to 4 nodes of 2 or 3 kinds, with the defaults of a file.

    Args:
        seed: Seed of the draw.
        most_devices: Maximum number of devices, at least 4.
        all_busy: Whether no device may be idle; by default few files forbid it.
    """
    text = small_cluster_text(seed, most_devices=most_devices, all_busy=all_busy)
    return build_experiment(parse_yaml(text, file=f"cluster {seed}"), MemoryFiles())


def small_cluster_text(seed: int, *, most_devices: int = 10, all_busy: bool = False) -> str:
    """Return the experiment file of `small_cluster`."""
    rng = random.Random(seed)
    nodes = list(_nodes(rng, most_devices))
    settings = [
        f"model: {_model(rng)}",
        "cluster:\n  nodes:\n" + "\n".join(f"    - {{{row}}}" for row in nodes),
    ]
    link = _link(rng, len(nodes))
    settings += [f"  links: [{link}]"] if link else []
    runtime = rng.choice(RUNTIMES)
    if runtime == "nanotron" and any(f"device: {old}" in row for row in nodes for old in _OLD):
        runtime = "torch"
    settings += [f"runtime: {runtime}", f"global_batch_size: {rng.choice(BATCHES)}"]
    if rng.random() < 0.3:
        settings.append(f"recompute: {rng.choice(('none', 'full'))}")
    limits = dict.fromkeys(["space: heterogeneous", *_limits(rng)])
    limits.update({BUSY: None} if all_busy else {})
    settings.append(f"search: {{{', '.join(limits)}}}")
    return f"name: small-{seed}\n" + "\n".join(settings) + "\n"


def _nodes(rng: random.Random, most_devices: int) -> Iterator[str]:
    """Yield the keys of every node; with zones, the first node is in one of its own."""
    kinds = [
        (device, rng.choice((1, 1, 2, 2, 3, 4)), rng.choice(("", "", "", "protocol: tcp, ")))
        for device in rng.sample(DEVICES, rng.choice((2, 2, 3)))
    ]
    tight = rng.random() < 0.3
    slow = rng.random() < 0.3
    zones = rng.random() < 0.25
    extra = rng.choices(kinds, k=rng.randint(0, 4 - len(kinds)))
    rates = {kind: rng.choice((1, 5, 10) if slow else (10, 25, 100)) for kind in kinds}
    inner = {kind: rng.choice((50, 100, 400, 1200)) for kind in kinds}
    spare = most_devices
    for index, kind in enumerate([*kinds, *extra]):
        device, slots, protocol = kind
        slots = min(slots, spare - max(0, len(kinds) - index - 1))
        if slots < 1:
            return
        spare -= slots
        memory = f"memory_gib: {rng.choice((6, 8, 11))}, " if tight and index == 0 else ""
        zone = f", zone: {'near' if index else 'far'}" if zones else ""
        yield (
            f"device: {device}, slots: {slots}, {memory}{protocol}"
            f"intra_gbit_per_s: {inner[kind]}, inter_gbit_per_s: {rates[kind]}{zone}"
        )


def _link(rng: random.Random, num_nodes: int) -> str:
    """Return the link of one pair of nodes, or an empty text; zones keep their interfaces."""
    if rng.random() >= 0.25:
        return ""
    low, high = sorted(rng.sample(range(num_nodes), 2))
    latency = rng.choice(("", ", latency_us: 2000"))
    return f"{{between: [node{low}, node{high}], gbit_per_s: {rng.choice((1, 5, 100))}{latency}}}"


def _model(rng: random.Random) -> str:
    """Return a language model, an encoder with a decoder, or blocks of two kinds."""
    hidden, heads = rng.choice((1024, 1536, 2048, 3072)), rng.choice((8, 16))
    length = rng.choice((512, 1024, 2048))
    family = rng.choice(("gpt2", "gpt2", "llama", "t5", "blocks"))
    shape = (
        f"hidden_size: {hidden}, num_heads: {heads}, sequence_length: {length}, "
        f"vocab_size: {rng.choice((8192, 51200, 128000))}"
    )
    if family == "t5":
        decoder = rng.choice((length, length // 4))
        return f"{{family: t5, num_layers: 8, decoder_sequence_length: {decoder}, {shape}}}"
    if family == "blocks":
        wide, narrow = rng.choice((3, 12)), rng.choice((4, 10))
        return (
            "{family: blocks, blocks: ["
            f"{{name: wide, repeat: {wide}, parameters: 5.0e+6, forward_gflops: 40, "
            "activation_elements: 9.0e+6, boundary_elements: 800000, sharded: true}, "
            f"{{name: narrow, repeat: {narrow}, parameters: 6.0e+7, forward_gflops: 15, "
            "activation_elements: 2.0e+6, boundary_elements: 100000, sharded: true}]}"
        )
    tied = rng.choice(("true", "false"))
    layers = rng.choice((6, 12, 24))
    return f"{{family: {family}, num_layers: {layers}, tied_embedding: {tied}, {shape}}}"


def _limits(rng: random.Random) -> Iterator[str]:
    """Yield limits of the search; most clusters have none."""
    if rng.random() < 0.1:
        yield f"max_pp: {rng.choice((1, 2))}"
    if rng.random() < 0.1:
        yield BUSY
    if rng.random() < 0.1:
        yield "micro_batch_sizes: [1, 2, 4]"
    if rng.random() < 0.1:
        yield "max_tp: 2"
