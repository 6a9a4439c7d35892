"""The parts of the documents that are made from the code, written into their pages.

A page has them between two comments, ``<!-- reference: keys NodeSection -->`` and ``<!-- end -->``.
``make reference`` writes them anew; a test compares them with the code. Types, ranges and defaults
are the code's own; a meaning is the text at each key, field, option or function in its source.
"""

import ast
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module, resources
from pathlib import Path
from statistics import median
from textwrap import dedent
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import click
import yaml
from annotated_types import Ge, Le
from pydantic_core import PydanticUndefined

from amp_ray.cli import commands
from amp_ray.clusters.device import CATALOGUE
from amp_ray.inputs import cluster_section, experiment, experiment_file, model_shape
from amp_ray.inputs.section import Within, is_section, keys_of
from amp_ray.models.model import ModelShape
from amp_ray.runtimes.releases import RELEASES
from amp_ray.runtimes.traits import RUNTIMES, RuntimeTraits
from amp_ray.search.effort import EFFORT, SearchEffort
from amp_ray.strategies.zero import MOST_ZERO_STAGE
from amp_ray.units import GIB, GIGA, TERA

TOP: Final = Path(__file__).parents[1]

FEW: Final = 10
"""The range of a count is shown if it ends below this."""

_SOURCES: Final = {"ModelSection": (model_shape.ModelKeys, ModelShape)}
"""Classes whose source has the texts, for a section that is made from others."""

_WORDS: Final = {bool: "true, false", int: "count", float: "number", str: "text", Any: "any"}

_BLOCK: Final = re.compile(
    r"^(<!-- reference: (\w+)(?: ([\w.]+))? -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL
)


def filled(text: str) -> str:
    """Return a page with its parts made anew.

    Raises:
        ValueError: If a page asks for a part that there is not, or a key has no text.
    """

    def part(match: re.Match[str]) -> str:
        if match[2] not in _PARTS:
            message = f"{match[1].strip()}: expected one of {', '.join(sorted(_PARTS))}"
            raise ValueError(message)
        made = _PARTS[match[2]](*([match[3]] if match[3] else []))
        return f"{match[1]}\n{made}\n\n{match[4]}"

    return _BLOCK.sub(part, text)


