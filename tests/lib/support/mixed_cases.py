"""Mixed clusters whose searches are measured."""

from collections.abc import Sequence

GPT = (
    "{family: gpt2, num_layers: 24, hidden_size: 2048, num_heads: 16, sequence_length: 1024, "
    "vocab_size: 51200}"
)
LLAMA = (
    "{family: llama, num_layers: 40, hidden_size: 5120, num_heads: 40, sequence_length: 4096, "
    "vocab_size: 32000, feed_forward_size: 13824}"
)
RATES = {
    "A100-40": (2400, 200),
    "A100-80": (2400, 200),
    "H100": (3600, 400),
    "V100-16": (1200, 100),
    "P100-16": (400, 80),
    "T4": (100, 50),
}
CASES = (
    ("16 of 2 kinds", GPT, 1, ("A100-40", "V100-16"), 64, "0.3 s"),
    ("4 kinds x 8", GPT, 1, ("A100-40", "V100-16", "T4", "P100-16"), 128, "2 s"),
    ("48 of 3", GPT, 2, ("A100-40", "V100-16", "T4"), 192, ""),
    ("64 of 4", GPT, 2, ("A100-40", "V100-16", "T4", "P100-16"), 256, "6 s"),
    ("128 of 4", LLAMA, 4, ("A100-40", "V100-16", "T4", "A100-80"), 512, "12 s"),
    ("256 of 2", LLAMA, 16, ("A100-80", "H100"), 1024, "15 s"),
)


def case_text(model: str, count: int, kinds: Sequence[str], batch: int) -> str:
    """Return the experiment file of a case."""
    nodes = "\n".join(
        f"    - {{count: {count}, device: {kind}, slots: 8, "
        f"intra_gbit_per_s: {RATES[kind][0]}, inter_gbit_per_s: {RATES[kind][1]}}}"
        for kind in kinds
    )
    return (
        f"name: mixed\nmodel: {model}\ncluster:\n  nodes:\n{nodes}\n"
        f"global_batch_size: {batch}\nsearch: {{space: heterogeneous}}\n"
    )
