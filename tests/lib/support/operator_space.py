"""Tiny experiments whose stages are cut between operators."""

import random
from dataclasses import replace

from amp_ray.inputs.experiment import Experiment
from support.aceso import EXPERIMENT, GPT_ROWS, aceso_files
from support.experiments import experiment_from

OPERATORS = (
    "conv1",
    "layer1-0-conv1",
    "layer1-0-bn3",
    "layer1-0-relu",
    "layer1-1-conv1",
    "layer1-1-bn3",
    "layer1-1-relu",
    "layer2-0-conv1",
    "fc",
)
_CLUSTERS = ((1, 1), (1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (3, 1))


def tiny_experiment(
    seed: int,
    most_operators: int = 5,
    *,
    per_operator: bool = False,
    recompute: str | None = None,
) -> Experiment:
    """Draw nodes, memory and batch and, unless it is given, recompute.

    The model has a few operators of a ResNet; if attention is recomputed, it is a GPT of one layer.
    """
    chance = random.Random(seed)
    model, rows = "resnet_x", (*OPERATORS[: chance.randrange(2, most_operators)], OPERATORS[-1])
    nodes, slots = chance.choice(_CLUSTERS)
    if recompute == "selective":
        model, rows, nodes, slots = "gpt_tiny", GPT_ROWS, 1, min(nodes * slots, 3)
    files = aceso_files(
        model,
        rows,
        sizes=chance.choice([(1, 2, 4), (1, 4), (1, 2)]),
        algorithms=chance.choice([(0,), (0,), (0, 1)]),
        seed=seed,
    )
    memory = f"memory_gib: {chance.uniform(2.52, 2.95):.3f}"
    text = EXPERIMENT.replace("gpt_tiny", model).replace("num_layers: 2", "num_layers: 1")
    text = text.replace(
        "count: 2, device: T4, slots: 2,",
        f"count: {nodes}, device: T4, slots: {slots}, {memory},",
    )
    text = text.replace("batch_size: 16", f"batch_size: {chance.choice([2, 4, 8])}")
    more = (
        f"search: {{space: operator, per_operator: {str(per_operator).lower()}}}\n"
        f"recompute: {recompute or chance.choice(['auto', 'auto', 'auto', 'none'])}\n"
        f"zero_stage: {chance.choice([0, 1])}\n"
    )
    return experiment_from(text + more, {f"p/{name}": file for name, file in files.items()})


def with_memory(experiment: Experiment, memory_bytes: int) -> Experiment:
    """Return an experiment whose devices, all of the same type, have ``memory_bytes``."""
    nodes = experiment.cluster.nodes
    device = replace(nodes[0].device, memory_bytes=memory_bytes)
    nodes = tuple(replace(node, device=device) for node in nodes)
    return replace(experiment, cluster=replace(experiment.cluster, nodes=nodes))
