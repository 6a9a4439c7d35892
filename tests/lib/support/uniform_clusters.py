"""Random small clusters of equal nodes, each with a model and a runtime: drawn by seed alone."""

import random
from typing import Final

DEVICES: Final = ("T4", "V100-16", "V100-32", "A100-40", "A100-80", "H100")
RUNTIMES: Final = ("torch", "deepspeed", "megatron-core", "fsdp2")
BATCHES: Final = (8, 12, 16, 24, 32, 48, 64)


def uniform_cluster_text(seed: int) -> str:
    """Return an experiment file on 4 to 16 equal devices, with the defaults of a file."""
    rng = random.Random(seed)
    hidden, layers = rng.choice((1024, 1536, 2048)), rng.choice((8, 12, 18, 24))
    family, tied = rng.choice(("gpt2", "gpt2", "llama")), rng.choice(("true", "false"))
    slots = rng.choice((2, 4, 8))
    count = rng.choice([number for number in (1, 2, 3, 4) if 4 <= number * slots <= 16])
    runtime = rng.choice(RUNTIMES)
    memory = f", memory_gib: {rng.choice((4, 6, 8))}" if rng.random() < 0.4 else ""
    return f"""\
name: uniform-{seed}
model: {{family: {family}, num_layers: {layers}, hidden_size: {hidden}, num_heads: 16,
  sequence_length: {rng.choice((512, 1024, 2048))}, vocab_size: {rng.choice((8192, 51200, 128000))},
  tied_embedding: {tied}}}
cluster:
  nodes:
    - {{count: {count}, device: {rng.choice(DEVICES)}, slots: {slots}{memory},
       intra_gbit_per_s: {rng.choice((50, 100, 400))},
       inter_gbit_per_s: {rng.choice((1, 5, 10, 25))}}}
runtime: {runtime}
zero_stage: {"auto" if runtime == "fsdp2" else rng.choice((0, 0, "auto"))}
recompute: {rng.choice(("auto", "none", "full"))}
global_batch_size: {rng.choice(BATCHES)}
search: {{max_tp: {rng.choice((1, 2, 4))}}}
"""
