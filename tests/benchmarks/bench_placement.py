"""How long richer spaces take: process CPU of one core, warm; what is proven of placements."""

import time
from collections.abc import Iterator
from pathlib import Path

from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.placement import plan_placements, solve_placement
from amp_ray.search.planner import make_planner
from amp_ray.search.space import candidates_of, uniform_candidates
from amp_ray.strategies.candidate import Candidate
from support.experiments import experiment_from

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
REPEATS = 3
SEARCHES = {
    "het_placement": "a few s",
    "het_gpus": "",
    "het_gpus_uneven": "",
    "het_gpus_large": "",
}
"""Experiments that choose devices too, with their targets."""

NUM_STAGES = 64

NODES = """\
    - {{count: {a100}, device: A100-80, slots: 8, intra_gbit_per_s: 1200, inter_gbit_per_s: 800}}
    - {{count: {v100}, device: V100-32, slots: 8, intra_gbit_per_s: 400, inter_gbit_per_s: 100}}
    - {{count: {small}, device: A100-40, slots: 8, intra_gbit_per_s: 1200, inter_gbit_per_s: 400}}
"""
MANY_NODES = NODES.format(a100=24, v100=24, small=16)
FEW_NODES = NODES.format(a100=3, v100=3, small=2)

LARGE = """\
name: large
model: {{family: gpt2, num_layers: 96, hidden_size: {hidden_size}, num_heads: 64,
         sequence_length: 2048, vocab_size: 51200}}
cluster:
  nodes:
{nodes}
precision: fp16
recompute: full
zero_stage: 1
global_batch_size: {batch}
"""
"""96 layers; three types of devices."""

Row = dict[str, str]


def rows() -> Iterator[Row]:
    """Measure every case; one table row each."""
    for name, target in SEARCHES.items():
        yield _search_row(name, target)
    for what, experiment in _clusters().items():
        for tp in _degrees(experiment):
            yield _worst(what, experiment, tp)


def _search_row(name: str, target: str) -> Row:
    """Search the whole space of an experiment."""
    experiment = load_experiment(EXPERIMENTS / f"{name}.yaml")
    seconds = []
    for _ in range(REPEATS):
        planner = make_planner(experiment, "amp-ray")
        start_s = time.process_time()
        search_candidates(planner, candidates_of(experiment), workers=ALONE)
        seconds.append(time.process_time() - start_s)
    cluster = experiment.cluster
    devices = f"{cluster.num_devices} GPUs of {len(cluster.device_types)} types"
    return {
        "what": f"{name} ({experiment.space}): {devices}",
        "worst": f"{min(seconds):.2f} s CPU",
        "target": target,
        "gap": "",
    }


def _clusters() -> dict[str, Experiment]:
    """Build the large clusters."""
    return {
        "64 nodes": experiment_from(LARGE.format(hidden_size=8192, batch=128, nodes=MANY_NODES)),
        "8 nodes": experiment_from(LARGE.format(hidden_size=4096, batch=64, nodes=FEW_NODES)),
    }


def _degrees(experiment: Experiment) -> list[int]:
    """List the tensor parallel degrees of pipelines with 64 stages."""
    return sorted({candidate.options.tp for candidate in _pipelines(experiment)})


def _pipelines(experiment: Experiment) -> list[Candidate]:
    """List the candidates with 64 stages."""
    return [candidate for candidate in uniform_candidates(experiment) if candidate.pp == NUM_STAGES]


def _worst(what: str, experiment: Experiment, tp: int) -> Row:
    """Plan every pipeline of one tp, each with a new cost model; the slowest one counts."""
    timed = [
        _timed(experiment, candidate)
        for candidate in _pipelines(experiment)
        if candidate.options.tp == tp
    ]
    gaps = [gap for _, gap in timed if gap is not None]
    dp = experiment.cluster.num_devices // (NUM_STAGES * tp)
    return {
        "what": f"{NUM_STAGES} stages, 3 device types, 96 layers: {what}, tp {tp}, dp {dp}",
        "worst": f"{max(seconds for seconds, _ in timed):.2f} s CPU",
        "target": "1 s",
        "gap": f"{max(gaps):.2%}" if gaps else "not all placements looked at",
    }


def _timed(experiment: Experiment, candidate: Candidate) -> tuple[float, float | None]:
    """Plan one candidate; give seconds, the fastest of several, and the gap to the lower bound."""
    seconds = []
    for _ in range(REPEATS):
        cost_model = CostModel(experiment=experiment)
        start_s = time.process_time()
        plan_placements(cost_model, candidate)
        seconds.append(time.process_time() - start_s)
    solution = solve_placement(CostModel(experiment=experiment), candidate)
    if solution.value_s is None or solution.lower_bound_s is None:
        return min(seconds), None
    return min(seconds), solution.value_s / solution.lower_bound_s - 1
