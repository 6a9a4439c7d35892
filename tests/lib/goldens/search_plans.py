"""Plans that searches find, with the experiments: found plans show what random ones do not."""

import json
from collections.abc import Iterator
from typing import Any, Final

from amp_ray.cost.estimate import Estimate
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.yaml_text import Document, with_changes
from amp_ray.runtime.first_file import preset
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.ray.searching import ALONE
from amp_ray.strategies.strategy import Strategy
from goldens.documents import FILES, REPOSITORY, experiment_of, strategy_of, values_of
from support.small_clusters import small_cluster_text

PLANS: Final = REPOSITORY / "tests" / "golden" / "plans.jsonl"
SEEDS: Final = range(1130, 1140)
"""Seeds of `small_cluster` that `compare_plans.py` does not have."""

_FIRST_ROWS: Final = 4
"""Rows of a ranking that are kept, beside some of the others."""

_SOME: Final = (0.2, 0.5, 0.8, 0.999)
"""Places of the others: strategies that do not fit come last."""

_EXPERIMENTS: Final = ("demo", "long_sequence", "homogeneous", "het_cluster", "het_placement")

_PRESETS: Final = (
    ("llama-3-8b", "dgx-h100", 4, 64, "megatron-core precision=bf16"),
    ("llama-3-8b", "dgx-h100", 4, 64, "megatron-core precision=fp8 release='26.02'"),
    ("llama-3-8b", "dgx-h100", 4, 64, "fsdp2 precision=bf16"),
    ("llama-3-8b", "dgx-h100", 2, 64, "torch precision=bf16"),
    ("llama-3-70b", "dgx-h200", 8, 128, "megatron-core precision=bf16"),
    ("llama-3-8b", "gb200-nvl72", 4, 64, "megatron-core precision=nvfp4"),
    ("llama-2-13b", "aws-p4d", 2, 64, "nanotron precision=bf16"),
    ("llama-2-13b", "dgx-a100", 2, 64, "automodel precision=bf16"),
    ("llama-2-7b", "dgx-a100", 2, 64, "llm-foundry precision=bf16"),
    ("gpt2-1.5b", "aws-p3-16xlarge", 2, 64, "megatron"),
    ("gpt2-1.5b", "aws-p3dn", 2, 64, "megatron-lm-2022"),
    ("gpt2-1.5b", "aws-g4dn-metal", 2, 64, "deepspeed"),
    ("mixtral-8x7b", "dgx-h100", 8, 64, "megatron-core precision=bf16 model.sequence_length=4096"),
    ("mixtral-8x7b", "dgx-h200", 4, 64, "fsdp2 precision=bf16 model.sequence_length=4096"),
    ("qwen3-30b-a3b", "gb200-nvl72", 4, 64, "megatron-core precision=fp8"),
    ("qwen3-30b-a3b", "dgx-h100", 4, 64, "automodel precision=bf16"),
    ("gpt-oss-120b", "dgx-b200", 8, 64, "megatron-core precision=bf16"),
    ("deepseek-v3", "dgx-b300", 16, 128, "megatron-core precision=fp8"),
)
"""Model, cluster, nodes, batch, and runtime with changes of the experiment file."""

_NET: Final = (
    *("blocks", "cpu", "few", "gpt2", "latent", "llama", "mixed", "mixtral", "resnet", "t5"),
    *("table", "torch", "torch-default", "amp"),
    "llama runtime=torch zero_stage=auto recompute=auto search.virtual_stages=[1,2]",
    "llama search.max_cp=4 zero_stage=1 recompute=auto model.sequence_length=65536",
    "torch search.token_slices=true",
    "torch search.space=heterogeneous recompute=auto zero_stage=auto",
    "torch search.space=placement zero_stage=3",
    "mixed runtime=torch recompute=auto zero_stage=auto",
    "mixed runtime=megatron-lm-2022 search.space=placement recompute=auto zero_stage=auto",
    "t5 search.space=heterogeneous cluster.nodes.0.count=1",
    "amp search.space=heterogeneous",
    "amp search.space=placement",
    "gpt2 search.tp_across_nodes=true",
    "gpt2 runtime=nanotron cluster.nodes.0.device=A100-40 recompute=auto zero_stage=auto",
    "blocks runtime=torch zero_stage=auto recompute=auto",
    "transgan search.idle_devices=false",
)
"""Experiments of the net, with changes."""


def sources() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each experiment to search, with a name."""
    for name in _EXPERIMENTS:
        yield name, values_of((REPOSITORY / "experiments" / f"{name}.yaml").read_text("utf-8"))
    for model, cluster, num_nodes, batch, options in _PRESETS:
        yield f"{model} on {cluster}", _of_presets(model, cluster, num_nodes, batch, options)
    for line in _NET:
        name, *changes = line.split()
        values = values_of((FILES / f"{name}.yaml").read_text("utf-8"))
        yield f"net {line}", _changed(values, changes)
    for seed in SEEDS:
        yield f"cluster {seed}", values_of(small_cluster_text(seed))


def _of_presets(
    model: str, cluster: str, num_nodes: int, batch: int, options: str
) -> dict[str, Any]:
    """Return the experiment file of two presets."""
    runtime, *changes = options.split()
    node = preset("clusters", cluster)
    if "rack" in node:
        node["rack"] = {"nodes": num_nodes}
    values = {
        "name": model,
        "model": preset("models", model),
        "cluster": {"nodes": [{**node, "count": num_nodes}]},
        "runtime": runtime,
        "global_batch_size": batch,
    }
    return _changed(values, changes)


def _changed(values: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    return dict(with_changes(Document(file="golden", values=values), changes).values)


def ranked(values: dict[str, Any]) -> dict[Strategy, str]:
    """Search an experiment; return some rows of its ranking, fast ones and others."""
    ranking = plan_experiment(
        experiment_of(values), num_rows=20, workers=ALONE, progress=lambda _, __: None
    ).ranking
    rows = [row.strategy for row in ranking.results if isinstance(row, Estimate)]
    others = [rows[int(place * len(rows))] for place in _SOME if rows]
    chosen = [*rows[:_FIRST_ROWS], *others]
    return {own: "search" for own in chosen if not own.has_operators}


def recorded_plans() -> Iterator[tuple[dict[str, Any], Experiment, dict[Strategy, str]]]:
    """Yield the experiments of `compare_plans.py` with their recorded plans."""
    for line in PLANS.read_text("utf-8").splitlines():
        case = json.loads(line)
        experiment = experiment_of(case["document"])
        records = [case[key]["strategy"] for key in ("fastest", "safe") if key in case]
        yield (
            case["document"],
            experiment,
            {strategy_of(record, experiment): "search" for record in records},
        )


def searches() -> Iterator[tuple[str, dict[str, Any], dict[Strategy, str]]]:
    """Search every source; a search that ends with an error is told and left out."""
    for name, values in sources():
        try:
            yield name, values, ranked(values)
        except InputError as error:
            print(f"{name}: {error}")
