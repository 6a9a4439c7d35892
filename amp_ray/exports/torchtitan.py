"""Convert strategies to torchtitan's configuration and back, for torchtitan 0.3.0.

An export is a Python file with a configuration function. `PARALLELISM` and `TRAINING` hold fields
of torchtitan's classes of these names; model and data come from one of torchtitan's configurations.
"""

import json
import re
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pprint import pformat
from typing import Any, Final

from amp_ray.errors import shown
from amp_ray.exports.assumed import assumptions
from amp_ray.exports.chosen import Chosen, Export, Program, check_family, settings_of
from amp_ray.exports.scripts import comment, host_notes, python_comment
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.not_read import NotRead, count_of, not_read, section_of, switched_on
from amp_ray.models.model import Layer, Model, ModelShape
from amp_ray.shipped import Table, Words
from amp_ray.strategies.recompute import PER_OPERATOR, parse_recompute
from amp_ray.strategies.strategy import all_bounds

_DEGREES: Final = {
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
}
_SETTINGS: Final = (
    *(*_DEGREES, "dp", "recompute", "sequence_parallel", "virtual_stages", "etp"),
    *("zero_stage", "shard_ranks", "keeps_weights", "loss_chunks"),
)

_RUNTIME: Final = "fsdp2"  # whose traits are switched on
_OTHER_MODEL: Final = ("llama3", "llama3_debugmodel", "debugmodel")
_SCHEDULE: Final = "1F1B"  # torchtitan's default
_INTERLEAVED: Final = "Interleaved1F1B"
_DEFAULT_CHUNKS: Final = 2  # stages of a rank in its interleaved schedule
_EIGHT_BIT: Final = re.compile(r"float8|\bmx|mxfp8")
_FSDP: Final = 3  # ZeRO stage of FSDP

_PRECISION: Final = {"bf16": "bfloat16", "fp32": "float32"}


class _Table(Table):
    """The file `torchtitan.yaml`, which describes its fields."""

    file = "exports/torchtitan.yaml"
    models: tuple[tuple[tuple[int, int, int, int], str, str, str], ...]
    optional: Words
    read: Words
    as_assumed: dict[str, tuple[int | str, ...]]
    without_effect: Words


_MODULE_FILE: Final = re.compile(r"[A-Za-z_]\w*\.py", re.ASCII)

_MODULES: Final = {"embedding": "tok_embeddings", "norm": "norm", "head": "lm_head"}

_BODY: Final = '''
import dataclasses

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.{module} import config_registry, model_registry

BASE = {base}
"""The configuration that gives data and optimizer."""
MODEL = {model}
"""The model without converters to narrower formats; arguments of `model_registry`."""

PARALLELISM = {parallelism}
TRAINING = {training}
RECOMPUTE = {recompute}
COMPILE = {compile}


def planned():
    """Return the configuration."""
    config = getattr(config_registry, BASE)()
    config.model_spec = model_registry(**MODEL)
    config.parallelism = dataclasses.replace(config.parallelism, **PARALLELISM)
    config.training = dataclasses.replace(config.training, **TRAINING)
    kinds = {{"none": None, "full": FullAC.Config(), "per-operator": SelectiveAC.Config()}}
    config.activation_checkpoint = kinds[RECOMPUTE]
    config.compile = dataclasses.replace(config.compile, **COMPILE)
{mtp}    return config
'''
_MTP: Final = """\
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.deepseek_v3.mtp import MTPLoss
    config.loss = MTPLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
"""


_VERSION: Final = "For torchtitan 0.3.0"
_FILE: Final = "amp_ray_titan.py"  # the usual name; torchtitan imports the file by its stem


def titan_config(chosen: Chosen) -> Export:
    """Return a configuration for ``torchrun -m torchtitan.train --module FILE --config planned``.

    Raises:
        ValueError: If torchtitan cannot express the strategy.
    """
    file = chosen.file if _MODULE_FILE.fullmatch(chosen.file) else _FILE
    body, notes = _configuration(chosen)
    notes = (*notes, *host_notes(chosen, "torchtitan"))
    head = (
        chosen.title,
        f"{_VERSION}, as {file} in the current folder, on every host:",
        f"torchrun ... {' '.join(_words(file))}",
        *notes,
    )
    return Export(files={_FILE: python_comment("\n".join(head)) + body}, notes=notes)


def titan_program(chosen: Chosen) -> Program:
    """Return torchtitan's trainer with the strategy's configuration as a file.

    Raises:
        ValueError: If torchtitan cannot express the strategy.
    """
    body, notes = _configuration(chosen)
    text = python_comment("\n".join((chosen.title, f"{_VERSION}.", *notes))) + body
    return Program(words=_words(_FILE), files={_FILE: text}, head=f"{_VERSION}.", notes=notes)


