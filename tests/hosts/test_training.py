"""Real training over SSH: every strategy trains the same model."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from amp_ray.cost.instructions import Schedule
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.study.pool import make_runner
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import FULL
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.strategies.zero import NO_ZERO, Zero
from support.experiments import experiment_from
from support.host_cluster import HostCluster
from support.losses import TOLERANCE, largest_difference
from support.trial_runs import Trials, were_warm

from .conftest import NEEDS_TRAINING, Bench, MakeCluster

pytestmark = [pytest.mark.hosts, NEEDS_TRAINING]

TEXT = """\
name: tiny
model: {family: gpt2, num_layers: 4, hidden_size: 32, num_heads: 4, sequence_length: 16,
        vocab_size: 61}
cluster:
  hostfile: hostfile
  nodes:
    - {count: COUNT, device: cpu, slots: 2, intra_gbit_per_s: 20, inter_gbit_per_s: 10}
precision: fp32
optimizer: sgd
global_batch_size: 8
trials: {backend: ssh, steps: 5, warmup_steps: 2, timeout_s: 600}
"""


def strategy(
    bounds: tuple[int, ...],
    placement: tuple[int, ...],
    *,
    tp: int = 1,
    dp: int = 1,
    size: int = 2,
    zero: Zero = NO_ZERO,
) -> Strategy:
    candidate = Candidate(
        micro_batch_size=size,
        options=StageOptions(tp=tp, dp=dp, zero=zero),
        pp=len(bounds) - 1,
        num_micro_batches=8 // (dp * size),
    )
    return Strategy.uniform(candidate, bounds, placement)


def recomputed(plain: Strategy, *stages: int) -> Strategy:
    """Return a strategy in which some stages recompute their forward pass."""
    return replace(
        plain,
        stages=tuple(
            replace(stage, options=replace(stage.options, recompute=FULL))
            if number in stages
            else stage
            for number, stage in enumerate(plain.stages)
        ),
    )


# Devices 0, 2, 4 and 6 are the first slots of four hosts; 1, 3, 5 and 7 are the second slots.
REFERENCE = strategy((0, 7), (0,), size=8)
STRATEGIES = {
    "tensor parallel over four hosts": strategy((0, 7), (0, 2, 4, 6), tp=4, size=4),
    "data parallel over four hosts": strategy((0, 7), (6, 4, 2, 0), dp=4, size=1),
    "uneven pipeline over four hosts": strategy((0, 1, 5, 6, 7), (4, 1, 6, 2)),
    "replicas apart, pipelines across": strategy((0, 3, 7), (0, 4, 2, 6), dp=2),
    "all three mixed, placed at random": recomputed(
        strategy((0, 2, 7), (5, 0, 6, 3, 1, 7, 2, 4), tp=2, dp=2), 0
    ),
}
UNEQUAL = (
    # One stage has tp 2, one has dp 2 with uneven shares; each is on both hosts.
    Strategy(
        stages=(
            Stage(first_layer=0, end_layer=3, options=StageOptions(tp=2, dp=1), shares=(4,)),
            Stage(first_layer=3, end_layer=7, options=StageOptions(tp=1, dp=2), shares=(1, 3)),
        ),
        micro_batch_size=4,
        num_micro_batches=2,
        placement=(0, 2, 3, 1),
    ),
    strategy((0, 1, 5, 6, 7), (2, 1, 3, 0)),
)
"""A strategy for two hosts."""

SHARDED = strategy((0, 5, 7), (3, 0, 1, 2), dp=2, zero=Zero(stage=1))
"""A strategy with ZeRO-1."""


MakeTrials = Callable[..., Trials]


@pytest.fixture
def make_trials(tmp_path: Path) -> Iterator[MakeTrials]:
    """Make runners on test hosts; check at the end that nothing is left there."""
    opened: list[tuple[Trials, Bench]] = []

    def make(cluster: HostCluster, **changes: Any) -> Trials:  # noqa: ANN401 - of the experiment
        bench = Bench(cluster, tmp_path)
        folder = tmp_path / str(len(opened))
        trials = Trials(folder, make_runner(experiment(bench, **changes), 0))
        opened.append((trials, bench))
        return trials

    yield make
    for trials, _ in opened:
        trials.runner.close()
    for _, bench in opened:
        bench.check_clean()


def experiment(bench: Bench, **changes: Any) -> Experiment:  # noqa: ANN401 - Experiment's own
    hosts = bench.cluster.hosts
    hostfile = "".join(f"{host.address} slots=2\n" for host in hosts)
    described = experiment_from(TEXT.replace("COUNT", str(len(hosts))), {"hostfile": hostfile})
    trials = {"ssh": bench.ssh, **changes.pop("trials", {})}
    return replace(described, trials=replace(described.trials, **trials), **changes)


def test_every_strategy_trains_the_same_model_over_ssh(
    make_cluster: MakeCluster, make_trials: MakeTrials
) -> None:
    cluster = make_cluster(num_hosts=4)
    trials = make_trials(cluster)
    expected = trials.losses(REFERENCE)
    assert max(expected) - min(expected) > 1000 * TOLERANCE
    differences = {
        name: largest_difference(trials.losses(chosen), expected)
        for name, chosen in STRATEGIES.items()
    }
    assert all(were_warm(trials.last))
    trials.runner.close()
    sharded = make_trials(cluster, zero_stage=1)
    differences["ZeRO-1"] = largest_difference(sharded.losses(SHARDED), expected)
    assert {name: apart for name, apart in differences.items() if apart >= TOLERANCE} == {}


def test_plain_torch_trains_unequal_stages_over_ssh(
    make_cluster: MakeCluster, make_trials: MakeTrials
) -> None:
    cluster = make_cluster(num_hosts=2)
    trials = make_trials(cluster, traits=RUNTIMES["torch"])
    expected = trials.losses(REFERENCE)
    assert all(were_warm(trials.last))
    for chosen in UNEQUAL:
        assert largest_difference(trials.losses(chosen), expected) < TOLERANCE
        (timeline,) = trials.last.glob("hosts/*/timeline.json")
        ranks = json.loads(timeline.read_text(encoding="utf-8"))["ranks"]
        orders = Schedule(pp=chosen.pp, num_slices=(1,) * chosen.num_micro_batches).lists()
        for rank in ranks:
            described = [instruction for instruction, _, _ in rank["instructions"]]
            assert described == [str(instruction) for instruction in orders[rank["stage"]]]
