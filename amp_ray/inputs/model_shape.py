"""A model's figures, from its keys in an experiment file and from a ``config.json``."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, Field, create_model

from amp_ray.errors import InputError, Mistakes, Where
from amp_ray.inputs.model_config import Architecture, read_config
from amp_ray.inputs.section import Count, Flag, Index, Name, Positive, Section, Text, Title
from amp_ray.models.model import FOR_PEOPLE, MOST_LAYERS, BlockFigures, LayerList, ModelShape
from amp_ray.shipped import Table, Words
from amp_ray.units import GIGA, counted

_Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False, strict=True)]
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS, strict=True)]


class BlockSection(Section):
    """One entry of ``model.blocks``: ``repeat`` equal blocks; figures are per sample."""

    name: Name
    """Name in tables and messages."""
    repeat: Layers = 1
    """Number of equal blocks in a row."""
    parameters: _Amount
    """Number of parameters of one block."""
    forward_gflops: _Amount
    """10^9 floating-point operations of the forward pass, two per multiply-add; the backward pass
    has twice as many."""
    activation_elements: _Amount
    """Elements kept for the backward pass; 2 bytes each at fp16 and bf16, 4 at fp32."""
    boundary_elements: Positive
    """Elements sent to the next block."""
    sharded: Flag = False
    """Whether tensor parallelism divides parameters, work and activations, with an all-reduce of
    `boundary_elements` in each pass; otherwise every rank does all the work."""


class ModelKeys(Section):
    """``model``: a family with its figures, or a Hugging Face ``config.json``."""

    name: Title | None = None
    """Name in tables and reports, such as `Qwen/Qwen3-8B`. Default: `model_type` of `config`, else
    the family."""
    config: Text | None = None
    """A Hugging Face `config.json`. Families: gpt2, llama, t5, vit."""
    layer_list: LayerList | None = None
    """List of layers in which `bounds` count. Families: gpt2, transgan; others
    `runtime` only.
    Default: the runtime's."""


_FIGURES: Final[Mapping[str, Any]] = {
    "family": Text,
    "num_layers": Layers,
    "depth": Annotated[list[Index], Field(min_length=1, max_length=16)],
    "num_decoder_layers": Layers,
    "blocks": Annotated[list[BlockSection], Field(min_length=1, max_length=MOST_LAYERS)],
    "first_dense_layers": Index,
    "mtp_layers": Index,
    "extra_parameters": Index,
    "attention_windows": Annotated[list[Index], Field(min_length=1)],
}
"""Types of the figures that are neither a count of at least 1 nor a flag."""

if TYPE_CHECKING:

    class ModelSection(ModelKeys):
        """The keys of `ModelKeys`, and the figures of `ModelShape`."""

        def __init__(self, **figures: object) -> None: ...

else:
    ModelSection = create_model(
        "ModelSection",
        __base__=ModelKeys,
        **{
            figure.name: (
                _FIGURES.get(figure.name, Flag if figure.type is bool else Count) | None,
                None,
            )
            for figure in fields(ModelShape)
            if figure.name not in FOR_PEOPLE
        },
    )


_EXPERTS: Final = ("num_experts", "experts_per_token", "expert_feed_forward_size")
_LATENT: Final = ("key_value_rank", "head_size", "rotary_head_size", "value_head_size")
_OF_EXPERTS: Final = ("shared_feed_forward_size", "first_dense_layers")
_ANY_FAMILY: Final = ("config", "family", "layer_list", *FOR_PEOPLE)

_GATED_MULTIPLE: Final = 256
"""Llama rounds its feed-forward width, 8/3 of the hidden size, up to a multiple of this."""


class _Family(BaseModel, extra="forbid", frozen=True):
    needed: Words
    optional: Words
    defaults: dict[str, Any] = {}


class Families(Table):
    """The file `families.yaml`, which describes its fields."""

    file = "inputs/families.yaml"
    families: dict[str, _Family]


def model_shape(section: ModelSection, config_text: str | None = None) -> ModelShape:
    """Return the figures of a model; keys of the section have priority over the configuration.

    A ``ValueError`` names a missing figure or one that the family does not have.
    """
    figures = {key: value for key, value in section.model_dump().items() if value is not None}
    if config_text is not None:
        file = str(section.config)
        stated, (of_config, architecture) = figures, read_config(config_text, file)
        figures = of_config | stated
        _check_complete(architecture, file, figures)
        length = figures.get("sequence_length")
        if length and "sequence_length" not in stated:
            most = f"sequence_length {length}, the most of the model's configuration"
            figures["assumed"] = (f"{most}: set model.sequence_length to that of your training",)
    family: str | None = figures.get("family")
    families = Families.shipped().families
    if family is None:
        *names, last = families
        raise ValueError(
            f"model needs 'family' ({', '.join(names)} or {last}) "
            "or 'config' (a Hugging Face config.json)"
        )
    _check_figures(figures, family)
    named = {key: value for key, value in figures.items() if key not in {"config", "layer_list"}}
    figures = {**families[family].defaults, **named}
    if "num_heads" in figures:
        figures.setdefault("num_key_value_heads", figures["num_heads"])
        figures.setdefault("feed_forward_size", _feed_forward(family, figures["hidden_size"]))
    if family in {"gpt2", "llama"}:
        _complete_experts(figures)
    elif family in _COMPLETE:
        _COMPLETE[family](figures)
    lists = {key: tuple(value) for key, value in figures.items() if isinstance(value, list)}
    return ModelShape(**figures | lists)


