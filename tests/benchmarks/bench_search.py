"""How long a search takes: process CPU of one core, warm, and the whole command from outside."""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.experiment_file import build_experiment
from amp_ray.inputs.profile import Profile
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.planner import make_planner
from amp_ray.search.run import NUM_INTERVALS
from amp_ray.search.space import candidates_of, uniform_candidates

REPOSITORY = Path(__file__).resolve().parents[2]
EXPERIMENTS = REPOSITORY / "experiments"
PUBLISHED_S = {"homogeneous": 500, "het_cluster": 500, "het_model": 200}
REPEATS = 5

LARGE = """
name: large-{gpus}
model: {{family: gpt2, num_layers: 96, hidden_size: 12288, num_heads: 96,
         sequence_length: 2048, vocab_size: 51200}}
cluster:
  nodes:
    - {{count: {nodes}, device: A100-80, slots: 8, intra_gbit_per_s: 1200, inter_gbit_per_s: 800}}
precision: bf16
recompute: full
zero_stage: 1
global_batch_size: 512
"""


ALL_DIMENSIONS = """
name: all-dimensions-{gpus}
model: {model}
cluster:
  nodes:
    - {{count: {nodes}, device: H100, slots: 8, inter_gbit_per_s: 3200}}
precision: bf16
recompute: auto
zero_stage: auto
runtime: megatron-core
global_batch_size: {batch}
search: {{{search}}}
"""
"""Micro-batch, tp with sequence parallelism, pp, chunks, cp, ZeRO and recompute, all chosen."""

GPT_175B = """{family: gpt2, num_layers: 96, hidden_size: 12288, num_heads: 96,
        sequence_length: 2048, vocab_size: 51200}"""
LLAMA_8B_1M = """{family: llama, num_layers: 32, hidden_size: 4096, num_heads: 32,
        num_key_value_heads: 8, feed_forward_size: 14336, sequence_length: 1048576,
        vocab_size: 128256, tied_embedding: false}"""
MIXTRAL_8X22B = """{family: llama, num_layers: 56, hidden_size: 6144, num_heads: 48,
        num_key_value_heads: 8, feed_forward_size: 16384, sequence_length: 4096,
        vocab_size: 32000, num_experts: 8, experts_per_token: 2, tied_embedding: false}"""
LARGE_CASES = (
    (128, GPT_175B, 1024, "virtual_stages: [1, 2, 4], max_cp: 8"),
    (512, GPT_175B, 1024, "virtual_stages: [1, 2, 4], max_cp: 8"),
    (1024, GPT_175B, 1024, "virtual_stages: [1, 2, 4], max_cp: 8"),
    (1024, MIXTRAL_8X22B, 1024, "virtual_stages: [1, 2], max_cp: 4"),
    (256, LLAMA_8B_1M, 16, "virtual_stages: [1, 2], max_cp: 64"),
)
NUM_SCORED = 1500


class NoFiles:
    """An experiment that names no other file."""

    def text(self, name: str) -> str:
        """Refuse: nothing is named."""
        raise FileNotFoundError(name)

    def folder(self, name: str) -> dict[str, str]:
        """Refuse: nothing is named."""
        raise FileNotFoundError(name)

    def foreign_profile(self, _source: str, name: str, *_given: object) -> Profile:
        """Refuse: nothing is named."""
        raise FileNotFoundError(name)


def rows() -> Iterator[dict[str, str]]:
    """Measure every case; one table row each."""
    for name, published_s in PUBLISHED_S.items():
        experiment = load_experiment(EXPERIMENTS / f"{name}.yaml")
        yield _search_row(experiment, "0.1 s", f"published {published_s} s")
    for gpus, target in ((128, "0.3 s"), (1024, "3 s")):
        text = LARGE.format(gpus=gpus, nodes=gpus // 8)
        experiment = build_experiment(parse_yaml(text, file="large.yaml"), NoFiles())
        yield _search_row(experiment, target, "")
    for gpus, model, batch, search in LARGE_CASES:
        keys = {"gpus": gpus, "nodes": gpus // 8, "model": model, "batch": batch, "search": search}
        text = ALL_DIMENSIONS.format(**keys)
        yield _plan_row(build_experiment(parse_yaml(text, file="large.yaml"), NoFiles()))
    yield from _score_rows()
    yield _command_row()


def _plan_row(experiment: Experiment) -> dict[str, str]:
    """Plan the first rows of all dimensions; the first of three runs compiles, the best counts."""
    plan = partial(plan_experiment, workers=ALONE, progress=lambda _done, _all: None)
    planned, seconds = plan(experiment, num_rows=10), []
    for _ in range(2):
        start_s = time.process_time()
        planned = plan(experiment, num_rows=10)
        seconds.append(time.process_time() - start_s)
    ranking, shape = planned.ranking, experiment.model.shape
    num = len(ranking.results) + ranking.num_left_out
    return {
        "what": f"{experiment.name}: {num} candidates, {shape.num_layers} layers, "
        f"{shape.num_experts} experts, {shape.sequence_length} tokens",
        "measured": f"{min(seconds):.2f} s CPU",
        "target": "5 s",
        "remark": f"{ranking.num_left_out} left out; intervals of {NUM_INTERVALS} rows included",
    }


def _score_rows() -> Iterator[dict[str, str]]:
    """Score complete strategies of a small cluster, one by one."""
    experiment = load_experiment(EXPERIMENTS / "homogeneous.yaml")
    planner = AmpRayPlanner(experiment=experiment)
    results = [planner.plan(candidate) for candidate in candidates_of(experiment)]
    different = [result.strategy for result in results if isinstance(result, Estimate)]
    strategies = [different[number % len(different)] for number in range(NUM_SCORED)]
    planner = AmpRayPlanner(experiment=experiment)
    start_s = time.process_time()
    for strategy in strategies:
        planner.score(strategy)
    took_s = time.process_time() - start_s
    yield {
        "what": f"{NUM_SCORED} strategies scored, {len(different)} of them different",
        "measured": f"{took_s:.2f} s CPU, {1000 * took_s / NUM_SCORED:.2f} ms each",
        "target": "1.5 s, 1 ms",
        "remark": "",
    }


def _search_row(experiment: Experiment, target: str, remark: str) -> dict[str, str]:
    """Search a whole space with a new planner each time; the fastest of several."""
    num = len(uniform_candidates(experiment))
    seconds = []
    for _ in range(REPEATS):
        planner = make_planner(experiment, "amp-ray")
        start_s = time.process_time()
        search_candidates(planner, candidates_of(experiment), workers=ALONE)
        seconds.append(time.process_time() - start_s)
    return {
        "what": f"{experiment.name}: {num} candidates on {experiment.cluster.num_devices} GPUs",
        "measured": f"{sorted(seconds)[REPEATS // 2]:.3f} s CPU",
        "target": target,
        "remark": remark,
    }


def _command_row() -> dict[str, str]:
    """Run the whole command twice; the second run counts, as the target says."""
    experiment = str(EXPERIMENTS / "homogeneous.yaml")
    argv = [sys.executable, "-m", "amp_ray", "plan", experiment, "--json"]
    wall_s = 0.0
    for _ in range(2):
        start_s = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
        wall_s = time.perf_counter() - start_s
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {
        "what": "amp-ray plan experiments/homogeneous.yaml, second run",
        "measured": f"{wall_s:.2f} s wall, {peak_mb:.0f} MiB",
        "target": "1.5 s, 200 MB",
        "remark": "interpreter start, imports and compiled code from the cache included",
    }
