"""The models of AMP's published experiments, smaller: shapes, and an experiment with one."""

from amp_ray.models.model import ModelShape

GPT2 = ModelShape(
    family="gpt2",
    num_layers=24,
    hidden_size=64,
    num_heads=4,
    sequence_length=16,
    vocab_size=100,
    num_key_value_heads=4,
    feed_forward_size=256,
    tied_embedding=True,
)
TRANSGAN = ModelShape(
    family="transgan",
    num_layers=24,
    hidden_size=1024,
    num_heads=4,
    sequence_length=81,
    num_key_value_heads=4,
    feed_forward_size=4096,
    depth=(12, 0, 0, 0, 0, 12),
    bottom_width=9,
    latent_size=512,
    window_size=18,
)

TEXT = """\
name: published
model: {family: gpt2, num_layers: 24, hidden_size: 64, num_heads: 4, sequence_length: 8,
        vocab_size: 64}
cluster:
  nodes: [{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}]
runtime: amp-2022
global_batch_size: 8
"""
