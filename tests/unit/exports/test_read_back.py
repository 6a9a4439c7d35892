"""Reading an exported file gives the same strategy, for every preset and program."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import amp_ray as amp
from amp_ray.exports.chosen import Chosen, Export
from amp_ray.exports.configs import accelerate_config, nanotron_config
from amp_ray.exports.megatron import bridge_overrides, megatron_script
from amp_ray.exports.our_program import deepspeed_folder
from amp_ray.exports.reading import read_program
from amp_ray.exports.schedulers import slurm_folder
from amp_ray.exports.torchtitan import titan_config
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import strategies_of, strategy_to_json
from amp_ray.runtime.first_file import presets
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import Zero

BATCH = 64
WRITERS: dict[str, tuple[Callable[[Chosen], Export], str, tuple[str, ...]]] = {
    "run.sh": (megatron_script, "megatron-core", ()),
    "bridge.sh": (bridge_overrides, "megatron-core", ()),
    "job.sbatch": (slurm_folder, "megatron-core", ()),
    "titan.py": (titan_config, "fsdp2", ()),
    # The rest follows, or is set elsewhere: docs/exports.md
    "nanotron.yaml": (nanotron_config, "nanotron", ("bounds", "placement")),
    "accelerate.yaml": (accelerate_config, "fsdp2", ("sequence_parallel",)),
    "megatron.yaml": (accelerate_config, "megatron-core", ()),
    "ds_config.json": (deepspeed_folder, "deepspeed", ("bounds", "recompute", "placement")),
}
"""Writers with a runtime, and the keys of a strategy that their files do not have."""


def strategies(base: Experiment) -> Iterator[Strategy]:
    """Yield strategies on all devices that the runtime can launch, with even cuts."""
    blocks, num_devices = base.model.indices("block"), base.cluster.num_devices
    zeros = [Zero(), Zero(stage=1), Zero(stage=3), Zero(stage=3, shard_ranks=4)]
    eps = (1, 4) if base.model.shape.num_experts else (1,)
    for tp, pp, ep, zero in product((1, 2, 8), (1, 2), eps, zeros):
        dp = num_devices // tp // pp
        if zero.shard_ranks >= dp or dp % ep:
            continue
        experts: dict[str, Any] = {"ep": ep, "etp": int(tp > 1)} if ep > 1 else {}
        options = StageOptions(tp=tp, dp=dp, zero=zero, sequence_parallel=tp > 1, **experts)
        for recompute in (NO_RECOMPUTE, FULL):
            candidate = Candidate(
                micro_batch_size=2,
                options=replace(options, recompute=recompute),
                pp=pp,
                num_micro_batches=BATCH // dp // 2,
            )
            cuts = (blocks[len(blocks) * stage // pp] for stage in range(1, pp))
            strategy = Strategy.uniform(candidate, (0, *cuts, base.model.num_layers))
            if not base.traits.why_not_launched(strategy):
                yield strategy


@pytest.mark.parametrize("file", WRITERS)
def test_an_exported_file_is_read_as_the_same_strategy(file: str) -> None:
    write, runtime, elsewhere = WRITERS[file]
    written = set()
    for model in presets()["models"]:
        changes = (f"runtime={runtime}",)
        base = amp.load(model=model, cluster="dgx-h100", nodes=2, batch=BATCH, changes=changes)
        for strategy in strategies(base):
            try:
                files = write(Chosen(experiment=base, strategy=strategy)).files
            except ValueError:
                continue
            text = files.get(file, next(iter(files.values())))
            record = read_program(text, file=file, experiment=base)
            assert record is not None
            notes = record.pop("not_read", ())
            # What a recipe trains is known of some; of others its settings are not read.
            unknown = set() if model == "llama-3-8b" else {"--recipe"}
            assert {name for note in notes for name in note.names} <= unknown
            expected = strategy_to_json(strategy, base.cluster)
            if elsewhere:
                wrong = {key for key in record if (record[key] or None) != expected.get(key)}
                assert not wrong - {*elsewhere}
            else:
                [entry] = strategies_of([record], file=file, experiment=base)
                assert entry.strategy == strategy
            written.add(model)
    assert "llama-3-8b" in written