def _words(file: str) -> tuple[str, ...]:
    """Return the arguments of the interpreter that train by a configuration file."""
    module = file.removesuffix(".py")
    return ("-m", "torchtitan.train", "--module", module, "--config", "planned")


def _check_settings(chosen: Chosen, settings: Mapping[str, Any]) -> None:
    """Raise `ValueError` if torchtitan cannot train so."""
    options = chosen.strategy.stages[0].options
    if options.expert_tp != (1 if options.ep > 1 else options.tp):
        message = f"torchtitan divides experts by tp only without ep, found {options.expert_tp}"
        raise ValueError(f"{message} ranks for each expert, ep {options.ep}")
    if settings["zero_stage"] not in {0, _FSDP}:
        raise ValueError(
            f"torchtitan shards weights too, or nothing: zero_stage 3 or 0, not "
            f"{settings['zero_stage']}; the nearest is 3 with reshard_after_forward: false"
        )
    if settings["precision"] not in _PRECISION:
        raise ValueError(f"torchtitan trains in bf16 or fp32, not {settings['precision']}")
    recompute = settings["recompute"]
    if recompute.layers is not None or recompute.kind == "selective":
        message = f"torchtitan recomputes by operator or wholly, in all blocks alike: {recompute}"
        raise ValueError(message)


def _configuration(chosen: Chosen) -> tuple[str, tuple[str, ...]]:
    """Return the code of a configuration, and notes on it."""
    shape, traits = chosen.experiment.model.shape, chosen.experiment.traits
    figures = (shape.num_layers, shape.hidden_size, shape.vocab_size, shape.num_experts)
    table = _Table.shipped()
    named = next((names for (key, *names) in table.models if key == figures), None)
    check_family(chosen, "torchtitan", ("llama",), table.optional if named else ())
    settings = settings_of(chosen, "torchtitan", _SETTINGS)
    _check_settings(chosen, settings)
    module, base, flavor = named or _OTHER_MODEL
    notes = ["BASE gives data and optimizer"]
    if named is None:
        notes = [f"no configuration of torchtitan has this model: set BASE and MODEL, now {base}"]
    if settings["loss_chunks"] != 1:
        notes.append(f"set {settings['loss_chunks'] or 'several'} chunks of the loss yourself")
    model: dict[str, object] = {"flavor": flavor}
    if shape.num_experts:
        model["moe_comm_backend"] = "deepep" if traits.sends_tokens_once else "standard"
    if shape.mtp_layers:
        model["num_mtp_layers"] = shape.mtp_layers
    is_fused = traits.fused_pointwise and traits.name == _RUNTIME
    compiled = {"enable": is_fused or traits.overlaps_gathers}
    compiled["enable_async_tensor_parallel"] = traits.overlaps_gathers
    code = _BODY.format(
        module=module,
        base=json.dumps(base),
        model=model,
        parallelism=pformat(_parallelism(chosen, settings), sort_dicts=False, width=96),
        training=pformat(_training(settings), sort_dicts=False),
        recompute=json.dumps(settings["recompute"].kind),
        compile=compiled,
        mtp=_MTP if shape.mtp_layers else "",
    )
    words = ("COMPILE", "moe_comm_backend", "mixed_precision_reduce", "disable_cuda_graphs")
    return comment("\n".join(assumptions(chosen, "torchtitan", words))) + code, tuple(notes)


def _parallelism(chosen: Chosen, settings: Mapping[str, Any]) -> dict[str, Any]:
    shards = chosen.strategy.zero.shards(settings["dp"])
    values: dict[str, Any] = {
        **{theirs: settings.get(ours, 1) for ours, theirs in _DEGREES.items()},
        "data_parallel_replicate_degree": settings["dp"] // shards,
        "data_parallel_shard_degree": shards,
        "enable_sequence_parallel": bool(settings.get("sequence_parallel", False)),
    }
    if shards > 1:
        values["fsdp_reshard_after_forward"] = "never" if settings["keeps_weights"] else "always"
    if settings["pp"] > 1:
        is_chunked = settings["virtual_stages"] > 1
        values["pipeline_parallel_schedule"] = _INTERLEAVED if is_chunked else _SCHEDULE
        values["pipeline_parallel_microbatch_size"] = settings["micro_batch_size"]
        layers = chosen.experiment.model.layers
        bounds = all_bounds(chosen.experiment.model, chosen.strategy)
        values["module_fqns_per_model_part"] = [
            _modules(layers[first:end], sum(layer.kind == "block" for layer in layers[:first]))
            for first, end in pairwise(bounds)
        ]
    return values


def _modules(layers: tuple[Layer, ...], number: int) -> list[str]:
    """Return the names of a stage's modules; ``number`` is the index of its first block."""
    names = []
    for layer in layers:
        if layer.kind == "block":
            names.append(f"layers.{number}")
            number += 1
        elif layer.kind in _MODULES:
            names.append(_MODULES[layer.kind])
    return names