def _check_complete(architecture: Architecture, file: str, figures: Mapping[str, Any]) -> None:
    """Refuse a configuration that lacks a figure which the file of the experiment does not set."""
    keys = architecture.keys
    mistakes = Mistakes()
    for figure in Families.shipped().families[figures["family"]].needed:
        if figure not in figures and figure in keys:
            with mistakes.collect():
                where = Where(file=file, key=" or ".join(keys[figure]))
                raise InputError(f"key is missing; add it, or set model.{figure}", where=where)
    mistakes.check()


def _complete_experts(figures: dict[str, Any]) -> None:
    """Add the default width of experts; refuse figures that do not fit."""
    names = (*_EXPERTS, *_OF_EXPERTS, *_LATENT, "query_rank")
    present = [key for key in names if figures.get(key)]
    if "num_experts" in present and "expert_feed_forward_size" not in present:
        figures["expert_feed_forward_size"] = figures["feed_forward_size"]
        present.append("expert_feed_forward_size")
    for first, *needed in (_EXPERTS, _LATENT):
        lacking = [key for key in needed if key not in present]
        if first in present and lacking:
            raise ValueError(
                f"{first} {figures[first]} needs {', '.join(needed)}; missing: {', '.join(lacking)}"
            )
    of_experts = (*_EXPERTS, *_OF_EXPERTS)
    alone = [
        key
        for key in present
        if (key in of_experts and "num_experts" not in present)
        or (key in (*_LATENT[2:], "query_rank") and "key_value_rank" not in present)
    ]
    if alone:
        needed_key = "num_experts" if alone[0] in of_experts else "key_value_rank"
        raise ValueError(f"{alone[0]} {figures[alone[0]]} needs {needed_key}, which is missing")
    if figures.get("experts_per_token", 0) > figures.get("num_experts", 0):
        raise ValueError(
            f"experts_per_token is {figures['experts_per_token']}; expected at most num_experts "
            f"{figures['num_experts']}"
        )


def _complete_vit(figures: dict[str, Any]) -> None:
    """Add the tokens of a sample: one per patch, and one for the class."""
    image, patch = figures["image_size"], figures["patch_size"]
    if image % patch:
        raise ValueError(f"image_size {image} is not a multiple of patch_size {patch}")
    figures["sequence_length"] = (image // patch) ** 2 + 1


def _complete_transgan(figures: dict[str, Any]) -> None:
    """Add the total number of blocks of a generator, and the tokens of its lowest level."""
    num_layers = sum(figures["depth"])
    if num_layers > MOST_LAYERS:
        raise ValueError(f"depth adds up to {num_layers}; expected at most {MOST_LAYERS} blocks")
    figures["num_layers"], figures["sequence_length"] = num_layers, figures["bottom_width"] ** 2


def _complete_t5(figures: dict[str, Any]) -> None:
    """Set the decoder's length to the encoder's, unless the file sets it."""
    figures.setdefault("num_decoder_layers", figures["num_layers"])
    figures.setdefault("decoder_sequence_length", figures["sequence_length"])


def _complete_blocks(figures: dict[str, Any]) -> None:
    """Convert the entries of a list of blocks, and count the blocks."""
    figures["blocks"] = [_block(**block) for block in figures["blocks"]]
    figures["num_layers"] = sum(block.repeat for block in figures["blocks"])
    if figures["num_layers"] > MOST_LAYERS:
        number = counted(figures["num_layers"], "block")
        raise ValueError(f"blocks are {number}; expected at most {MOST_LAYERS}")


def _block(*, forward_gflops: float, parameters: float, **figures: Any) -> BlockFigures:  # noqa: ANN401 - by field
    return BlockFigures(
        forward_flops=forward_gflops * GIGA, parameters=round(parameters), **figures
    )


_COMPLETE: Final[Mapping[str, Callable[[dict[str, Any]], None]]] = {
    "transgan": _complete_transgan,
    "t5": _complete_t5,
    "vit": _complete_vit,
    "blocks": _complete_blocks,
}
"""How to complete the figures of a file, by family."""


def _check_figures(figures: Mapping[str, Any], family: str) -> None:
    """Refuse an unknown family, and figures that it lacks or does not have."""
    families = Families.shipped().families
    if family not in families:
        raise ValueError(f"family {family!r} is unknown; known: {', '.join(families)}")
    needed, optional = families[family].needed, families[family].optional
    missing = [key for key in needed if key not in figures]
    if missing:
        message = f"family {family!r} needs {', '.join(needed)}; missing: {', '.join(missing)}"
        raise ValueError(message)
    useless = [key for key in figures if key not in needed + optional + _ANY_FAMILY]
    if useless:
        raise ValueError(
            f"family {family!r} has no {', '.join(useless)}; its figures are "
            f"{', '.join(needed + optional)}"
        )


def _feed_forward(family: str, hidden: int) -> int:
    """Return the family's feed-forward width for files that do not set it."""
    if family == "llama":
        return -(-8 * hidden // 3 // _GATED_MULTIPLE) * _GATED_MULTIPLE
    return 4 * hidden
