import pytest

from amp_ray.search.space import searched_dimensions
from support.experiments import experiment_from

LLAMA = """\
name: llama-3-8b
model: {family: llama, num_layers: 32, hidden_size: 4096, num_heads: 32, num_key_value_heads: 8,
  sequence_length: 8192, vocab_size: 128256, feed_forward_size: 14336}
cluster:
  nodes: [{count: 4, device: H100, slots: 8, intra_gbit_per_s: 3600, inter_gbit_per_s: 3200}]
precision: bf16
global_batch_size: 64
"""


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        ("runtime: deepspeed", set()),
        ("runtime: deepspeed\nzero_stage: auto", {"zero_stage"}),
        (
            "runtime: deepspeed\nrecompute: auto\nsearch: {space: placement}",
            {"placement", "recompute"},
        ),
        ("runtime: deepspeed\nsearch: {max_tp: 1}", {"-tp"}),
        ("runtime: llm-foundry", {"-dp", "-pp", "-tp"}),
    ],
)
def test_dimensions_that_are_fixed_are_not_searched(keys: str, more: set[str]) -> None:
    found = set(searched_dimensions(experiment_from(LLAMA + keys + "\n")))
    fixed = {name.removeprefix("-") for name in more if name.startswith("-")}
    assert found == {"tp", "dp", "pp", "micro_batch_size"} - fixed | {
        name for name in more if not name.startswith("-")
    }
