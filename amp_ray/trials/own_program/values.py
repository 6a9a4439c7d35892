"""What a strategy puts in place of the placeholders of a user's own program."""

from collections.abc import Callable
from typing import Final

from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import Strategy
from amp_ray.trials.launch import FOLDER, MASTER_ADDRESS, MASTER_PORT, RankCommand
from amp_ray.trials.own_program.files import DS_CONFIG_FILE, HOSTFILE, STRATEGY_FILE
from amp_ray.trials.own_program.megatron_flags import megatron_flags, stage_blocks
from amp_ray.trials.own_program.placeholders import Values

NOT_PER_NODE: Final = ("rank", "local_rank")
"""A command that starts several ranks is none of them."""


def _each_has(strategy: Strategy) -> int | None:
    """Return the samples of every replica; where stages have shares, they may differ."""
    shared = any(stage.shares is not None for stage in strategy.stages)
    return None if shared else strategy.micro_batch_size


_FOR_ALL: Final[dict[str, Callable[[Strategy], object]]] = {
    "tp": lambda strategy: strategy.tp,
    "dp": lambda strategy: strategy.dp,
    "recompute": lambda strategy: strategy.recompute,
    "micro_batch_size": _each_has,
}
"""What stages may differ in; None where they do."""


def strategy_values(
    experiment: Experiment, strategy: Strategy, *, no_ds_config: str | None = None
) -> Values:
    """Return everything that is the same for all commands of a trial."""
    found = {name: read(strategy) for name, read in _FOR_ALL.items()}
    missing = {
        name: "the stages of this strategy differ in it; read the file {strategy}"
        for name, value in found.items()
        if value is None
    }
    texts = {name: str(value) for name, value in found.items() if value is not None}
    several: dict[str, tuple[str, ...]] = {}
    try:
        several["megatron_flags"] = megatron_flags(experiment, strategy)
    except ValueError as error:
        missing["megatron_flags"] = str(error)
    if no_ds_config is not None:
        missing["ds_config"] = no_ds_config
    return Values(
        texts={
            **texts,
            **_experiment_texts(experiment),
            **_shape_texts(experiment, strategy),
            "ds_config": f"{FOLDER}/{DS_CONFIG_FILE}",
            "hostfile": f"{FOLDER}/{HOSTFILE}",
            "strategy": f"{FOLDER}/{STRATEGY_FILE}",
            "trial_dir": FOLDER,
            "master_addr": MASTER_ADDRESS,
            "master_port": MASTER_PORT,
        },
        several=several,
        missing=missing,
    )


def command_values(command: RankCommand) -> Values:
    """Return what differs between the commands of a trial."""
    variables = {
        "rank": "RANK",
        "local_rank": "LOCAL_RANK",
        "world_size": "WORLD_SIZE",
        "node_rank": "NODE_RANK",
        "num_nodes": "NNODES",
        "slots_per_node": "LOCAL_WORLD_SIZE",
    }
    own = command.environment
    return Values(
        texts={name: own[variable] for name, variable in variables.items() if variable in own},
        missing=dict.fromkeys(NOT_PER_NODE, "one command starts all ranks of a node")
        if command.slots
        else {},
    )


def _experiment_texts(experiment: Experiment) -> dict[str, str]:
    """Return what no strategy changes."""
    trials, shape = experiment.trials, experiment.model.shape
    values: dict[str, object] = {
        "num_layers": experiment.model.num_layers,
        "num_blocks": len(experiment.model.indices("block")),
        "zero_stage": experiment.zero_stage,
        "precision": experiment.precision,
        "hidden_size": shape.hidden_size,
        "num_heads": shape.num_heads,
        "sequence_length": shape.sequence_length,
        "vocab_size": shape.vocab_size,
        "steps": trials.num_steps,
        "warmup_steps": trials.num_warmup_steps,
        "total_steps": trials.num_warmup_steps + trials.num_steps,
    }
    return {name: str(value) for name, value in values.items()}


def _shape_texts(experiment: Experiment, strategy: Strategy) -> dict[str, str]:
    values: dict[str, object] = {
        "pp": strategy.pp,
        "num_micro_batches": strategy.num_micro_batches,
        "gradient_accumulation_steps": strategy.num_micro_batches,
        "global_batch_size": strategy.global_batch_size,
    }
    lists = {
        "bounds": strategy.bounds,
        "stage_layers": [stage.end_layer - stage.first_layer for stage in strategy.stages],
        "stage_blocks": stage_blocks(experiment.model, strategy.bounds),
    }
    return {
        **{name: str(value) for name, value in values.items()},
        **{name: ",".join(map(str, entries)) for name, entries in lists.items()},
    }