def _training(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TrainingConfig``; a pipeline divides a local batch itself."""
    passes = settings["num_micro_batches"] if settings["pp"] > 1 else 1
    return {
        "local_batch_size": settings["micro_batch_size"] * passes,
        "global_batch_size": settings["global_batch_size"],
        "seq_len": settings["sequence_length"],
        "mixed_precision_param": _PRECISION[settings["precision"]],
        "mixed_precision_reduce": "float32",
        "disable_cuda_graphs": True,  # they work without pipelines and waits for experts only
    }


def read_settings(settings: Mapping[str, Any], experiment: Experiment) -> dict[str, Any]:
    """Return torchtitan's settings as keys of a STRATEGY and of the experiment.

    Args:
        settings: The sections ``parallelism``, ``training`` and ``recompute``, by name.
        experiment: Experiment with the model, whose blocks are divided.

    Raises:
        ValueError: If torchtitan does not have a value, or a key of the STRATEGY does not follow.
    """
    training = section_of(settings, "training")
    old = {**training, **section_of(settings, "experimental")}  # until 2025
    parallelism = {**old, **section_of(settings, "parallelism")}
    _check_job(settings, experiment)
    record: dict[str, Any] = {
        ours: count_of(parallelism, theirs, 1) for ours, theirs in _DEGREES.items()
    }
    if record["ep"] > 1 and record["tp"] > 1:  # it divides experts by tp only without ep
        record["etp"] = 1
    record["zero_stage"] = 0
    if parallelism.get("data_parallel_shard_degree", -1) != 1:
        reshard = parallelism.get("fsdp_reshard_after_forward", "default")
        record["zero_stage"] = _FSDP
        record["reshard_after_forward"] = reshard == "always" or (
            reshard == "default" and record["pp"] == 1
        )
        record["shard_groups"] = count_of(parallelism, "data_parallel_replicate_degree", 1)
    if "global_batch_size" in training:
        record["global_batch_size"] = count_of(training, "global_batch_size", 1)
    size = "batch_size" if "batch_size" in training else "local_batch_size"
    record["micro_batch_size"] = count_of(training, size, 8)
    if record["pp"] > 1:
        record["micro_batch_size"] = count_of(parallelism, "pipeline_parallel_microbatch_size", 1)
    if record["tp"] > 1 and parallelism.get("enable_sequence_parallel", True):
        record["sequence_parallel"] = True
    record |= _recompute(settings, len(experiment.model.indices("block")) // record["pp"])
    schedule = parallelism.get("pipeline_parallel_schedule", _SCHEDULE)
    parts = parallelism.get("module_fqns_per_model_part")
    if parts and record["pp"] > 1:
        record["bounds"] = _bounds(parts, experiment.model)
        record["virtual_stages"] = max(1, len(record["bounds"]) // record["pp"])
    elif record["pp"] == 1 or schedule in {_SCHEDULE, _INTERLEAVED}:
        if record["pp"] > 1 and schedule == _INTERLEAVED:
            record["virtual_stages"] = _DEFAULT_CHUNKS
        stages = record["pp"] * record.get("virtual_stages", 1)
        record["bounds"] = _default_bounds(parallelism, stages, experiment.model)
    return record


def _check_job(settings: Mapping[str, Any], experiment: Experiment) -> None:
    """Refuse settings of another model, precision or sequence length than the experiment's.

    Raises:
        ValueError: If one of them differs.
    """
    shape, training = experiment.model.shape, section_of(settings, "training")
    length = count_of(training, "seq_len", shape.sequence_length or 1)
    if length != (shape.sequence_length or length):
        raise ValueError(
            f"seq_len {length}: the experiment's model has sequence_length "
            f"{shape.sequence_length}; add --set model.sequence_length={length}"
        )
    model = section_of(settings, "model")
    check_configuration(f"{model.get('name')}_{model.get('flavor')}", "flavor", shape)
    check_configuration(settings.get("config"), "config", shape)
    float8 = section_of(settings, "float8")
    is_8_bit = float8.get("enable_float8_linear") or float8.get("enable_fp8_linear")
    if (is_8_bit or _EIGHT_BIT.search(str(model.get("converters")))) and (
        experiment.precision != "fp8"
    ):
        advice = (
            "add --set precision=fp8"
            if experiment.traits.fp8
            else f"which runtime {experiment.traits.name} is not planned in: take it out of the "
            f"file to see the time in {experiment.precision}"
        )
        raise ValueError(f"converters of 8 bits (float8, mx) mean precision fp8, {advice}")
    names = {theirs: ours for ours, theirs in _PRECISION.items()}
    precision = names.get(str(training.get("mixed_precision_param")))
    if precision and experiment.precision in _PRECISION and precision != experiment.precision:
        raise ValueError(
            f"mixed_precision_param means precision {precision}; the experiment has "
            f"{experiment.precision}: add --set precision={precision}"
        )


def check_configuration(name: object, key: str, shape: ModelShape) -> None:
    """Refuse the name of a configuration of torchtitan that is known to train another model.

    Args:
        name: Module and flavor, such as ``llama3_8b``.
        key: The key that names it, for the message.
        shape: The experiment's model.

    Raises:
        ValueError: If the model of that configuration has other sizes than the experiment's.
    """

    def plain(text: str) -> str:
        return re.sub(r"[-.]", "_", text.lower())

    for (layers, width, *_), kind, _, size in _Table.shipped().models:
        actual = shape.num_layers, shape.hidden_size
        if plain(f"{kind}_{size}") == plain(str(name)) and (layers, width) != actual:
            raise ValueError(
                f"{key}: {shown(name)} has {layers} layers of width {width}; the experiment's "
                f"model has {shape.num_layers} of {shape.hidden_size}: compare it with an "
                "experiment of its own model"
            )


def key_is_without_effect(key: str) -> bool:
    """Return whether no plan depends on a key, such as ``checkpoint.interval``."""
    return not not_read([key], "", known=_Table.shipped().without_effect)


def notes_of_settings(settings: Mapping[str, Any], file: str) -> tuple[NotRead, ...]:
    """Return what to say about keys that are not read; those that are off are not mentioned."""
    parallelism, table = section_of(settings, "parallelism"), _Table.shipped()
    assumed = [
        f"parallelism.{key}"
        for key, values in table.as_assumed.items()
        if parallelism.get(key) in values
    ]
    read = (*table.without_effect, *table.read, *assumed)
    return not_read(switched_on(settings), file, known=read)


def _every(recompute: Mapping[str, Any]) -> int:
    """Return n if selective recompute is that of every n-th block, else 0."""
    option = str(recompute.get("selective_ac_option", "op"))
    return int(option) if re.fullmatch("[1-9][0-9]{0,3}", option) else 0


def _default_bounds(parallelism: Mapping[str, Any], pp: int, model: Model) -> list[int]:
    """Return the cuts that torchtitan chooses where no list of modules does.

    Stages have equal shares of the blocks, the first ones one more; embedding and head count for
    some (``generate_llm_fqn_per_model_part``, torchtitan/distributed/pipeline_parallel.py).
    """
    keys = [f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    first, last = (count_of(parallelism, key, 1, low=0) for key in keys)
    blocks = model.indices("block")
    share, rest = divmod(len(blocks) + first + last, pp)
    if share <= max(first, last) and pp > 1:
        message = f"{_DEGREES['pp']}: {pp} stages for {len(blocks)} blocks: expected fewer stages"
        raise ValueError(message)
    ends = accumulate(share + (stage < rest) for stage in range(pp - 1))
    return [0, *(blocks[end - first] for end in ends), model.num_layers]


def _recompute(settings: Mapping[str, Any], num_blocks: int) -> dict[str, Any]:
    """Return the key ``recompute`` of stages with a number of blocks, if the settings have it."""
    checkpoint = section_of(settings, "activation_checkpoint")
    key, value = "mode", checkpoint.get("mode")
    if value is None:
        key, value = "recompute", settings.get("recompute")
    if value is None:
        return {}
    try:
        recompute = parse_recompute(value if isinstance(value, str) else shown(value))
    except ValueError:
        message = f"{key}: found {shown(value)}, which is not planned; expected none, selective or"
        raise ValueError(f"{message} full") from None
    every = _every(checkpoint)
    if recompute.kind == "selective" and every:
        layers = num_blocks // every
        return {"recompute": {"kind": "full", "layers": layers} if layers else "none"}
    if recompute.kind == "selective":
        return {"recompute": PER_OPERATOR.kind}
    return {"recompute": recompute.to_json()}


def _bounds(parts: object, model: Model) -> list[int]:
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        message = f"module_fqns_per_model_part: found {shown(parts)}; expected a list of lists"
        raise ValueError(message)
    numbers: dict[str, int] = {}
    block = 0
    for index, layer in enumerate(model.layers):
        if layer.kind == "block":
            numbers[f"layers.{block}"] = index
            block += 1
        elif layer.kind in _MODULES:
            numbers[_MODULES[layer.kind]] = index
    names = list(numbers)  # a list: a name in a file may be a mapping, which has no hash
    unknown = [shown(name) for part in parts for name in part if name not in names]
    if unknown or not all(parts):
        raise ValueError(
            f"module_fqns_per_model_part: found {(unknown or ['an empty stage'])[0]}; the modules "
            f"are {', '.join(names[:3])}, ..., {names[-1]}"
        )
    return [0, *(numbers[part[0]] for part in parts[1:]), model.num_layers]
