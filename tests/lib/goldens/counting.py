"""Count the golden strategies that exercise each runtime and each dimension."""

from collections import Counter
from collections.abc import Iterable, Iterator

from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from goldens.documents import Values, experiment_of, strategy_of
from goldens.records import Group


def table(groups: Iterable[Group]) -> Iterator[str]:
    """Yield a line for each runtime and dimension with its number of strategies."""
    counts = counted(groups)
    for name in sorted(counts):
        yield f"{counts[name]:6} {name}"


def counted(groups: Iterable[Group]) -> Counter[str]:
    """Return the numbers of strategies by runtime and dimension."""
    counts: Counter[str] = Counter()
    for group in groups:
        experiment = experiment_of(group.document)
        for source, record, figures in zip(
            group.sources, group.strategies, group.figures, strict=True
        ):
            strategy = strategy_of(record, experiment)
            counts.update(["strategies", f"source {source}"])
            counts.update(_of_experiment(experiment, group.document))
            counts.update(_of_strategy(strategy, experiment))
            counts.update(_of_figures(figures))
    return counts


def _of_experiment(experiment: Experiment, document: Values) -> Iterator[str]:
    """Yield what an experiment has."""
    traits, cluster, shape = experiment.traits, experiment.cluster, experiment.model.shape
    yield f"runtime {traits.full_name}"
    yield f"model {shape.family}{' with experts' if shape.num_experts else ''}"
    yield f"precision {experiment.precision}"
    yield from (f"kept {key} {value}" for key, value in traits.formats.kept.items())
    yield f"optimizer {experiment.optimizer}"
    yield f"profile {document.get('profile', {}).get('source', 'analytic')}"
    yield from (f"recomputed module {name}" for name in traits.recompute_modules)
    tells = {
        "offloaded blocks": traits.offloaded_blocks,
        "changed traits": document.get("traits"),
        "changed constants": document.get("constants"),
        "loss in parts": traits.loss_chunks != 1,
        "latent attention": shape.key_value_rank,
        "several kinds of boards": len(cluster.device_types) > 1,
        "racks": any(len(node.host_names) > 1 for node in cluster.nodes),
        "boards of two kinds in a host": len(set(cluster.host_names)) < len(cluster.nodes),
        "rates by size": cluster.has_rates_by_size,
        "links of pairs of nodes": cluster.pair_links,
        "links of zones": cluster.zone_links,
        "prices": cluster.has_prices,
        "power limits": any(node.device.power_limit_w for node in cluster.nodes),
        "slices measured": experiment.profile.slices,
        "graphs": traits.cuda_graphs != "none",
        "fused experts": traits.fused_experts,
        "launch limit": traits.launch_limit_s,
        "sliced messages": traits.sliced_activations or traits.sliced_gradients,
    }
    yield from (name for name, has in tells.items() if has)


def _of_strategy(strategy: Strategy, experiment: Experiment) -> Iterator[str]:
    """Yield the dimensions that a strategy uses."""
    cluster, model = experiment.cluster, experiment.model
    stages = [stage.options for stage in strategy.stages]
    first, node_of = stages[0], cluster.node_of_device
    groups = [
        {node_of[device] for device in strategy.devices(index)[start : start + stage.tp]}
        for index, stage in enumerate(stages)
        for start in range(0, stage.num_ranks, stage.tp)
    ]
    kinds = {kind for stage in stages for kind in [str(stage.recompute).split(":")[0]]}
    yield from (f"recompute {kind}" for kind in kinds)
    yield f"ZeRO {strategy.zero.stage}{' kept' if strategy.zero.keeps_weights else ''}"
    parts = any(stage.recompute.layers for stage in stages)
    is_tied = model.shape.tied_embedding and strategy.pp > 1
    tells = {
        "tp": any(stage.tp > 1 for stage in stages),
        "pp": strategy.pp > 1,
        "dp": any(stage.dp > 1 for stage in stages),
        "shard groups": strategy.zero.shard_ranks,
        "recompute of some blocks": parts,
        "recompute differs by stage": strategy.recompute is None,
        "sequence parallelism": strategy.sequence_parallel,
        "chunks, even": strategy.is_interleaved and not strategy.chunk_bounds,
        "chunks, uneven": strategy.chunk_bounds,
        "token slices": strategy.is_sliced,
        "cp": first.cp > 1,
        f"cp {experiment.traits.context_parallel}": first.cp > 1,
        "ep": first.ep > 1,
        "etp": first.etp not in {0, first.tp},
        "stages of different tp or dp": strategy.tp is None or strategy.dp is None,
        "uneven shares": any(len(set(stage.shares or ())) > 1 for stage in strategy.stages),
        "idle devices": len(strategy.placement) < cluster.num_devices,
        "devices out of order": list(strategy.placement) != sorted(strategy.placement),
        "tp across nodes": any(len(nodes) > 1 for nodes in groups),
        "tied embedding in a pipeline": is_tied,
    }
    yield from (name for name, has in tells.items() if has)


def _of_figures(figures: Values) -> Iterator[str]:
    """Yield the verdict."""
    yield from (f"reason: {kind}" for kind in figures["reasons"])
    tells = {
        "feasible": figures["feasible"],
        "risky": figures["feasible"] and figures["failure_probability"] >= 0.1,
        "unexplained": figures["unexplained"],
        "money counted": figures["money"] is not None,
    }
    yield from (name for name, has in tells.items() if has)
