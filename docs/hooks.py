"""What `mkdocs build` makes from the code: tables of keys, runtimes, devices, presets, limits.

A line ``::: keys NodeSection`` of a page becomes the table of that section's keys: types, ranges
and defaults are the reader's own, the meaning is the text below each key in its source.
"""

import ast
import inspect
import re
import types
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from annotated_types import Ge, Le
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic_core import PydanticUndefined

from amp_ray.clusters.device import CATALOGUE
from amp_ray.inputs import cluster_section, experiment, experiment_file, model_shape
from amp_ray.inputs.section import Within, is_section, keys_of
from amp_ray.models.model import ModelShape
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

_KEYS: Final = re.compile(r"^::: keys (\w+)$", re.MULTILINE)

_OUTSIDE: Final = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")
"""A link to a file that is no page of the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Begin with the README, whose links start at the top of the checkout."""
    text = (TOP / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!docs/|https?:|#)", "](../", text).replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - what MkDocs calls it with
    """Fill in the tables; name files outside of the site instead of linking to them."""
    markdown = _KEYS.sub(lambda match: _keys(match[1]), markdown)
    for word, table in _TABLES.items():
        if f"::: {word}\n" in markdown:
            markdown = markdown.replace(f"::: {word}\n", f"{table()}\n")
    folder = (TOP / "docs" / page.file.src_uri).parent

    def named(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(TOP / "docs"):
            return match[0]
        if not target.exists():
            message = f"{page.file.src_uri}: there is no {match[2]}"
            raise PluginError(message)
        name = f"`{target.relative_to(TOP)}`"
        return name if match[1].strip("`") in name else f"{match[1]} ({name})"

    return _OUTSIDE.sub(named, markdown)


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
        raise PluginError(message)
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
            yes(traits.unequal_stages),
        ]

    lines = [f"- `{traits.name}`: {traits.description}" for traits in RUNTIMES.values()]
    head = "runtime | tp | sequence parallel | pp | interleaved | cp | ep | ZeRO | ZeRO with pp"
    rows = (row(traits) for traits in RUNTIMES.values())
    table = _table(f"{head} | recompute | fp8 | stages that differ", rows)
    return "\n".join([*lines, "", table])


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
            device.source,
        ]
        for device in CATALOGUE.values()
    )
    return _table("device | GiB | GB/s | fp32 TFLOP/s | fp16 | bf16 | fp8 | source", rows)


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


_TABLES: Final = {
    "devices": _devices,
    "effort": _effort,
    "launched": _launched,
    "presets": _presets,
    "runtimes": _runtimes,
}
