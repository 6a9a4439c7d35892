"""Compare the flags of Megatron-LM with an experiment, by the table of `megatron_keys.yaml`."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from amp_ray.errors import shown
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.not_read import NotRead, not_read
from amp_ray.models.model import ModelShape
from amp_ray.runtimes.traits import OPTIMIZERS, RECOMPUTED
from amp_ray.shipped import Table, Words
from amp_ray.trials.own_program.megatron_flags import HEAD_RANKS

_MOST_PADDING: Final = 2**12  # rows of a vocabulary: more than 128 x tp 16, and special tokens
_ON: Final = ""
_FUSED_LOSS: Final = ("cross-entropy-loss-fusion", "cross-entropy-fusion-impl")


class FlagTable(Table):
    """The file `megatron_keys.yaml`, which describes its fields."""

    file = "exports/megatron_keys.yaml"
    aliases: dict[str, str]
    read: Words
    sizes: dict[str, str]
    latent: Words
    traits: dict[str, dict[str, tuple[str, bool | str]]]
    counts: dict[str, str]
    of_models: dict[str, str]
    needs: dict[str, str]
    as_assumed: dict[str, Words]
    without_effect: Words

    def is_read(self, flag: str) -> bool:
        """Return whether a flag's value is read, or compared with the experiment."""
        return flag in self.read or self._is_compared(flag)

    def is_without_effect(self, flag: str) -> bool:
        """Return whether no plan depends on a flag."""
        return not (self._is_compared(flag) or not_read([flag], "", known=self.without_effect))

    def _is_compared(self, flag: str) -> bool:
        return any(flag in part for part in (self.sizes, self.traits, self.counts, self.as_assumed))


def check_model(flags: Mapping[str, str], shape: ModelShape) -> None:
    """Refuse flags of another model than the experiment's.

    Raises:
        ValueError: If a size or a switch of the architecture is not that of the model.
    """
    table = FlagTable.shipped()
    for flag, figure in table.sizes.items():
        value = flags.get(flag)
        is_other = (flag in table.latent) != bool(shape.key_value_rank)
        if value is None or (is_other and flag in {*table.latent, "kv-channels"}):
            continue
        if flag == "qk-layernorm" and shape.key_value_rank:  # norms of latents, which it has
            continue
        expected, actual = _expected(figure, shape), _actual(flag, value)
        if flag == "multi-latent-attention":
            expected = bool(expected)
        if figure == "vocab_size" and isinstance(actual, int):
            is_padding = abs(actual - shape.vocab_size) < _MOST_PADDING
            actual = expected if is_padding else actual
        if actual is not None and actual != expected:
            advice = (
                f"add --set model.sequence_length={actual}"
                if figure == "sequence_length"
                else "compare it with an experiment of its own model"
            )
            message = f"--{flag} {value}".rstrip()
            raise ValueError(f"{message}: the experiment's model has {figure} {expected}; {advice}")


def _expected(figure: str, shape: ModelShape) -> object:
    usual = {
        "num_key_value_heads": shape.num_heads,
        "head_size": shape.hidden_size // (shape.num_heads or 1),
        "expert_feed_forward_size": shape.feed_forward_size,
    }
    return getattr(shape, figure) or usual.get(figure, getattr(shape, figure))


def _actual(flag: str, value: str) -> object:
    """Return the figure that a flag sets; None if it depends on the environment."""
    if flag == "moe-layer-freq":
        pattern = re.fullmatch(r"\(?\[0\]\*([0-9]{1,5})\+\[1\]\*[0-9]{1,5}\)?", value)
        return 0 if value in {"1", "[1]"} else int(pattern[1]) if pattern else value
    if flag == "untie-embeddings-and-output-weights":
        return False
    if flag in {"add-qkv-bias", "qk-layernorm", "multi-latent-attention"}:
        return True
    if re.search(r"[$`]", value):
        return None
    return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else shown(value)


