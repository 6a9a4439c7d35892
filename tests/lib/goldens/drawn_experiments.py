"""Random experiment files over all runtimes, models, clusters and options: drawn by seed alone."""

import random
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import count
from typing import Any, Final

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import CATALOGUE
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.first_file import presets
from amp_ray.runtimes.releases import CHOICES, RELEASES
from amp_ray.runtimes.traits import RUNTIMES, RuntimeTraits
from goldens.documents import experiment_of

Keys = dict[str, Any]
Draw = Callable[[random.Random], Keys]

LENGTHS: Final = (512, 1024, 2048)
BATCHES: Final = (16, 24, 32, 48, 64, 96)

# ------------------------------------------------------------------------------------ models


def _language(rng: random.Random, family: str) -> Keys:
    hidden, heads = rng.choice((512, 1024, 2048)), rng.choice((8, 16))
    return {
        "family": family,
        "num_layers": rng.choice((4, 6, 8, 12)),
        "hidden_size": hidden,
        "num_heads": heads,
        "sequence_length": rng.choice(LENGTHS),
        "vocab_size": rng.choice((8192, 50257, 51200, 128256)),
    }


def _gpt2(rng: random.Random) -> Keys:
    experts = {"num_experts": 4, "experts_per_token": rng.choice((1, 2))}
    tied = rng.choice((True, False))
    return {
        **_language(rng, "gpt2"),
        "tied_embedding": tied,
        **(experts if rng.random() < 0.15 else {}),
    }


def _llama(rng: random.Random) -> Keys:
    model = {**_language(rng, "llama"), "num_key_value_heads": rng.choice((4, 8))}
    options: Keys = {
        "attention_windows": [256, 0],
        "query_key_norm": True,
        "post_norms": True,
        "attention_bias": True,
        "tied_embedding": True,
    }
    chosen = {key: value for key, value in options.items() if rng.random() < 0.15}
    model["sequence_length"] = rng.choice((1024, 4096, 8192))
    return {**model, **chosen}


def _experts(rng: random.Random) -> Keys:
    model = {**_llama(rng), "num_experts": rng.choice((4, 8, 16)), "experts_per_token": 2}
    model["expert_feed_forward_size"] = rng.choice((512, 1408))
    if rng.random() < 0.4:
        model["shared_feed_forward_size"] = 1024
    if rng.random() < 0.3:
        model["first_dense_layers"] = 1
    if rng.random() < 0.25:
        model |= {"expert_bias": True, "clamped_activation": True, "scaled_rotation": True}
    return model


def _latent(rng: random.Random) -> Keys:
    model: Keys = {**_language(rng, "llama"), "num_heads": 16, "head_size": 128}
    model |= {"key_value_rank": 512, "rotary_head_size": 64, "value_head_size": 128}
    if rng.random() < 0.5:
        model["query_rank"] = 768
    if rng.random() < 0.7:
        model |= {"num_experts": 8, "experts_per_token": 2, "expert_feed_forward_size": 1024}
        model["first_dense_layers"] = rng.choice((0, 1))
    if rng.random() < 0.5:
        model["mtp_layers"] = 1
    return model


def _t5(rng: random.Random) -> Keys:
    decoder = {"num_decoder_layers": rng.choice((4, 6)), "decoder_sequence_length": 256}
    gated = {"gated_feed_forward": rng.choice((True, False))}
    return {**_language(rng, "t5"), **decoder, **gated}


def _vit(rng: random.Random) -> Keys:
    layers = rng.choice((6, 12))
    return {"family": "vit", "num_layers": layers, "hidden_size": 1024, "num_heads": 16}


def _wide_resnet(rng: random.Random) -> Keys:
    return {"family": "wide_resnet", "num_layers": 50, "width_factor": rng.choice((2, 4))}


def _transgan(rng: random.Random) -> Keys:
    depth = rng.choice(([4, 2, 2], [12, 0, 0, 0, 0, 12]))
    window = {"bottom_width": 9, "latent_size": 512, "window_size": 18}
    return {"family": "transgan", "hidden_size": 1024, "num_heads": 4, "depth": depth, **window}


def _blocks(rng: random.Random) -> Keys:
    def block(name: str, repeat: int, parameters: float) -> Keys:
        return {
            "name": name,
            "repeat": repeat,
            "parameters": parameters,
            "forward_gflops": rng.choice((4, 40)),
            "activation_elements": 4.0e6,
            "boundary_elements": rng.choice((100_000, 800_000)),
            "sharded": rng.choice((True, False)),
        }

    sizes = rng.choice((0.0, 1.0e6)), rng.choice((5.0e6, 6.0e7))
    return {
        "family": "blocks",
        "blocks": [block("stem", 1, sizes[0]), block("body", rng.choice((6, 9)), sizes[1])],
    }


