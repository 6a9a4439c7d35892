"""A small cluster of unequal nodes for tests: one node has slow devices, two have quick ones."""

from amp_ray.cost.model import CostModel
from amp_ray.strategies.candidate import Candidate, StageOptions
from support.experiments import experiment_from

MIXED = """\
name: mixed
model: {family: gpt2, num_layers: 8, hidden_size: 1024, num_heads: 8, sequence_length: 512,
        vocab_size: 1024, tied_embedding: TIED}
cluster:
  nodes:
    - {count: 1, slots: 2, device: SLOW, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
    - {count: 2, slots: 2, device: QUICK, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
global_batch_size: 24
"""
"""Experiment in which devices 0 and 1 are slow, and 2 to 5 quick."""

FIGURES = "memory_gib: {}, memory_gbyte_per_s: 300, num_multiprocessors: 40, fp16_tflops: {}"
QUICK_TFLOPS, QUICK_GIB = 20.0, 16.0


def mixed_cost_model(
    *replacements: tuple[str, str],
    slow_tflops: float = 5.0,
    slow_gib: float = QUICK_GIB,
    tied: bool = False,
) -> CostModel:
    """Build the cost model of the mixed cluster.

    Args:
        replacements: Pairs of a text in `MIXED` and its replacement.
        slow_tflops: Peak rate of the slow devices.
        slow_gib: Memory of the slow devices.
        tied: Whether the first and the last layer share a weight.
    """
    text = MIXED.replace("TIED", str(tied).lower())
    for old, new in replacements:
        text = text.replace(old, new)
    for name, gib, tflops in (
        ("SLOW", slow_gib, slow_tflops),
        ("QUICK", QUICK_GIB, QUICK_TFLOPS),
    ):
        text = text.replace(name, f"{{name: {name}, {FIGURES.format(gib, tflops)}}}")
    return CostModel(experiment=experiment_from(text))


def mixed_candidate(*, tp: int = 1, dp: int = 1, micro_batch_size: int = 1) -> Candidate:
    """Return a candidate for all six devices.

    Args:
        tp: A divisor of 2.
        dp: A divisor of 6.
        micro_batch_size: A divisor of ``24 / dp``.
    """
    return Candidate(
        micro_batch_size=micro_batch_size,
        options=StageOptions(tp=tp, dp=dp),
        pp=6 // (tp * dp),
        num_micro_batches=24 // (dp * micro_batch_size),
    )
