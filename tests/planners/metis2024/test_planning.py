from dataclasses import replace
from pathlib import Path

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.errors import InputError
from amp_ray.planners.metis2024.planner import Metis2024Planner
from amp_ray.planners.metis2024.profile_export import metis_sizes
from amp_ray.runtime.files import load_experiment
from support.experiments import experiment_from, small_experiment
from support.metis import metis_profile_files


def test_an_analytic_experiment_is_planned_by_what_its_profiler_would_have_measured() -> None:
    best = Metis2024Planner(experiment=small_experiment()).best()
    assert isinstance(best, Estimate)
    assert best.strategy.global_batch_size == 8
    assert sorted(best.strategy.placement) == [0, 1, 2, 3]


def test_a_published_profile_is_taken_as_it_is() -> None:
    experiment = small_experiment()
    text = """\
name: own
model: {family: gpt2, num_layers: 2, hidden_size: 64, num_heads: 4, sequence_length: 32,
        vocab_size: 128}
cluster: {nodes: [{device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}]}
profile: {source: metis, path: p}
global_batch_size: 8
"""
    files = {f"p/{name}": file for name, file in metis_profile_files().items()}
    experiment = experiment_from(text, files)
    assert Metis2024Planner(experiment=experiment).published is experiment.profile.published


def test_a_model_without_an_end_has_no_such_profile() -> None:
    experiment = small_experiment()
    model = replace(experiment.model, layers=experiment.model.layers[1:])
    with pytest.raises(InputError, match="Metis knows one input layer"):
        Metis2024Planner(experiment=replace(experiment, model=model))


NODES = "    - {count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}"
LINKS = "intra_gbit_per_s: 50, inter_gbit_per_s: 10}"

CRASHES = {
    "12 devices": (f"    - {{count: 3, device: T4, slots: 4, {LINKS}", 12, 24),
    "unequal nodes": (
        f"    - {{device: T4, slots: 4, {LINKS}\n    - {{device: V100, slots: 8, {LINKS}",
        12,
        8,
    ),
    "nodes that the first one does not divide": (
        f"    - {{device: T4, slots: 4, {LINKS}\n    - {{device: V100, slots: 3, {LINKS}",
        7,
        12,
    ),
    "batch 96": (f"    - {{count: 2, device: T4, slots: 4, {LINKS}", 8, 96),
    "an H100": (f"    - {{device: H100, slots: 4, {LINKS}\n{NODES}", 8, 8),
    "16 slots": (f"    - {{device: A100-80, slots: 16, {LINKS}", 16, 16),
}
"""Clusters on which the published planner crashes."""


@pytest.mark.parametrize(("nodes", "devices", "batch"), CRASHES.values(), ids=CRASHES)
def test_any_cluster_is_planned(nodes: str, devices: int, batch: int) -> None:
    experiment = small_experiment(
        (NODES, nodes), ("global_batch_size: 8", f"global_batch_size: {batch}")
    )
    best = Metis2024Planner(experiment=experiment).best()
    assert isinstance(best, Estimate)
    assert best.feasible
    assert sorted(best.strategy.placement) == list(range(devices))
    assert best.strategy.global_batch_size == batch


@pytest.mark.parametrize("name", ["het_gpus", "het_gpus_uneven", "het_gpus_large"])
def test_the_experiments_of_mixed_devices_are_planned(repository: Path, name: str) -> None:
    experiment = load_experiment(repository / "experiments" / f"{name}.yaml")
    planner = Metis2024Planner(experiment=experiment)
    best = planner.best()
    assert isinstance(best, Estimate)
    assert best.feasible
    assert len(best.strategy.placement) == experiment.cluster.num_devices
    assert best.strategy.stages[-1].end_layer == experiment.model.num_layers
    assert planner.score(best.strategy) == best


def test_sizes_are_divisors_of_the_batch_and_powers_of_two() -> None:
    assert metis_sizes(1) == (1,)
    assert metis_sizes(9) == (1, 2, 3, 4, 8, 9)
