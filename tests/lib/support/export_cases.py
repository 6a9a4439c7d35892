"""Every preset with every runtime, and strategies with each option, for tests of exports."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import product
from typing import Any

import yaml

from amp_ray.exports.chosen import Chosen
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.cuts import ruled_bounds
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE, SELECTIVE, Recompute
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import NO_ZERO, Zero
from support.experiments import experiment_from

NUM_DEVICES = 32
BATCH = 128
RUNTIMES = ("megatron-core", "fsdp2", "nanotron", "megatron", "deepspeed")
KEYS = {
    **dict.fromkeys(("fsdp2", "nanotron", "megatron", "deepspeed"), ("precision: bf16\n",)),
    "megatron-core": (
        "precision: bf16\n",
        "precision: fp16\n",
        "precision: {compute: fp8, primary: fp8}\nzero_stage: 1\n",
        "precision: {compute: bf16, gradients: bf16, moments: bf16}\nzero_stage: 1\n",
        "precision: bf16\ntraits: {offloaded_blocks: 4}\n",
        "precision: bf16\ntraits: {context_parallel: both}\n",
    ),
}
"""Further keys of the experiment file to try, by runtime."""

PRESETS = yaml.safe_load(
    resources.files("amp_ray.data").joinpath("presets.yaml").read_text("utf-8")
)["models"]

RECOMPUTES = (NO_RECOMPUTE, FULL, SELECTIVE, Recompute(kind="full", layers=2))
ZEROS = (NO_ZERO, *(Zero(stage=stage) for stage in (1, 2, 3)), Zero(stage=3, keeps_weights=True))
GRIDS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 2},
    {"tp": 4, "sequence_parallel": True},
    {"cp": 2},
    {"tp": 2, "cp": 2, "sequence_parallel": True},
    {"ep": 4},
    {"tp": 2, "ep": 8, "etp": 1, "sequence_parallel": True},
)


@cache
def preset(name: str, runtime: str, keys: str, device: str = "H100") -> Experiment:
    """Return an experiment with a preset model on four nodes of eight boards."""
    record = {
        "name": name,
        "model": PRESETS[name],
        "cluster": {
            "nodes": [{"count": 4, "device": device, "slots": 8, "inter_gbit_per_s": 3200}]
        },
        "global_batch_size": BATCH,
        "runtime": runtime,
    }
    return experiment_from(yaml.safe_dump(record) + keys)


def strategies(experiment: Experiment) -> Iterator[Strategy]:
    """Yield strategies that the runtime runs: each grid with each ZeRO, pp and cut."""
    for index, (grid, pp, zero) in enumerate(product(GRIDS, (1, 2, 4), ZEROS)):
        recompute = RECOMPUTES[index % len(RECOMPUTES)]
        options = {"tp": 1, "cp": 1, **grid}
        dp = NUM_DEVICES // pp // options["tp"] // options["cp"]
        stage = StageOptions(dp=dp, zero=zero, recompute=recompute, **options)
        candidate = Candidate(
            options=stage, pp=pp, micro_batch_size=1, num_micro_batches=BATCH // dp
        )
        if experiment.traits.why_no_recompute([recompute]) is not None:
            stage = replace(stage, recompute=NO_RECOMPUTE)
            candidate = replace(candidate, options=stage)
        if not _divides(experiment, stage):
            continue
        for bounds, chunks in _cuts(experiment, pp):
            strategy = replace(Strategy.uniform(candidate, bounds), virtual_stages=chunks)
            if not experiment.traits.why_not_launched(strategy):
                yield strategy


def chosen_cases(
    name: str, runtime: str, keys: str = "precision: bf16\n", device: str = "H100"
) -> Iterator[Chosen]:
    """Yield the strategies of a preset."""
    experiment = preset(name, runtime, keys, device)
    for strategy in strategies(experiment):
        yield Chosen(experiment=experiment, strategy=strategy, predicted_s=1.0)


def _divides(experiment: Experiment, options: StageOptions) -> bool:
    shape = experiment.model.shape
    spreads = options.ep > 1 or options.etp > 0
    divides = experiment.traits.divides_biased_experts or not shape.expert_bias
    if options.expert_tp > 1 and not divides:
        return False
    heads = (shape.num_heads, shape.num_key_value_heads)
    return not any(count % options.tp for count in heads) and (
        not spreads or (shape.num_experts > 0 and shape.num_experts % options.ep == 0)
    )


def _cuts(experiment: Experiment, pp: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield bounds and chunks per stage: the rule's, or an even, an uneven and a chunked cut."""
    num_layers, blocks = experiment.model.num_layers, len(experiment.model.indices("block"))
    if experiment.traits.partition != "exact" or pp == 1:
        bounds = ruled_bounds(experiment, pp) if pp > 1 else (0, num_layers)
        if bounds is not None and not (
            experiment.traits.partition == "even-blocks" and blocks % pp
        ):
            yield bounds, 1
        return
    inner = [1 + blocks * stage // pp for stage in range(1, pp)]
    yield (0, *inner, num_layers), 1
    yield (0, *(cut - 1 for cut in inner), num_layers), 1
    yield (0, *inner[1:], num_layers - 2, num_layers), 1
    if blocks % (2 * pp) == 0 and experiment.traits.interleaves:
        yield (0, *inner, num_layers), 2