def main() -> None:
    """Write the parts of all pages; print the pages that change."""
    for path in sorted(TOP.joinpath("docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            path.write_text(new, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(TOP)}\n")


def _table(head: str, rows: Iterator[list[str]]) -> str:
    """Return a table of Markdown; ``head`` has its columns with bars between."""
    width = head.count("|") + 1
    lines = [f"| {head} |", "|---" * width + "|"]
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines.extend(f"| {' | '.join(row)} |" for row in cells)
    return "\n".join(lines)


# -------------------------------------------------------------------------------- keys


def _keys(name: str) -> str:
    """Return the keys of a section; refuse one that the source says nothing of."""
    modules = (model_shape, cluster_section, experiment, experiment_file)
    section: type = next(vars(module)[name] for module in modules if name in vars(module))
    meanings: dict[str, str] = {}
    for source in _SOURCES.get(name, (section,)):
        meanings |= _texts(source)
    missing = set(keys_of(section)) - set(meanings)
    if missing:
        message = f"{name}: no text below {', '.join(sorted(missing))}"
        raise ValueError(message)
    hints = get_type_hints(section, include_extras=True)

    def rows() -> Iterator[list[str]]:
        for key, field in keys_of(section).items():
            meaning, _, default_text = meanings[key].partition(" Default: ")
            default = _default(field.get_default(call_default_factory=True))
            yield [
                f"`{key}`",
                _kind(hints[key]),
                default_text.removesuffix(".") or default,
                meaning,
            ]

    return _table("key | type | default | meaning", rows())


def _texts(section: type) -> dict[str, str]:
    """Return the text below each key of a section's source, or each field of a class."""
    (source,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(source, ast.ClassDef)
    texts = {}
    for key, text in zip(source.body, source.body[1:], strict=False):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and is_text:
            texts[key.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return texts


def _kind(hint: Any) -> str:  # noqa: ANN401 - any type expression
    """Return a type in words; of a figure with its range and unit."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _range(arguments[1:]) or _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in arguments)
    if origin in {Union, types.UnionType}:
        return " or ".join(_kind(argument) for argument in arguments if argument is not type(None))
    if origin in {list, tuple}:
        return f"list of {_kind(arguments[0])}"
    if origin is dict or (isinstance(hint, type) and is_section(hint)):
        return "mapping"
    return _WORDS[hint]


def _range(limits: tuple[Any, ...]) -> str | None:
    """Return the range of a figure with its unit, or of a number with both ends."""
    for limit in limits:
        within = getattr(limit, "func", None)
        if isinstance(within, Within):
            return f"{within.low:,g} to {within.high:,.0f} {within.unit}"
        ends = {type(end): end for end in getattr(limit, "metadata", ())}
        if {Ge, Le} <= set(ends) and ends[Le].le < FEW:
            return f"{ends[Ge].ge} to {ends[Le].le}"
    return None


def _default(value: object) -> str:
    """Return a default as it would stand in a file."""
    if value is PydanticUndefined:
        return "needed"
    if value is None or isinstance(value, list | tuple | dict) or is_section(type(value)):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


# ---------------------------------------------------------------- runtimes, boards, presets


def _runtimes() -> str:
    """Return what each runtime is, and what it can combine."""

    def yes(flag: object) -> str:
        return "yes" if flag else "-"

    def row(traits: RuntimeTraits) -> list[str]:
        exchange = traits.context_parallel
        return [
            f"`{traits.name}`",
            yes(traits.tensor_parallel),
            yes(traits.sequence_parallel),
            yes(traits.pipeline_parallel),
            yes(traits.interleaves),
            exchange if exchange != "none" else "-",
            yes(traits.expert_parallel),
            traits.zero_stages,
            ", ".join(map(str, traits.pipeline_zero_stages)) if traits.pipeline_parallel else "-",
            ", ".join(traits.recompute),
            yes(traits.fp8),
            yes(traits.nvfp4),
            yes(traits.unequal_stages),
        ]

    lines = [f"- `{traits.name}`: {traits.description}" for traits in RUNTIMES.values()]
    head = "runtime | tp | sequence parallel | pp | interleaved | cp | ep | ZeRO | ZeRO with pp"
    rows = (row(traits) for traits in RUNTIMES.values())
    table = _table(f"{head} | recompute | fp8 | nvfp4 | stages that differ", rows)
    return "\n".join([*lines, "", table])


def _releases() -> str:
    """Return the releases of each runtime, with the traits that they set."""

    def text(value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    rows = (
        [
            f"`{runtime}`",
            f"`{name}`",
            release.date,
            ", ".join(f"`{key}: {text(value)}`" for key, value in release.traits.items()) or "-",
            release.source,
        ]
        for runtime, releases in RELEASES.items()
        for name, release in releases.items()
    )
    return _table("runtime | release | of | traits | source", rows)


_DIMENSIONS: Final[dict[str, Callable[[RuntimeTraits], bool]]] = {
    "tensor parallelism": lambda traits: traits.tensor_parallel,
    "sequence parallelism": lambda traits: traits.sequence_parallel,
    "pipelines": lambda traits: traits.pipeline_parallel,
    "uneven cuts": lambda traits: traits.pipeline_parallel and traits.partition == "exact",
    "interleaved chunks": lambda traits: traits.interleaves,
    "token slices": lambda traits: traits.token_slices,
    "stages of different tp, dp, shares": lambda traits: traits.unequal_stages,
    "context parallelism": lambda traits: traits.context_parallel != "none",
    "expert parallelism": lambda traits: traits.expert_parallel,
    "ZeRO 1": lambda traits: traits.min_zero_stage <= 1 <= traits.max_zero_stage,
    "ZeRO 2": lambda traits: traits.min_zero_stage <= 2 <= traits.max_zero_stage,  # noqa: PLR2004
    "ZeRO 3 (FSDP)": lambda traits: traits.max_zero_stage == MOST_ZERO_STAGE,
    "recompute": lambda traits: "full" in traits.recompute,
    "recompute that differs by stage": lambda traits: traits.recompute_per_stage,
    "fp8": lambda traits: traits.fp8,
    "nvfp4": lambda traits: traits.nvfp4,
}


def _launched() -> str:
    """Return which runtimes each dimension is planned for, and which of our programs run it."""
    ours = ("deepspeed", "torch")

    def row(name: str, has: Callable[[RuntimeTraits], bool]) -> list[str]:
        able = [f"`{traits.name}`" for traits in RUNTIMES.values() if has(traits)]
        planned = "all" if len(able) == len(RUNTIMES) else ", ".join(able)
        return [name, planned, *("yes" if has(RUNTIMES[program]) else "-" for program in ours)]

    head = "dimension | planned for | launched by `deepspeed` | launched by `torch`"
    return _table(head, (row(name, has) for name, has in _DIMENSIONS.items()))


def _devices() -> str:
    """Return the catalogue."""

    def rate(flops: float | None) -> str:
        return "-" if flops is None else f"{flops / TERA:,g}"

    rows = (
        [
            f"`{device.name}`",
            f"{device.memory_bytes / GIB:,.2f}",
            f"{device.memory_bytes_per_s / GIGA:,.0f}",
            *(rate(flops) for flops in (device.fp32_flops, device.fp16_flops, device.bf16_flops)),
            rate(device.fp8_flops),
            rate(device.nvfp4_flops),
            "-" if device.board_power_w is None else f"{device.board_power_w:,.0f}",
            device.source,
        ]
        for device in CATALOGUE.values()
    )
    head = "device | GiB | GB/s | fp32 TFLOP/s | fp16 | bf16 | fp8 | nvfp4 | W | source"
    return _table(head, rows)


def _presets() -> str:
    """Return what `amp-ray init` knows by name."""
    text = resources.files("amp_ray").joinpath("data", "presets.yaml").read_text("utf-8")
    presets = yaml.safe_load(text)
    return "\n".join(
        f"- {what}: {', '.join(f'`{name}`' for name in presets[what])}"
        for what in ("models", "clusters")
    )


def _effort() -> str:
    """Return the limits that trade time against the quality of plans and bounds."""
    rows = (
        [f"`{name}`", f"{getattr(EFFORT, name):,}", text]
        for name, text in _texts(SearchEffort).items()
    )
    return _table("limit | default | what it trades", rows)


# ----------------------------------------------------------------------------- commands


def _errors() -> str:
    """Return the errors of published tables without calibration, as they were last recorded."""
    recorded = json.loads((TOP / "tests" / "golden" / "accuracy.json").read_text(encoding="utf-8"))
    rows = (
        [section, label, _count_of(figures), *map(_percent, map(figures.get, _ERRORS))]
        for section, labels in recorded.items()
        for label, figures in labels.items()
        if not label.startswith(("band", "fit", "3 ", "5 ", "8 "))
        and figures.keys() & {"mean_error", "median_error", "refused_fraction"}
        and section != "coverage"
    )
    return _table(
        "section | rows | number | mean | median | .90 quantile | bias | said not to fit", rows
    )


_ERRORS: Final = ("mean_error", "median_error", "p90_error", "bias", "refused_fraction")


def _count_of(figures: Mapping[str, float]) -> str:
    count = figures.get("num_rows", figures.get("num_peaks"))
    return "" if count is None else f"{count:.0f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100.0 * share:.1f} %"


_ONE_GPU: Final = {
    "H200, first run": "one-gpu-h200-first.json",
    "H200, second run": "one-gpu-h200.json",
    "H100": "one-gpu-h100.json",
}
"""Results of `experiments/one_gpu.py` by their names in the documents."""

_ONE_GPU_PARTS: Final = {
    "layer": "both passes of a layer's shard",
    "attention": "attention core",
    "launch": "host's launches of a layer",
    "step": "training step",
    "optimizer": "optimizer step",
    "memory": "peak memory of tensors",
}


def _one_gpu() -> str:
    """Return the errors of what was measured on one GPU, from the files of the results."""
    folder = TOP / "experiments" / "results"
    files = [json.loads((folder / file).read_text("utf-8")) for file in _ONE_GPU.values()]

    def cell(record: Mapping[str, Any], part: str) -> str:
        errors = [row["error"] for row in record["rows"] if row["part"] == part]
        sizes = [abs(error) for error in errors if error is not None]
        return f"{_percent(median(sizes))} ({len(sizes)}), at most {100.0 * max(sizes):.0f} %"

    rows = ([text, *(cell(each, part) for each in files)] for part, text in _ONE_GPU_PARTS.items())
    return _table(" | ".join(["part", *_ONE_GPU]), rows)


def _commands() -> str:
    """Return the help of every command."""
    context = click.Context(commands, info_name="amp-ray", **commands.context_settings)
    return "\n\n".join(
        _command(commands.get_command(context, name), name, context) for name in commands.names
    )


def _command(command: click.Command | None, name: str, parent: click.Context) -> str:
    """Return the help of a command and its subcommands.

    Of a command that the group above has too, only the further options are listed.
    """
    assert command is not None
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join((context.command_path, *command.collect_usage_pieces(context)))
    options, text = _options(command, context), inspect.cleandoc(command.help or "")
    above = parent.parent
    if (
        above
        and isinstance(above.command, click.Group)
        and name in above.command.list_commands(above)
    ):
        plain = _options(command, click.Context(command, info_name=name, parent=above))
        options = [option for option in options if option not in plain]
        text = f"As {above.command_path} {name}, with one more option."
    parts = [
        f"## {context.command_path}",
        *map(_escaped, text.split("\n\n")),
        f"```text\n{usage}\n```",
        "\n".join(
            f"- `{words}`: {_escaped(text)}" if text else f"- `{words}`" for words, text in options
        ),
    ]
    if isinstance(command, click.Group):
        parts += [
            _command(command.get_command(context, word), word, context)
            for word in command.list_commands(context)
        ]
    return "\n\n".join(parts)


def _options(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    """Return the names and texts of a command's options."""
    return [
        record
        for option in command.get_params(context)
        if isinstance(option, click.Option)
        and "--help" not in option.opts  # every command has it
        and (record := option.get_help_record(context))
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """Return plain text in one line, without marks that Markdown would read."""
    return re.sub(r"([*<])", r"\\\1", _one_line(text))


# ---------------------------------------------------------------------- classes, functions


def _object(place: str) -> Any:  # noqa: ANN401 - whatever lies there
    module, _, name = place.rpartition(".")
    return getattr(import_module(module), name)


def _fields(place: str) -> str:
    """Return the fields of a class as a table."""
    rows = (
        [f"`{name}`", f"`{kind}`".replace(" | ", "` or `"), f"`{value}`" if value else "-", text]
        for name, (kind, value, text) in _fields_of(_object(place)).items()
    )
    return _table("field | type | default | meaning", rows)


def _fields_of(owner: type) -> dict[str, tuple[str, str, str]]:
    """Return type, default and meaning of every public field, as its source has them.

    The meaning is the text or comment at the field, or its line in the class's docstring.
    """
    lines = dedent(inspect.getsource(owner)).splitlines()
    (source,) = ast.parse("\n".join(lines)).body
    assert isinstance(source, ast.ClassDef)
    meanings = _listed(owner.__doc__ or "", "Args") | _listed(owner.__doc__ or "", "Attributes")
    meanings |= _texts(owner)
    fields = {}
    for key in source.body:
        if not isinstance(key, ast.AnnAssign) or not isinstance(key.target, ast.Name):
            continue
        name, kind = key.target.id, ast.unparse(key.annotation)
        if name.startswith("_") or kind.startswith("ClassVar"):
            continue
        value = "" if key.value is None else _source_of(key.value, lines)
        text = meanings.get(name) or _comment_at(lines, key.lineno - 1, key.end_lineno or 0)
        fields[name] = (kind, value, text[:1].upper() + text[1:])
    return fields


def _source_of(value: ast.expr, lines: list[str]) -> str:
    """Return a default as it is written, so that 4e-6 stays this."""
    if value.lineno != value.end_lineno:
        return ast.unparse(value)
    return lines[value.lineno - 1].encode()[value.col_offset : value.end_col_offset].decode()


def _comment_at(lines: list[str], first: int, end: int) -> str:
    """Return the comment above a field, or behind it."""
    above: list[str] = []
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
        above.insert(0, lines[first].strip().lstrip("# "))
    _, mark, behind = lines[end - 1].partition("  # ")
    return " ".join((*above, behind) if mark else above).strip()


def _listed(doc: str, section: str) -> dict[str, str]:
    """Return the texts of a section of a docstring, by name."""
    return _listed_in(_sections(doc).get(section, ""))


def _listed_in(body: str) -> dict[str, str]:
    entries = re.split(r"^(\*{0,2}\w+): ", dedent(body), flags=re.MULTILINE)
    pairs = zip(entries[1::2], entries[2::2], strict=True)
    return {name.lstrip("*"): _one_line(text) for name, text in pairs}


_SECTIONS: Final = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example")


def _sections(doc: str) -> dict[str, str]:
    """Return the parts of a docstring; the text before the first heading has the name ``""``."""
    parts = re.split(rf"^({'|'.join(_SECTIONS)}):\n", inspect.cleandoc(doc), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def _api(place: str) -> str:
    """Return a function or a class, with signature, text and members."""
    thing, name = _object(place), place.rpartition(".")[2]
    if not isinstance(thing, type):
        return f"### {name}\n\n{_function(thing)}"
    parts = [f"### {name}", *_text_of(thing.__doc__ or "")]
    fields = _fields_of(thing)
    if fields:
        parts.append("\n".join(f"- {_field(key, *value)}" for key, value in fields.items()))
    for key, member in vars(thing).items():
        if key.startswith(("_", "drawn")) or key in fields:
            continue
        if isinstance(member, property):
            parts.append(f"#### {name}.{key}\n\n{_function(member.fget, is_property=True)}")
        elif inspect.isfunction(member):
            parts.append(f"#### {name}.{key}\n\n{_function(member)}")
    return "\n\n".join(parts)


def _field(name: str, kind: str, value: str, text: str) -> str:
    default = f", default `{value}`" if value else ""
    return f"`{name}` (`{kind}`{default}){f': {text}' if text else ''}"


def _function(function: Any, *, is_property: bool = False) -> str:  # noqa: ANN401 - any callable
    """Return signature, text, arguments, results, errors and example of a function."""
    (source,) = ast.parse(dedent(inspect.getsource(inspect.unwrap(function)))).body
    assert isinstance(source, ast.FunctionDef)
    result = "" if source.returns is None else f" -> {ast.unparse(source.returns)}"
    arguments = [word for word in _arguments(source.args) if word != "self"]
    signature = f"{source.name}({', '.join(arguments)}){result}"
    if is_property:
        signature = f"{source.name}: {result.removeprefix(' -> ')}"
    elif len(signature) > _WIDTH:
        inner = "".join(f"    {word},\n" for word in arguments)
        signature = f"{source.name}(\n{inner}){result}"
    doc = function.__doc__ or ""
    parts = [f"```python\n{signature}\n```", *_text_of(doc)]
    listed = _listed(doc, "Args")
    if listed:
        parts.append("\n".join(f"- `{name}`: {text}" for name, text in listed.items()))
    parts += _results(_sections(doc))
    return "\n\n".join(parts)


_WIDTH: Final = 88  # most characters of a signature in one line


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """Yield the arguments as they stand in a signature."""
    plain = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(plain) - len(arguments.defaults))
    for argument, default in zip(plain, [*missing, *arguments.defaults], strict=True):
        yield _argument(argument, default)
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, value)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(argument)
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _text_of(doc: str) -> list[str]:
    """Return the paragraphs before the first heading of a docstring."""
    return [_one_line(text) for text in _sections(doc)[""].split("\n\n") if text.strip()]


def _results(sections: Mapping[str, str]) -> Iterator[str]:
    """Yield results, errors and example of a docstring."""
    if "Returns" in sections:
        yield f"Returns: {_one_line(sections['Returns'])}"
    for name, text in _listed_in(sections.get("Raises", "")).items():
        yield f"Raises `{name}`: {text}"
    if "Example" in sections:
        yield f"```pycon\n{dedent(sections['Example']).strip()}\n```"


_PARTS: Final[Mapping[str, Callable[..., str]]] = {
    "api": _api,
    "commands": _commands,
    "devices": _devices,
    "effort": _effort,
    "errors": _errors,
    "fields": _fields,
    "keys": _keys,
    "launched": _launched,
    "one_gpu": _one_gpu,
    "presets": _presets,
    "runtimes": _runtimes,
    "releases": _releases,
}
"""What makes each part; keys, fields and api have an argument."""

if __name__ == "__main__":
    main()
