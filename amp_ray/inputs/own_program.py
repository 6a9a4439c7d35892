"""A user's training program: its command, and the source of its iteration times."""

from typing import Annotated, Final, Literal

from pydantic import Field, Tag

from amp_ray.inputs.section import Section, Text, by_type

BuiltIn = Literal["helper", "megatron", "deepspeed"]

SECONDS_PER_UNIT: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Units in which a log may give a time."""


class Pattern(Section):
    """``trials.program.metric`` as a mapping: where a log tells the time of an iteration."""

    pattern: Text
    """Regular expression with one group, around the number; every match in the log is an
    iteration."""
    unit: Literal["s", "ms", "us"] = "s"
    """Of that number."""


class OwnProgram(Section):
    """``trials.program``: what is run instead of the package's own training program."""

    argv: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Program and arguments, with placeholders such as `{tp}`; no shell sees them."""
    per: Literal["rank", "node"] = "rank"
    """Whether it is started once per rank, or once per host and starts the ranks itself."""
    metric: Annotated[
        Annotated[BuiltIn, Tag("built-in")] | Annotated[Pattern, Tag("pattern")],
        by_type(dict | Pattern, "pattern", "built-in"),
    ] = "helper"
    """Where iteration times come from: the Python helper, the log lines of Megatron or DeepSpeed,
    or a pattern."""
    files: tuple[Text, ...] = ()
    """Copied into the trial's folder on every host; relative to the experiment file's folder."""
    cwd: Text | None = None
    """Where it starts, on every host. Default: the trial's folder."""
    collect: tuple[Text, ...] = ()
    """Further files of the trial's folder that are brought back, such as `*.csv`."""
