"""How long a search takes: process CPU of one core, warm, and the whole command from outside."""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.planning import make_planner
from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.space import candidates_of, uniform_candidates
from amp_ray.spec.build import build_experiment
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.profile import Profile
from amp_ray.spec.yaml_text import parse_yaml

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
    yield _command_row()


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