def _preset(rng: random.Random) -> Keys:
    models = presets()["models"]
    return dict(models[rng.choice(sorted(models))])


_MODELS: Final[Mapping[str, Draw]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "experts": _experts,
    "latent": _latent,
    "t5": _t5,
    "vit": _vit,
    "wide_resnet": _wide_resnet,
    "transgan": _transgan,
    "blocks": _blocks,
    "preset": _preset,
}
_USUAL_MODELS: Final = (
    *("gpt2",) * 4,
    *("llama",) * 5,
    *("experts",) * 4,
    *("latent", "latent", "preset", "preset"),
    *("t5", "vit", "wide_resnet", "transgan", "blocks"),
)

# ---------------------------------------------------------------------------------- clusters


def _rate(rng: random.Random, *rates: float) -> Any:  # noqa: ANN401 - one rate, or rates by size
    """Return a rate; now and then rates by the size of a message."""
    rate = rng.choice(rates)
    if rng.random() < 0.85:
        return rate
    return [[65536, rate / 8], [1048576, rate / 2], [67108864, rate]]


def _node(rng: random.Random, device: str | Keys | None = None) -> Keys:
    node: Keys = {
        "device": device or rng.choice(("T4", "V100-16", "V100-32", "A100-40", "A100-80", "H100")),
        "slots": rng.choice((2, 4, 4, 8)),
        "intra_gbit_per_s": _rate(rng, 50, 400, 2400),
        "inter_gbit_per_s": _rate(rng, 5, 25, 100, 400),
    }
    options: Keys = {
        "protocol": rng.choice(("tcp", "rdma", "efa")),
        "intra_latency_us": 15,
        "inter_latency_us": 40,
        "inter_collective_us": 60,
        "memory_gib": rng.choice((6, 10, 14)),
        "price_per_device_hour": 1.5,
    }
    return {**node, **{key: value for key, value in options.items() if rng.random() < 0.25}}


def _even(rng: random.Random) -> Keys:
    return {"nodes": [{**_node(rng), "count": rng.choice((1, 2, 2, 3, 4))}]}


def _mixed(rng: random.Random) -> Keys:
    nodes = [{**_node(rng), "count": rng.choice((1, 1, 2))} for _ in range(rng.choice((2, 2, 3)))]
    links: list[Keys] = []
    if rng.random() < 0.4:
        links = [{"between": ["node0", "node1"], "gbit_per_s": rng.choice((1, 5, 100))}]
    return {"nodes": nodes, "links": links}


def _zones(rng: random.Random) -> Keys:
    nodes = [
        {**_node(rng), "zone": zone, "price_per_device_hour": price}
        for zone, price in (("east", 1.2), ("east", 0.4), ("west", 2.9))
    ]
    link = {"between": ["east", "west"], "gbit_per_s": 2, "latency_us": 20000}
    return {"nodes": nodes, "links": [{**link, "price_per_gbyte": 0.02}]}


def _racks(rng: random.Random) -> Keys:
    node = _node(rng, rng.choice(("GB200", "GB300", "H100", "A100-80")))
    rack: Keys = {"nodes": rng.choice((2, 4))}
    if rng.random() < 0.5:
        rack |= {"gbit_per_s": _rate(rng, 800, 1600), "latency_us": 12}
    node |= {"slots": rng.choice((2, 4)), "count": 2 * rack["nodes"], "rack": rack}
    return {"nodes": [node]}


def _uneven_racks(rng: random.Random) -> Keys:
    [racks] = _racks(rng)["nodes"]
    return {"nodes": [racks, {**_node(rng), "count": rng.choice((1, 2))}]}


def _two_kinds_in_a_host(rng: random.Random) -> Keys:
    network = rng.choice((10, 100))
    boards = (("T4", 2), ("V100-32", rng.choice((1, 2))))
    host = [
        {"host": "big", "device": device, "slots": slots, "inter_gbit_per_s": network}
        for device, slots in boards
    ]
    return {"nodes": [*host, {**_node(rng, "T4"), "inter_gbit_per_s": network}]}


def _limited_power(rng: random.Random) -> Keys:
    device = rng.choice([name for name in ("A100-80", "H100", "B200") if name in CATALOGUE])
    node = {**_node(rng, device), "power_w": rng.choice((250, 300)), "count": 2}
    return {"nodes": [node, _node(rng, device)] if rng.random() < 0.3 else [node]}


