"""An experiment in which a test makes one mistake, and the files that it names."""

from collections.abc import Callable
from typing import Final

Files = dict[str, str | bytes]
"""Content of files by path."""

Refused = Callable[..., str]
"""Runs a command on files that it refuses; returns its messages."""

EXPERIMENT: Final = """\
name: mistaken
model: {family: gpt2, num_layers: 2, hidden_size: 64, \
num_heads: 4, sequence_length: 32, vocab_size: 128}
cluster:
  nodes:
    - {count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
profile: {source: analytic}
precision: fp16
zero_stage: 0
runtime: deepspeed
global_batch_size: 8
search: {space: uniform}
"""
NUM_LAYERS: Final = 5
"""Number of layers: embedding, two blocks, norm and head."""

DESCRIPTION: Final = """\
num_layers: 5
model: two blocks
precision: fp16
hardware: T4
versions: none
"""
HEADER: Final = "layer,tp,micro_batch_size,forward_s\n"
TABLE: Final = HEADER + "".join(f"{layer},1,1,0.001\n" for layer in range(NUM_LAYERS))


def edited(*replacements: tuple[str, str]) -> str:
    """Return the experiment with parts of its text replaced."""
    text = EXPERIMENT
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return text


MODEL: Final = "vocab_size: 128}"
"""Text in the experiment before which figures of the model can be inserted."""

NODE: Final = "slots: 2, "
"""Text in the experiment at which keys of the nodes can be inserted."""

WITH_HOSTFILE: Final = edited(("  nodes:", "  hostfile: hosts\n  nodes:"))
WITH_TABLE: Final = edited(("{source: analytic}", "{source: table, path: measured}"))
COLUMNS: Final = "tp,pp,dp,micro_batch_size"
