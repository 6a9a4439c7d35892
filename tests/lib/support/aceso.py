"""Synthetic profiles in Aceso's format, and the folder of the published ones."""

import random
from collections.abc import Sequence
from typing import Final

from amp_ray.inputs.experiment import Experiment
from support.experiments import experiment_from

HEADER: Final = (
    "op_name,forward-compute,backward-compute,input_size,output_size,weights,activations,"
    "fwd_reserved,bwd_reserved"
)

GPT_LAYER: Final = (
    "enc-1st-layernorm",
    "enc-attention-qkv",
    "enc-attention-score",
    "enc-attention-softmax",
    "enc-attention-dropout",
    "enc-attention-context",
    "enc-attention-dense",
    "enc-post-attention-dropout",
    "enc-2nd-layernorm",
    "enc-MLP-GEMM-1",
    "enc-MLP-gelu",
    "enc-MLP-GEMM-2",
    "enc-post-MLP-dropout",
)
GPT_ROWS: Final = ("encoder-embedding", *GPT_LAYER, "final-layernorm", "gpt-post-process")

_ATTENTION: Final = ("qkv", "score", "softmax", "dropout", "context", "dense")
T5_DECODER_LAYER: Final = (
    "dec-1st-layernorm",
    *(f"dec-self-attention-{name}" for name in _ATTENTION),
    "dec-post-self-attention-dropout",
    "dec-2nd-layernorm",
    *(f"dec-inter-attention-{name}" for name in _ATTENTION),
    "dec-post-inter-attention-dropout",
    "dec-3rd-layernorm",
    "dec-MLP-GEMM-1",
    "dec-MLP-gelu",
    "dec-MLP-GEMM-2",
    "dec-post-MLP-dropout",
)
T5_ROWS: Final = (
    "encoder-embedding",
    *GPT_LAYER,
    "encoder-final-layernorm",
    "decoder-embedding",
    *T5_DECODER_LAYER,
    "final-layernorm",
    "t5-post-process",
)

_BOTTLENECK: Final = ("conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "downsample", "relu")


def resnet_rows(blocks: Sequence[int] = (2, 1)) -> tuple[str, ...]:
    """Return the operators of a ResNet; ``blocks`` has the number of bottlenecks per group."""
    inner = [
        f"layer{group}-{block}-{name}"
        for group, count in enumerate(blocks, start=1)
        for block in range(count)
        for name in _BOTTLENECK
    ]
    return ("conv1", "bn1", "relu", "maxpool", *inner, "avgpool", "fc")


def aceso_files(
    model: str = "gpt_tiny",
    rows: Sequence[str] = GPT_ROWS,
    *,
    sizes: Sequence[int] = (1, 2, 4),
    tps: Sequence[int] = (1, 2),
    algorithms: Sequence[int] = (0, 1),
    seed: int = 0,
) -> dict[str, str]:
    """Return a profile folder, as text by name: times and sizes shrink with tp.

    Numbers are random, but the same for the same seed, in whole MiB and microseconds. Neighbouring
    operators have different activations; collectives have all whole sizes up to 64 MiB.
    """
    chance = random.Random(seed)
    base = {
        name: [chance.randrange(8, 200) for _ in range(2)]
        + [16, 16, chance.randrange(0, 5), 4 * chance.randrange(1, 12), 8, chance.randrange(0, 40)]
        for name in rows
    }
    files = {}
    for size in sizes:
        for tp in tps:
            for algorithm in algorithms:
                lines = [
                    ",".join([name, *(_cell(value, size, tp, algorithm) for value in values)])
                    for name, values in base.items()
                ]
                name = f"{model}_mbs{size}_tp{tp}_algo{algorithm}.csv"
                files[name] = "\n".join([HEADER, *lines]) + "\n"
    for kind in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"):
        lines = [f"{mib},{0.01 * mib + 0.002:.3f}" for mib in range(1, 65)]
        files[f"prim_{model}_{kind}_2gpus.csv"] = "\n".join(["data_size(MB),time(ms)", *lines])
    files["p2p_intra_node.csv"] = "1,2,4,8,16,32\n4.0,5.0,6.0,7.0,8.0,9.0\n"
    files["p2p_inter_node.csv"] = "1,2,4,8,16,32\n1.0,1.5,2.0,2.5,3.0,3.5\n"
    return files


def _cell(value: int, size: int, tp: int, algorithm: int) -> str:
    """Return a value at a micro-batch size, tp and algorithm; algorithm 1 costs a little more."""
    return f"{value * size / tp + algorithm:.3f}"


EXPERIMENT: Final = """
name: tiny
model:
  {family: gpt2, num_layers: 2, hidden_size: 64, num_heads: 4, sequence_length: 64, vocab_size: 512}
cluster:
  nodes:
    - {count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
profile: {source: aceso, path: p, model: gpt_tiny}
global_batch_size: 16
"""


def aceso_experiment(text: str = EXPERIMENT, files: dict[str, str] | None = None) -> Experiment:
    """Build an experiment whose profile is a folder in Aceso's format."""
    chosen = aceso_files() if files is None else files
    return experiment_from(text, {f"p/{name}": content for name, content in chosen.items()})