def _data_sheet(rng: random.Random) -> Keys:
    device = {"name": "board", "memory_gib": rng.choice((8, 47.5)), "memory_gbyte_per_s": 768}
    device |= {"num_multiprocessors": 84, **({"fp32_tflops": 38.7} if rng.random() < 0.5 else {})}
    device |= {"fp16_tflops": 155, "bf16_tflops": 155, "fp8_tflops": 310}
    return {"nodes": [{**_node(rng, device), "count": 2}]}


def _new_boards(rng: random.Random) -> Keys:
    names = ("H200", "B200", "B300", "GB200", "MI300X", "RTX4090", "L40S", "L4", "P100-16", "cpu")
    node = {**_node(rng, rng.choice(names)), "count": rng.choice((1, 2))}
    if rng.random() < 0.5:
        del node["intra_gbit_per_s"]
    return {"nodes": [node]}


def _preset_cluster(rng: random.Random) -> Keys:
    clusters = presets()["clusters"]
    name = rng.choice([name for name in sorted(clusters) if name != "this-machine"])
    node = dict(clusters[name])
    if "rack" in node:
        node["rack"] = {"nodes": 2}
    return {"nodes": [{**node, "count": rng.choice((2, 4))}]}


_CLUSTERS: Final[tuple[Draw, ...]] = (
    *(_even,) * 5,
    *(_mixed,) * 5,
    *(_racks, _racks, _uneven_racks, _zones, _two_kinds_in_a_host, _limited_power),
    *(_data_sheet, _new_boards, _new_boards, _new_boards, _preset_cluster, _preset_cluster),
)

# ----------------------------------------------------------------------- programs and options

_FLAGS: Final = tuple(
    trait.name
    for trait in fields(RuntimeTraits)
    if trait.type in {bool, "bool"} and trait.name not in {"fp8", "nvfp4"}
)
_COUNTED_TRAITS: Final[Mapping[str, tuple[float, ...]]] = {
    "offloaded_blocks": (1, 3),
    "virtual_stages": (2,),
    "bucket_elements": (1.0e6, 1.0e7),
    "waiting_elements": (1.0e7, 1.0e9),
    "launch_setup_s": (30.0,),
    "mask_bytes": (0.0, 2.0e6),
    "synchronisation_s": (0.0, 63e-6),
    "piped_collective_s": (1e-4,),
    "gather_slice_s": (7.8e-6,),
    "restart_launches": (3.0,),
    "expert_streams": (0, 4),
    "exchange_multiprocessors": (0, 16),
    "forward_runs": (1, 2),
}
_PRECISIONS: Final = ("fp16", "fp16", "bf16", "bf16", "bf16", "fp32", "fp8", "fp8", "nvfp4")
_KEPT: Final = (
    {"gradients": "bf16"},
    {"moments": "bf16"},
    {"gradients": "bf16", "moments": "bf16"},
    {"moments": "fp8"},
    {"primary": "fp8"},
    {"primary": "fp8", "moments": "bf16", "gradients": "bf16"},
)
_MODULES: Final = ("core_attn", "mlp", "moe_act", "layernorm", "mla_up_proj")


def _precision(rng: random.Random, traits: RuntimeTraits) -> Any:  # noqa: ANN401 - word or mapping
    precision = rng.choice(_PRECISIONS)
    if traits.keeps and rng.random() < 0.35:
        return {"compute": rng.choice(("bf16", "fp8")), **rng.choice(_KEPT)}
    return precision


def _changed_traits(rng: random.Random, traits: RuntimeTraits) -> Keys:
    chosen: Keys = {}
    if rng.random() < 0.2:
        for name in rng.sample(_FLAGS, 2):
            chosen[name] = not getattr(traits, name)
    if rng.random() < 0.2:
        name = rng.choice(sorted(_COUNTED_TRAITS))
        chosen[name] = rng.choice(_COUNTED_TRAITS[name])
    if rng.random() < 0.15:
        name = rng.choice(sorted(CHOICES))
        chosen[name] = rng.choice(CHOICES[name])
    if traits.offloads_activations and rng.random() < 0.15:
        chosen["offloaded_blocks"] = rng.choice((1, 2, 4))
    return chosen


def _constants(rng: random.Random) -> Keys:
    default = Constants()
    names = [name for name in Constants.__dataclass_fields__ if getattr(default, name)]
    return {name: getattr(default, name) * rng.choice((0.5, 1.2)) for name in rng.sample(names, 2)}


