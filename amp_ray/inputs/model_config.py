"""A Hugging Face ``config.json``: its figures under our names, by records of `architectures.yaml`.

A key is read, or refused because it makes another architecture, or named as not read.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import partial
from itertools import takewhile
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, ConfigDict
from pydantic import dataclasses as checked

from amp_ray.errors import LONGEST_VALUE, InputError, Mistakes, Where, printable, shown
from amp_ray.inputs.not_read import not_read
from amp_ray.inputs.strict_text import parse_json
from amp_ray.models.model import MOST_LAYERS
from amp_ray.shipped import Table, with_inherited

_MERGED: Final = ("keys", "fixed", "defaults", "expects")
_FLAGS: Final = ("tied_embedding", "attention_bias", "query_key_norm")
_MAY_BE_ZERO: Final = ("first_dense_layers", "mtp_layers", "query_rank", "shared_feed_forward_size")
_LARGEST_FIGURE: Final = 10**9
_MOST_PARTS: Final = 6  # of another architecture that a message lists
_LIST: Final = "docs/experiment-file.md lists the types that are read"
_ADVICE: Final = "a model of other blocks can be described by model.blocks"
_LANGUAGE_PARTS: Final = ("text_config", "llm_config", "language_config")
_TOWERS: Final = re.compile("vision|visual|audio|speech|image")
_OFF: Final[tuple[object, ...]] = (None, False, 0, "", [], {})
_READ_BELOW: Final = ("head_dim", "sliding_window", "layer_types")


@checked.dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Architecture:
    """A record of `architectures.yaml`, which describes its fields."""

    family: str = "llama"
    keys: dict[str, list[str]] = field(default_factory=dict)
    fixed: dict[str, bool] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    expects: dict[str, list[Any] | None] = field(default_factory=dict)
    windows: list[bool] = field(default_factory=list)
    full_types: list[str] = field(default_factory=list)
    vectors: dict[str, list[str]] = field(default_factory=dict)
    not_counted: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    def reads(self, key: str) -> bool:
        """Return whether a key of a configuration is read here."""
        return key in _READ_BELOW or any(key in names for names in self.keys.values())


_Names = Annotated[re.Pattern[str], BeforeValidator(lambda names: "|".join(map(translate, names)))]
_Records = Annotated[
    dict[str, Architecture], BeforeValidator(partial(with_inherited, merged=_MERGED))
]


class Types(Table):
    """The file `architectures.yaml`."""

    file = "inputs/architectures.yaml"
    types: _Records
    other_parts: _Names
    no_figure: _Names


def read_config(text: str, file: str) -> tuple[dict[str, Any], Architecture]:
    """Read the figures of a configuration, under our names, and how its type is read.

    Of a model with several parts the language model is read, and the others are named.

    Raises:
        InputError: If the architecture is unknown, a figure has the wrong type, or a key turns the
            model into another architecture.
    """
    whole = parse_json(text, file=file, finite=False)
    part = next((key for key in _LANGUAGE_PARTS if isinstance(whole.get(key), dict)), None)
    language = whole if part is None else _shared_keys(whole) | whole[part]
    config = _Config.of(language, Where(file=file, key=part))
    unread = config.unread(language)
    if part is not None:
        outer = {key: value for key, value in whole.items() if key != part}
        unread += replace(config, place=Where(file=file)).unread(outer)
    notes = not_read(unread, file)
    towers = (key for key in whole if _is_tower(key, whole[key]))
    remarks = {
        "name": config.kind,
        "not_counted": (
            *config.architecture.not_counted,
            *(printable(f"the encoder of {key}, beside the language model") for key in towers),
        ),
        "differs": tuple(config.architecture.differs),
        "not_read": tuple(map(str, notes)),
    }
    return config.figures() | remarks, config.architecture


def _shared_keys(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a model with several parts that its language model may leave out."""
    return {key: whole.get(key) for key in ("model_type", "tie_word_embeddings")}


