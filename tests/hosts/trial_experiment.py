"""A tiny experiment on test hosts, and strategies of it."""

import sys
from typing import Final

from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from support.experiments import experiment_from

from .conftest import Bench

NUM_SLOTS: Final = 2

TEXT: Final = """\
name: tiny
model: {{family: gpt2, num_layers: 4, hidden_size: 32, num_heads: 4, sequence_length: 16,
        vocab_size: 61}}
cluster:
  hostfile: hostfile
  nodes:
    - {{count: {count}, device: cpu, slots: 2, intra_gbit_per_s: 20, inter_gbit_per_s: 10}}
precision: fp32
optimizer: sgd
global_batch_size: 8
trials:
  backend: ssh
  steps: 3
  warmup_steps: 1
  timeout_s: 600
  ssh: {{user: root, config: null, connect_timeout_s: 10, python: {python},
        known_hosts: {known_hosts}, identities: [{identity}]}}
"""


def strategy(bounds: tuple[int, ...], placement: tuple[int, ...], *, dp: int = 1) -> Strategy:
    """Return a pipeline; devices 0 and 1 are of the first host, 2 and 3 of the second."""
    num_micro_batches = 4 // dp
    candidate = Candidate(
        micro_batch_size=2,
        options=StageOptions(tp=1, dp=dp),
        pp=len(bounds) - 1,
        num_micro_batches=num_micro_batches,
    )
    return Strategy.uniform(candidate, bounds, placement)


PIPELINE: Final = strategy((0, 3, 7), (0, 2))
"""Rank 0 on the first host, rank 1 on the second one."""

ALL_SLOTS: Final = strategy((0, 3, 7), (0, 1, 2, 3), dp=2)


UNEQUAL: Final = Strategy(
    stages=(
        Stage(first_layer=0, end_layer=3, options=StageOptions(tp=2, dp=1), shares=(4,)),
        Stage(first_layer=3, end_layer=7, options=StageOptions(tp=1, dp=2), shares=(3, 1)),
    ),
    micro_batch_size=4,
    num_micro_batches=2,
    placement=(0, 1, 2, 3),
)
"""Stages that differ, for runtime torch."""


def experiment_text(bench: Bench, **changes: object) -> str:
    """Return an experiment file for the hosts of a bench."""
    values = {
        "count": len(bench.cluster.hosts),
        "python": sys.executable,
        "known_hosts": bench.cluster.known_hosts,
        "identity": bench.cluster.identity,
    }
    return TEXT.format(**{**values, **changes})


def make_experiment(bench: Bench, **changes: object) -> Experiment:
    """Return the experiment of such a file."""
    names = [host.address for host in bench.cluster.hosts]
    hostfile = "".join(f"{name} slots={NUM_SLOTS}\n" for name in names)
    return experiment_from(experiment_text(bench, **changes), {"hostfile": hostfile})