def notes_of(
    flags: Mapping[str, str], experiment: Experiment, file: str, form: str = "--{}"
) -> tuple[NotRead, ...]:
    """Return what to say about flags that are not read, with values where these decide."""
    shape, traits, table = experiment.model.shape, experiment.traits, FlagTable.shipped()
    fitting = {flag for flag, figure in table.of_models.items() if getattr(shape, figure)}
    fitting |= {*_FUSED_LOSS} if traits.loss_fraction < 1 else set()
    unknown = [
        flag
        for flag in flags
        if not (flag in fitting or table.is_read(flag) or table.is_without_effect(flag))
    ]
    unread = [*unknown, *_unlike(flags, experiment)]
    notes = not_read(unread, file, shown_as=form)
    hints: dict[str, list[str]] = {}
    for flag, (trait, value) in _decided(flags):
        if getattr(traits, trait) != value:
            text = str(value).lower()
            hints.setdefault(f"traits.{trait}={text}", []).append(flag)
    modules = {*flags.get("recompute-modules", "").split()} & {*RECOMPUTED}
    if modules - {*traits.recompute_modules}:
        hint = f"'recompute={{modules: [{', '.join(sorted(modules))}]}}'"
        hints[hint] = [f"recompute-modules {name}" for name in sorted(modules)]
    for hint, names in hints.items():
        why = f"plan it with --set {hint}"
        notes += not_read(names, file, shown_as=form, why=why)
    environment = [flag for flag in table.sizes if re.search(r"[$`]", flags.get(flag, ""))]
    why = "it depends on the shell's environment"
    return notes + not_read(environment, file, shown_as=form, why=why)


def _words(value: str) -> list[str]:
    """Return the words of a flag's value, which overrides write as a list in brackets.

    Example:
        >>> _words("attn mlp"), _words("[attn,mlp]")
        (['attn', 'mlp'], ['attn', 'mlp'])
    """
    return re.findall(r"[^\s,\[\]]+", value)


def _decided(flags: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, object]]]:
    """Yield flags with their values, and the trait that they decide."""
    table = FlagTable.shipped()
    for flag, trait in table.counts.items():
        if re.fullmatch("[0-9]{1,12}", flags.get(flag, "")):
            yield f"{flag} {flags[flag]}", (trait, int(flags[flag]))
    for flag, traits in table.traits.items():
        if flags.get(table.needs.get(flag, flag), "1") == "1":
            continue
        for word in _words(flags.get(flag, "")) if _ON not in traits else [_ON]:
            if flag in flags and word in traits:
                yield f"{flag} {word}".strip(), traits[word]


def _unlike(flags: Mapping[str, str], experiment: Experiment) -> Iterator[str]:
    """Yield flags with values that the cost model does not assume and no trait decides."""
    table = FlagTable.shipped()
    sizes = re.findall(r"[0-9]+", flags.get(HEAD_RANKS, ""))
    if sizes and sizes != _context_sizes(flags, experiment):
        yield " ".join((HEAD_RANKS, *sizes))
    for flag in {**table.as_assumed, **table.traits}:
        if flag not in flags or _ON in table.traits.get(flag, {}):
            continue
        usual = {*table.as_assumed.get(flag, ()), *table.traits.get(flag, {})}
        if flag == "recompute-num-layers" and flags.get("recompute-method") == "block":
            continue
        if flag == "optimizer":
            usual.add(experiment.optimizer)
        yield from (f"{flag} {word}" for word in _words(flags[flag]) if word not in usual)


def _context_sizes(flags: Mapping[str, str], experiment: Experiment) -> list[str]:
    """Return the ranks of a sequence that divide heads, and of a ring, as they are planned."""
    tp, cp = (int(flags.get(f"{name}-parallel-size", "1")) for name in ("tensor-model", "context"))
    heads = experiment.head_ranks(tp, cp)
    return [str(heads), str(cp // heads)]


def check_optimizer(flags: Mapping[str, str], experiment: Experiment) -> None:
    """Refuse another optimizer of those that can be planned."""
    is_planned(flags.get("optimizer", experiment.optimizer), "--optimizer", experiment)


def is_planned(kind: str, key: str, experiment: Experiment) -> bool:
    """Return whether an optimizer is one that can be planned.

    Args:
        kind: Its name in a program, such as ``FusedAdam``.
        key: The key that names it, for the message.
        experiment: The experiment, whose optimizer it is compared with.

    Raises:
        ValueError: If it is another one of them than the experiment's.
    """
    name = kind.lower().removeprefix("fused").removeprefix("deepspeedcpu").removesuffix("w")
    if name in OPTIMIZERS and name != experiment.optimizer.removesuffix("w"):
        raise ValueError(
            f"{key} {shown(kind)}; the experiment has {experiment.optimizer}: add --set "
            f"optimizer={name}"
        )
    return name in OPTIMIZERS