def _recompute(rng: random.Random, traits: RuntimeTraits) -> Any:  # noqa: ANN401 - word or mapping
    if "modules" in traits.recompute and rng.random() < 0.3:
        return {"modules": rng.sample(_MODULES, rng.choice((1, 2, 3)))}
    return "auto"


_OF_AMP: Final[Mapping[str, tuple[Keys, str]]] = {
    "amp-2022": (
        {
            "family": "gpt2",
            "num_layers": 24,
            "hidden_size": 1024,
            "num_heads": 16,
            "sequence_length": 1024,
            "vocab_size": 52256,
        },
        "shipped:amp-2022-gpt2",
    ),
    "amp-2022-transgan": (
        {
            "family": "transgan",
            "hidden_size": 1024,
            "num_heads": 4,
            "depth": [12, 0, 0, 0, 0, 12],
            "bottom_width": 9,
            "latent_size": 512,
            "window_size": 18,
        },
        "shipped:amp-2022-transgan",
    ),
}
"""Published models with measured layer times, by the runtime of the measurements."""


def _measured(rng: random.Random) -> Keys:
    """Return model, cluster and profile with measured layer times, some with token slices."""
    slices = rng.random() < 0.5
    boards = rng.sample(("T4", "V100-16"), 1 if slices else rng.choice((1, 2)))
    model = {"family": "gpt2", "num_layers": 6, "hidden_size": 512, "num_heads": 8}
    model |= {"sequence_length": 512, "vocab_size": 8192}
    nodes = [
        {"count": 1, "slots": 4, "intra_gbit_per_s": 100, "device": board, "inter_gbit_per_s": 10}
        for board in boards
    ]
    path = "../../golden/measured-slices" if slices and boards == ["T4"] else "table"
    return {
        "model": model,
        "cluster": {"nodes": nodes},
        "profile": {"source": "table", "path": path},
        "precision": "fp16",
    }


def _of_amp(rng: random.Random, runtime: str) -> Keys:
    model, path = _OF_AMP[runtime]
    boards = ("V100-16",) if runtime.endswith("transgan") else ("V100-16", "T4")
    nodes = [
        {"count": 2, "device": board, "slots": 4, "intra_gbit_per_s": 170, "inter_gbit_per_s": 10}
        for board in rng.sample(boards, rng.choice((1, len(boards))))
    ]
    return {
        "model": model,
        "cluster": {"nodes": nodes},
        "profile": {"source": "table", "path": path},
        "precision": "fp16",
    }


# ------------------------------------------------------------- rare options, one theme for each


def _boards(device: str, count: int = 2, **keys: object) -> Keys:
    node = {"device": device, "slots": 8, "inter_gbit_per_s": 400, "count": count}
    return {"nodes": [{**node, **keys}]}


def _four_bits(rng: random.Random) -> Keys:
    cluster = _boards(rng.choice(("B200", "GB200", "B300")), slots=4)
    model = rng.choice((_llama, _experts))(rng)
    return {"model": model, "cluster": cluster, "precision": "nvfp4", "traits": {}}


def _fused_experts(rng: random.Random) -> Keys:
    rack = {"rack": {"nodes": 4}} if rng.random() < 0.7 else {}
    cluster = _boards(rng.choice(("GB200", "GB300")), 4, slots=4, **rack)
    return {"model": _experts(rng), "cluster": cluster, "precision": "fp8", "traits": {}}


def _heads_divided(rng: random.Random) -> Keys:
    model = {**_language(rng, "llama"), "num_heads": 16, "num_key_value_heads": 8}
    model["sequence_length"] = 8192
    exchange = rng.choice(("both", "all-to-all"))
    return {
        "model": model,
        "cluster": _boards(rng.choice(("H100", "A100-80"))),
        "precision": "bf16",
        "traits": {"context_parallel": exchange},
    }


def _measured_slices(rng: random.Random) -> Keys:
    board = rng.choice(("T4", "V100-16"))
    model = {"family": "gpt2", "num_layers": 6, "hidden_size": 512, "num_heads": 8}
    return {
        "model": {**model, "sequence_length": 512, "vocab_size": 8192},
        "cluster": _boards(board, 1),
        "profile": {"source": "table", "path": "../../golden/measured-slices"},
        "precision": "fp16",
        "traits": {},
    }