def _is_tower(key: str, value: object) -> bool:
    return isinstance(value, dict) and _TOWERS.search(key) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    values: Mapping[str, Any]  # with the defaults of its type, without nulls
    kind: str
    architecture: Architecture
    place: Where  # its file, and its key there if it is a part of a larger model

    @classmethod
    def of(cls, values: Mapping[str, Any], place: Where) -> Self:
        """Find the record of a configuration; refuse an unknown type."""
        kind, table = values.get("model_type"), Types.shipped()
        if not isinstance(kind, str) or kind not in table.types:
            is_part = table.other_parts.match
            parts = [
                key for key, value in values.items() if is_part(key) and not _is_off(key, value)
            ]
            having = f" with {', '.join(parts[:_MOST_PARTS])}" if parts else ""
            near = difflib.get_close_matches(str(kind)[:LONGEST_VALUE], table.types, cutoff=0.75)
            similar = f"similar names that are read: {', '.join(near)}; " if near else ""
            message = f"found {shown(kind)}{having}; {similar}{_LIST}; {_ADVICE}"
            raise InputError(message, where=_within(place, "model_type"))
        architecture = table.types[kind]
        stated = {key: value for key, value in values.items() if value is not None}
        values = {k: v for k, v in architecture.defaults.items() if v is not None} | stated
        return cls(values=values, kind=kind, architecture=architecture, place=place)

    def refusal(self, key: str, value: object, expected: str) -> InputError:
        message = f"found {shown(value)}; expected {expected}"
        return InputError(message, where=_within(self.place, key))

    def unread(self, values: Mapping[str, Any]) -> list[str]:
        """Return the keys that are not read; refuse those of another architecture."""
        mistakes, unread = Mistakes(), []
        for key, value in values.items():
            allowed = self._allowed(key, value)
            if allowed is None:
                unread.append(key)
            elif not (_is_off(key, value) or value in allowed or _are_all(value, allowed)):
                of_type = f"model_type {self.kind!r} has no such part"
                if allowed:
                    of_type = f"expected {' or '.join(map(shown, allowed))} for {self.kind}"
                message = f"found {shown(value)}; {of_type}; {_ADVICE}"
                mistakes.add(InputError(message, where=_within(self.place, key)))
        mistakes.check()
        return unread

    def _allowed(self, key: str, value: object) -> Sequence[Any] | None:
        """Return the values that a key may have; None if it is not read."""
        expected = self.architecture.expects.get(key)
        if expected is not None:
            return expected
        table = Types.shipped()
        is_read = key in self.architecture.expects or self.architecture.reads(key)
        if is_read or _is_off(key, value) or _is_tower(key, value) or table.no_figure.match(key):
            return [value]
        return [] if table.other_parts.match(key) else None

    def figures(self) -> dict[str, Any]:
        """Return the figures; a ``InputError`` names each wrong one."""
        architecture, mistakes = self.architecture, Mistakes()
        figures: dict[str, Any] = {"family": architecture.family, **architecture.fixed}
        for figure, names in architecture.keys.items():
            key = next((name for name in names if name in self.values), None)
            if key is not None and (self.values[key] or figure not in _MAY_BE_ZERO):
                with mistakes.collect():
                    figures[figure] = self._figure(key, figure)
        mistakes.check()
        for family, add in (("t5", self._add_t5), ("vit", self._add_vit), ("llama", self._add)):
            if architecture.family == family:
                add(figures)
        return figures

    def _figure(self, key: str, figure: str = "") -> Any:  # noqa: ANN401 - a flag or a count
        value = self.values[key]
        if figure in _FLAGS:
            fits, expected = isinstance(value, bool), "true or false"
        else:
            is_depth = figure in {"num_layers", "num_decoder_layers"}
            most = MOST_LAYERS if is_depth else _LARGEST_FIGURE
            fits = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
            expected = f"an integer from 1 to {most:,}"
        if not fits:
            raise self.refusal(key, value, expected)
        return value

    def _add_t5(self, figures: dict[str, Any]) -> None:
        gates = str(self.values.get("feed_forward_proj"))
        figures["gated_feed_forward"] = gates.startswith("gated-")

    def _add_vit(self, figures: dict[str, Any]) -> None:
        names = self.values.get("id2label")
        if isinstance(names, dict) and names:
            figures.setdefault("num_classes", len(names))

    def _add(self, figures: dict[str, Any]) -> None:
        """Add the figures that follow from several keys of a llama-like decoder."""
        if "head_dim" in self.values and "key_value_rank" not in figures:
            size = self._figure("head_dim")
            if size * figures.get("num_heads", 0) != figures.get("hidden_size", 0):
                figures["head_size"] = size
        windows = self._windows(figures.get("num_layers", 0))
        if any(windows):
            figures["attention_windows"] = list(windows)
        if self.values.get("n_shared_experts") and "expert_feed_forward_size" in figures:
            shared = self._figure("n_shared_experts") * figures["expert_feed_forward_size"]
            figures["shared_feed_forward_size"] = shared
        experts, num_layers = self.values.get("moe_layers"), figures.get("num_layers", 0)
        if experts and experts != [*range(num_layers)]:
            raise self.refusal("moe_layers", experts, f"all blocks, 0 to {num_layers - 1}")
        if "mlp_layer_types" in self.values:
            figures["first_dense_layers"] = self._num_dense(figures.get("num_layers", 0))
        flags = self.architecture.vectors
        on = [name for name, keys in flags.items() if all(self.values.get(key) for key in keys)]
        figures["extra_parameters"] = sum(self._num_vector(name, figures) for name in on)

    def _num_dense(self, num_layers: int) -> int:
        """Return the number of blocks without experts, which are the first ones."""
        types = self.values["mlp_layer_types"]
        dense = len(list(takewhile("dense".__eq__, types))) if isinstance(types, list) else 0
        if types != ["dense"] * dense + ["sparse"] * (num_layers - dense):
            raise self.refusal("mlp_layer_types", types, "dense blocks first, then sparse ones")
        return dense

    def _num_vector(self, name: str, figures: Mapping[str, Any]) -> int:
        """Return the parameters of a block that `vectors` names; 0 if a figure is missing."""
        heads = figures.get("num_heads", 0)
        hidden = figures.get("hidden_size", 0)
        if name == "query_key_norm":
            size = figures.get("head_size") or hidden // (heads or 1)
            return int(size * (heads + figures.get("num_key_value_heads", heads)))
        if name == "indexer":  # queries, one key, its norm, and weights of heads
            count, size = self._figure("index_n_heads"), self._figure("index_head_dim")
            queries = figures.get("query_rank", 0) * count * size
            return int(queries + hidden * (size + count) + 2 * size)
        experts = figures.get("num_experts", 0)
        inner = 2 * figures.get("expert_feed_forward_size", 0)  # both halves of a gated product
        counts = {
            "sinks": heads,
            "router_bias": experts,
            "expert_bias": experts * (inner + hidden),
        }
        return int(counts.get(name, hidden))

    def _windows(self, num_layers: int) -> tuple[int, ...]:
        """Return the window of each block, or of a period of blocks; 0 for all tokens."""
        slides = self._sliding(num_layers)
        if not any(slides) or self.values.get("use_sliding_window") is False:
            return ()
        if not self.values.get("sliding_window"):
            if "layer_types" in self.values:
                where = _within(self.place, "sliding_window")
                raise InputError("key is missing; layer_types has windows", where=where)
            return ()
        size = self._figure("sliding_window")
        return (size,) if all(slides) else tuple(size if slide else 0 for slide in slides)

    def _sliding(self, num_layers: int) -> tuple[bool, ...]:
        """Return which blocks attend within a window, over a period or all blocks."""
        types, pattern = self.values.get("layer_types"), self.values.get("sliding_window_pattern")
        if types:
            allowed = ["full_attention", "sliding_attention", *self.architecture.full_types]
            if not isinstance(types, list) or any(kind not in allowed for kind in types):
                expected = f"a list of {' or '.join(allowed)}; {_ADVICE}"
                raise self.refusal("layer_types", types, expected)
            if num_layers not in (0, len(types)):
                expected = f"{num_layers} entries, as num_hidden_layers, not {len(types)}"
                raise self.refusal("layer_types", types, expected)
            return tuple(kind == "sliding_attention" for kind in types)
        if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
            return tuple(letter == "L" for letter in pattern)
        if pattern:
            period = self._figure("sliding_window_pattern", "num_layers")
            return (*(True,) * (period - 1), False)
        if self.values.get("use_sliding_window"):
            first = self.values.get("max_window_layers", num_layers)
            if not isinstance(first, int):
                raise self.refusal("max_window_layers", first, "an integer")
            return tuple(index >= first for index in range(num_layers))
        return tuple(self.architecture.windows)


def _are_all(value: object, allowed: Sequence[Any]) -> bool:
    return isinstance(value, list) and all(entry in allowed for entry in value)


def _is_off(key: str, value: object) -> bool:
    return value in _OFF or (value == 1 and key.endswith("_experts"))


def _within(place: Where, key: str) -> Where:
    return place.at(key if place.key is None else f"{place.key}.{key}")
