"""What `plan` offers for a runtime, its program is told without a refusal."""

import pytest
import yaml

from amp_ray.cost.estimate import Estimate
from amp_ray.exports.chosen import Chosen
from amp_ray.exports.starts import start_of
from amp_ray.inputs.experiment_file import build_experiment
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.ray.searching import ALONE
from support.experiments import MemoryFiles
from support.export_cases import PRESETS

CASES: tuple[tuple[str, str, int, dict[str, object]], ...] = (
    ("llama-3-8b", "nanotron", 1, {}),
    ("llama-3-8b", "fsdp2", 1, {}),
    ("llama-3-8b", "megatron-core", 1, {}),
    ("llama-3-8b", "megatron", 2, {}),
    ("gpt-oss-120b", "megatron-core", 4, {"max_cp": 1, "virtual_stages": [1]}),
    ("qwen3-30b-a3b", "fsdp2", 2, {"max_cp": 1, "virtual_stages": [1]}),
)


@pytest.mark.parametrize(("preset", "runtime", "nodes", "search"), CASES)
def test_every_feasible_row_is_exported(
    preset: str, runtime: str, nodes: int, search: dict[str, object]
) -> None:
    node = {"count": nodes, "device": "H100", "slots": 8, "inter_gbit_per_s": 3200}
    record = {
        "name": preset,
        "model": PRESETS[preset],
        "cluster": {"nodes": [node]},
        "precision": "bf16",
        "global_batch_size": 64,
        "runtime": runtime,
        "search": {"micro_batch_sizes": [1], **search},
    }
    document = parse_yaml(yaml.safe_dump(record), file="test.yaml")
    experiment = build_experiment(document, MemoryFiles())
    planned = plan_experiment(experiment, workers=ALONE, progress=lambda _done, _all: None)
    results = planned.ranking.results
    rows = [row for row in results if isinstance(row, Estimate) and row.feasible]
    assert len(rows) > 3
    for row in rows:
        assert start_of(Chosen(experiment=experiment, strategy=row.strategy)) is not None