def _measured_blocks(rng: random.Random) -> Keys:
    """Return measured layers whose all-reduces take no time, since tp divides none of them."""
    block = {"name": "body", "repeat": 9, "parameters": 5.0e6, "forward_gflops": 4}
    block |= {"activation_elements": 4.0e6, "boundary_elements": 100_000}
    return {
        "model": {"family": "blocks", "blocks": [block]},
        "cluster": _boards(rng.choice(("T4", "V100-16")), 1),
        "profile": {"source": "table", "path": "table"},
        "precision": "fp16",
        "traits": {},
    }


def _odd_sizes(rng: random.Random) -> Keys:
    model = {"family": "gpt2", "num_layers": 7, "hidden_size": 500, "num_heads": 25}
    vocabulary = rng.choice((50257, 50258, 50260, 50304))
    return {"model": {**model, "sequence_length": 1000, "vocab_size": vocabulary}}


def _offloaded(rng: random.Random) -> Keys:
    cluster = _boards(rng.choice(("H100", "A100-80", "GB200")), 1)
    traits = {"offloaded_blocks": rng.choice((1, 2, 4))}
    return {"cluster": cluster, "precision": "bf16", "traits": traits, "recompute": "none"}


def _many_nodes(rng: random.Random) -> Keys:
    nodes = [{**_node(rng), "slots": 8, "count": rng.choice((4, 8))} for _ in range(2)]
    return {"cluster": {"nodes": nodes}, "global_batch_size": 256}


def _narrow_states(rng: random.Random) -> Keys:
    formats = {"compute": rng.choice(("bf16", "fp8")), **rng.choice(_KEPT)}
    return {"cluster": _boards("H100"), "precision": formats, "traits": {}}


THEMES: Final[tuple[tuple[str, Draw], ...]] = (
    ("megatron-core", _four_bits),
    ("megatron-core", _fused_experts),
    ("megatron-core", _heads_divided),
    ("torch", _heads_divided),
    ("torch", _measured_slices),
    ("deepspeed", _measured_blocks),
    ("torch", _odd_sizes),
    ("megatron-core", _offloaded),
    ("torch", _many_nodes),
    ("megatron-core", _many_nodes),
    ("megatron-core", _narrow_states),
)
"""Runtimes and options that few plain draws have."""

PROGRAMS: Final = tuple(
    (runtime, release)
    for runtime in RUNTIMES
    for release in (None, *tuple(RELEASES.get(runtime, {}))[1:])
)
"""Runtimes with each of their releases; None is the newest."""

NUM_PLAIN: Final = 18 * len(PROGRAMS)
"""Seeds from here on have themes."""

# --------------------------------------------------------------------------------- documents


def drawn_values(rng: random.Random, runtime: str, release: str | None) -> Keys:
    """Draw an experiment file for a runtime; it may be invalid."""
    traits = RUNTIMES[runtime]
    draw = rng.choice(_CLUSTERS)
    keys: Keys = {
        "model": _MODELS[rng.choice(_USUAL_MODELS)](rng),
        "cluster": draw(rng),
        "precision": _precision(rng, traits),
    }
    if runtime in _OF_AMP and rng.random() < 0.6:
        keys = _of_amp(rng, runtime)
    elif rng.random() < 0.08 and runtime not in _OF_AMP:
        keys = _measured(rng)
    options: Keys = {
        "traits": _changed_traits(rng, traits),
        "constants": _constants(rng) if rng.random() < 0.15 else {},
        "release": release,
        "loss_chunks": rng.choice((1, 1, "auto", 4)) if traits.chunks_loss else 1,
        "recompute": _recompute(rng, traits),
    }
    return {
        "name": "drawn",
        **keys,
        "runtime": runtime,
        "optimizer": rng.choice(("adam", "adam", "adamw", "sgd")),
        "global_batch_size": rng.choice(BATCHES),
        **{key: value for key, value in options.items() if value not in ({}, None, 1)},
    }


def drawn_experiment(seed: int) -> tuple[Keys, Experiment]:
    """Draw a valid experiment: seeds take turns over releases of runtimes, the last over themes."""
    runtime, release = PROGRAMS[seed % len(PROGRAMS)]
    theme: Draw = lambda _: {}  # noqa: E731
    if seed >= NUM_PLAIN:
        runtime, theme = THEMES[seed % len(THEMES)]
        release = None
    for attempt in count():
        rng = random.Random(f"{seed} {attempt}")
        values = {**drawn_values(rng, runtime, release), **theme(rng)}
        try:
            return values, experiment_of(values)
        except (InputError, ValueError):
            continue
    raise AssertionError
